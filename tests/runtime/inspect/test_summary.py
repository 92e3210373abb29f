"""Where the time of a trace went: by hand, on traces whose answer is known."""

import json
from itertools import pairwise

import numpy as np
import pytest
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.components.actions.profile_torch import read_summaries, summary_text
from xtrain.runtime.inspect.profile_summary import (
    TornTrace,
    clipped,
    entries_of,
    kind_of,
    length,
    minus,
    only_calls,
    summarise,
    union,
)

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


def instants(pairs):
    return {at for begin, end in pairs for at in range(int(begin), int(end))}


@drawn(100, 2000)
@given(PAIRS, PAIRS)
def test_sets_of_instants(one, other):
    both = union(one), union(other)
    for found, pairs in zip(both, (one, other), strict=True):
        assert instants(found) == instants(pairs) and length(found) == len(instants(pairs))
        assert all(before[1] < after[0] for before, after in pairwise(found))
    left = minus(*both)
    assert instants(left) == instants(one) - instants(other) and length(left) == len(instants(left))
    assert instants(clipped(both[0], 5, 20)) == {at for at in instants(one) if 5 <= at < 20}
    assert union(np.concatenate(both)).shape[1] == 2


@pytest.mark.parametrize(("name", "kind"), [
    ("aten::mm", "matmul"),
    ("aten::addmm", "matmul"),
    ("aten::_grouped_mm", "matmul"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matmul"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
    ("triton_tem_fused_flex_attention_0", "attention"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ("gloo:all_reduce", "communication"),
    ("c10d::_allgather_base_", "communication"),
    ("_c10d_functional::wait_tensor", "communication"),
    ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ("Memset (Device)", "copies"),
    ("aten::copy_", "copies"),
    ("fsdp::all_gather_copy_in", "copies"),
    ("aten::mul", "other"),
    ("aten::embedding", "other"),
    ("aten::_fused_adamw_", "other"),
    ("aten::sum", "other"),
    ("triton_poi_fused_add_mul_0", "other"),
])  # fmt: skip
def test_kinds(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(("name", "calls"), [
    ("autograd::engine::evaluate_function: MmBackward0", True),
    ("torch::autograd::AccumulateGrad", True),
    ("AddmmBackward0", True),
    ("ChunkedCrossEntropy", True),
    ("aten::mm", False),
    ("CompiledFunctionBackward", False),
    ("Torch-Compiled Region: 0/0", False),
])  # fmt: skip
def test_what_only_calls_others_is_no_work(name, calls):
    assert only_calls(name) == calls


def entry(category, name, begin, end, line=1):
    """An entry of a trace, in milliseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin * 1e3,
        "dur": (end - begin) * 1e3,
        "pid": 7,
        "tid": line,
    }


def trace(path, *entries):
    others = [{"ph": "M", "name": "process_name", "pid": 7}, entry("python_function", "f", 0, 99), {"ph": "i", "ts": 1}]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*others, *entries], "traceName": "x"}, indent=1))
    return path


def ms(shares, seconds):
    return {name: pytest.approx(share * seconds * 1e3) for name, share in shares.items()}


STEPS = [entry("user_annotation", f"ProfilerStep#{n}", 10 * n, 10 * n + 10) for n in (4, 5, 6)]


def test_of_a_gpu_kernels_count_and_what_hides_communication_is_computing(tmp_path):
    path = trace(
        tmp_path / "t.json",
        *STEPS,
        entry("cpu_op", "aten::mm", 50, 70),  # the launch: no time of the GPU
        entry("kernel", "sm90_gemm", 50, 53, line=7),
        entry("kernel", "elementwise_kernel", 53, 54, line=7),
        entry("kernel", "ncclDevKernel_AllGather", 52, 57, line=20),  # 2 ms beside the products, 3 exposed
        entry("gpu_memcpy", "Memcpy DtoH", 56, 58, line=9),  # hides one of those
        entry("kernel", "flash_bwd", 60, 64, line=7),
        entry("kernel", "sm90_gemm", 66, 73, line=7),  # ends behind the mark of its step
        entry("kernel", "sm90_gemm", 30, 49, line=7),  # of steps that are not asked for
        entry("user_annotation", "step.optimizer", 55, 58),
        entry("user_annotation", "step.optimizer", 66, 80),
        entry("user_annotation", "FSDP::pre_forward", 50, 60),
    )
    found = summarise(entries_of(path), rank=3, first=5, last=6)
    assert (found.device, found.seconds, len(found.step_seconds)) == ("gpu", pytest.approx(0.023), 2)
    seconds = {"matmul": 10, "attention": 4, "other": 1, "copies": 2, "exposed": 2, "idle": 4}
    assert ms(found.shares, found.seconds) == seconds and sum(found.shares.values()) == pytest.approx(1)
    assert found.communication * found.seconds == pytest.approx(0.005)
    assert found.nodes == {"step.optimizer": pytest.approx(0.010)}


def test_of_a_cpu_operations_count_once_and_threads_that_transfer_do_not(tmp_path):
    path = trace(
        tmp_path / "t.json",
        *STEPS,
        entry("cpu_op", "aten::linear", 40, 44),
        entry("cpu_op", "aten::addmm", 40.5, 43),
        entry("cpu_op", "aten::copy_", 42, 42.5),  # part of the product
        entry("cpu_op", "autograd::engine::evaluate_function: X", 44, 49),  # waits: no work of its own
        entry("cpu_op", "aten::mul", 45, 46),
        entry("cpu_op", "aten::clone", 47, 48),
        entry("cpu_op", "aten::copy_", 47.2, 47.9),
        entry("user_annotation", "gloo:all_reduce", 43, 47.5, line=2),
        entry("cpu_op", "aten::add_", 43, 44, line=2),
    )
    found = summarise(entries_of(path), rank=0, first=4, last=4)
    seconds = {"matmul": 4, "attention": 0, "other": 1, "copies": 1, "exposed": 2, "idle": 2}
    assert found.device == "cpu" and ms(found.shares, found.seconds) == seconds
    assert found.communication * found.seconds == pytest.approx(0.0045)
    own = {each.name: (each.calls, round(each.seconds * 1e3, 6)) for each in found.operators}
    assert own == {
        "gloo:all_reduce": (1, 4.5),
        "aten::addmm": (1, 2.0),
        "aten::linear": (1, 1.5),
        "aten::copy_": (2, 1.2),
        "aten::mul": (1, 1.0),
        "aten::clone": (1, 0.3),
    }
    assert [each.seconds for each in found.operators] == sorted(
        (each.seconds for each in found.operators), reverse=True
    )


@pytest.mark.parametrize(("cut", "more"), [(1, ""), (40, ""), (40, "}"), (300, ""), (300, ", }")])
def test_a_trace_that_is_not_whole_is_none(tmp_path, cut, more):
    path = trace(tmp_path / "t.json", *STEPS)
    path.write_text(path.read_text()[:-cut] + more)
    with pytest.raises(TornTrace):
        list(entries_of(path))


@pytest.mark.parametrize(
    "text", ["", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "[]"]
)
def test_what_is_no_trace_is_none(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TornTrace):
        list(entries_of(tmp_path / "t.json"))


def test_a_trace_without_the_steps_is_none(tmp_path):
    path = trace(tmp_path / "t.json", *STEPS)
    with pytest.raises(TornTrace, match="2 of steps 5 to 7"):
        summarise(entries_of(path), rank=0, first=5, last=7)


def test_the_page(tmp_path):
    long = "void kernel<" + "x | `y`, " * 40
    path = trace(
        tmp_path / "t.json", *STEPS, entry("kernel", long, 40, 45), entry("user_annotation", "tick.log", 41, 43)
    )
    summaries = [summarise(entries_of(path), rank=rank, first=4, last=5) for rank in (0, 9)]
    text = summary_text(summaries, node="tick.profile", world=64, note="Cut short.")
    assert text.startswith("# Profile of steps 4 to 5\n\n`tick.profile`, 2 of 64 ranks; time of the GPU. Cut short.\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[2] == ["0", "10.000", "0.0%", "0.0%", "25.0%", "0.0%", "0.0%", "75.0%", "0.0%"] and cells[3][0] == "9"
    assert ["`tick.log`", "1.000", "10.0%"] in cells
    assert len({len(row) for row in rows[-3:]}) == 1 and len(rows[-1]) < 140, "whatever kernels are called"
    assert "step 4\n" in summary_text([summarise(entries_of(path), rank=0, first=4, last=4)], node="n", world=1)


def test_summaries_are_read_as_they_were_written(tmp_path):
    from attrs import asdict

    from xtrain.runtime.loop.memory_report import file_of, write_json

    path = trace(tmp_path / "t.json", *STEPS, entry("kernel", "gemm", 40, 45))
    found = [summarise(entries_of(path), rank=rank, first=4, last=6) for rank in (0, 11)]
    for each in reversed(found):
        write_json(file_of(tmp_path / "p", each.rank, "summary.json"), asdict(each))
    assert read_summaries(tmp_path / "p") == found
