"""`setup.parallel.pp`: the stages of this rank under one of torch's pipeline schedules.

What stages pass on is the residual stream [B, S, D]. Everything else of a batch (positions, documents, labels) every
rank has itself, in the inbox of its parts.
"""

from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from xtrain.planner.mesh.pipeline import SINGLE, ZERO_BUBBLE
from xtrain.planner.plan import Plan
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.build import DTYPES, compute_format
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallelize.fsdp import reshard
from xtrain.runtime.reporting.packages import check_schedule
from xtrain.runtime.state import Rank

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
        """The first rank of the world that holds the last stage."""
        return self.last_owner * (self.rank.world_size // self.rank.pipeline_ranks)

    @property
    def last_owner(self) -> int:
        """The pipeline coordinate of the last stage."""
        return self._owner(self.stages - 1)

    def train(self, batches: list[ModelBatch], scale: float) -> Tensor:
        """Forward and backward of all batches, gradients of `scale` · objective added up and reduced once.

        Returns the sum of their `ModelBatch.sums` on the rank of the last stage, zeros on the others.
        """
        rows, positions = self._stream_shape(batches[0])
        assert all(batch.shape == batches[0].shape for batch in batches)
        schedule = self.schedule_for(len(batches), rows, positions)
        for part in self.model.parts:
            part.inbox.extend(batches)
        # What is to be cut into microbatches, where a schedule asks for something: nobody reads it.
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self.own else ()
        schedule._loss_fn = lambda objective, _: objective.sum() * scale
        last: dict[str, Any] = {"target": numbers, "losses": []} if self.has_last else {}
        schedule.step(*first, **_without_outputs(schedule), **last)
        if self.has_last:
            return torch.stack([batch.sums for batch in batches]).sum(0)
        return torch.zeros(self.model.recorded, dtype=self.objective, device=self.rank.device)

    def schedule_for(self, count: int, rows: int, positions: int) -> Any:
        """The schedule of `count` microbatches whose residual stream is [rows, positions, D]."""
        key = (count, rows, positions)
        if key not in self._schedules:
            self._schedules[key] = self._make(*key)
        return self._schedules[key]

    def schedules_of(self, count: int) -> list[Any]:
        """Those of so many microbatches that have been made."""
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
                # Shapes are told, not tried out: a trial forward would count tokens and route them a second time.
                input_args=number if index == 0 else stream,
                output_args=objective if index == self.stages - 1 else stream,
                group=self.group,
            )
            for part, index in zip(self.model.parts, self.own, strict=True)
        ]
        stage = stages[0] if self.schedule in SINGLE else stages
        # The loss is divided by the tokens of the whole step already: nothing is to be averaged over microbatches.
        return SCHEDULES[self.schedule](stage, count, loss_fn=_unset, scale_grads=False)

    def add_gradients(self, batches: Sequence[ModelBatch], *, reduce: bool) -> None:
        """Forward of all batches, then backward of their objectives, of any shapes; gradients are added up.

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
        """Begin to; it is kept until it has arrived."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self.group, group_dst=self._owner(stage), tag=tag)
        assert work is not None
        sent[:] = [(earlier, kept) for earlier, kept in sent if not earlier.is_completed()]
        sent.append((work, tensor))

    @torch.no_grad()
    def forward(self, batches: Iterable[ModelBatch]) -> Iterator[tuple[ModelBatch, Tensor | None]]:
        """Forward every batch through all stages; each with the last stage's output, on its rank. Collective.

        Batch by batch, stage by stage on every rank: sends that nobody waits for yet can then not lock each other.
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
        """Rows and positions of the residual stream between blocks."""
        rows, positions = batch.shape
        return rows, self.between_blocks(positions)

    def between_blocks(self, positions: int) -> int:
        """How many of a rank's positions of a row it holds between blocks."""
        tensor = self.model.axes.tensor
        return positions // tensor.size if tensor is not None and tensor.sequence else positions


def forwarded(
    model: ModelParts, pipeline: PipelineSchedule | None, batches: Iterator[ModelBatch]
) -> Iterator[ModelBatch]:
    """Every batch after its forward, through all stages. Collective."""
    if pipeline is None:
        for batch in batches:
            model.whole(None, batch)
            yield batch
        return
    for batch, _ in pipeline.forward(batches):
        yield batch


def _without_outputs(schedule: Any) -> dict[str, bool]:
    """Nobody looks at the outputs. Schedules of older versions of torch keep them all the same."""
    return {"return_outputs": False} if "return_outputs" in signature(schedule.step).parameters else {}


def _unset(*_: Any) -> Tensor:
    raise AssertionError("the loss function is set anew for every step")


@op("setup.parallel.pp", gives="pipeline")
def connect_stages(
    plan: Plan, model: ModelParts, rank: Rank, meshes: Meshes, size: int, schedule: str, stages_per_rank: int
) -> PipelineSchedule:
    """Make this rank's parts stages of a pipeline of `size` ranks.

    Raises EnvironmentFault where torch is too old for the schedule.
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
    """Make the schedule of every number of microbatches that training meets, before the first step."""
    loader, mesh = plan.node("setup.loader").args, plan.mesh
    positions = pipeline.between_blocks(loader["sequence"] // (mesh.size("ring") * mesh.size("ulysses")))
    for count in counts:
        pipeline.schedule_for(count, loader["micro"], positions)
