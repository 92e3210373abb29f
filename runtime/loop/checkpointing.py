"""Nodes that read and write checkpoints.

`setup.read_weights`, `setup.pretrained`, `setup.read_adapter`, `setup.resume`, `setup.checkpoint`, `tick.model`.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.optim import Optimizer

from xtrain.blocks.adapted import alone_name
from xtrain.plan.checkpoints import base_names
from xtrain.plan.groups import alone
from xtrain.plan.peft import assign_peft
from xtrain.plan.plan import Plan
from xtrain.plan.timeline import waits
from xtrain.plan.weight_files import SCORE_WEIGHT, WeightFiles
from xtrain.plan.weight_layout import Assignment, assign
from xtrain.records.training_events import PretrainedEvent, ResumedEvent, WeightsEvent
from xtrain.runtime.base.errors import ResumeRefused, StorageFailed
from xtrain.runtime.base.mesh import CollectiveErrors
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Clocks, Progress, Rank
from xtrain.runtime.feed.setup import Feed, see_horizon
from xtrain.runtime.loop.metrics import Window
from xtrain.runtime.nn.averages import WeightAverages
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.transformer import ModelParts, QuantisedParameter
from xtrain.runtime.nn.weights import model_tensors, share_scales, store, store_experts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.provenance import written_by
from xtrain.runtime.observe.records import Records
from xtrain.runtime.store.base_weights import prefix, published
from xtrain.runtime.store.beginning import (
    HeldCheckpoints,
    StartingPoint,
    begun_from,
    check_base,
    check_model,
    check_origin,
    find,
    planned_adapter,
    planned_files,
    starting_point,
)
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder, Publisher
from xtrain.runtime.store.file_saver import FileSaver, Snapshots
from xtrain.runtime.store.full_state import FullState, KeptFile, Restored, choose, flaw_of
from xtrain.runtime.store.reading import WholeTensors, read_tensors
from xtrain.runtime.store.rollback import finish_rollback
from xtrain.runtime.store.saver import HostCopy, Mode, Overlap, Saver
from xtrain.runtime.store.stored_weights import WeightReader
from xtrain.runtime.store.writing import Backend, Transaction

Verify = Literal["content", "sizes"]
# Outcomes of restored groups that deserve a warning.
WORDS: Final = {
    ("ema", "begun"): "the checkpoint has no averaged weights: the average starts from the weights of this step",
    ("ema", "dropped"): "the averaged weights of the checkpoint are dropped, because this plan has no `ema`",
}


@frozen
class Beginning:
    """Starting point of a run, and its live state."""

    start: StartingPoint
    state: FullState


@op("setup.pretrained", traced=False)
def read_pretrained(plan: Plan, model: ModelParts, rank: Rank, records: Records, path: str, anew: bool = False) -> None:
    """Read the weights of another run, nothing else; a resumed run skips this and reads its own checkpoint. anew: read
    them here too."""
    if not anew and not _begins(plan, records):
        return
    collective, held = CollectiveErrors.of(rank), HeldCheckpoints()
    entry = collective.first(lambda: held.find(lambda: find(Path(path), weights=True)))
    check_origin(plan, entry)
    if flaw := flaw_of(entry, collective, content=True):
        raise ResumeRefused(f"the weights in {entry.path} are damaged: {flaw}")
    which = published(entry)
    before = prefix(entry, which)
    beside = {tensor.name for tensor in plan.parameters.tensors if tensor.adapter}
    beside |= {SCORE_WEIGHT} - entry.state()["tensors"].keys()  # drawn for the weights of a language model
    tensors = {f"{before}{name}": tensor for name, tensor in model_tensors(model, "").items() if name not in beside}
    plain = [] if "base" in entry.state() else list(model.quantised())
    for quantised in plain:
        tensors.pop(f"{before}{quantised.name}")
        tensors.pop(f"{before}{quantised.name}_scales", None)
    read_tensors(tensors, entry.path, collective)
    if plain:
        collective.all(lambda: store_all(plain, WholeTensors(entry.path), before))
    held.close()
    records.event(PretrainedEvent(step=0, path=str(entry.path), of_step=entry.step, weights=which))


@op("setup.read_weights", traced=False)
@torch.no_grad()
def read_weights(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    digest: str,
    folder: str = "",
    repo: str = "",
    revision: str = "",
    anew: bool = False,
    grows: bool = False,
) -> None:
    """Read this rank's pieces of the weights in a model folder; a resumed run reads its checkpoint instead, unless
    `anew`. grows: rows that the embedding and head lack start as the mean of the others.

    Raises StorageFailed on all ranks if a file has changed since planning, or holds NaN.
    """
    if not anew and not _begins(plan, records):
        return

    def files() -> tuple[WeightFiles, Assignment]:
        weight_files = planned_files(digest, folder, repo, revision)
        return weight_files, assign(plan.architecture, weight_files, grows=grows)

    read_files(files, folder or repo, model, rank, records, beat)


@op("setup.read_adapter", traced=False)
@torch.no_grad()
def read_adapter(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    folder: str,
    digest: str,
    task: str = "",
    anew: bool = False,
) -> None:
    """Read this rank's pieces of a PEFT adapter; a resumed run reads its checkpoint instead, unless `anew`. task: whose
    adapter it is, of several.

    Raises StorageFailed on all ranks if a file has changed since planning, or holds NaN.
    """
    if not anew and starting_point(plan, records.directory).entry is not None:
        return

    def files() -> tuple[WeightFiles, Assignment]:
        files = planned_adapter(plan, folder, digest, task).files
        arch = alone(plan.architecture, task) if task else plan.architecture
        trained = [tensor for tensor in plan.parameters.tensors if tensor.trained and tensor.task == task]
        own = {alone_name(tensor): tensor.name for tensor in trained}
        as_alone = (evolve(tensor, name=alone_name(tensor), task="") for tensor in trained)
        parts = assign_peft(arch, tuple(as_alone), files).parts
        return files, Assignment({own[name]: part for name, part in parts.items()})

    read_files(files, folder, model, rank, records, beat)


def read_files(
    files: Callable[[], tuple[WeightFiles, Assignment]],
    path: str,
    model: ModelParts,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
) -> None:
    """Read this rank's pieces of all weights in a folder. Raises StorageFailed on all ranks."""

    def read() -> tuple[int, float]:
        begin = time.perf_counter()

        def report(done: int) -> None:
            beat.mark()
            records.event(WeightsEvent(step=0, path=path, done=done, total=reader.total(parameters)))

        with WeightReader(*files(), report) as reader:
            quantised = {parameter.name: parameter for parameter in model.quantised() if reader.has(parameter.name)}
            named = [(name, tensor) for name, tensor in model_tensors(model, "").items() if reader.has(name)]
            parameters = [(name, tensor) for name, tensor in named if name not in quantised]
            reader.read(parameters)
            for parameter in quantised.values():
                _read_quantised(reader, parameter)
        return reader.bytes, time.perf_counter() - begin

    try:
        rank_reads = CollectiveErrors.of(rank).all(read)
        share_scales(model)
    except StorageFailed as error:
        raise StorageFailed(str(error), "X524") from error
    own, seconds = [rank_read[0] for rank_read in rank_reads], [rank_read[1] for rank_read in rank_reads]
    records.event(WeightsEvent(step=0, path=path, done=own[0], total=own[0], rank_bytes=own, rank_seconds=seconds))


def _begins(plan: Plan, records: Records) -> bool:
    """Return True if the run reads its initial weights: on a fresh start, or because checkpoints leave some out."""
    return bool(base_names(plan)) or starting_point(plan, records.directory).entry is None


def _read_quantised(reader: WeightReader, parameter: QuantisedParameter) -> None:
    """Read and quantize one whole matrix at a time, in fp32, which holds every stored format."""

    def matrix(expert: int | None = None) -> Tensor:
        whole = torch.empty(parameter.matrix.shape[-2:], dtype=torch.float32)
        reader.read_whole(parameter.name, whole, expert)
        return whole.to(parameter.parameter.device)

    if len(parameter.matrix.shape) == 3:
        store_experts(parameter, matrix)
    else:
        store(parameter, matrix())


def store_all(quantised: list[QuantisedParameter], source: WholeTensors, before: str) -> None:
    """Quantize matrices that a checkpoint stores unquantized, one at a time. before: prefix of their names."""
    for parameter in quantised:
        store(parameter, source.read(f"{before}{parameter.name}").to(parameter.parameter.device))


@op("setup.resume", gives="begun", traced=False)
def resume(
    plan: Plan,
    model: ModelParts,
    optimizer: Optimizer,
    feed: Feed,
    rank: Rank,
    progress: Progress,
    records: Records,
    window: Window,
    resume: bool,
    origin: str | None,
    verify: Verify,
    ema: WeightAverages | None = None,
    base: str | None = None,
    kept_completions: KeptFile | None = None,
    prompt_rates: KeptFile | None = None,
) -> Beginning:
    """Restore the full state that the run starts from, if any: the named one, or the latest of the run."""
    state = FullState(
        plan=plan,
        rank=rank,
        model=model,
        ema=ema,
        optimizer=optimizer,
        feed=feed,
        progress=progress,
        base=base,
        completions=kept_completions or prompt_rates,
    )
    window.clear()
    if rank.replica is not None and rank.replica.comes_back:  # another group sends the state to resume from
        return Beginning(StartingPoint(entry=None, own=False, anew=False), state)
    collective = CollectiveErrors.of(rank)
    collective.first(lambda: finish_rollback(records.directory))
    held = HeldCheckpoints()
    start = collective.first(lambda: held.find_start(plan, records.directory))
    if start.own:
        start = _newest_intact(start, collective, records, content=verify == "content")
    elif start.entry is not None and (flaw := flaw_of(start.entry, collective, content=verify == "content")):
        raise ResumeRefused(f"the checkpoint {start.entry.path} is damaged: {flaw}")
    if start.entry is None:
        return Beginning(start, state)
    check_model(plan, start.entry)
    check_base(start.entry, base)
    restored = state.restore(start.entry, collective)
    held.close()
    if start.own and (record := start.entry.state().get("record")):
        records.go_on_with(record, start.step)
    _report(restored, state, start, records)
    if feed.batch is not None and feed.batch.past is not None and not waits(plan):
        see_horizon(plan, feed, rank, records, progress)  # recompute lengths in tokens from this step
    return Beginning(start, state)


def _report(restored: Restored, state: FullState, start: StartingPoint, records: Records) -> None:
    """Report the checkpoint that a run resumes from, and every change from before."""
    assert start.entry is not None
    messages = restored.remarks.in_words() if restored.remarks else []
    before, now = start.entry.state()["steps"], state.feed.steps
    if _other_budget(state.feed, before) and state.plan.node("setup.scheduler").args["kind"] != "constant":
        messages.append(
            f"the learning-rate schedule was for {before:,} steps and is now for {now:,}: the rate jumps here"
        )
    messages += [WORDS[pair] for pair in restored.groups.items() if pair in WORDS]
    for message in messages:
        records.warn(message, step=start.step)
    source = "run" if start.own else "from"
    path, groups = str(start.entry.path), {**restored.groups}
    records.event(ResumedEvent(step=start.step, path=path, source=source, groups=groups))


def _other_budget(feed: Feed, before: int) -> bool:
    """Return True if the run's budget has changed since it had `before` steps; another batch size alone does
    not count."""
    batch = feed.batch
    return batch is None or before != batch.steps_with(batch.row_sizes if batch.past is None else batch.past)


def _newest_intact(
    start: StartingPoint, collective: CollectiveErrors, records: Records, *, content: bool
) -> StartingPoint:
    """Return the newest intact checkpoint of the run, with a warning for each damaged one."""
    folder = CheckpointFolder(records.directory / "checkpoints")

    def report(entry: CheckpointEntry, flaw: str) -> None:
        message = f"checkpoint {entry.name} is damaged and was skipped: {flaw}"
        records.warn(message, step=entry.step)

    named = collective.first(folder.named)
    entry = choose(folder, collective, content=content, report=report)
    assert entry is not None
    if entry.name != named:
        message = f"checkpoint {named or 'latest'} is damaged or missing; resuming from {entry.name}"
        records.warn(message, step=entry.step)
    if entry.step < start.step:
        # The launcher judged by sizes: records after this checkpoint will be computed again.
        collective.first(lambda: records.undo_after(entry.step))
    return StartingPoint(entry=entry, own=True, anew=False)


@op("setup.checkpoint", gives="saver", traced=False)
def prepare_saving(
    plan: Plan,
    begun: Beginning,
    rank: Rank,
    records: Records,
    backend: Backend,
    keep: int | None,
    mode: Mode,
    copies: int,
    overlap: Overlap,
    best: str | None,
    failures: int | None,
    highest: bool = False,
) -> Saver:
    """Create the saver of this run, and remove checkpoints that it no longer keeps."""
    start = begun.start
    publisher = Publisher(CheckpointFolder(records.directory / "checkpoints"), best, highest)
    transaction = Transaction(publisher=publisher, collective=CollectiveErrors.of(rank), keep=keep, backend=backend)
    common: dict[str, Any] = {
        "state": begun.state,
        "records": records,
        "transaction": transaction,
        "overlap": overlap,
        "best": best,
        "highest": highest,
        "failures": failures,
        "saved_step": start.step if start.own else None,
        "begun_from": begun_from(plan, start),
        "written_by": written_by(records.directory),
    }
    if rank.replica is not None:
        replica = rank.replica
        common["writes"] = lambda: replica.leads
    saver = _saver(common, mode, copies, rank)
    if start.own and start.entry is not None:
        saver.prune(start.entry)
    return saver


def _saver(common: dict[str, Any], mode: Mode, copies: int, rank: Rank) -> Saver:
    pinned = mode == "async_pinned"
    if mode == "sync":
        return Saver(**common, staging=None)
    if common["transaction"].backend == "dcp":
        staging = HostCopy(pinned=pinned, device=rank.device)
        staging.prepare(common["state"].tensors())
        return Saver(**common, staging=staging)
    snapshots = Snapshots(most=copies, pinned=pinned and rank.device.type == "cuda")
    return FileSaver(**common, snapshots=snapshots)


@op("step.put_off_save", traced=False)
def put_off_save(saver: Saver, clocks: Clocks) -> StepCall:
    """Make a save that was put off, because another was being written or the step was bad. The first rank decides for
    the former."""
    number = clocks.ask_for(lambda: not saver.busy)
    saver.may_begin = lambda: clocks.due(number)

    def make_up_save(step: Step) -> None:
        if saver.put_off and saver.may_begin() and not saver.progress.bad.in_a_row:
            saver.save(saver.put_off, must=False)

    return make_up_save


@op("step.await_copy", traced=False)
def await_copy(saver: Saver) -> StepCall:
    """Wait before the optimizer step until the copy of the state being saved is complete."""

    def await_state_copy(step: Step) -> None:
        saver.await_copy()

    return await_state_copy


@op("tick.model")
def save_model(saver: Saver, node_id: str) -> StepCall:
    """Save the weights alone, for publishing."""

    def save_weights(step: Step) -> None:
        saver.save_model(node_id)

    return save_weights
