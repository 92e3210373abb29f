"""Scores of completions: rewards, reward models, and log-probabilities of a reference model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from attrs import evolve, frozen
from torch import Tensor

from xtrain.dsl.schema.losses import ADAPTER_OFF, REF
from xtrain.dsl.schema.policy import EXPERTS
from xtrain.plan.architecture import Architecture
from xtrain.plan.hardware import kernel_on
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import WeightFiles
from xtrain.plan.weight_layout import assign
from xtrain.runtime.base.errors import EnvironmentFault, ResumeRefused
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank, Resources
from xtrain.runtime.feed.prepared import PreparedDataset
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.batch import DocumentLayout, ModelBatch, Prompt, SampledGroup, Step, StepCall
from xtrain.runtime.nn.build import DTYPES, stage_class
from xtrain.runtime.nn.loss import Head
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import PipelineSchedule, forwarded
from xtrain.runtime.nn.transformer import ModelParts, StageSpan, Transformer
from xtrain.runtime.nn.weights import model_tensors
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.reference_column import weights_before, weights_now
from xtrain.runtime.sampling.reference_weights import ReferenceWeights
from xtrain.runtime.sampling.sampler import RowRanks
from xtrain.runtime.store.beginning import planned_scorer
from xtrain.runtime.store.stored_weights import WeightReader

Score = Callable[[SampledGroup], Sequence[float]]
"""Maps a group to the rewards of its completions."""


def by_text(reward: Callable[[Prompt, str], float]) -> Score:
    """Return a score that depends on a prompt and the text of a completion."""
    return lambda group: [reward(group.prompt, completion.text) for completion in group.completions]


def scoring(score: Score, row_ranks: RowRanks) -> StepCall:
    """Score each group on one of the ranks with the same rows, and share the rewards."""

    def score_groups(step: Step) -> None:
        groups = [group for microbatch in step.groups for group in microbatch]
        count = sum(len(group.completions) for group in groups)
        scores = [reward for group in groups for reward in score(group)] if row_ranks.is_first else [0.0] * count
        rewards = row_ranks.share(torch.tensor(scores, dtype=torch.float64, device=row_ranks.rank.device)).cpu().numpy()
        first = 0
        for group in groups:
            group.rewards = rewards[first : first + len(group.completions)]
            first += len(group.completions)

    return score_groups


@frozen(eq=False)
class Scorer:
    """Reward model that scores groups. model: None on ranks that receive rewards."""

    model: Transformer | None
    device: torch.device
    beat: HeartbeatWriter | None = None

    @torch.no_grad()
    def rewards(self, group: SampledGroup) -> list[float]:
        """Return the reward of each completion: the head's output at the last token of its document (prompt,
        completion, and unless it was cut the tokens after the answer). At least fp32.

        A group is one batch, on every layout of ranks.
        """
        assert self.model is not None
        if self.beat is not None:
            self.beat.mark()
        prompt = group.prompt
        head, rest = prompt.ids.tolist(), prompt.rest.tolist()
        documents = [[*head, *completion.tokens, *([] if completion.cut else rest)] for completion in group.completions]
        last_G = torch.tensor([len(document) - 1 for document in documents], device=self.device)
        hidden_GSD = self.model.hidden(batch_of(documents, self.device))
        hidden_GD = hidden_GSD[torch.arange(len(documents), device=self.device), last_G]
        exact = torch.float64 if hidden_GD.dtype == torch.float64 else torch.float32
        weight_1D = self.model.score.weight
        return (hidden_GD.to(exact) * weight_1D.to(exact)).sum(-1).tolist()


def batch_of(documents: list[list[int]], device: torch.device) -> ModelBatch:
    """Return a batch with one row for each document, padded at the end."""
    longest = max(map(len, documents))
    ids_GS = torch.zeros(len(documents), longest, dtype=torch.int64)
    bounds = [0]
    for row, document in enumerate(documents):
        ids_GS[row, : len(document)] = torch.tensor(document)
        bounds += [] if len(document) == longest else [row * longest + len(document)]
        bounds.append((row + 1) * longest)
    lengths = torch.tensor([[len(document)] for document in documents])
    positions_GS = torch.arange(longest).expand(len(documents), longest)
    return ModelBatch(
        input_ids_BS=ids_GS.to(device),
        labels_BS=None,
        positions_BS=positions_GS.to(device),
        real_BS=(positions_GS < lengths).to(device),
        packing=DocumentLayout.from_lengths(torch.tensor(bounds, dtype=torch.int32), len(documents), longest, device),
    )


@op("setup.scorer", gives="scorer", traced=False)
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
    """Load the reward model. attention: device type → kernel. Raises EnvironmentFault if files have changed since
    planning."""
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
    """Load the whole model of a folder. Raises OSError if a file does not match its header."""
    span = StageSpan(0, architecture.layers - 1, embeds=True, predicts=True)
    head = Head(vocabulary=architecture.vocab, z_weight=0.0, chunk_bytes=1)
    with torch.device("meta"):
        make = stage_class(architecture)
        model = make(architecture, span, axes=Axes(), kernel=kernel, head=head, rows=1).to(DTYPES[format])
    model.allocate(device, device)
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    with WeightReader(files, assign(architecture, files), lambda done: None) as reader:
        reader.read([(name, tensor) for name, tensor in tensors.items() if reader.has(name)])
    return model.eval().requires_grad_(False)


@frozen(kw_only=True, eq=False)
class KeptReference:
    """Reference stored as its differences from the model of the run: this rank's pieces of `kept`, by name, and whether
    the adapter is left out."""

    model: ModelParts
    kept: Mapping[str, Tensor]
    without_adapter: bool

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Turn the model into the reference inside the block; afterwards it is restored bit for bit."""
        self._trade()
        try:
            with self.model.without_adapter() if self.without_adapter else nullcontext():
                yield
        finally:
            self._trade()

    @torch.no_grad()
    def _trade(self) -> None:
        """Exchange weights tensor by tensor, so that there is never a third copy of all of them."""
        reshard(self.model)  # FSDP has gathered the other weights
        tensors = model_tensors(self.model, "")
        for name, kept in self.kept.items():
            weight = local(tensors[name])
            before = weight.clone()
            weight.copy_(kept)
            kept.copy_(before)


@op("setup.rollout_reference", gives="kept_reference", traced=False)
def keep_reference(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    records: Records,
    beat: HeartbeatWriter,
    prepared: dict[str, PreparedDataset],
    resources: Resources,
    reference: str,
    bytes: int,
) -> KeptReference:
    """Keep the reference's weights that training changes, before a state of the run is read. bytes: of the rank with
    the most of them.

    Raises EnvironmentFault if files have changed since planning, ResumeRefused if the run has compared with other
    weights so far.
    """
    named = weights_now(plan, rank, beat, reference)
    for dataset in plan.node("setup.loader").args["datasets"]:
        if weights_before(plan, records, dataset, reference) not in (None, named):
            raise ResumeRefused(
                f"the run compared completions with the reference {reference}, whose weights have changed; restore the "
                "files that it started from, or start from scratch with checkpoint.resume = false"
            )
        # Checkpoints take the reference's identity from here.
        known = {"reference": reference, "weights": named}
        prepared = {**prepared, dataset: evolve(prepared[dataset], reference=known)}
    resources["prepared"] = prepared
    off = reference == ADAPTER_OFF
    adapted = {tensor.name for tensor in plan.parameters.tensors if tensor.adapter}
    weights = ReferenceWeights(plan=plan, model=model, rank=rank, records=records, beat=beat, resources=resources)
    with weights.in_place(reference, "", None):
        frozen_ones = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        kept = {
            name: local(value).clone()
            for name, value in model_tensors(model, "").items()
            if name not in frozen_ones and not (off and name in adapted)
        }
    return KeptReference(model=model, kept=kept, without_adapter=off)


@op("rollout.reference")
def refer(
    model: ModelParts, rank: Rank, kept_reference: KeptReference, pipeline: PipelineSchedule | None = None
) -> StepCall:
    """Add the reference's log-probabilities to the microbatches of a step."""

    @torch.no_grad()
    def add_reference_logprobs(step: Step) -> None:
        def batches() -> Iterator[ModelBatch]:
            for microbatch in step.microbatches:
                batch = ModelBatch.of(microbatch, rank.device)
                batch.columns.pop(EXPERTS, None)  # a reference chooses experts itself
                batch.each = batch.as_sampled = True
                yield batch

        model.train(False)
        try:
            with kept_reference.in_place():
                losses = [batch.losses_BS for batch in forwarded(model, pipeline, batches())]
        finally:
            model.train()
        for number, losses_BS in enumerate(losses):
            if losses_BS is not None:  # otherwise another stage has them
                microbatch = step.microbatches[number]
                columns = {**microbatch.columns, REF: losses_BS.neg()}
                step.microbatches[number] = evolve(microbatch, columns=columns)

    return add_reference_logprobs
