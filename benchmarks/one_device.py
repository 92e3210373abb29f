"""Throughput of one device on shapes that people train, against a hand-written loop over the same kernels.

    python benchmarks/one_device.py --shape 1b            # on a CUDA GPU: bf16, compiled blocks, flex attention
    OMP_NUM_THREADS=1 python benchmarks/one_device.py --shape tiny --steps 20 --device cpu

Both sides run in one process, in turns, with the same model, rows and fused AdamW; the median of the turns counts. Rows
are all of one kind: with one document each, or with several. Weights are random, and nothing is saved. Prints one JSON
line: tokens a second, share of the device's peak, memory by category beside the plan's, the step that the plan has
predicted, graph breaks and recompiles. `efficiency` is that of `cluster { efficiency }`: what is computed a second time
counts. With --profile FILE three more steps are traced into it, and a second line has their ten largest kernels and
gaps.
"""

import argparse
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import asdict

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.device import forget_peak, peak_bytes, peak_flops
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.loop.memory_report import memory_by_category
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.build import compute_format
from xtrain.runtime.observe.stopping import stop_signals

SHAPES = {
    "tiny": "dim = 128, layers = 4, heads = 4, kv_heads = 2, ffn = 384, vocab = 1024",
    "1b": "dim = 2048, layers = 16, heads = 32, kv_heads = 8, head_dim = 64, ffn = 8192, vocab = 128256",
    "8b": "dim = 4096, layers = 32, heads = 32, kv_heads = 8, ffn = 14336, vocab = 128256",
}
SPEC = """
experiment device {{ budget = {steps} steps }}
model llama {{ {shape}, tie_embeddings = {tied} }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 2000, length = {length}, spread = {spread}) }}
batch {{ sequence = {sequence}, micro = {micro}, rows = {rows} }}
optimizer {optimizer}
precision {{ params = {params} }}
launch {{ device = {device} }}
{cluster}
{activation}
compile {{ mode = {compile} }}
checkpoint {{ enabled = false }}
every 1 step log
{more}
"""
TRACED = 3  # steps of a profile
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def spec_text(arguments: argparse.Namespace) -> str:
    """The spec that arguments mean."""
    cluster = ""
    if arguments.cluster:
        flops = f", flops = {arguments.flops:.6g}" if arguments.flops else ""
        cluster = f"cluster {arguments.cluster} {{ nodes = 1, devices = 1{flops} }}"
    return SPEC.format(
        steps=10_000_000,
        shape=SHAPES[arguments.shape],
        tied=str(arguments.shape == "1b").lower(),
        sequence=arguments.sequence,
        length=8 * arguments.sequence if arguments.rows == "single" else max(3, arguments.sequence // 8),
        spread=0 if arguments.rows == "single" else 0.5,
        micro=arguments.micro,
        rows=arguments.micro * arguments.accumulate,
        optimizer=arguments.optimizer,
        params=arguments.params,
        device=arguments.device,
        activation=f"activation {arguments.activation}" if arguments.activation != "none" else "",
        compile=arguments.compile,
        cluster=cluster,
        more=arguments.more,
    )


class Xtrain:
    """A run that goes on for `steps` more steps each time it is asked."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.steps = arguments.steps
        cuda = arguments.device == "cuda"
        self.before = torch.cuda.memory_allocated() if cuda else 0  # by others in this process
        (folder / "device.xtrain").write_text(spec_text(arguments))
        plan = plan_from_spec(folder / "device.xtrain").plan
        assert plan is not None
        self.plan = plan
        self.executor = Executor(plan, folder / "run", rank=0)
        self.executor._set_up(0.0)
        parts = self.executor.resources
        self.model, self.optimizer, self.feed = parts["model"], parts["optimizer"], parts["feed"]
        self.device = parts["rank"].device
        self.peak = self.reserved = 0

    def close(self) -> None:
        """Nothing is read and written any more."""
        self.executor.poller.close()
        self.executor._shut_down(failed=False)
        self.executor.requests.rest()

    def ours(self) -> float:
        """Seconds a step, as the executor does it."""
        forget_peak(self.device)
        self.feed.steps = self.executor.progress.step + self.steps
        object.__setattr__(self.plan.timeline, "steps", self.feed.steps)
        seconds = self._timed(self.executor.loop.run)
        if self.device.type == "cuda":
            self.peak = max(self.peak, peak_bytes(self.device) - self.before)
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        return seconds

    def by_hand(self) -> float:
        """Seconds a step of the loop one would write first."""
        return self._timed(self._loop)

    def _loop(self) -> None:
        for step in range(self.steps):
            batches = self.feed.loader.microbatches(step)
            self.optimizer.zero_grad()
            valid = sum(batch.num_valid for batch in batches)
            for batch in batches:
                loss = self.model.whole(None, ModelBatch.of(batch, self.device)).sum() / valid
                loss.backward()
            torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), 1.0)
            self.optimizer.step()
            loss.item()

    def _timed(self, work) -> float:
        self._wait()
        begin = time.perf_counter()
        work()
        self._wait()
        return (time.perf_counter() - begin) / self.steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def prepared(arguments: argparse.Namespace) -> Iterator[Xtrain]:
    """A run that is let go at the end, also by the signals that it listens to."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    with tempfile.TemporaryDirectory() as name:
        try:
            run = Xtrain(Path(name), arguments)
            try:
                yield run
            finally:
                run.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def figures(run: Xtrain, arguments: argparse.Namespace) -> dict[str, Any]:
    """Turns of both sides, and what they say. After a side by hand its gradients are still there."""
    run.ours(), run.by_hand()  # kernels are compiled here
    run.peak = 0  # what compiling took
    turns = [(run.ours(), run.by_hand()) for _ in range(arguments.turns)]
    ours, hand = (median(side) for side in zip(*turns, strict=True))
    estimates, cuda, times = run.plan.estimates, run.device.type == "cuda", run.plan.estimates.times
    tokens, flops = estimates.tokens_per_step, estimates.flops_per_step
    peak = arguments.flops or peak_flops(run.device, compute_format(run.plan))
    computed = max(each.hardware_flops for each in estimates.classes)
    return {
        "shape": arguments.shape,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "step_seconds": round(ours, 5),
        "planned_step_seconds": times and [round(times.fast, 5), round(times.slow, 5)],
        "of_planned_step": times and round(ours / times.step, 4),
        "tokens_per_second": round(tokens / ours),
        "by_hand_tokens_per_second": round(tokens / hand),
        "of_by_hand": round(hand / ours, 4),
        "mfu": round(flops / ours / peak, 4) if peak else None,
        "efficiency": round(computed / ours / peak, 4) if peak else None,
        "memory": memory(run),
        **compiling(),
    }


def compiling() -> dict[str, Any]:
    """How often code left its compiled graphs, or was compiled again, since the process began, and why."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    breaks = counters["graph_break"]
    again = [each.recompile_reason.splitlines()[0][:160] for each in get_compilation_metrics() if each.recompile_reason]
    return {
        "graph_breaks": sum(breaks.values()),
        "breaks": list(breaks)[:5],
        "recompiles": len(again),
        "why": again[:8],
    }


def memory(run: Xtrain) -> dict[str, Any]:
    """Bytes by category as planned and as held after a backward, and the peak beside the planned one; that of a CPU is
    of the whole process and says nothing."""
    planned = max((each.memory for each in run.plan.estimates.classes), key=lambda each: each.allocated_bytes)
    held = memory_by_category(run.model, run.optimizer, (), run.device).device
    states = sum(held[name] for name in ("parameters", "gradients", "optimizer"))
    cuda = run.device.type == "cuda"
    return {
        "planned": {name: size for name, size in asdict(planned).items() if size},
        "held": {name: size for name, size in held.items() if size},
        "states_of_planned": round(states / planned.states, 4),
        "planned_gib": round(planned.allocated_bytes / 2**30, 3),
        "peak_gib": round(run.peak / 2**30, 3) if cuda else None,
        "peak_of_planned": round(run.peak / planned.allocated_bytes, 4) if cuda else None,
        "reserved_gib": round(run.reserved / 2**30, 3) if cuda else None,
    }


def profiled(run: Xtrain, path: Path) -> dict[str, Any]:
    """Three steps, traced into `path`: the kernels (on a CPU: operations) that take most, and the longest gaps between
    them on the device, in milliseconds of all steps."""
    from torch.profiler import ProfilerActivity, profile

    device = [ProfilerActivity.CUDA] if run.device.type == "cuda" else []
    run.steps = TRACED
    with profile(activities=[ProfilerActivity.CPU, *device]) as recorded:
        run.ours()
    recorded.export_chrome_trace(str(path))
    entries = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]
    kinds = ON_DEVICE if device else ("cpu_op",)
    return {"traced_steps": TRACED, **largest([each for each in entries if each.get("cat") in kinds])}


def largest(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a trace, whose times are microseconds."""
    totals: dict[str, tuple[float, int]] = {}
    gaps, busy, before, end = [], 0.0, "", 0.0
    for each in sorted(entries, key=lambda each: each["ts"]):
        name, begin, last = each["name"][:120], each["ts"], each["ts"] + each["dur"]
        seconds, calls = totals.get(name, (0.0, 0))
        totals[name] = seconds + each["dur"], calls + 1
        if before and begin > end:
            gaps.append({"ms": round((begin - end) / 1e3, 3), "after": before, "before": name})
        busy += max(0.0, last - max(begin, end if before else begin))
        if not before or last > end:
            before, end = name, last
    kernels = [
        {"name": name, "ms": round(time / 1e3, 3), "calls": calls}
        for name, (time, calls) in sorted(totals.items(), key=lambda one: -one[1][0])[:10]
    ]
    idle = sum(gap["ms"] for gap in gaps)
    gaps.sort(key=lambda gap: -gap["ms"])
    return {"kernels": kernels, "gaps": gaps[:10], "busy_ms": round(busy / 1e3, 3), "idle_ms": round(idle, 3)}


def too_much(arguments: argparse.Namespace) -> str:
    """Why it is not worth a try on the device that is there; empty: it is."""
    if arguments.device != "cuda":
        return ""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "device.xtrain"
        path.write_text(spec_text(arguments))
        plan = plan_from_spec(path).plan
    assert plan is not None
    planned = plan.estimates.fullest.memory.total_bytes
    there = torch.cuda.get_device_properties(0).total_memory
    return f"{planned / 2**30:.1f} GiB planned, {there / 2**30:.1f} there" if planned > 1.1 * there else ""


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run in this process."""
    if reason := too_much(arguments):
        return {"skipped": reason}
    with prepared(arguments) as run:
        return figures(run, arguments)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", choices=SHAPES, default="1b")
    found.add_argument("--sequence", type=int, default=4096)
    found.add_argument("--micro", type=int, default=1)
    found.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    found.add_argument("--rows", choices=("single", "packed"), default="single", help="one document a row, or several")
    found.add_argument("--steps", type=int, default=10)
    found.add_argument("--turns", type=int, default=5)
    found.add_argument("--params", default="bf16", help="inside `precision { params = … }`")
    found.add_argument("--optimizer", default="adamw { lr = 1e-5 }")
    found.add_argument("--activation", choices=("none", "full", "selective"), default="none")
    found.add_argument("--compile", choices=("none", "default", "max_autotune"), default="default")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--cluster", help="a preset, to print the plan's prediction beside what is measured")
    found.add_argument("--flops", type=float, help="peak FLOP/s of a device without a data sheet")
    found.add_argument("--more", default="", help="further blocks of the spec")
    found.add_argument("--profile", type=Path, help="where the trace of three more steps goes")
    return found


def arguments_of(**given: Any) -> argparse.Namespace:
    """Those of the command, the usual ones where none are given."""
    return argparse.Namespace(**{**vars(parser().parse_args([])), **given})


def main() -> None:
    arguments = parser().parse_args()
    if reason := too_much(arguments):
        print(json.dumps({"skipped": reason}))
        return
    with prepared(arguments) as run:
        print(json.dumps(figures(run, arguments)), flush=True)
        if arguments.profile:
            print(json.dumps(profiled(run, arguments.profile)), flush=True)


if __name__ == "__main__":
    main()
