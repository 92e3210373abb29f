"""`setup.teacher_model`, `setup.teacher_weights`, `setup.read_teacher`: a model that a loss learns from, beside that of
the run on the ranks that have its head, and cut over the same axes.

Shapes: B rows, S positions of a rank, T = B·S, E dim of the teacher, V vocabulary of this rank.
"""

from typing import Any

import torch
from attrs import evolve, frozen
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from xtrain.planner.architecture import Architecture
from xtrain.planner.attention_kernels import kernel_on
from xtrain.planner.plan import Node
from xtrain.planner.weights.files import WeightFiles
from xtrain.planner.weights.fit import Assignment, assign
from xtrain.runtime.checkpoint.model_folder import planned_files
from xtrain.runtime.checkpoint.ops import read_files
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.build import DTYPES
from xtrain.runtime.models.loss import Head
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.transformer import StageSpan, Transformer
from xtrain.runtime.models.whole_distillation import Taught
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op, op_of
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallel.tensor import column_parallel_input
from xtrain.runtime.parallelize.fsdp import reshard
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Rank


@frozen(eq=False)
class LiveTeacher:
    """model: of one part, cut over the axes of the run where these cut it; on ranks that do not compute it, of none."""

    model: ModelParts
    architecture: Architecture

    @torch.no_grad()
    def taught(self, batch: ModelBatch, head: Head, width: int) -> Taught:
        """What it makes of a microbatch. head: of the student. width: of its piece of the vocabulary.

        What is gathered of it for that stays until `let_go`.
        """
        teacher, tensor = self.model.whole, self.model.axes.tensor
        hidden_BSE = column_parallel_input(teacher.hidden(batch), tensor)
        weight_VE = teacher.head_weight()
        if tensor is None and head.tensor is not None:
            weight_VE = weight_VE[head.first : head.first + width]
        return Taught(hidden_BSE.flatten(0, 1), weight_VE, teacher.head)

    def let_go(self) -> None:
        """Free what has been gathered."""
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
    """Build the teacher without memory, where this rank is at the pipeline coordinate `owner`; elsewhere no part of it.

    attention: device type → kernel. format: of all its numbers. cuts: nodes, op and arguments, that spread it over
    ranks as the same nodes do the model of the run.
    """
    axes = Axes()
    if rank.coordinates["pp"] != owner:
        return LiveTeacher(ModelParts((), axes), architecture)
    head = Head(vocabulary=architecture.vocab, z_weight=0.0, chunk_bytes=0, cap=architecture.ends.logit_cap)
    span = StageSpan(0, architecture.layers - 1, embeds=True, predicts=True)
    kernel = kernel_on(rank.device.type, torch.get_float32_matmul_precision(), attention)
    with torch.device("meta"):
        whole = Transformer(architecture, span, axes=axes, kernel=kernel, head=head, rows=1).to(DTYPES[format])
    teacher = LiveTeacher(ModelParts((whole,), axes), architecture)
    known = {"model": teacher.model, "meshes": meshes, "rank": evolve(rank, coordinates={**rank.coordinates, "pp": 0})}
    whole.requires_grad_(False)
    for each in cuts:
        node = Node(id=each["op"], kind="setup", op=each["op"], args=each["args"], axes=(), does="")
        op_of(node).bind(node, known)()
    whole.requires_grad_(False)  # what has been cut is made anew
    if isinstance(whole, FSDPModule):
        register_fsdp_forward_method(whole, "hidden")
    teacher.model.train(False)
    return teacher


@op("setup.teacher_weights")
@torch.no_grad()
def give_memory(model: ModelParts, teacher: LiveTeacher, rank: Rank, offload: bool) -> None:
    """Let the teacher have memory, and compute before the head of the model. offload: its shards are in host memory."""
    for part in teacher.model.parts:
        part.to_empty(device=torch.device("cpu") if offload else rank.device)
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros_like(buffer, device=rank.device))
    for part in model.parts:
        part.teacher = teacher if part.span.predicts else None


@op("setup.read_teacher")
@torch.no_grad()
def read_teacher_weights(
    teacher: LiveTeacher,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    folder: str,
    digest: str,
) -> None:
    """Read this rank's pieces of the teacher's weights. Raises StorageFailed on all ranks where a file is not what it
    was when the plan was made, or has NaN."""

    def files() -> tuple[WeightFiles, Assignment]:
        found = planned_files(digest, folder)
        return found, assign(teacher.architecture, found)

    read_files(files, folder, teacher.model, rank, records, beat)
