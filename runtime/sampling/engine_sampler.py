"""`setup.engine` and `rollout.weights`: completions that an engine of another program samples, on all ranks alike.

The first of the ranks with the same rows asks for their completions and shares them. All ranks wait together, so that a
fault of one ends them all with its reason.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from xtrain.dsl.schema.policy import ENGINES
from xtrain.plan.plan import Plan
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.base.mesh import CollectiveErrors, Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.loop.checkpointing import Beginning
from xtrain.runtime.nn.batch import Completion, Step, StepCall
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.texts import Continuation, Sampling, TextEnds
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.provenance import written_by
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.engines import (
    EngineClient,
    EngineFailed,
    EngineNeeds,
    HeldWeights,
    SampleAsked,
    SampledText,
    connect,
    lock_of,
)
from xtrain.runtime.sampling.prompts import KeptCompletions
from xtrain.runtime.sampling.sampler import RowRanks
from xtrain.runtime.store.adapter_export import AdapterExport
from xtrain.runtime.store.export import Export
from xtrain.runtime.store.writing import write_tensors

FOLDER: Final = "rollout_weights"  # in the directory of the run
SHARDS: Final = f"{FOLDER}/shards{durable.PARTIAL}"
LONGEST_WAIT: Final = 0.25  # seconds between two looks at whether all ranks have their completions


@define(eq=False)
class RunEngine:
    """The engine of a run on this rank. keeps: it samples with several versions of the weights at once. held: those
    that may be needed, by their step; the same on all ranks. newest: the step of the last ones that it was given."""

    engine: EngineClient
    rank: Rank
    keeps: bool
    full: bool
    held: dict[int, HeldWeights] = field(factory=dict)
    newest: int = -1

    def agree(self, action: Callable[[], None], *, here: bool = True) -> None:
        """Call an action on the ranks with `here`. Raises EngineFailed on all ranks alike."""
        future: Future[None] = Future()
        try:
            future.set_result(action() if here else None)
        except EngineFailed as failed:
            future.set_exception(failed)
        self.wait([future], None)

    def wait(self, futures: Sequence["Future[Any]"], beat: HeartbeatWriter | None) -> None:
        """Wait until the futures of all ranks are done. Raises EngineFailed on all ranks alike."""
        pause = 1e-3
        while True:
            done, open_ = wait(futures, timeout=pause)
            failed = next((error for each in done if (error := each.exception()) is not None), None)
            if failed is not None and not isinstance(failed, EngineFailed):
                raise failed
            state = torch.tensor([failed is not None, bool(open_)], dtype=torch.int32, device=self.rank.device)
            if self.rank.world_size > 1:
                dist.all_reduce(state, op=dist.ReduceOp.MAX)
            broken, unfinished = state.tolist()
            if broken:
                raise EngineFailed(self._reason("" if failed is None else str(failed)))
            if not unfinished:
                return
            pause = min(2 * pause, LONGEST_WAIT)
            if beat is not None:
                beat.mark()

    def _reason(self, own: str) -> str:
        """Return the reasons of all ranks. Collective."""
        reasons: list[str | None] = [own]
        if self.rank.world_size > 1:
            reasons = [None] * self.rank.world_size
            dist.all_gather_object(reasons, own)
        return "; ".join(dict.fromkeys(each for each in reasons if each))

    def remarks(self) -> Iterator[str]:
        """Yield what happened since the last call that the user should know."""
        while self.engine.remarks:
            with suppress(KeyError):  # threads add others meanwhile
                yield self.engine.remarks.popitem()[0]


@op("setup.engine", gives="engine", traced=False)
def open_engine(
    plan: Plan,
    rank: Rank,
    meshes: Meshes,
    tokenizer: TextTokenizer,
    records: Records,
    kind: str,
    url: str,
    patience: float,
    rank_of_adapter: int,
    key: str | None = None,
) -> RunEngine:
    """Connect to the engine that samples the completions. Raises EngineFailed on all ranks alike if it cannot."""
    if key is not None and key not in os.environ:
        raise EnvironmentFault("X709", f"the environment variable {key} with the key of the engine is not set")
    component, secret = ENGINES[kind], None if key is None else os.environ[key]
    engine = EngineClient(connect(kind, url, secret, patience), f"{component.title} at {url}", patience, tokenizer)
    opened = RunEngine(engine, rank, component.keeps_models or rank_of_adapter > 0, rank_of_adapter == 0)
    context = plan.node("setup.prompts").args["positions"] + 1
    needs = EngineNeeds(vocabulary=plan.architecture.vocab, context=context, rank=rank_of_adapter)
    opened.agree(lambda: engine.check(needs), here=rank.is_first or RowRanks.of(rank, meshes).is_first)
    if rank.is_first:
        _clear(records.directory / FOLDER)
    return opened


@op("rollout.weights")
def give_weights(
    plan: Plan,
    begun: Beginning,
    model: ModelParts,
    rank: Rank,
    feed: Feed,
    records: Records,
    engine: RunEngine,
    dtype: str,
    kept_completions: KeptCompletions | None = None,
    stale: int = 0,
    period: int = 1,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Give the engine the weights before a step that asks for completions.

    They are written as an export is, to a folder of the run. Folders of weights whose completions have come are
    removed.
    """
    collective = CollectiveErrors.of(rank)
    folder = records.directory / FOLDER
    shards = records.directory / SHARDS

    def give(step: Step) -> None:
        if engine.held and (step.index % period or step.index + stale >= feed.steps):
            return  # no completions are asked for in this step
        name: str = collective.first(lambda: f"xtrain-{step.index}-{secrets.token_hex(4)}")
        collective.first(lambda: _begin(folder, shards))
        reshard(model)  # parameters have the names of their shards only inside this context
        tensors, said = begun.state.weights(averaged=False)

        def convert() -> None:
            export = (partial(Export, most=5 * 2**30) if engine.full else AdapterExport)(
                plan=plan,
                run=records.directory,
                base=Path.cwd(),
                tensors=shards,
                prefix="model.",
                weights=said["weights"],
                state={**begun.state.described(), "made_by": written_by(records.directory), **records.unwritten()},
                dtype=dtype,
            )
            try:
                export.write(folder / name, lambda *progress: beat.mark() if beat is not None else None)
            except (EnvironmentFault, DataError) as fault:
                raise OSError(str(fault)) from fault  # reported to all ranks

        write_tensors("dcp", tensors, shards, collective)
        collective.first(convert)
        collective.first(lambda: _clear(shards))
        if kept_completions is not None and not engine.keeps:
            kept_completions.settle()
        weights = HeldWeights(step=step.index, folder=folder / name, name=name)
        engine.agree(lambda: engine.engine.put(weights), here=rank.is_first)
        weights.at["name"] = collective.first(lambda: weights.at["name"])
        # A run that has gone back has weights of this step and of steps to come.
        for old in [number for number in engine.held if not step.index - stale <= number < step.index]:
            gone = engine.held.pop(old)
            if rank.is_first:
                engine.engine.drop(gone)
                _clear(gone.folder)
                lock_of(gone.folder).unlink(missing_ok=True)
        engine.held[step.index], engine.newest = weights, step.index

    return give


def _begin(folder: Path, shards: Path) -> None:
    folder.mkdir(exist_ok=True)
    _clear(shards)
    shards.mkdir()


def _clear(folder: Path) -> None:
    if folder.exists():
        durable.clear(folder)


Waiting = Callable[[], list[Completion]]
"""Waits for completions. Collective."""


@frozen(kw_only=True, eq=False)
class EngineSampler:
    """Sampler whose completions an engine writes. most: tokens of a completion. Calls are collective over all ranks."""

    engine: RunEngine
    tokenizer: TextTokenizer
    row_ranks: RowRanks
    sampling: Sampling
    most: int
    beat: HeartbeatWriter | None = None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        ends: Sequence[TextEnds],
        keys: Sequence[str],
        most: Sequence[int] | None = None,
        ended: Callable[[int, Continuation], None] | None = None,
    ) -> list[Completion]:
        """Sample a completion of each prompt with the newest weights; see `Sampler.sample`."""
        return self.ask(prompts, ends, keys, most, ended)()

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        ends: Sequence[TextEnds],
        keys: Sequence[str],
        most: Sequence[int] | None = None,
        ended: Callable[[int, Continuation], None] | None = None,
    ) -> Waiting:
        """Ask for completions by the newest weights, and return the function that waits for them."""
        limits = [self.most] * len(prompts) if most is None else most
        weights = self.engine.held[self.engine.newest]
        asked = [*_asked(prompts, ends, keys, limits, self.sampling.temperature)]
        first = self.row_ranks.is_first
        futures = [self.engine.engine.submit(weights, one) for one in asked if first]

        def completions() -> list[Completion]:
            self.engine.wait(futures, self.beat)
            drawn: list[SampledText] = [text for future in futures for text in future.result()]
            sizes = [len(one.keys) for one in asked]
            own = iter(drawn if first else [SampledText((), ())] * sum(sizes))
            texts = [next(own) if limit else SampledText((), ()) for limit in limits]
            shared = self.row_ranks.share_numbers([[*text.tokens, *text.logprobs] for text in texts])
            found = []
            for row, numbers in enumerate(shared):
                half = len(numbers) // 2
                said = Continuation(self.tokenizer, prompts[row], ends[row], limits[row], done=not half)
                tokens = [int(token) for token in numbers[:half]]
                for token in tokens:
                    said.add(token)
                if ended is not None and half:
                    ended(row, said)
                found.append(
                    Completion(
                        tokens=tokens,
                        logprobs=list(numbers[half:]),
                        text=said.text,
                        cut=said.cut,
                        version=weights.step,
                    )
                )
            return found

        return completions


def _asked(
    prompts: Sequence[Sequence[int]],
    ends: Sequence[TextEnds],
    keys: Sequence[str],
    limits: Sequence[int],
    temperature: float,
) -> Iterator[SampleAsked]:
    """Yield a request for each run of rows that continue the same prompt; rows without tokens have none."""
    rows = zip(map(tuple, prompts), ends, limits, keys, strict=True)
    for (prompt, end, limit), same in groupby(rows, key=lambda row: row[:3]):
        if limit:
            yield SampleAsked(
                prompt=prompt, keys=tuple(key for *_, key in same), most=limit, ends=end, temperature=temperature
            )
