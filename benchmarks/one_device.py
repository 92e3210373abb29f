"""Throughput of one device on shapes that people train, against a hand-written loop over the same kernels.

    python benchmarks/one_device.py --shape 1b            # on a CUDA GPU: bf16, compiled blocks, flex attention
    OMP_NUM_THREADS=1 python benchmarks/one_device.py --shape tiny --steps 20 --device cpu

Both sides run in one process, in turns, with the same model, packed rows and fused AdamW; the median of the turns
counts. Weights are random. Prints one JSON line: tokens a second, share of the device's peak, peak memory, and what
the plan has predicted. `efficiency` is that of `cluster { efficiency }`: what is computed a second time counts.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.executor import Executor
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.build import compute_format
from xtrain.runtime.monitoring.devices import peak_flops

SHAPES = {
    "tiny": "dim = 128, layers = 4, heads = 4, kv_heads = 2, ffn = 384, vocab = 1024",
    "1b": "dim = 2048, layers = 16, heads = 32, kv_heads = 8, head_dim = 64, ffn = 8192, vocab = 128256",
    "8b": "dim = 4096, layers = 32, heads = 32, kv_heads = 8, ffn = 14336, vocab = 128256",
}
SPEC = """
experiment device {{ budget = {steps} steps }}
model llama {{ {shape}, tie_embeddings = {tied} }}
tokenizer bytes
dataset stdlib {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = {sequence}, micro = {micro}, rows = {micro} }}
optimizer adamw {{ lr = 1e-5 }}
precision {{ params = {params} }}
launch {{ device = {device} }}
{cluster}
{activation}
compile {{ mode = {compile} }}
every 1 step log
every 100000 steps checkpoint
"""


class Xtrain:
    """A run that goes on for `steps` more steps each time it is asked."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.steps = arguments.steps
        text = SPEC.format(
            steps=10_000_000,
            shape=SHAPES[arguments.shape],
            tied=str(arguments.shape == "1b").lower(),
            sequence=arguments.sequence,
            micro=arguments.micro,
            params=arguments.params,
            device=arguments.device,
            activation=f"activation {arguments.activation}" if arguments.activation != "none" else "",
            compile=arguments.compile,
            cluster=f"cluster {arguments.cluster} {{ nodes = 1, devices = 1 }}" if arguments.cluster else "",
        )
        (folder / "device.xtrain").write_text(text)
        plan = plan_from_spec(folder / "device.xtrain").plan
        assert plan is not None
        self.plan = plan
        self.executor = Executor(plan, folder / "run", rank=0)
        self.executor._set_up(0.0)
        parts = self.executor.resources
        self.model, self.optimizer, self.feed = parts["model"], parts["optimizer"], parts["feed"]
        self.device = parts["rank"].device

    def ours(self) -> float:
        """Seconds a step, as the executor does it."""
        self.feed.steps = self.executor.progress.step + self.steps
        object.__setattr__(self.plan.timeline, "steps", self.feed.steps)
        return self._timed(self.executor.loop.run)

    def by_hand(self) -> float:
        """Seconds a step of the loop one would write first."""
        return self._timed(self._loop)

    def _loop(self) -> None:
        for step in range(self.steps):
            batch = self.feed.loader.microbatches(step)[0]
            self.optimizer.zero_grad()
            loss = self.model.whole(None, ModelBatch.of(batch, self.device)).sum() / batch.num_valid
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--params", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--activation", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--compile", choices=("none", "default", "max_autotune"), default="default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cluster", help="a preset, to print the plan's prediction beside what is measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Xtrain(Path(name), arguments)
        run.ours(), run.by_hand()  # kernels are compiled here
        turns = [(run.ours(), run.by_hand()) for _ in range(arguments.turns)]
        ours, hand = (median(side) for side in zip(*turns, strict=True))
        print(json.dumps({"shape": arguments.shape, **figures(run, ours, hand)}))


def figures(run: Xtrain, ours: float, hand: float) -> dict[str, object]:
    """ours, hand: seconds a step."""
    estimates, cuda = run.plan.estimates, run.device.type == "cuda"
    tokens, flops = estimates.tokens_per_step, estimates.flops_per_step
    peak, times = peak_flops(run.device, compute_format(run.plan)), estimates.times
    computed = max(each.hardware_flops for each in estimates.classes)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "step_seconds": round(ours, 5),
        "planned_step_seconds": times and [round(times.fast, 5), round(times.slow, 5)],
        "tokens_per_second": round(tokens / ours),
        "by_hand_tokens_per_second": round(tokens / hand),
        "of_by_hand": round(hand / ours, 4),
        "mfu": round(flops / ours / peak, 4) if peak else None,
        "efficiency": round(computed / ours / peak, 4) if peak else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "planned_gib": round(
            max(each.memory.total_bytes - each.memory.reserve for each in estimates.classes) / 2**30, 2
        ),
    }


if __name__ == "__main__":
    main()
