"""What a step costs beyond a hand-written loop over the same model, data and optimizer.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py

Both sides run in one process, in turns; each turn's figure is processor time per step, and the median of the turns
counts. Everything is on: a record of metrics every step, events, node times. Prints one JSON line.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.executor import Executor
from xtrain.runtime.models.batch import ModelBatch

SPEC = """
experiment overhead {{ budget = {steps} steps }}
model llama {{ dim = 32, layers = 4, heads = 4, ffn = 96, vocab = 4096, init_std = 0.1 }}
tokenizer bytes
dataset stdlib {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = 64, micro = 4, rows = 4 }}
optimizer adamw {{ lr = 1e-3 }}
precision {{ matmul = highest }}
every 1 step log
every {steps} steps checkpoint
"""
STEPS, TURNS = 400, 5


def ours(folder: Path, turn: int) -> tuple[float, Executor]:
    (folder / "overhead.xtrain").write_text(SPEC.format(steps=STEPS))
    plan = plan_from_spec(folder / "overhead.xtrain").plan
    assert plan is not None
    executor = Executor(plan, folder / f"run{turn}", rank=0)
    executor._set_up(0.0)
    begin = time.process_time()
    executor.loop.run()
    return (time.process_time() - begin) / STEPS, executor


def by_hand(executor: Executor) -> float:
    """The same model goes on with the same batches in the loop one would write first."""
    parts = executor.resources
    model, optimizer, feed = parts["model"], parts["optimizer"], parts["feed"]
    batches = [feed.loader.microbatches(step)[0] for step in range(STEPS)]
    device = torch.device("cpu")
    begin = time.process_time()
    for batch in batches:
        optimizer.zero_grad()
        loss = model.whole(None, ModelBatch.of(batch, device)).sum() / batch.num_valid
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
    return (time.process_time() - begin) / STEPS


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        xtrain, hand = [], []
        for turn in range(TURNS + 1):
            seconds, executor = ours(folder, turn)
            bare = by_hand(executor)
            if turn:  # the first turn warms up
                xtrain.append(seconds)
                hand.append(bare)
    overhead = median(a - b for a, b in zip(xtrain, hand, strict=True))
    figures = {"hand_ms": median(hand) * 1e3, "xtrain_ms": median(xtrain) * 1e3, "overhead_ms": overhead * 1e3}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
