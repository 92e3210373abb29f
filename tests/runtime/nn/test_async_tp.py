"""Tensor parallel whose products go on while pieces travel: torch's pass finds them in what blocks compute, and a plan
refuses what it is not made for."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_rank import one_rank
from topologies import Topology
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._symmetric_memory import _test_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.resumable import resumable
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.nn.axes import TensorAxis, column_parallel_input, row_parallel_output
from xtrain.runtime.nn.parallelize import overlap_products

ASYNC = ("parallel.tp.overlap=true", "compile.mode=default", "launch.device=cuda")


def test_products_of_a_block_are_fused_with_what_travels(monkeypatch):
    """Two in the forward, two in the backward, and no collective is left beside them. Without NCCL, torch's pass would
    do nothing."""
    # Not where tests are collected: it takes a second.
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        tensor = TensorAxis(group=group, sequence=True, loss=True)

        def block(x_BSD, up_FD, down_DF):
            leaves = [each.detach().requires_grad_() for each in (x_BSD, up_FD, down_DF)]
            hidden_BSF = torch.sin(F.linear(column_parallel_input(leaves[0], tensor), leaves[1]))
            out_BSD = row_parallel_output(F.linear(hidden_BSF, leaves[2]), tensor)
            return out_BSD, *torch.autograd.grad(out_BSD.sum(), leaves)

        with FakeTensorMode():
            given = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((2, 8, 32), (16, 32), (32, 16))]
            graph = make_fx(block, decomposition_table=select_decomp_table())(*given)
            remove_noop_ops(graph.graph)
            view_to_reshape(graph)
            with _test_mode():
                micro_pipeline_tp_pass(graph.graph)
    finally:
        dist.destroy_process_group()
    called = [str(node.target) for node in graph.graph.nodes if "symm_mem" in str(node.target)]
    fused = ["symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"]
    assert sorted(called) == sorted(2 * fused)
    assert not [node for node in graph.graph.nodes if "_c10d_functional" in str(node.target)]


def test_a_device_without_such_memory_is_refused():
    rank = one_rank(world_size=2)
    with pytest.raises(EnvironmentFault, match="shared memory of CUDA devices, but the device is cpu") as refused:
        overlap_products(rank, None)  # pyright: ignore[reportArgumentType]
    assert refused.value.code == "X446"


def compiled_of(folder, *settings: str):
    path = Topology(tp=2).trial("fp32").write(folder, alone=False)
    path.write_text(path.read_text().replace("cluster other { flops = 1e9 }", "cluster h100"))
    (folder / "data.jsonl").write_text('{"text": "a"}\n')
    return plan_from_spec(path, ("parallel.tp=2", *settings), 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [(("parallel.tp.overlap=true", "compile.mode=default", "cluster.preset=cpu"), "the device is cpu"),
        (("parallel.tp.overlap=true", "launch.device=cuda"), "nothing is compiled"),
        ((*ASYNC, "parallel.tp.sequence=false"), "tp.sequence is false")],
)  # fmt: skip
def test_what_it_is_not_made_for_is_refused(tmp_path, settings, message):
    found = compiled_of(tmp_path, *settings)
    assert found.plan is None
    assert [(each.code, message in each.message) for each in found.diagnostics.errors] == [("X446", True)]


def test_the_plan_shows_it_and_counts_what_is_computed_meanwhile(tmp_path):
    plans = [compiled_of(tmp_path, *ASYNC[1:]).plan, compiled_of(tmp_path, *ASYNC).plan]
    plain, overlapped = plans
    assert plain is not None and overlapped is not None
    ops = [node.op for node in overlapped.nodes]
    assert "setup.async_tp" not in [node.op for node in plain.nodes]
    assert ops.index("setup.async_tp") + 1 == ops.index("setup.compile")
    calls = [each for each in overlapped.estimates.classes[0].traffic if each.meanwhile]
    layers, microbatches = overlapped.architecture.layers, overlapped.node("step.forward_backward").args["accumulate"]
    # Of attention and of the feed-forward layers: gathered and summed, forwards and backwards.
    assert {(each.op, each.count) for each in calls} == {
        (op, 4 * layers * microbatches) for op in ("all_gather", "reduce_scatter")
    }
    assert not any(each.exposed for each in calls)
    before, after = plain.estimates.times, overlapped.estimates.times
    assert before is not None and after is not None and after.exposed < before.exposed
    verdict = resumable(plain, overlapped)
    assert (verdict.kind, verdict.effect) == ("safe", "rounding")
    assert [reason.path for reason in verdict.reasons] == ["parallel.tp.overlap"]
