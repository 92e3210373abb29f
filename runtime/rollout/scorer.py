"""`setup.scorer`: a reward model of its own, which the first rank of those with the same rows has as a whole.

Shapes: G completions of a group, S positions of the longest with its prompt, D dim.
"""

import torch
from attrs import frozen
from torch import Tensor

from xtrain.planner.architecture import Architecture
from xtrain.planner.attention_kernels import kernel_on
from xtrain.planner.weights.files import WeightFiles
from xtrain.planner.weights.fit import assign
from xtrain.runtime.checkpoint.model_folder import planned_scorer
from xtrain.runtime.checkpoint.stored_weights import WeightReader
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.build import DTYPES
from xtrain.runtime.models.document_layout import DocumentLayout
from xtrain.runtime.models.loss import Head
from xtrain.runtime.models.transformer import StageSpan, Transformer
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.rollout.groups import SampledGroup
from xtrain.runtime.rollout.row_ranks import RowRanks
from xtrain.runtime.state import Rank


@frozen(eq=False)
class Scorer:
    """model: None on ranks that are told rewards."""

    model: Transformer | None
    device: torch.device
    beat: HeartbeatWriter | None = None

    @torch.no_grad()
    def rewards(self, group: SampledGroup) -> list[float]:
        """Of each completion what the head gives the last token of its document: the prompt, the completion, and unless
        that is cut what documents have behind answers. In at least fp32.

        A group is one batch, on every layout of ranks.
        """
        assert self.model is not None
        if self.beat is not None:
            self.beat.mark()
        prompt = group.prompt
        head, rest = prompt.ids.tolist(), prompt.rest.tolist()
        documents = [[*head, *each.tokens, *([] if each.cut else rest)] for each in group.completions]
        last_G = torch.tensor([len(each) - 1 for each in documents], device=self.device)
        hidden_GSD = self.model.hidden(batch_of(documents, self.device))
        hidden_GD = hidden_GSD[torch.arange(len(documents), device=self.device), last_G]
        exact = torch.float64 if hidden_GD.dtype == torch.float64 else torch.float32
        weight_1D = self.model.score.weight
        return (hidden_GD.to(exact) * weight_1D.to(exact)).sum(-1).tolist()


def batch_of(documents: list[list[int]], device: torch.device) -> ModelBatch:
    """A row for each document, filled up behind it."""
    longest = max(map(len, documents))
    ids_GS = torch.zeros(len(documents), longest, dtype=torch.int64)
    bounds = [0]
    for row, each in enumerate(documents):
        ids_GS[row, : len(each)] = torch.tensor(each)
        bounds += [] if len(each) == longest else [row * longest + len(each)]
        bounds.append((row + 1) * longest)
    lengths = torch.tensor([[len(each)] for each in documents])
    positions_GS = torch.arange(longest).expand(len(documents), longest)
    return ModelBatch(
        input_ids_BS=ids_GS.to(device),
        labels_BS=None,
        positions_BS=positions_GS.to(device),
        real_BS=(positions_GS < lengths).to(device),
        packing=DocumentLayout.from_lengths(torch.tensor(bounds, dtype=torch.int32), len(documents), longest, device),
    )


@op("setup.scorer", gives="scorer")
def load_scorer(
    rank: Rank,
    meshes: Meshes,
    attention: dict[str, str],
    format: str,
    folder: str,
    digest: str = "",
    architecture: Architecture | None = None,
    beat: HeartbeatWriter | None = None,
) -> Scorer:
    """attention: device type → kernel. Raises EnvironmentFault where files are not those of the plan."""
    kernel, device = kernel_on(rank.device.type, torch.get_float32_matmul_precision(), attention), rank.device
    try:
        files = planned_scorer(folder, digest)
        if not RowRanks.of(rank, meshes).is_first:
            return Scorer(None, device)
        assert architecture is not None
        model = scorer_model(architecture, files, kernel, format, device)
    except OSError as error:
        raise EnvironmentFault("X524", str(error)) from error
    return Scorer(model, device, beat)


@torch.no_grad()
def scorer_model(
    architecture: Architecture, files: WeightFiles, kernel: str, format: str, device: torch.device
) -> Transformer:
    """The model of a folder, whole. Raises OSError where a file is not what its header says."""
    span = StageSpan(0, architecture.layers - 1, embeds=True, predicts=True)
    head = Head(vocabulary=architecture.vocab, z_weight=0.0, chunk_bytes=1)
    with torch.device("meta"):
        model = Transformer(architecture, span, axes=Axes(), kernel=kernel, head=head, rows=1).to(DTYPES[format])
    model.to_empty(device=device)
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    with WeightReader(files, assign(architecture, files), lambda done: None) as reader:
        reader.read([(name, tensor) for name, tensor in tensors.items() if reader.has(name)])
    return model.eval().requires_grad_(False)
