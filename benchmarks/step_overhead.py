"""What a step costs beyond a hand-written loop over the same model, data and optimizer.

    OMP_NUM_THREADS=1 python benchmarks/step_overhead.py

A step of a run and one by hand follow each other in one process, with everything on: a record of metrics every step,
events, node times, alerts. Figures are milliseconds of processor time of the main thread: the median, the lowest tenth,
and the median of the differences of neighbours. What the other threads of the process take meanwhile, writers and
heartbeats, is counted over all pairs. Prints one JSON line.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.observe.records import Records

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
FIRST = 20  # steps before those that count: kernels are chosen and memory is taken


class InTurns:
    """Does a step by hand behind every step of the run, which ends where its records are handed over."""

    def __init__(self, executor: Executor) -> None:
        parts = executor.resources
        self.model, self.optimizer, self.feed = parts["model"], parts["optimizer"], parts["feed"]
        self.progress = executor.progress
        self.ours, self.hand = list[float](), list[float]()
        self._began: float | None = None
        self._flush = Records.flush

    def flush(self, records: Records, step: int) -> None:
        self._flush(records, step)
        if self._began is not None:
            self.ours.append(time.thread_time() - self._began)
            begin = time.thread_time()
            self.by_hand(step - 1)
            self.hand.append(time.thread_time() - begin)
        self._began = time.thread_time()

    def by_hand(self, step: int) -> None:
        """The loop one would write first."""
        batch = self.feed.loader.microbatches(step)[0]
        self.optimizer.zero_grad()
        loss = self.model.whole(None, ModelBatch.of(batch, torch.device("cpu"))).sum() / batch.num_valid
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "overhead.xtrain"
        path.write_text(SPEC.format(steps=FIRST + steps))
        plan = plan_from_spec(path).plan
        assert plan is not None
        executor = Executor(plan, path.parent / "run", rank=0)
        executor._set_up(0.0)
        turns = InTurns(executor)
        main_thread, process = time.thread_time(), time.process_time()
        with mock.patch.object(Records, "flush", lambda records, step: turns.flush(records, step)):
            executor.loop.run()
        main_thread, process = time.thread_time() - main_thread, time.process_time() - process
    ours, hand = turns.ours[FIRST:], turns.hand[FIRST:]
    figures = {
        "hand_ms": median(hand),
        "xtrain_ms": median(ours),
        "hand_lowest_tenth_ms": sorted(hand)[len(hand) // 10],
        "xtrain_lowest_tenth_ms": sorted(ours)[len(ours) // 10],
        "overhead_ms": median(a - b for a, b in zip(ours, hand, strict=True)),
        "other_threads_ms": max(0.0, process - main_thread) / (FIRST + steps),
    }
    print(json.dumps({name: round(1e3 * value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
