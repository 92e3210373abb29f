"""Pipeline stages of this rank under torch's schedules, and the model as a training step calls it.

Stages that read no tokens receive an outline of the batch: the places of its documents.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from xtrain.plan.pipeline import SINGLE, ZERO_BUBBLE
from xtrain.plan.plan import Plan
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.packages import check_schedule
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.collate import CollateChain, decode_outline, encode_outline
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.build import DTYPES, compute_format
from xtrain.runtime.nn.parallelize import is_sharded, reshard
from xtrain.runtime.nn.transformer import ModelParts


@frozen
class WrappedModel:
    """A model with a stack's wrapper.

    forward: objective of a microbatch, from (None, batch), whose backward gives gradients; it calls the wrapped model,
    with modules' hooks. sync_gradients: whether the next backward sums gradients over ranks, or only adds them up on
    this rank. backward: of the objective. gradients: this rank's own gradients, summed over ranks, if they are not the
    parameters'. optimizer: of the parameters, if the stack wraps it too.
    """

    forward: Callable[[None, ModelBatch], Tensor]
    sync_gradients: Callable[[bool], None]
    backward: Callable[[Tensor], None] = Tensor.backward
    gradients: Callable[[], list[Tensor]] | None = None
    optimizer: Optimizer | None = None

    @classmethod
    def of(cls, model: ModelParts) -> "WrappedModel":
        """Return a model without wrapper: its FSDP units, if any, sum gradients themselves."""
        whole = model.whole
        pieces = is_sharded(model)

        def sync_gradients(on: bool) -> None:
            if isinstance(whole, FSDPModule):
                whole.set_requires_gradient_sync(on)
                if not pieces:  # converted once a step, not once a microbatch
                    whole.set_reshard_after_backward(on)

        return cls(forward=whole, sync_gradients=sync_gradients)


@frozen(kw_only=True, eq=False)
class Outlines:
    """Readers of rows along a pipeline, and the outline for the other ranks.

    readers: pipeline coordinates that read. group: the pipeline; None if all its ranks read. rows: of a microbatch,
    [rows, positions] whole. numbers: of rows, sent along. local_part: returns this rank's part of a microbatch of whole
    rows.
    """

    rank: Rank
    readers: list[int]
    group: dist.ProcessGroup | None
    rows: tuple[int, int]
    numbers: tuple[str, ...]
    local_part: Callable[[Microbatch], Microbatch]

    @classmethod
    def of(cls, plan: Plan, collate: CollateChain, rank: Rank, meshes: Meshes) -> "Outlines":
        loader = plan.node("setup.loader").args
        readers = plan.node("step.fetch").args["readers"]
        shared = plan.args("step.share_outline")
        return cls(
            rank=rank,
            readers=readers,
            group=meshes.group("pp") if len(readers) < rank.pipeline_ranks else None,
            rows=(loader["micro"], loader["sequence"]),
            numbers=tuple(shared.get("numbers", ())),
            local_part=collate.local_part,
        )

    @property
    def reads(self) -> bool:
        return self.rank.coordinates["pp"] in self.readers

    def share(self, microbatches: list[Microbatch], count: int) -> list[Microbatch]:
        """Return the `count` microbatches: unchanged where they were read, without tokens elsewhere. Collective."""
        if self.group is None:
            return microbatches
        rows, positions = self.rows
        empty_NBS = torch.empty(count, rows, positions + 2 * len(self.numbers), dtype=torch.int32)
        outline_NBS = encode_outline(microbatches, positions, self.numbers) if self.reads else empty_NBS
        outline_NBS = outline_NBS.to(self.rank.device)
        dist.broadcast(outline_NBS, group=self.group, group_src=self.readers[0])
        if self.reads:
            return microbatches
        return [self.local_part(whole) for whole in decode_outline(outline_NBS, self.numbers)]

    def completed(self, microbatches: Iterable[Microbatch], count: int) -> Iterator[Microbatch]:
        """Yield a stream of `count` shared microbatches, one at a time."""
        reading = iter(microbatches) if self.reads else None
        for _ in range(count):
            yield from self.share([next(reading)] if reading is not None else [], 1)


SCHEDULES: Final = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


@define(kw_only=True, eq=False)
class PipelineSchedule:
    """This rank's stages, and a schedule for every number and shape of microbatches, made once.

    owners: the stages of each pipeline coordinate. objective: number format of the loss; stream: of the residual
    stream.
    """

    model: ModelParts
    rank: Rank
    group: dist.ProcessGroup
    schedule: str
    owners: list[list[int]]
    stream: torch.dtype
    objective: torch.dtype
    _schedules: dict[tuple[int, int, int], Any] = field(factory=dict)

    @property
    def own(self) -> list[int]:
        return self.owners[self.rank.coordinates["pp"]]

    @property
    def stages(self) -> int:
        return sum(map(len, self.owners))

    @property
    def has_last(self) -> bool:
        return self.stages - 1 in self.own

    @property
    def last_rank(self) -> int:
        """The first rank of the world that has the last stage."""
        return self.last_owner * (self.rank.world_size // self.rank.pipeline_ranks)

    @property
    def last_owner(self) -> int:
        """The pipeline coordinate of the last stage."""
        return self._owner(self.stages - 1)

    def train(self, batches: list[ModelBatch], scale: float) -> Tensor:
        """Run forward and backward of all batches; gradients of `scale` · objective are added up and reduced once.

        Returns the sum of their `ModelBatch.sums` on the rank of the last stage, zeros on the others.
        """
        rows, positions = self._stream_shape(batches[0])
        assert all(batch.shape == batches[0].shape for batch in batches)
        schedule = self.schedule_for(len(batches), rows, positions)
        for part in self.model.parts:
            part.inbox.extend(batches)
        # Schedules want something to cut into microbatches; it is never read.
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self.own else ()
        schedule._loss_fn = lambda objective, _: objective.sum() * scale
        last: dict[str, Any] = {"target": numbers, "losses": []} if self.has_last else {}
        schedule.step(*first, **_without_outputs(schedule), **last)
        if self.has_last:
            return torch.stack([batch.sums for batch in batches]).sum(0)
        return torch.zeros(self.model.recorded, dtype=self.objective, device=self.rank.device)

    def schedule_for(self, count: int, rows: int, positions: int) -> Any:
        """Return the schedule of `count` microbatches whose residual stream is [rows, positions, D]."""
        key = (count, rows, positions)
        if key not in self._schedules:
            # Each holds buffers for what its stages receive: schedules of rows of another length are dropped.
            self._schedules = {other: known for other, known in self._schedules.items() if other[1:] == key[1:]}
            self._schedules[key] = self._make(*key)
        return self._schedules[key]

    def schedules_of(self, count: int) -> list[Any]:
        """Return the existing schedules of `count` microbatches."""
        return [schedule for (number, *_), schedule in self._schedules.items() if number == count]

    def _make(self, count: int, rows: int, positions: int) -> Any:
        stream = torch.empty(
            rows, positions, self.model.parts[0].arch.dim, dtype=self.stream, device="meta", requires_grad=True
        )
        number = torch.zeros(1, dtype=torch.int64, device="meta")
        objective = torch.empty(1, dtype=self.objective, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                part,
                index,
                self.stages,
                self.rank.device,
                # Shapes are given, not tried: a trial forward would count tokens and route them a second time.
                input_args=number if index == 0 else stream,
                output_args=objective if index == self.stages - 1 else stream,
                group=self.group,
            )
            for part, index in zip(self.model.parts, self.own, strict=True)
        ]
        stage = stages[0] if self.schedule in SINGLE else stages
        # The loss is already divided by the tokens of the whole step: nothing is averaged over microbatches.
        return SCHEDULES[self.schedule](stage, count, loss_fn=_unset, scale_grads=False)

    def add_gradients(self, batches: Sequence[ModelBatch], *, reduce: bool) -> None:
        """Run forward of all batches, then backward of their objectives, of any shapes; gradients are added up.

        All forwards come first (GPipe, arXiv 1811.06965): two ranks then send to each other in one order, so that no
        send can wait for another. reduce: FSDP sums them over ranks in the last backward. Collective.
        """
        ((part, stage),) = zip(self.model.parts, self.own, strict=True)
        sent: list[tuple[dist.Work, Tensor]] = []
        done: list[tuple[Tensor | None, Tensor]] = []
        for batch in batches:
            given = None if stage == 0 else self._received(None, stage, batch).requires_grad_()
            output: Tensor = part(given, batch)
            if stage < self.stages - 1:
                self._send(output.detach(), stage + 1, stage, sent)
            done.append((given, output))
        for number, (given, output) in enumerate(reversed(done), start=1):
            slope = torch.ones_like(output)
            if stage < self.stages - 1:
                dist.recv(slope, group=self.group, group_src=self._owner(stage + 1), tag=stage)
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(reduce and number == len(done))
            if output.requires_grad:
                output.backward(slope)
            if given is not None:
                grad = torch.zeros_like(given) if given.grad is None else given.grad
                self._send(grad, stage - 1, stage - 1, sent)
        for work, _ in sent:
            work.wait()

    def _send(self, tensor: Tensor, stage: int, tag: int, sent: list[tuple[dist.Work, Tensor]]) -> None:
        """Start a send; the tensor is kept until it has arrived."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self.group, group_dst=self._owner(stage), tag=tag)
        assert work is not None
        sent[:] = [(earlier, kept) for earlier, kept in sent if not earlier.is_completed()]
        sent.append((work, tensor))

    @torch.no_grad()
    def forward(self, batches: Iterable[ModelBatch]) -> Iterator[tuple[ModelBatch, Tensor | None]]:
        """Run every batch through all stages; yields it with the last stage's output, on its rank. Collective.

        Batch by batch and stage by stage on every rank, sends that are not awaited yet cannot deadlock.
        """
        sent: list[tuple[dist.Work, Tensor]] = []
        for batch in batches:
            given: Tensor | None = None
            for part, stage in zip(self.model.parts, self.own, strict=True):
                output: Tensor = part(None if stage == 0 else self._received(given, stage, batch), batch)
                if stage < self.stages - 1 and stage + 1 not in self.own:
                    self._send(output, stage + 1, stage, sent)
                given = output
            yield batch, given if self.has_last else None
        for work, _ in sent:
            work.wait()
        reshard(self.model)

    def _received(self, own: Tensor | None, stage: int, batch: ModelBatch) -> Tensor:
        if stage - 1 in self.own:
            assert own is not None
            return own
        rows, positions = self._stream_shape(batch)
        dim = self.model.parts[0].arch.dim
        x_BSD = torch.empty(rows, positions, dim, dtype=self.stream, device=self.rank.device)
        dist.recv(x_BSD, group=self.group, group_src=self._owner(stage - 1), tag=stage - 1)
        return x_BSD

    def _owner(self, stage: int) -> int:
        return next(place for place, stages in enumerate(self.owners) if stage in stages)

    def _stream_shape(self, batch: ModelBatch) -> tuple[int, int]:
        """Return the rows and positions of the residual stream between blocks."""
        rows, positions = batch.shape
        return rows, self.between_blocks(positions)

    def between_blocks(self, positions: int) -> int:
        """Return the number of positions of a row that a rank has between blocks."""
        tensor = self.model.axes.tensor
        return positions // tensor.size if tensor is not None and tensor.sequence else positions


def forwarded(
    model: ModelParts, pipeline: PipelineSchedule | None, batches: Iterator[ModelBatch]
) -> Iterator[ModelBatch]:
    """Yield every batch after its forward through all stages. Collective."""
    if pipeline is None:
        for batch in batches:
            model.whole(None, batch)
            yield batch
        return
    for batch, _ in pipeline.forward(batches):
        yield batch


def _without_outputs(schedule: Any) -> dict[str, bool]:
    """Return the argument that drops the outputs, if the schedule has it; older versions of torch keep them."""
    return {"return_outputs": False} if "return_outputs" in signature(schedule.step).parameters else {}


def _unset(*_: Any) -> Tensor:
    raise AssertionError("the loss function is set in every step")


@op("setup.parallel.pp", gives="pipeline")
def connect_stages(
    plan: Plan, model: ModelParts, rank: Rank, meshes: Meshes, size: int, schedule: str, stages_per_rank: int
) -> PipelineSchedule:
    """Make this rank's parts stages of a pipeline of `size` ranks.

    Raises EnvironmentFault if torch is too old for the schedule.
    """
    check_schedule(schedule, str(torch.__version__))
    owners = plan.node("setup.build_model").args["owners"]
    group = meshes.group("pp")
    assert group.size() == size == len(owners) and len(model.parts) == stages_per_rank
    for part in model.parts:
        part.splits_backward = schedule in ZERO_BUBBLE
    stream = DTYPES[compute_format(plan)]
    return PipelineSchedule(
        model=model,
        rank=rank,
        group=group,
        schedule=schedule,
        owners=owners,
        stream=stream,
        objective=torch.float64 if stream == torch.float64 else torch.float32,
    )


@op("setup.schedule_cache")
def build_schedules(plan: Plan, pipeline: PipelineSchedule, counts: list[int]) -> None:
    """Build the schedule of every number of microbatches in training, before the first step."""
    loader, mesh = plan.node("setup.loader").args, plan.mesh
    positions = pipeline.between_blocks(loader["sequence"] // (mesh.size("ring") * mesh.size("ulysses")))
    for count in counts:
        pipeline.schedule_for(count, loader["micro"], positions)
