"""The process that ranks of the tests are forked from: that of the product, with what only tests need.

python rank_forker.py PARENT_PID
"""

import fcntl
import signal
import sys
from pathlib import Path

from xtrain.runtime.inspect import rank_forker
from xtrain.runtime.inspect.rank_forker import answer_jobs, die_with

# What `train_once` takes a step of: a model and its layout.
LAYOUTS = (
    ("dense", ("parallel.fsdp=2", "parallel.tp=2")),
    ("dense", ("parallel.pp=2", "parallel.pp.schedule=zero_bubble", "parallel.fsdp=1")),
    ("moe", ("parallel.fsdp=2", "parallel.tp=2")),
)
# Modules whose faults tests put into ranks: they add them to MUTATIONS.
FAULTS = ("rank_control", "rank_files", "rank_health", "rank_nonfinite", "rank_resume", "rank_saving")


def preload(*more: str) -> None:
    """more: modules, beside those that every rank imports."""
    feed_once()
    rank_forker.preload(*more, once=_once)


def _once() -> None:
    _load_kernels_alone()
    train_once()


def load_for_ranks() -> None:
    """What every rank loads on its way to the first step, and finds out of its processor."""
    rank_forker.load_for_ranks()
    _load_kernels_alone()


def _load_kernels_alone() -> None:
    with Path(__file__).open() as lock:  # where no machine code is kept yet, one process compiles and others read
        fcntl.flock(lock, fcntl.LOCK_EX)
        rank_forker.load_kernels()


def feed_once() -> None:
    """Read a row, with masks and without, so that numba reads compiled kernels once and not in every rank."""
    import numpy as np

    from xtrain.components.collators.flatten_torch import flatten
    from xtrain.components.collators.pack_torch import pack
    from xtrain.components.collators.shift_tokens_torch import shift_tokens
    from xtrain.components.collators.to_tensor_torch import to_tensor
    from xtrain.components.packings.sequential_run import pack as pack_sequential
    from xtrain.runtime.feed.collate import compose
    from xtrain.runtime.feed.loader import RowFeeder
    from xtrain.runtime.feed.records import BadRecordReport
    from xtrain.runtime.feed.token_store import TokenStore

    tokens, offsets = np.arange(6, dtype=np.uint16), np.array([0, 6])
    rows = pack_sequential(np.diff(offsets), 8, "split")
    chain = compose([to_tensor(), flatten(), shift_tokens(), pack(capacity=8)])
    for trained in (None, np.ones(6, dtype=np.uint8)):
        store = TokenStore(
            key="", tokens=tokens, offsets=offsets, num_files=1, bad_records=BadRecordReport(), trained=trained
        )
        RowFeeder(store=store, documents=np.arange(1), rows=rows, collate=chain).microbatch(np.array([0]))


def train_once() -> None:
    """Take a step of a few layouts."""
    from trials import Trial

    from xtrain.planner.load import plan_from_text

    for model, layout in LAYOUTS:
        text = Trial(model=model).text(alone=False)
        plan = plan_from_text(text, "trial.xtrain", ("model.layers=2", "launch.device=cpu", *layout)).plan
        assert plan is not None
        rank_forker.rehearse(plan)


def main() -> None:
    die_with(int(sys.argv[1]))
    preload("forked_rank", *FAULTS)
    answer_jobs()


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored below nohup, where the tests may run
    main()
