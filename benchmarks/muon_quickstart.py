"""Muon and AdEMAMix against AdamW on `specs/quickstart.xtrain`: all trained with the same five learning rates.

    OMP_NUM_THREADS=1 python benchmarks/muon_quickstart.py --steps 300

Everything but optimizer, rate and the number of steps is that of the spec; all begin with the same weights and see the
same rows. The figure of a run is its loss on 256 rows of the modules held out, after the last step. Before that all
take some steps in turns, in one process: the time of a step is processor time, the median of the turns. Prints every
figure when it is known, then a table in Markdown and one JSON line.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from xtrain.planner.load import plan_from_text
from xtrain.records.names import EndStatus
from xtrain.runtime.loop.executor import Executor

SPEC = Path(__file__).parents[1] / "specs/quickstart.xtrain"
EVALUATION = "on finish eval stdlib { batches = 32 }"
RATES = ("1e-3", "2e-3", "3e-3", "6e-3", "1.2e-2")
OPTIMIZERS = {
    "adamw": (),
    "muon": (),
    "muon, iteration = polar_express": ("iteration=polar_express",),
    "muon, neurons = 0.95": ("neurons=0.95",),
    "ademamix, both warm-ups": ("alpha_warmup={steps}", "beta3_warmup={steps}"),
}
TURN = 3  # steps


def executor_of(folder: Path, optimizer: str, rate: str, steps: int, *more: str) -> Executor:
    """more: lines of the spec."""
    kind = optimizer.partition(",")[0]
    sets = [f"experiment.budget={steps} steps", f"optimizer.kind={kind}", f"optimizer.lr={rate}"]
    sets += [f"optimizer.{setting.format(steps=steps)}" for setting in OPTIMIZERS[optimizer]]
    lines = [line for line in SPEC.read_text().splitlines() if not line.startswith(("every 100", "on finish"))]
    compiled = plan_from_text("\n".join([*lines, *more]), str(SPEC), sets, world=1)
    if compiled.plan is None:
        raise SystemExit(compiled.diagnostics.render(color=False))
    folder.mkdir(parents=True)
    return Executor(compiled.plan, folder, rank=0)


def trained(folder: Path, optimizer: str, rate: str, steps: int) -> float:
    """The loss on what is held out."""
    if executor_of(folder, optimizer, rate, steps, EVALUATION).run() != EndStatus.DONE:
        raise SystemExit(f"{optimizer} with {rate} did not end; see {folder}")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    loss = [event for event in events if event["event"] == "eval"][-1]["loss"]
    print(f"{optimizer} {rate}: {loss:.4f}", flush=True)
    return loss


def step_times(folder: Path, optimizers: Sequence[str], turns: int) -> dict[str, list[float]]:
    """Processor seconds a step, one figure a turn."""
    runs = {name: executor_of(folder / name, name, "3e-3", (turns + 1) * TURN) for name in optimizers}
    for run in runs.values():
        run._set_up(0.0)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            run.resources["feed"].steps = (turn + 1) * TURN
            object.__setattr__(run.plan.timeline, "steps", (turn + 1) * TURN)
            begin = time.process_time()
            run.loop.run()
            if turn:  # the first one warms up
                found[name].append((time.process_time() - begin) / TURN)
                print(f"{name}: {found[name][-1]:.3f} s a step", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turns", type=int, default=9, help="of all optimizers, for the time of a step")
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = step_times(folder / "times", arguments.only, arguments.turns) if arguments.turns else None
        losses = {
            optimizer: {rate: trained(folder / optimizer / rate, optimizer, rate, arguments.steps) for rate in RATES}
            for optimizer in arguments.only
        }
    print(f"| `lr` | {' | '.join(RATES)} |\n| --- |{' --: |' * len(RATES)}")
    for optimizer, of_rates in losses.items():
        best = min(of_rates.values())
        cells = [f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in of_rates.values()]
        print(f"| `{optimizer}` | {' | '.join(cells)} |")
    figures = {"steps": arguments.steps, "loss": losses}
    if times is not None:
        figures["step_seconds"] = {name: round(median(each), 4) for name, each in times.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
