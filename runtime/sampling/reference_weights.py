"""Weights of reference models and live teachers, and the log-ratio of model and reference on answers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, evolve, frozen
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from xtrain.dsl.schema.losses import ADAPTER_OFF, INITIAL, MISMATCHED, REF
from xtrain.plan.architecture import Architecture
from xtrain.plan.canonical import DATA
from xtrain.plan.canonical import digest as canonical_digest
from xtrain.plan.hardware import kernel_on
from xtrain.plan.peft import PEFT_WEIGHTS
from xtrain.plan.plan import Node, Plan
from xtrain.plan.weight_files import WeightFiles
from xtrain.plan.weight_layout import Assignment, assign
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op, op_of
from xtrain.runtime.base.state import Rank, Resources
from xtrain.runtime.feed.collate import CollateChain
from xtrain.runtime.feed.digests import FileDigests, remembering
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.feed.packing.rows import Rows
from xtrain.runtime.feed.packing.stored_rows import RawRow, mismatched
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.checkpointing import read_files, read_weights
from xtrain.runtime.nn.axes import Axes, column_parallel_input
from xtrain.runtime.nn.batch import ModelBatch, Step, StepCall
from xtrain.runtime.nn.build import DTYPES, stage_class
from xtrain.runtime.nn.distillation import Taught
from xtrain.runtime.nn.loss import Head
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import PipelineSchedule, forwarded
from xtrain.runtime.nn.transformer import ModelParts, StageSpan
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.store.beginning import find, planned_adapter, planned_files, starting_point

# Nodes that set the initial values of parameters: first of the model, then of an adapter.
OF_MODEL: Final = ("setup.weights", "setup.read_weights", "setup.pretrained")
OF_ADAPTER: Final = ("setup.adapter", "setup.read_adapter")
# Arguments that only say where files or tensors are.
PLACES: Final = ("offload", "folder", "repo", "revision", "path", "digest")


def identity_of(plan: Plan, reference: str, digest: str, index: Path) -> str:
    """Return a hash that identifies a reference's weights: of the seed if they are drawn, of file contents (read once)
    otherwise, and of the architecture. index: cache of file digests.

    Raises OSError if a file is missing.
    """
    return canonical_digest(_depends_on(plan, reference, digest, index), DATA, size=16)


def _depends_on(plan: Plan, reference: str, digest: str, index: Path) -> dict[str, Any]:
    build, freeze = plan.node("setup.build_model").args, plan.args("setup.freeze")
    arch = plan.architecture if reference == INITIAL else plan.architecture.base
    depends_on: dict[str, Any] = {
        "architecture": arch.to_json(),
        "formats": [build["params"], freeze.get("format", "")],
        "base": plan.args("setup.quantise").get("base", {}),
    }
    with remembering(digests := FileDigests(index)):
        if reference not in (INITIAL, ADAPTER_OFF):
            return {**depends_on, "weights": [["folder", _contents(digests, _files(reference, digest))]]}
        nodes = begun_by(plan, OF_MODEL if reference == ADAPTER_OFF else (*OF_MODEL, *OF_ADAPTER))
        known = [[node.op, _kept(node), _contents(digests, _read(plan, node))] for node in nodes]
    return {**depends_on, "weights": known}


def begun_by(plan: Plan, ops: tuple[str, ...]) -> list[Node]:
    """Return the nodes of a plan with these ops, in order."""
    return [node for node in plan.nodes if node.op in ops]


def _kept(node: Node) -> dict[str, Any]:
    """Return a node's arguments that determine values; for a checkpoint its files with their checksums."""
    if node.op == "setup.pretrained":
        return find(Path(node.args["path"]), weights=True).state()["files"]
    return {name: value for name, value in node.args.items() if name not in PLACES}


def _files(folder: str, digest: str) -> list[Path]:
    files = planned_files(digest, folder)
    return [Path(files.folder) / name for name in files.files]


def _read(plan: Plan, node: Node) -> list[Path]:
    """Return the files that a node reads."""
    if node.op == "setup.read_weights":
        files = planned_files(**node.args)
        return [Path(files.folder) / name for name in files.files]
    if node.op == "setup.read_adapter":
        return [Path(planned_adapter(plan, **node.args).folder) / PEFT_WEIGHTS]
    return []


def _contents(digests: FileDigests, files: list[Path]) -> list[list[str]]:
    """Return name and digest of each file."""
    digests.learn(files)
    return [[path.name, digests.digest(path)] for path in files]


@frozen(kw_only=True, eq=False)
class ReferenceWeights:
    """Model of a run that temporarily takes a reference's weights. resources: of the set-up."""

    plan: Plan
    model: ModelParts
    rank: Rank
    records: Records
    beat: HeartbeatWriter
    resources: Resources

    @contextmanager
    def in_place(self, reference: str, digest: str, task: str | None) -> Iterator[None]:
        """Give the model the reference's weights inside the block; afterwards it has its initial weights again, or
        values that a checkpoint will replace.

        task: whose adapter, of several. Collective; raises errors of reading weights.
        """
        if reference == INITIAL and not self._begins_with_a_part:
            if self._goes_on:
                self._begin((*OF_MODEL, *OF_ADAPTER))
            with self.model.with_adapter_of(task):
                yield
        elif reference in (INITIAL, ADAPTER_OFF):
            # An adapter from a folder has also replaced parts of the model.
            changed = self._goes_on or bool(begun_by(self.plan, ("setup.read_adapter",)))
            if changed:
                self._begin(OF_MODEL)
            with self.model.without_adapter():
                yield
            if changed:
                self._begin(OF_ADAPTER)
        else:
            read_weights(self.plan, self.model, self.rank, self.records, self.beat, digest, reference, anew=True)
            with self.model.without_adapter():
                yield
            self._begin((*OF_MODEL, *OF_ADAPTER))

    @property
    def _begins_with_a_part(self) -> bool:
        """True if the adapter starts with a part of the matrices. That part is taken out after references are computed,
        so without the adapter the model is still the initial one."""
        return bool(begun_by(self.plan, ("setup.decompose",)))

    @property
    def _goes_on(self) -> bool:
        """True if a state is restored later, so that weights in files have not been read."""
        return starting_point(self.plan, self.records.directory).entry is not None

    @torch.no_grad()
    def _begin(self, ops: tuple[str, ...]) -> None:
        """Set parameters to their initial values, with the nodes of these ops."""
        for node in begun_by(self.plan, ops):
            op_of(node).bind(node, {**self.resources, "node_id": node.id, "anew": True})()


@frozen(eq=False)
class LiveTeacher:
    """Teacher that computes next to the model. model: one part, sharded over the run's axes where these shard it; no
    part on ranks that do not compute it."""

    model: ModelParts
    architecture: Architecture

    @torch.no_grad()
    def taught(self, batch: ModelBatch, head: Head, width: int) -> Taught:
        """Return the teacher's predictions for a microbatch. head: of the student. width: of its piece of the
        vocabulary.

        Gathered parameters stay until `release`.
        """
        teacher, tensor = self.model.whole, self.model.axes.tensor
        hidden_BSE = column_parallel_input(teacher.hidden(batch), tensor)
        weight_VE = teacher.head_weight()
        if tensor is None and head.tensor is not None:
            weight_VE = weight_VE[head.first : head.first + width]
        return Taught(hidden_BSE.flatten(0, 1), weight_VE, teacher.head)

    def release(self) -> None:
        """Free gathered parameters."""
        reshard(self.model)


@op("setup.teacher_model", gives="teacher")
def build_teacher(
    rank: Rank,
    meshes: Meshes,
    architecture: Architecture,
    attention: dict[str, str],
    format: str,
    owner: int,
    cuts: list[dict[str, Any]],
) -> LiveTeacher:
    """Build the teacher on meta tensors, on the pipeline coordinate `owner`; elsewhere without parts.

    attention: device type → kernel. format: of all its numbers. cuts: nodes (op and arguments) that shard it as they
    shard the run's model.
    """
    axes = Axes()
    if rank.coordinates["pp"] != owner:
        return LiveTeacher(ModelParts((), axes), architecture)
    head = Head(vocabulary=architecture.vocab, z_weight=0.0, chunk_bytes=0, cap=architecture.ends.logit_cap)
    span = StageSpan(0, architecture.layers - 1, embeds=True, predicts=True)
    kernel = kernel_on(rank.device.type, torch.get_float32_matmul_precision(), attention)
    with torch.device("meta"):
        whole = stage_class(architecture)(architecture, span, axes=axes, kernel=kernel, head=head, rows=1).to(
            DTYPES[format]
        )
    teacher = LiveTeacher(ModelParts((whole,), axes), architecture)
    known = {"model": teacher.model, "meshes": meshes, "rank": evolve(rank, coordinates={**rank.coordinates, "pp": 0})}
    whole.requires_grad_(False)
    for cut in cuts:
        node = Node(id=cut["op"], kind="setup", op=cut["op"], args=cut["args"], axes=(), does="")
        op_of(node).bind(node, known)()
    whole.requires_grad_(False)  # sharding creates new parameters
    if isinstance(whole, FSDPModule):
        register_fsdp_forward_method(whole, "hidden")
    teacher.model.train(False)
    return teacher


@op("setup.teacher_weights")
@torch.no_grad()
def give_memory(model: ModelParts, teacher: LiveTeacher, rank: Rank, offload: bool) -> None:
    """Allocate the teacher, and attach it to the model's head. offload: keep its shards in host memory."""
    for part in teacher.model.parts:
        part.allocate(torch.device("cpu") if offload else rank.device, rank.device)
    for part in model.parts:
        part.teacher = teacher if part.span.predicts else None


@op("setup.read_teacher", traced=False)
@torch.no_grad()
def read_teacher_weights(
    teacher: LiveTeacher,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    folder: str,
    digest: str,
) -> None:
    """Read this rank's pieces of the teacher's weights. Raises StorageFailed on all ranks if a file has changed since
    planning, or has NaN."""

    def files() -> tuple[WeightFiles, Assignment]:
        weight_files = planned_files(digest, folder)
        return weight_files, assign(teacher.architecture, weight_files)

    read_files(files, folder, teacher.model, rank, records, beat)


@define(kw_only=True, eq=False)
class ReferencePoint:
    """Reference point of a loss on log-ratios. estimated: computed for each step and each evaluation."""

    value: float
    estimated: bool


def exchanged_rows(raw: Iterable[list[RawRow]], rows: Rows, collate: CollateChain) -> Iterator[Microbatch]:
    """Yield microbatches of the same rows with answers of other documents, and the reference's log-probabilities of
    these."""
    for microbatch in raw:
        mismatched_rows = (mismatched(row, rows) for row in microbatch)
        yield collate([evolve(row, columns=_of_reference(row)) for row in mismatched_rows])


def _of_reference(row: RawRow) -> dict[str, list[np.ndarray]]:
    """Return the column of mismatched answers; empty while the reference is computed."""
    return {REF: row.columns[MISMATCHED]} if MISMATCHED in row.columns else {}


@frozen(kw_only=True, eq=False)
class PointEstimate:
    """Estimator of the reference point. All calls are collective."""

    model: ModelParts
    rank: Rank
    pipeline: PipelineSchedule | None = None
    beat: HeartbeatWriter | None = None

    @torch.no_grad()
    def of(self, microbatches: Iterable[Microbatch]) -> float:
        """Return the mean, over the answers of all ranks, of Σ log π − log π_ref over their tokens, at least 0
        (Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1); 0 without answers. The model must be in evaluation
        mode."""
        rank = self.rank
        counts = all(rank.coordinates[axis] == 0 for axis in ("pp", "ring", "ulysses", "tp"))
        sums = torch.zeros(2, dtype=torch.float64, device=rank.device)

        def batches() -> Iterator[ModelBatch]:
            for microbatch in microbatches:
                if self.beat is not None:
                    self.beat.mark()
                if counts:
                    sums[1] += microbatch.num_units
                batch = ModelBatch.of(microbatch, rank.device)
                batch.each = True
                yield batch

        for batch in forwarded(self.model, self.pipeline, batches()):
            if batch.losses_BS is not None and rank.is_tp_first:
                assert batch.labels_BS is not None
                valid_BS = batch.labels_BS != IGNORE_INDEX
                sums[0] -= (batch.losses_BS.double() + batch.columns[REF].double())[valid_BS].sum()
        if rank.world_size > 1:
            dist.all_reduce(sums)
        total, answers = sums.tolist()
        return max(0.0, total / answers) if answers else 0.0


@op("step.reference_point", traced=False)
def estimate(
    model: ModelParts,
    rank: Rank,
    feed: Feed,
    reference_point: ReferencePoint,
    pipeline: PipelineSchedule | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Estimate the reference point of each step from its own rows."""
    estimated = PointEstimate(model=model, rank=rank, pipeline=pipeline, beat=beat)
    rows = feed.loader.datasets[0].reader.rows

    def estimate_point(step: Step) -> None:
        model.train(False)
        try:
            reference_point.value = estimated.of(exchanged_rows(feed.loader.rows(step.index), rows, feed.collate))
        finally:
            reshard(model)
            model.train()

    return estimate_point
