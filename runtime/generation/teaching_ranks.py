"""What a teacher holds probable of a dataset, computed by this process or by several of this machine together."""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from xtrain.planner.plan import Plan
from xtrain.planner.serialise import dumps, from_json
from xtrain.runtime.bootstrap import TIMEOUT
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loading.prepared import cache_of, prepared_from
from xtrain.runtime.data.look import data_nodes, tokenizer_of
from xtrain.runtime.data.stores.store import TokenStore
from xtrain.runtime.data.stores.taught import TaughtEntry, TaughtKey, open_taught
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.generation.teaching import Report, TeacherModel
from xtrain.runtime.input.teacher import TEACHERS

LINE_SECONDS: Final = 10.0
REFUSED: Final = 3  # the exit code of a rank that has said what is wrong


@frozen(eq=False)
class Lesson:
    """A dataset of a plan, and where what its teacher holds probable is kept."""

    plan: Plan
    name: str
    store: TokenStore
    cache: Path
    key: TaughtKey

    @classmethod
    def of(cls, plan: Plan, name: str, store: TokenStore) -> "Lesson":
        """Raises DataError where the teacher's files cannot be read."""
        node, cache = plan.node(f"setup.teacher.{name}"), cache_of(plan) / TEACHERS
        given = {each: node.args[each] for each in ("top", "temperature", "precision", "sequence")}
        return cls(plan, name, store, cache, TaughtKey.of(store, Path(node.args["folder"]), cache, **given))

    @property
    def is_there(self) -> bool:
        return open_taught(self.cache, self.key, self.store.num_tokens) is not None

    def give(self, ranks: int) -> None:
        """Compute it, from where an earlier attempt was ended on. Raises DataError, and EnvironmentFault where a device
        is not there; where it is a rank of several that finds what is wrong, that has been said then, and SystemExit is
        raised."""
        micro = self.plan.node("setup.loader").args["micro"]
        entry = TaughtEntry(self.cache, self.key, self.store.num_tokens, micro)
        with entry.begin():
            if ranks == 1:
                self._teacher(0, 1).fill(entry, self.store, progress(self.name))
            else:
                self._together(ranks, entry.done)
            entry.complete()

    def _teacher(self, number: int, world: int) -> TeacherModel:
        return TeacherModel.load(self.plan, self.plan.node(f"setup.teacher.{self.name}"), number, world)

    def _together(self, ranks: int, done: int) -> None:
        with TemporaryDirectory() as folder:
            arguments = (ranks, dumps(self.plan), self.name, done, f"{folder}/met")
            try:
                start_processes(take_part, arguments, ranks, start_method="spawn")
            except ProcessExitedException as ended:
                if ended.exit_code != REFUSED:
                    raise
                raise SystemExit(REFUSED) from ended


def take_part(number: int, world: int, plan: str, name: str, done: int, meeting: str) -> None:
    """A rank of several. done: microbatches that are there. meeting: a file by which they find each other."""
    try:
        _take_part(number, world, from_json(json.loads(plan)), name, done, meeting)
    except (DataError, EnvironmentFault) as error:
        if number == 0:
            print(f"error[{error.code}]: {error}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)


def _take_part(number: int, world: int, plan: Plan, name: str, done: int, meeting: str) -> None:
    cuda = plan.node("setup.bootstrap").args["device"] != "cpu" and torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", timeout=TIMEOUT, rank=number, world_size=world)
    try:
        # The first process has built the store already.
        store = prepared_from(plan, data_nodes(plan)[name], tokenizer_of(plan)).store
        lesson = Lesson.of(plan, name, store)
        teacher = lesson._teacher(number, world)
        entry = TaughtEntry(lesson.cache, lesson.key, store.num_tokens, teacher.rows, done)
        teacher.fill(entry, store, progress(name) if number == 0 else lambda done, count: None)
    finally:
        dist.destroy_process_group()


def progress(name: str) -> Report:
    """Writes a line now and then."""
    said = time.monotonic()

    def report(done: int, count: int) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            print(f"{name}: {done / count:.0%}, {done:,} of {count:,} microbatches", file=sys.stderr, flush=True)

    return report
