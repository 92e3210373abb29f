"""What each axis of parallelism makes of the time of a step, against one process on the same rows.

    python benchmarks/topologies.py [--only fsdp tp …] [--rows 8] [--steps 26]

Every layout is a real `xtrain run` with OMP_NUM_THREADS=1; its figure is the median over the steps after the first
five. Dense layouts are held against the dense model in one process, expert parallelism against the MoE. With more
ranks than cores the ranks take turns, so their figure says what the layout adds in work and messages, not how it
scales. Prints a JSON line a layout, then the table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from attrs import asdict, frozen

WARM_UP = 5
# About five million parameters; the MoE has as many for each token, and three times that in all.
MODELS = {
    "dense": "llama { dim = 256, layers = 8, heads = 8, kv_heads = 4, ffn = 512 }",
    "moe": "qwen3_moe { dim = 256, layers = 8, heads = 8, kv_heads = 4, experts = 8, experts_per_token = 2, "
    "expert_ffn = 256 }",
}
SPEC = """
experiment topologies {{ budget = {steps} steps }}
model {model}
tokenizer bytes
dataset stdlib {{ source = python_stdlib() }}
batch {{ sequence = 512, micro = 1, rows = {rows} }}
optimizer adamw {{ lr = 1e-3 }}
every 1 step log
every {steps} steps checkpoint
"""


@frozen
class MeasuredLayout:
    """An axis, how many ranks it gets, and the settings that say so."""

    axis: str
    ranks: int
    sets: tuple[str, ...]
    model: str = "dense"


@frozen
class LayoutTime:
    axis: str
    ranks: int
    model: str
    step_ms: float
    times_alone: float
    cores: int


def layouts() -> list[MeasuredLayout]:
    found = []
    for n in (2, 4):
        cp = (f"parallel.cp={n}", "parallel.fsdp=1")
        found += [
            MeasuredLayout("fsdp", n, (f"parallel.fsdp={n}",)),
            MeasuredLayout("replicate", n, (f"parallel.fsdp.replicate={n}", "parallel.fsdp=1")),
            MeasuredLayout("ddp", n, (f"parallel.fsdp.replicate={n}", "parallel.fsdp=1", "parallel.stack=ddp")),
            MeasuredLayout("tp", n, (f"parallel.tp={n}",)),
            MeasuredLayout(
                "tp, whole sequence and loss",
                n,
                (f"parallel.tp={n}", "parallel.tp.sequence=false", "parallel.tp.loss=false"),
            ),
            MeasuredLayout("ring", n, (*cp, f"parallel.cp.ring={n}")),
            MeasuredLayout("ulysses", n, (*cp, f"parallel.cp.ulysses={n}")),
            MeasuredLayout("pp, 1f1b", n, (f"parallel.pp={n}",)),
            MeasuredLayout("pp, zbv", n, (f"parallel.pp={n}", "parallel.pp.schedule=zbv")),
            MeasuredLayout("ep", n, (f"parallel.ep={n}", f"parallel.fsdp={n}"), "moe"),
            MeasuredLayout("fsdp", n, (f"parallel.fsdp={n}",), "moe"),
        ]
    return found


def step_seconds(folder: Path, model: str, sets: tuple[str, ...], rows: int, steps: int) -> float:
    """Median step time of a run, in seconds."""
    spec = folder / f"{model}.xtrain"
    spec.write_text(SPEC.format(model=MODELS[model], rows=rows, steps=steps))
    run = f"run-{len(list(folder.iterdir()))}"
    settings = (f"workspace.run={run}", *sets)
    flags = [word for text in settings for word in ("--set", text)]
    command = [sys.executable, "-m", "xtrain", "run", spec.name, "--ui", "none", *flags]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    (path,) = folder.glob(f"runs/*/{run}/metrics.jsonl")
    found = map(json.loads, path.read_text().splitlines())
    seconds = [record["step_seconds"] for record in found if "step_seconds" in record]
    (folder / run).touch()
    return median(seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="AXIS", help="axes whose name begins with one of these")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=WARM_UP + 21)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    chosen = [x for x in layouts() if not arguments.only or x.axis.startswith(tuple(arguments.only))]
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = {}
        for model in dict.fromkeys(layout.model for layout in chosen):
            alone[model] = step_seconds(folder, model, (), arguments.rows, arguments.steps)
            figures.append(LayoutTime("one process", 1, model, round(alone[model] * 1e3, 1), 1.0, cores))
            print(json.dumps(asdict(figures[-1])), flush=True)
        for x in chosen:
            seconds = step_seconds(folder, x.model, x.sets, arguments.rows, arguments.steps)
            ratio = round(seconds / alone[x.model], 2)
            figures.append(LayoutTime(x.axis, x.ranks, x.model, round(seconds * 1e3, 1), ratio, cores))
            print(json.dumps(asdict(figures[-1])), flush=True)
    print(f"\n{cores} cores; {arguments.rows} rows of 512 positions a step; more ranks than cores take turns\n")
    print(f"{'axis':<28} {'model':<6} {'ranks':>5} {'step':>10} {'/ alone':>8}")
    for f in figures:
        print(f"{f.axis:<28} {f.model:<6} {f.ranks:>5} {f.step_ms:>7.0f} ms {f.times_alone:>8.2f}")


if __name__ == "__main__":
    main()
