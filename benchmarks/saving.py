"""How long training stands still for a checkpoint: saved at once, and beside training.

    OMP_NUM_THREADS=1 python benchmarks/saving.py [--megabytes 500] [--device cpu]

One run, in one process: six saves beside training, and as many for which training waits, in turns, of the same state.
Blocked is what the tick takes and what the optimizer then waits for the copy; the first save of each kind is told by
itself. Also: how long it takes to compare all checksums, and to load. Prints a JSON line
for each mode.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.store.checkpoints import CheckpointFolder

SPEC = """
experiment saving {{ budget = {steps} steps }}
model llama {{ dim = 512, layers = {layers}, heads = 8, ffn = 1536, tie_embeddings = true }}
tokenizer bytes
dataset stdlib {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = 256, micro = 4, rows = 4 }}
optimizer adamw {{ lr = 1e-3 }}
launch {{ device = {device} }}
every 1 step log
every 2 steps checkpoint
every 3 steps checkpoint then stop
checkpoint {{ mode = {mode}, keep = 1, model = false }}
"""
BLOCK = 4 * 512 * 512 + 3 * 512 * 1536  # parameters; a state has three fp32 numbers for each
SAVES = 7


def run(folder: Path, mode: str, megabytes: int, device: str) -> dict:
    layers = max(1, round(megabytes * 1e6 / 12 / BLOCK))
    (folder / "saving.xtrain").write_text(SPEC.format(steps=1000, layers=layers, mode=mode, device=device))
    plan = plan_from_spec(folder / "saving.xtrain", (f"workspace.root={folder}",)).plan
    assert plan is not None
    executor = Executor(plan, folder / mode, rank=0)
    executor._set_up(0.0)
    executor.progress.step = 0
    for _ in range(SAVES):
        executor.loop.run()  # up to the next step that ends with a save that is waited for
        executor.resources["saver"].settle()
    events = [json.loads(line) for line in (folder / mode / "events.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "checkpoint"]
    first, *beside = [event for event in saves if "blocked_seconds" in event]
    at_once = [event for event in saves if "blocked_seconds" not in event][1:]
    latest = CheckpointFolder(folder / mode / "checkpoints").latest()
    assert latest is not None
    begin = time.perf_counter()
    assert latest.flaws(content=True) == []
    verified = time.perf_counter() - begin
    sync, blocked = median(e["seconds"] for e in at_once), [e["blocked_seconds"] for e in beside]
    metrics = [json.loads(line) for line in (folder / mode / "metrics.jsonl").read_text().splitlines()]
    return {
        "mode": mode,
        "device": device,
        "megabytes": round(saves[0]["bytes"] / 1e6),
        "saves": len(beside),
        "step_seconds": median(m["step_seconds"] for m in metrics if "step_seconds" in m),
        "sync_seconds": sync,
        "blocked_first": first["blocked_seconds"],
        "blocked_seconds": median(blocked),
        "blocked_most": max(blocked),
        "blocked_share": median(blocked) / sync,
        "written_seconds": median(e["seconds"] for e in beside),
        "verify_seconds": verified,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for mode in ("async", "async_pinned"):
            figures = run(Path(name), mode, options.megabytes, options.device)
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
