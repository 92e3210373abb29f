"""Predicted memory and speed beside what others have published, each row a spec of ours.

    python benchmarks/accuracy.py            # the table
    python benchmarks/accuracy.py --write    # docs/accuracy.md, and what docs/plan.md says of Llama 3

Nothing is run: rows are planned, and the closed forms are read off. No constant is fitted to a row: what the
programs do otherwise than ours and is counted, all rows of a source share. The last table alone predicts speeds from
measured ones, each row from the others, as `cluster { calibration }` does.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from attrs import evolve, frozen

from xtrain.blocks.head_memory import ends_of
from xtrain.dsl.load import load_spec
from xtrain.plan.calibration import Calibration, TimedRun
from xtrain.plan.findings import Findings
from xtrain.plan.plan import Plan
from xtrain.planner.compile import resolve
from xtrain.planner.costs.block_trace import local_of
from xtrain.planner.costs.run import Faults, Goodput, goodput_of
from xtrain.planner.costs.times import timing_of_plan
from xtrain.planner.load import plan_from_spec, plan_from_text
from xtrain.planner.rules.validate import validate
from xtrain.text.units import BYTES

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/accuracy.md"
GIB: Final = 2**30

LLAMA: Final = {
    "8B": "dim = 4096, layers = 32, heads = 32, kv_heads = 8, ffn = 14336",
    "70B": "dim = 8192, layers = 80, heads = 64, kv_heads = 8, ffn = 28672",
    "405B": "dim = 16384, layers = 126, heads = 128, kv_heads = 8, ffn = 53248",
}
SPEC: Final = """
experiment published {{ budget = 100 steps }}
cluster {cluster}
parallel {{ {parallel} }}
precision {{ params = {params}, compute = bf16 }}
{activation}
model llama {{ {model}, vocab = 128256, rope_theta = 500_000 }}
tokenizer "none"
dataset synthetic {{ source = jsonl("none.jsonl") }}
batch {{ sequence = {sequence}, micro = {micro}, accumulate = {accumulate} }}
optimizer adamw {{ lr = 3e-4 }}
"""


@frozen(kw_only=True)
class PublishedRow:
    """One published measurement and the layout it was made with. measured: GiB of a device; speed: tokens a second of
    one device. head: ranks that share the logits. remark: where their program and ours are not the same."""

    source: str
    model: str
    devices: int
    parallel: str
    sequence: int
    micro: int
    accumulate: int = 1
    activation: str = ""
    cluster: str = "h100"
    params: str = "fp32"
    head: int = 1
    measured: float
    speed: float
    remark: str = ""

    @property
    def schedule(self) -> str:
        return next((word for word in ("interleaved_1f1b", "1f1b") if word in self.parallel), "")

    @property
    def text(self) -> str:
        cluster = f"{self.cluster} {{ nodes = {max(self.devices // 8, 1)}, devices = {min(self.devices, 8)} }}"
        return SPEC.format(
            cluster=cluster,
            parallel=self.parallel,
            params=self.params,
            activation=self.activation,
            model=LLAMA[self.model],
            sequence=self.sequence,
            micro=self.micro,
            accumulate=self.accumulate,
        )


HEAD_TOKENS, HEAD_VOCAB, HEAD_DIM = 4096, 131072, 1024
HEAD: Final = """
experiment head {{ budget = 1 step }}
precision {{ params = {params} }}
model llama {{ dim = 1024, layers = 1, heads = 8, vocab = 131072 }}
tokenizer "none"
dataset synthetic {{ source = jsonl("none.jsonl") }}
batch {{ sequence = 4096 }}
loss cross_entropy {{ chunk = {chunk} MiB }}
optimizer adamw {{ lr = 3e-4 }}
"""
# Of a logit in fp32: log-softmax, its gradient, and the gradient of the logit itself.
PLAIN_HEAD: Final = 12

TITAN: Final = "torchtitan"
KEMPNER: Final = "KempnerForge"
FULL: Final = "activation full"
EIGHTH: Final = "fp8 products there"


def titan_rows() -> list[PublishedRow]:
    """benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan, on H100 with 96 GB."""
    rows = [
        PublishedRow(
            source=TITAN, model="8B", devices=devices, parallel=f"fsdp {devices} {{ reduce = fp32 }}", sequence=8192,
            micro=2, activation="activation selective", measured=measured, speed=speed,
            remark="torchtitan keeps every second matrix product, xtrain all",
        )
        for devices, measured, speed in ((8, 82.4, 5762), (128, 67.0, 5605))
    ]  # fmt: skip
    fp8 = partial(PublishedRow, source=TITAN, activation=FULL, remark=f"{EIGHTH}, compiled")
    for fsdp, cp, measured, speed in ((8, 1, 83.9, 3890), (4, 2, 84.2, 2540), (2, 4, 84.0, 1071), (1, 8, 84.5, 548)):
        parallel = f"{_context(cp)}fsdp {fsdp} {{ reduce = fp32 }}"
        sizes = {"devices": 8, "sequence": 32768 * cp, "micro": 1}
        rows.append(fp8(model="8B", parallel=parallel, measured=measured, speed=speed, **sizes))
    parallel, sizes = "tp 8, fsdp 32 { reduce = fp32 }", {"head": 8, "devices": 256, "sequence": 8192, "micro": 16}
    rows.append(fp8(model="70B", parallel=parallel, measured=71.9, speed=829, **sizes))
    for schedule, measured, speed in (("1f1b", 82.5, 100), ("interleaved_1f1b", 72.7, 128)):
        parallel = f"tp 8, fsdp 8 {{ reduce = fp32 }}, pp 8 {{ schedule = {schedule} }}"
        sizes = {"head": 8, "devices": 512, "sequence": 8192, "micro": 1, "accumulate": 32}
        rows.append(fp8(model="405B", parallel=parallel, measured=measured, speed=speed, **sizes))
    for fsdp, cp, measured, speed in ((8, 1, 75.3, 76), (4, 2, 75.9, 47), (2, 4, 77.1, 31), (1, 8, 84.9, 16)):
        parallel = f"tp 8, {_context(cp)}fsdp {fsdp} {{ reduce = fp32 }}, pp 8 {{ schedule = 1f1b }}"
        sizes = {"head": 8, "devices": 512, "sequence": 32768 * cp, "micro": 1, "accumulate": 8}
        rows.append(fp8(model="405B", parallel=parallel, measured=measured, speed=speed, **sizes))
    return rows


def _context(cp: int) -> str:
    return f"cp {cp} {{ ring = {cp}, ulysses = 1 }}, " if cp > 1 else ""


def kempner_rows() -> list[PublishedRow]:
    """benchmarks/mfu_scaling of KempnerForge, on H200: bf16 parameters and moments, everything recomputed."""
    found = []
    for devices, parallel, measured, speed in (
        (1, "fsdp 1", 80.7, 10471),
        (2, "fsdp 2", 62.4, 18728 / 2),
        (4, "fsdp 4", 61.1, 38983 / 4),
        (2, "tp 2, fsdp 1", 57.8, 13163 / 2),
        (4, "tp 4, fsdp 1", 39.4, 25135 / 4),
        (4, "tp 2, fsdp 2", 45.9, 25980 / 4),
        (8, "tp 4, fsdp 2", 32.7, 44299 / 8),
        (16, "tp 4, fsdp 4", 29.4, 82988 / 16),
        (32, "tp 4, fsdp 8", 27.6, 155917 / 32),
    ):
        found.append(
            PublishedRow(
                source=KEMPNER, model="8B", devices=devices, parallel=parallel, sequence=4096, micro=4, accumulate=2,
                activation=FULL, cluster="h200", params="bf16", measured=measured, speed=speed,
            )
        )  # fmt: skip
    found.append(
        PublishedRow(
            source=KEMPNER, model="70B", devices=32, parallel="tp 4, fsdp 8", sequence=4096, micro=2, accumulate=4,
            activation=FULL, cluster="h200", params="bf16", measured=93.2, speed=17657 / 32,
        )
    )  # fmt: skip
    return found


@cache
def planned(row: "PublishedRow | XorlRow", fp8: bool = False) -> Plan:
    """The plan of a row. fp8: with fp8 products, if the row's program has them. Raises AssertionError with the
    diagnostics where there is none."""
    text = row.text.replace("compute = bf16", "compute = fp8") if fp8 and EIGHTH in row.remark else row.text
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(row, XorlRow):
            (Path(folder) / "config.json").write_text(json.dumps(QWEN[row.model]))
        compiled = plan_from_text(text.replace("FOLDER", folder), "row.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


# What decides costs in the published config.json of the models of xorl's packs.
_SHARED: Final = {"hidden_act": "silu", "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "attention_bias": False}
_HYBRID: Final = {
    **_SHARED, "model_type": "qwen3_5_moe_text", "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128, "num_key_value_heads": 2,
    "vocab_size": 248320, "max_position_embeddings": 262144, "router_aux_loss_coef": 0.001,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip
_PERIOD: Final = ["linear_attention"] * 3 + ["full_attention"]
QWEN: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-235B-A22B": {
        **_SHARED, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "num_experts": 128,
        "num_experts_per_tok": 8, "num_key_value_heads": 4, "hidden_size": 4096, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
    },
    "Qwen3.5-35B-A3B": {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False, "text_config": {
            **_HYBRID, "hidden_size": 2048, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256,
            "num_experts_per_tok": 8, "num_hidden_layers": 40, "layer_types": _PERIOD * 10}},
    "Qwen3.5-397B-A17B": {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False, "text_config": {
            **_HYBRID, "hidden_size": 4096, "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024, "num_attention_heads": 32, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 60, "layer_types": _PERIOD * 15}},
}  # fmt: skip
XORL_SPEC: Final = """
experiment published {{ budget = 100 steps }}
cluster h100 {{ nodes = {nodes}, devices = 8 }}
parallel {{ ep {ep}, fsdp {devices} }}
precision {{ params = {params}, compute = bf16 }}
activation full
model "FOLDER" {{ weights = none }}
tokenizer "none"
dataset synthetic {{ source = jsonl("none.jsonl") }}
batch {{ sequence = {sequence}, micro = {micro}, accumulate = {accumulate} }}
optimizer {optimizer} {{ lr = 1e-5 }}
"""


@frozen(kw_only=True)
class XorlRow:
    """A run of one of xorl's calibration packs (togethercomputer/xorl, src/xorl/sim/calibration_packs)."""

    model: str
    devices: int
    ep: int
    sequence: int
    micro: int
    accumulate: int = 1
    optimizer: str = "muon"
    params: str = "bf16"
    speed: float
    remark: str = ""
    source: str = "xorl"

    @property
    def text(self) -> str:
        return XORL_SPEC.format(
            nodes=self.devices // 8, ep=self.ep, devices=self.devices, params=self.params, sequence=self.sequence,
            micro=self.micro, accumulate=self.accumulate, optimizer=self.optimizer,
        )  # fmt: skip


def xorl_rows() -> list[XorlRow]:
    """All measured runs of the three packs but one with 10 rows at a time, which does not fit in the plan's 80 GiB: it
    was measured at half the speed, with allocation retries."""
    small = partial(XorlRow, model="Qwen3.5-35B-A3B", devices=32, ep=8, sequence=8192, optimizer="adamw",
                    params="fp32")  # fmt: skip
    large = partial(XorlRow, model="Qwen3.5-397B-A17B", devices=64, ep=32, sequence=4096)
    other = partial(XorlRow, model="Qwen3-235B-A22B", devices=32, ep=8, sequence=4096, micro=1)
    return [
        small(micro=8, speed=261_000 / 32),
        small(micro=6, speed=7956.25),
        other(speed=131_072 / 18.4 / 32),
        other(accumulate=2, speed=262_144 / 31.3 / 32),
        large(micro=3, speed=683.9, remark="R66"),
        large(micro=4, speed=757.4, remark="R67"),
        large(micro=4, speed=821.0, remark="R69, compiled"),
        large(micro=5, speed=847.3, remark="R70, compiled"),
        large(micro=5, speed=924.8, remark="R73, compiled"),
        large(micro=5, speed=925.3, remark="R75, compiled"),
    ]


def timed(row: PublishedRow | XorlRow) -> TimedRun:
    """A row as a measured run. Programs are machines of their own: they share efficiencies, not what else differs."""
    plan = planned(row, fp8=True)
    timing = timing_of_plan(plan)
    assert timing is not None
    seconds = plan.estimates.tokens_per_step / plan.mesh.world_size / row.speed
    return TimedRun(
        source=row.source, plan=plan.id, torch="", date="", samples=1, seconds=seconds, low=seconds, high=seconds,
        timing=evolve(timing, machine=f"{row.source}, {timing.machine}"),
    )  # fmt: skip


def calibrated_table(rows: Sequence[PublishedRow | XorlRow]) -> tuple[str, dict[str, float]]:
    """Speeds, each predicted from the other rows, and what the page says of them."""
    runs, widths, counts = [timed(row) for row in rows], [], Counter()
    lines = ["| from | layout | sequence · rows | tokens/s | predicted | range | | |", "|" + " --- |" * 8]
    for row, run in zip(rows, runs, strict=True):
        found = Calibration.of([other for other in runs if other is not run]).predicted(run.timing)
        planned_speed = row.speed * run.seconds / run.timing.seconds
        slow, likely, fast = (planned_speed / each for each in (found.high, found.factor, found.low))
        inside, width = slow <= row.speed <= fast, found.high / found.factor - 1
        if width:
            counts[found.label, inside] += 1
            widths.append(width)
        span = (
            f"{slow:,.0f} to {fast:,.0f}, ± {width:.0%}" if width else f"none: {found.beyond[-1].rpartition(' is ')[2]}"
        )
        lines.append(
            f"| {row.source} | {layout_of(row)} | {row.sequence:,} · {row.micro} × {row.accumulate} | {row.speed:,.0f} "
            f"| {likely:,.0f} | {span} | {found.label} "
            f"| {'' if inside or not width else '**outside**'} |"
        )
    labels = {label: counts[label, True] + counts[label, False] for label in ("exact", "interpolated", "extrapolated")}
    said = {
        "count": len(rows), "ranges": len(widths), "inside": sum(counts[label, True] for label in labels),
        "widest": max(widths),
        **labels, **{f"{label}_inside": counts[label, True] for label in labels},
    }  # fmt: skip
    return "\n".join(lines), said


def layout_of(row: PublishedRow | XorlRow) -> str:
    """The model and the axes of a row."""
    mesh = planned(row).mesh
    axes = [*mesh.axes, *(axis for axis in mesh.expert_axes if axis.name == "ep")]
    shown = " · ".join(f"{axis.name} {axis.size}" for axis in axes if axis.size > 1) or "one device"
    schedule = row.schedule if isinstance(row, PublishedRow) else ""
    remark = f", {row.remark}" if isinstance(row, XorlRow) and row.remark else ""
    return f"{row.model}, {shown}" + (f", {schedule}" if schedule else "") + remark


def predicted(row: PublishedRow, plan: Plan) -> float:
    """GiB that the allocator holds on the fullest rank. What lies outside of it, nobody counts.

    Their head takes all logits of a microbatch at once, where ours takes pieces: PLAIN_HEAD bytes of each are alive in
    its backward, beside everything that the forward has left.
    """
    mesh, loader = plan.mesh, plan.node("setup.loader").args
    tokens = loader["micro"] * loader["sequence"] // (mesh.size("ring") * mesh.size("ulysses"))
    plain = PLAIN_HEAD * tokens * plan.architecture.vocab / row.head
    found = []
    for each in plan.estimates.classes:
        memory = each.memory
        passing = memory.working + memory.loss
        with_head = max(passing, plain) if each.pp == len(plan.estimates.classes) - 1 else passing
        found.append(memory.total_bytes - memory.reserve - passing + with_head)
    return max(found) / GIB


def speeds(plan: Plan) -> tuple[float, float]:
    """Tokens a second of one device, slow and fast."""
    times = plan.estimates.times
    assert times is not None
    each = plan.estimates.tokens_per_step / plan.mesh.world_size
    return each / times.slow, each / times.fast


@frozen(kw_only=True)
class HeadRow:
    """A cross entropy in pieces of so many tokens. low, high: MiB that were measured beside the gradients."""

    params: str
    tokens: int
    low: int
    high: int

    @property
    def predicted(self) -> float:
        """MiB alive at once in the head, beside gradients of what it is given and of its weight."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "head.xtrain"
            path.write_text(HEAD.format(params=self.params, chunk=self.tokens * 4 * HEAD_VOCAB // 2**20))
            spec = load_spec(path).require()
        valid = validate(spec, None, Findings(spec))
        assert valid is not None
        run = resolve(spec, valid)
        gradients = BYTES[self.params] * HEAD_DIM * (HEAD_TOKENS + HEAD_VOCAB)
        return (ends_of(run, local_of(run)).forward - gradients) / 2**20


HEAD_ROWS: Final = (
    HeadRow(params="fp32", tokens=1024, low=1043, high=1043),
    HeadRow(params="fp32", tokens=256, low=270, high=270),
    HeadRow(params="fp32", tokens=32, low=72, high=126),
    HeadRow(params="bf16", tokens=256, low=276, high=276),
)


HOUR: Final = 3600.0


@frozen(kw_only=True)
class PublishedGoodput:
    """A run whose failures and effective training time are published. share: what is reported, or is reported to be
    exceeded. reported: what the source says, in a word; assumed: what it does not."""

    run: str
    share: float
    exceeded: bool
    faults: Faults
    interval: float
    reported: str
    assumed: str

    @property
    def predicted(self) -> float:
        return self.faults.goodput(self.interval)


# arXiv 2407.21783, section 3.3.4: 54 days, 419 unexpected interruptions, 16,384 GPUs. Section 3.3.1: 2 TB/s sustained.
LLAMA_SPEC: Final = "specs/llama_405b_16k.xtrain"
LLAMA_SETS: Final = (f"cluster.mtbf={54 * 24 * 16384 / 419:.0f} h", f"cluster.storage={2e12:.0f} B")


@cache
def llama_goodput() -> Goodput:
    """What the plan of the spec says, with restarts as it adds them up."""
    found = plan_from_spec(str(ROOT / LLAMA_SPEC), LLAMA_SETS)
    assert found.plan is not None, found.diagnostics.render()
    goodput = goodput_of(found.plan)
    assert goodput is not None
    return goodput


def llama_row(minutes: int) -> PublishedGoodput:
    faults = evolve(llama_goodput().faults, restart=60.0 * minutes)
    return PublishedGoodput(
        run="Llama 3 405B", share=0.9, exceeded=True, faults=faults, interval=llama_goodput().best,
        reported="419 failures in 54 days, 2 TB/s of storage",
        assumed=f"restarts of {minutes} min; the best interval; checkpoints as planned",
    )  # fmt: skip


def goodput_rows() -> list[PublishedGoodput]:
    """Effective training time of runs that have reported it."""
    found = [llama_row(minutes) for minutes in (5, 10, 15)]
    # arXiv 2402.15627, section 6.3: over 100 restarts in several weeks, found and diagnosed in less than 10 minutes on
    # average, progress caught up with within 15 minutes. What is lost to a checkpoint is part of these.
    for weeks in (3, 5):
        faults = Faults(between=weeks * 7 * 24 * HOUR / 100, restart=25 * 60.0, blocked=0.0, later=0.0)
        found.append(
            PublishedGoodput(
                run="MegaScale", share=0.9, exceeded=True, faults=faults, interval=1.0,
                reported="100 restarts; 10 min until diagnosed, 15 until caught up",
                assumed=f"several weeks are {weeks}; both times at their bounds, lost work within them",
            )
        )  # fmt: skip
    # arXiv 2509.16293, section 8.1: a dense model on 9,600 GPUs for three months, 175 incidents: 128 failures with a
    # cause that is seen (found after 30 s, solved in 93 s on average), 20 restarts by hand (57 s), 27 hangs, slow or
    # wrong steps (4,289 s); none cost more than 50 minutes. Every step is saved in memory: no work is lost.
    usual = (128 * (30 + 93) + 20 * 57 + 27 * 4289) / 175
    for seconds, assumed in ((usual, "three months are 90 days; mean times by kind"), (3000.0, "each costs the most")):
        faults = Faults(between=90 * 24 * HOUR / 175, restart=seconds, blocked=0.0, later=0.0)
        found.append(
            PublishedGoodput(
                run="ByteRobust", share=0.97, exceeded=False, faults=faults, interval=1.0,
                reported="175 incidents in three months, at most 50 min each", assumed=assumed,
            )
        )  # fmt: skip
    return found


# Kokolis et al. (arXiv 2410.21680): 6.50 failures in a thousand days of a node of eight GPUs, on the cluster RSC-1, and
# what the authors project from it: GPUs of a job → hours between its failures.
NODE_FAILURES: Final = 6.50e-3 / (24 * HOUR)
PROJECTED_HOURS: Final = {16_384: 1.8, 131_072: 0.23}


def ettr(faults: Faults, interval: float) -> float:
    """Their effective training time ratio, without waiting for a place in a queue; of the first order in failures:
    (1 - (restart + interval / 2) / M) / (1 + blocked / interval)."""
    return (1 - (faults.restart + interval / 2) / faults.between) / (1 + faults.blocked / interval)


def goodput_table() -> str:
    lines = ["| run | reported | assumed | goodput | predicted |", "|" + " --- |" * 5]
    lines += [
        f"| {row.run} | {row.reported} | {row.assumed} | {'> ' * row.exceeded}{row.share:.0%} | {row.predicted:.1%} |"
        for row in goodput_rows()
    ]
    return "\n".join(lines)


def ratio_table() -> str:
    """Of a job on RSC-1: hours between failures, and the effective training time ratio by both formulas."""
    lines = ["| GPUs | hours between failures | `mtbf / n` | interval | their ratio | goodput |", "|" + " --- |" * 6]
    for devices, hours in PROJECTED_HOURS.items():
        between = 1 / (NODE_FAILURES * devices / 8)
        faults = Faults(between=between, restart=120.0, blocked=10.0, later=0.0)
        interval = faults.best(60.0)
        lines.append(
            f"| {devices:,} | {hours} | {between / HOUR:.2f} | {interval / 60:.1f} min "
            f"| {ettr(faults, interval):.1%} | {faults.goodput(interval):.1%} |"
        )
    return "\n".join(lines)


TEXT: Final = """# Accuracy of the predictions

Written by `python benchmarks/accuracy.py --write`: published measurements of other trainers, compared with the plans
of equivalent xtrain specs, which were not run. The tests compare a plan with a trace of xtrain's own program, exactly
for model states and to a percent or two for the rest ([plan.md](plan.md)); this page asks whether the predictions
match real machines. Because the measured programs are not xtrain, the rows share these assumptions:

- Their output head computes a plain cross entropy over all logits of a microbatch, with {plain} bytes per logit in fp32
  at the same time: log-softmax, its gradient and that of the logits; torchtitan shards them over tp, KempnerForge does
  not. The rest is what xtrain's plan predicts for the same axes, rows and recomputation.
- Memory is what the allocator holds, without CUDA context and communication libraries. GB of KempnerForge are taken as
  GiB. torchtitan's fp8 products are planned as bf16.
- Predicted speed is the range of the plan, with the data sheets of the devices and the default efficiency of `cluster`,
  which is an assumption.

Of {count} rows, {within} memory predictions are within 15 % of the measurement, and {paced} measured speeds are within
the predicted range. [Predicted from measured speeds](#speeds-predicted-from-measured-ones) of other rows, it is
{of_published[inside]} of the {of_published[ranges]} that have one.

## Memory and speed of whole runs

{rows}

Predictions outside these bounds, and why: {misses}

## Speeds predicted from measured ones

What `cluster {{ calibration = FILE }}` does with runs of your own ([calibrate.md](calibrate.md)), done with the rows
above and {xorl} runs of xorl's calibration packs (togethercomputer/xorl at 4d8c620; Qwen3 and Qwen3.5 with experts on
32 and 64 H100): each row is predicted from all others. torchtitan's fp8 products are planned as fp8 here, and each
trainer is a machine of its own.

{calibrated}

{said[inside]} of the {said[ranges]} rows with a range lie in it: {interpolated} interpolated ones, {extrapolated}
extrapolated ones, and {exact} with another run of the same plan. The widest range is ± {said[widest]:.0%}. The row with
16 sequences at a time has none: nothing near it was measured, and its range would rest on the assumptions of the
process alone ([labels and ranges](calibrate.md#labels-and-ranges)). From the rows of torchtitan and KempnerForge alone
{of_published[inside]} of {of_published[ranges]} lie in their range.

One run of the packs is left out: ten rows at a time on 32 GPUs, which does not fit in the plan's 80 GiB, and was
measured at half the speed with allocation retries. No plan shows how R66 to R75 differ at the same size (compiled or
not, transfers further ahead). The constants of the covariance (`plan/calibration.py`) are round numbers that were
chosen after a look at these rows.

## The head alone

Cross entropy of 4,096 tokens over a vocabulary of 131,072, width 1,024, computed in chunks; MiB in addition to the
gradients themselves, compared with a measured loop that computes gradients in the forward.

{heads}

In bf16, xtrain accumulates the head's gradient in fp32 and rounds each chunk's product to bf16 before it is added: this
needs a second copy of the product, which the measured loop does not have.

## Goodput

Effective training time of runs whose failures are published, compared with the formula of
[plan.md](plan.md#failures). The sources say how often jobs failed, and of the times only what the second column holds:
a row shows what follows if the rest is as assumed.

{goodput}

For Llama 3 405B (arXiv 2407.21783, section 3.3.4) more than 90 % follows for restarts of up to about a quarter of an
hour. MegaScale (arXiv 2402.15627, section 6.3) exceeds 90 % if its several weeks are three or more. Neither source
gives the interval between checkpoints. ByteRobust (arXiv 2509.16293, section 8.1) reports up to 97 %, which lies
between what follows from the mean times of its table 6, and from its longest incident for all of them.

Kokolis et al. (arXiv 2410.21680) fit 6.50 failures in a thousand days of a node of eight GPUs on their cluster RSC-1,
and project from it how often jobs fail, which `mtbf / n` gives too. Their effective training time ratio is an
approximation of the first order in failures; both are shown for restarts of 2 minutes, saves of 10 seconds and the
best interval, which are assumptions.

{ratios}

Where a job fails every quarter of an hour the first order overstates what is lost: a failure that comes during a
restart costs less than a restart. So it is with 98,304 GPUs at Meta (arXiv 2602.00277), where a failure every 18
minutes that stalls training for 10 is said to leave 44 %, which is the first order, 1 - 10/18: with exponential times
between failures it is {stalled:.0%}.
"""

MISSES: Final = (
    "the 405B pipelines without context parallelism and the one with cp 8 (torchtitan's runtime keeps more than "
    "gathered stages, unsharded gradients and recomputed inputs, which is all that xtrain's keeps), the 70B rows "
    "(buffers of asynchronous tensor parallelism with sixteen rows at a time; what KempnerForge keeps is not known), "
    "and KempnerForge's FSDP on four devices, which it measured as hardly smaller than on two."
)


def page() -> str:
    """The Markdown of docs/accuracy.md."""
    lines = [
        "| from | layout | sequence · rows | GiB | predicted | ratio | tokens/s | predicted | |",
        "|" + " --- |" * 9,
    ]
    within, paced, rows = 0, 0, [*titan_rows(), *kempner_rows()]
    for row in rows:
        plan = planned(row)
        guess = predicted(row, plan)
        slow, fast = speeds(plan)
        ratio = guess / row.measured
        within += abs(ratio - 1) <= 0.15
        paced += slow <= row.speed <= fast
        what = layout_of(row)
        each = f"{row.sequence:,} · {row.micro} × {row.accumulate}"
        mark = "" if abs(ratio - 1) <= 0.15 else "**"
        lines.append(
            f"| {row.source} | {what} | {each} | {row.measured:.1f} | {guess:.1f} | {mark}{ratio:.2f}{mark} "
            f"| {row.speed:,.0f} | {slow:,.0f} to {fast:,.0f} | {row.remark} |"
        )
    calibrated, said = calibrated_table([*rows, *xorl_rows()])
    heads = ["| format | tokens per chunk | MiB | predicted |", "| --- | --- | --- | --- |"]
    for head in HEAD_ROWS:
        measured = f"{head.low}" if head.low == head.high else f"{head.low} to {head.high}"
        heads.append(f"| {head.params} | {head.tokens:,} | {measured} | {head.predicted:.0f} |")
    return TEXT.format(
        plain=PLAIN_HEAD,
        within=within,
        paced=paced,
        count=len(rows),
        rows="\n".join(lines),
        calibrated=calibrated,
        said=said,
        interpolated=f"{said['interpolated_inside']} of {said['interpolated']}",
        exact=f"{said['exact_inside']} of {said['exact']}",
        extrapolated=f"{said['extrapolated_inside']} of {said['extrapolated']}",
        of_published=calibrated_table(rows)[1],
        xorl=len(xorl_rows()),
        misses=MISSES,
        heads="\n".join(heads),
        goodput=goodput_table(),
        ratios=ratio_table(),
        stalled=Faults(between=18 * 60.0, restart=10 * 60.0, blocked=0.0, later=0.0).goodput(1.0),
    )


PLAN_PAGE: Final = ROOT / "docs/plan.md"
BEGIN, END = "<!-- llama 3: begin -->\n", "<!-- llama 3: end -->\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def plan_page() -> str:
    """The Markdown of docs/plan.md, with the goodput of Llama 3 as the plan has it today."""
    goodput = llama_goodput()
    five, ten, fifteen, twenty = (_percent(llama_row(minutes).predicted) for minutes in (5, 10, 15, 20))
    hours = goodput.faults.between / HOUR
    text = (
        "Of Llama 3 405B Meta reports 419 unexpected interruptions in 54 days on 16,384 H100 GPUs, one every "
        f"{hours:.1f} hours or {hours * 16384:,.0f} hours a device, and more than 90 % of effective training time "
        "(arXiv 2407.21783, section 3.3.4). With the 2 TB/s of their storage and the best interval of "
        f"{goodput.best / 60:.1f} minutes, the plan of `{LLAMA_SPEC}` gives {five} for restarts of 5 minutes, {ten} "
        f"for 10, {fifteen} for 15 and {twenty} for 20: their figure needs restarts of about 15 minutes at most. As "
        f"the plan adds it up, a restart takes {goodput.faults.restart / 60:.1f} minutes, of which 10 may pass until "
        f"it is noticed: {_percent(goodput.best_share)}."
    )
    page = PLAN_PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + fill(text, 120, break_on_hyphens=False) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted memory and speed beside published figures.")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy.md and docs/plan.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
        PLAN_PAGE.write_text(plan_page())
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
