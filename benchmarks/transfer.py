"""Best learning rates of `specs/quickstart.xtrain` over widths, with the standard parametrization and with µP.

    OMP_NUM_THREADS=1 python benchmarks/transfer.py --widths 64 128 256 512 --steps 120

Four layers, heads of 32 features, an untied head and 4 rows of 128 bytes a step; everything else is as in the spec.
The base of µP is the first width. The figure of a run is its loss on 128 rows of the modules held out, after the last
step. The best rate is the lowest point of the parabola through the best of the rates and its neighbors, over the
logarithm of the rate. Prints every figure when it is known, then tables in Markdown and one JSON line.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xtrain.planner.load import plan_from_text
from xtrain.records.names import EndStatus
from xtrain.runtime.loop.executor import Executor

SPEC = Path(__file__).parents[1] / "specs/quickstart.xtrain"
EVALUATION = "on finish eval stdlib { batches = 64 }"
KINDS = ("standard", "mup")


def loss_of(folder: Path, kind: str, width: int, base: int, rate: float, steps: int) -> float:
    sizes = {"dim": width, "heads": width // 32, "kv_heads": width // 32, "head_dim": 32, "ffn": 3 * width}
    sets = [f"model.{name}={size}" for name, size in sizes.items()]
    sets += [f"experiment.budget={steps} steps", f"optimizer.lr={rate}", "model.tie_embeddings=false"]
    sets += ["batch.sequence=128", "batch.rows=4", "batch.micro=2"]
    lines = [line for line in SPEC.read_text().splitlines() if not line.startswith(("every 100", "on finish"))]
    lines += [EVALUATION, f"parametrization {{ base_width = {base} }}" if kind == "mup" else ""]
    compiled = plan_from_text("\n".join(lines), str(SPEC), sets, world=1)
    if compiled.plan is None:
        raise SystemExit(compiled.diagnostics.render(color=False))
    folder.mkdir(parents=True)
    if Executor(compiled.plan, folder, rank=0).run() != EndStatus.DONE:
        raise SystemExit(f"{kind}, width {width} with {rate:g} did not end; see {folder}")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    loss = [event for event in events if event["event"] == "eval"][-1]["loss"]
    print(f"{kind} {width} {rate:g}: {loss:.4f}", flush=True)
    return loss


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate of the least loss; the least of the rates themselves at an end of the range."""
    rates = sorted(losses)
    least = min(range(len(rates)), key=lambda place: losses[rates[place]])
    if least in (0, len(rates) - 1):
        return rates[least]
    near = rates[least - 1 : least + 2]
    a, b, _ = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    return float(np.exp(-b / (2 * a)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2])
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    found: dict[str, dict[int, dict[float, float]]] = {kind: {width: {} for width in given.widths} for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        for width in given.widths:
            for kind in KINDS:
                for rate in given.rates:
                    folder = Path(name) / f"{kind}-{width}-{rate:g}"
                    found[kind][width][rate] = loss_of(folder, kind, width, given.widths[0], rate, given.steps)
    for kind, widths in found.items():
        print(f"\n| {kind} | {' | '.join(f'{rate:g}' for rate in given.rates)} | best rate |")
        print(f"| --- |{' --: |' * (len(given.rates) + 1)}")
        for width, losses in widths.items():
            print(f"| {width} | {' | '.join(f'{loss:.3f}' for loss in losses.values())} | {best_rate(losses):.2g} |")
    best = {kind: [best_rate(losses) for losses in widths.values()] for kind, widths in found.items()}
    print(json.dumps({"steps": given.steps, "best": best, "moved": {k: max(v) / min(v) for k, v in best.items()}}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
