"""Decoder-only transformer of every family, and the parts of it that a rank has, one for each pipeline stage."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from xtrain.dsl.schema.losses import LATER, LATER_LABELS, further_metrics
from xtrain.dsl.schema.policy import EXPERTS, KEPT, SEEN, SHARES
from xtrain.plan.architecture import Architecture, RotaryAngles
from xtrain.plan.hardware import BLOCK_MASKS, FLASH
from xtrain.runtime.nn.adapters import TaskLinear, put_on_head
from xtrain.runtime.nn.attention import KERNELS, AttentionModule, with_block_masks, with_bounds
from xtrain.runtime.nn.axes import Axes, column_parallel_input, local
from xtrain.runtime.nn.batch import DocumentLayout, ModelBatch, RowLosses
from xtrain.runtime.nn.block import DecoderBlock, Join, Values
from xtrain.runtime.nn.distillation import Distillation, Taught, distillation_losses, live_losses
from xtrain.runtime.nn.head_product import ComparedTokens, HeadFactors
from xtrain.runtime.nn.layers import Embedding, EmbeddingNoise, Factor, Linear, RMSNorm, Rotation, token_keys
from xtrain.runtime.nn.loss import Head, Objective, token_losses, whole_logits, with_zero_gradient
from xtrain.runtime.nn.moe import Experts
from xtrain.runtime.nn.number_formats import QuantisedMatrix
from xtrain.runtime.nn.unit_losses import RewardTerm, UnitTerm, reward_losses, rewards, row_losses, unit_losses


class HasParameters(Protocol):
    """A model, or the parts of one."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class TeacherForward(Protocol):
    """A model on the same ranks whose distribution the student's head is trained on."""

    @property
    def model(self) -> HasParameters: ...

    def taught(self, batch: ModelBatch, head: Head, width: int) -> Taught:
        """Compute a microbatch. head: of the student. width: of its piece of the vocabulary."""
        ...

    def release(self) -> None:
        """Free the gathered parameters."""
        ...


@frozen
class StageSpan:
    """The layers of a pipeline stage, both ends included, and whether the embedding and the head are part of it."""

    first: int
    last: int
    embeds: bool
    predicts: bool


class Transformer(nn.Module):
    """One stage of the model, or all of it: token ids or the residual stream in, losses or the residual stream out.

    `layers` is a dict by layer number, so that a part of the model keeps the names of the whole. A tied head is the
    embedding, and modules that predict further tokens read it; a stage that predicts has a copy of it for both.
    """

    def __init__(
        self,
        arch: Architecture,
        span: StageSpan,
        *,
        axes: Axes,
        kernel: str,
        head: Head,
        rows: int,
        base: Path | None = None,
    ) -> None:
        super().__init__()
        self._begin(arch, span, axes, head)
        self.uses_flex, self.uses_bounds = kernel in BLOCK_MASKS, kernel in FLASH
        if span.embeds or (span.predicts and arch.embeds_behind):
            self.embed_tokens = Embedding(arch.vocab, arch.dim, axes)
        numbers = range(span.first, span.last + 1)
        self.layers = nn.ModuleDict({str(i): DecoderBlock(arch, i, KERNELS[kernel], axes, rows, base) for i in numbers})
        for module in self.layers.modules():
            if isinstance(module, Join):
                module.embed = self.embed
        attention = [module for module in self.layers.modules() if isinstance(module, AttentionModule)]
        self.kernels = frozenset((module.scores, module.sinks is not None) for module in attention)
        if span.predicts:
            ends = arch.ends
            self.norm = RMSNorm(arch.dim, arch.norm_eps, plus_one=ends.norm_plus_one, scale=ends.norm_scale)
            if not arch.has_logits:
                self.score = Linear(arch.dim, 1)
            elif not arch.tie_embeddings or arch.head_matrices:
                self.lm_head = Linear(arch.dim, arch.vocab)
                if arch.tie_embeddings:  # the embedding's weight; only the adapter is here
                    self.lm_head.register_parameter("weight", None)
                put_on_head(self, arch, axes)

    def _begin(self, arch: Architecture, span: StageSpan, axes: Axes, head: Head) -> None:
        """Set what does not depend on the modules."""
        self.arch, self.span, self.axes, self.head = arch, span, axes, head
        self.uses_flex = self.uses_bounds = False
        self.kernels = frozenset[Any]()
        # A pipeline's schedule passes only tensors: batches wait here, and come in this order on every stage.
        self.inbox: deque[ModelBatch] = deque()
        self.splits_backward = False
        # In a pipeline, whose schedule expects gradients of everything that stages pass on: True if nothing before this
        # stage is trained, nor anything of the first stage.
        self.begins_backward = False
        self.drops = False
        # Weight of the mean loss of modules that predict further tokens.
        self.further_weight = 0.0
        self.noise: EmbeddingNoise | None = None
        self.temperature = 1.0  # of the distribution that losses use in training
        self.teacher: TeacherForward | None = None

    def forward(self, x_BSD: Tensor | None, batch: ModelBatch | None = None) -> Tensor:
        """Return the residual stream [B, S, D] for the next stage; on the last stage the objective [1], summed over the
        valid tokens of the batch, or with a cache the logits [B, V] after every row. Without a batch it takes the
        next one of the inbox.

        The head runs inside this forward, so that sharded weights are gathered when the chunked loss reads them.
        """
        if batch is None:
            batch = self.inbox.popleft()
        # The embedded tokens have no variable here: without a backward they are freed after the first block.
        if not self.begins_backward or not torch.is_grad_enabled():
            return self._decode(*self._through_blocks(self._embedded(x_BSD, batch), batch), batch)
        out = self._decode(*self._through_blocks(self._embedded(x_BSD, batch).detach(), batch), batch)
        given = out.new_zeros((), requires_grad=True) if self.span.embeds else x_BSD
        assert given is not None
        return with_zero_gradient(out, given)

    def _embedded(self, x_BSD: Tensor | None, batch: ModelBatch) -> Tensor:
        if self.span.embeds:
            assert batch.input_ids_BS is not None
            return self._noisy(self.embed(batch.input_ids_BS), batch)
        assert x_BSD is not None, "a stage that does not embed takes what the one before it gives"
        return x_BSD

    def embed(self, ids_BS: Tensor) -> Tensor:
        """Return the residual stream [B, S, D] before the first block."""
        x_BSD = self.embed_tokens(ids_BS)
        if (scale := self.arch.ends.embedding_scale) is None:
            return x_BSD
        # Rounded as in transformers, which has it in fp32 first.
        return x_BSD.mul_(torch.tensor(scale, dtype=torch.float32).to(x_BSD.dtype).item())

    def _noisy(self, x_BSD: Tensor, batch: ModelBatch) -> Tensor:
        """Add noise, in training only; with positions cut over tensor-parallel ranks, for this rank's positions."""
        if self.noise is None or batch.place_B is None:
            return x_BSD
        keys_BS = self._keys(batch, x_BSD.device)
        if x_BSD.shape[1] != keys_BS.shape[1]:
            assert self.axes.tensor is not None
            first = self.axes.tensor.group.rank() * x_BSD.shape[1]
            keys_BS = keys_BS[:, first : first + x_BSD.shape[1]]
        return self.noise.add(x_BSD, keys_BS)

    def _blocks(self) -> Iterator[DecoderBlock]:
        """Yield the blocks of the model itself."""
        for name, block in self.layers.items():
            assert isinstance(block, DecoderBlock)
            if int(name) < self.arch.blocks:
                yield block

    @property
    def _further(self) -> list[DecoderBlock]:
        """The blocks that predict further tokens."""
        blocks = [block for name, block in self.layers.items() if int(name) >= self.arch.blocks]
        assert all(isinstance(block, DecoderBlock) for block in blocks)
        return blocks  # type: ignore[return-value]

    @property
    def routing_layers(self) -> list[int]:
        """Its layers with experts, in order."""
        return [int(name) for name, block in self.layers.items() if int(name) in self.arch.expert_layers]

    def rotations(self, positions_BS: Tensor, dtype: torch.dtype) -> dict[RotaryAngles | None, Rotation | None]:
        """Return the rotations of its blocks, by their angles."""
        angles = dict.fromkeys(block.angles for block in self._blocks())
        return {key: None if key is None else Rotation.of(positions_BS, key, dtype) for key in angles}

    def check_code(self, digest: str) -> None:
        """Raise PlanMismatch if the code of the model has another digest; xtrain's own blocks have none."""

    def last_norm(self, x: Tensor) -> Tensor:
        """Return the head's input for the residual stream after the last block."""
        return self.norm(x)

    @torch.no_grad()
    def allocate(self, device: torch.device, computes: torch.device) -> None:
        """Give parameters memory on `device`, and buffers on the device that computes; parameters have no values."""
        self.to_empty(device=device)
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=computes))
        self.fill_buffers()

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Set factors to 1 and all other buffers to 0; reading weights sets those that files have."""
        for buffer in self.buffers():
            buffer.zero_()
        for module in self.modules():
            if isinstance(module, Factor):
                module.factor.fill_(1)

    def hidden(self, batch: ModelBatch) -> Tensor:
        """Return the head's input of a whole model, [B, S, D]: the residual stream after the last norm."""
        return self.last_norm(self._through_blocks(self._embedded(None, batch), batch)[0])

    def _through_blocks(self, x_BSD: Tensor, batch: ModelBatch) -> tuple[Tensor, Callable[..., Tensor]]:
        """Return the residual stream after the blocks of the model itself, and the function that calls further ones."""
        call = self._caller(x_BSD, batch)
        for block in self._blocks():
            x_BSD = call(block, x_BSD)
        return x_BSD, call

    def _caller(self, x_BSD: Tensor, batch: ModelBatch) -> Callable[..., Tensor]:
        """Return the function that calls a block with a residual stream, and with ids of later tokens for one that
        predicts further tokens. It keeps what blocks give to later ones."""
        rotations, packing = self.rotations(batch.positions_BS, x_BSD.dtype), self._packing(batch)
        # In evaluation rows have no numbers.
        keys_BS = self._keys(batch, x_BSD.device) if self.drops and batch.place_B is not None else None
        known = self._known_experts(batch)
        values: Values = {}

        def call_block(block: DecoderBlock, x_BSD: Tensor, later_BS: Tensor | None = None) -> Tensor:
            rotate, experts_BSK = rotations[block.angles], known.get(block.number)
            ids_BS = batch.input_ids_BS if block.embeds and later_BS is None else later_BS
            taken = {name: values[name] for name in block.takes if name in values}
            given = (keys_BS, experts_BSK, ids_BS, taken)
            out = block(x_BSD, rotate, packing, batch.real_BS, batch.cache, *given)
            if block.number == self.span.last:
                values.clear()
            if not block.gives:
                return out
            x_BSD, more = out
            values.update(more)
            return x_BSD

        return call_block

    def _packing(self, batch: ModelBatch) -> DocumentLayout:
        """Return the documents of a microbatch as blocks take them."""
        packing = batch.packing
        if (tasks := self.axes.tasks) is not None:
            packing = evolve(packing, task_rows=tasks.of_rows(batch.datasets, batch.shape[0]))
        if self.axes.ring is not None or batch.cache is not None:
            return packing
        if self.uses_flex:
            return with_block_masks(packing, self.kernels)
        return with_bounds(packing) if self.uses_bounds else packing

    def _known_experts(self, batch: ModelBatch) -> dict[int, Tensor]:
        """Return the recorded experts of sampled tokens for each layer with experts, in the form that a router
        takes."""
        if EXPERTS not in batch.columns:
            return {}
        of_layers = batch.columns[EXPERTS].split(self.arch.experts_per_token, 2)
        return dict(zip(self.arch.expert_layers, of_layers, strict=True))

    def _decode(self, x_BSD: Tensor, call: Callable[..., Tensor], batch: ModelBatch) -> Tensor:
        """Compute the end of the stage. x_BSD: after the last block. call: of further blocks."""
        if not self.span.predicts:
            return x_BSD
        if not self.arch.has_logits:
            return self._rewarded(x_BSD, batch)
        if batch.cache is not None:
            hidden_BD = self.last_norm(x_BSD[:, -1])
            return whole_logits(hidden_BD, self.head_weight(), self._head(), self._head_factors(batch, len(hidden_BD)))
        term, head = self.head.term, self._head()
        assert not isinstance(term, RewardTerm)
        if torch.is_grad_enabled() or batch.as_sampled:
            head = evolve(head, temperature=self.temperature, **self._of_sampler(batch))
        if not torch.is_grad_enabled() and not batch.measures:
            term, head = None, evolve(head, term=None)
        teacher = self.teacher if isinstance(term, Distillation) and term.live else None
        taught = None if teacher is None else teacher.taught(batch, head, self.head_weight().shape[0])
        hidden_BSD = self.last_norm(x_BSD)
        further = self._further if torch.is_grad_enabled() else []
        normed_BSD = hidden_BSD if further else None
        assert batch.labels_BS is not None
        hidden_BSD = column_parallel_input(hidden_BSD, self.axes.tensor)
        hidden_TD, labels_T = hidden_BSD.flatten(0, 1), batch.labels_BS.flatten()
        if batch.labels_BS.dim() == 3:  # several labels per position
            hidden_TD = hidden_TD.repeat_interleave(batch.labels_BS.shape[2], dim=0)
        each = batch.dataset_B is not None or batch.each
        weight_VD, factors = self.head_weight(), self._head_factors(batch, len(hidden_TD))
        columns = {} if term is None else {name: batch.numbers(name) for name in term.columns}
        if isinstance(term, UnitTerm):
            assert batch.units is not None
            units = batch.units
            terms = unit_losses(
                hidden_TD, weight_VD, labels_T, head, columns, units, self.axes, each=each, factors=factors
            )
        elif teacher is not None and taught is not None:
            terms = live_losses(hidden_TD, weight_VD, labels_T, head, taught, columns, each=each, factors=factors)
            del taught
            teacher.release()
        elif isinstance(term, Distillation):
            terms = distillation_losses(hidden_TD, weight_VD, labels_T, head, columns, each=each, factors=factors)
        else:
            terms = token_losses(hidden_TD, weight_VD, labels_T, head, each=each, columns=columns, factors=factors)
        objective, recorded = terms.objective, terms.recorded
        if normed_BSD is not None:
            del x_BSD, hidden_BSD, hidden_TD  # a backward keeps what it needs of them
            objective, recorded = self._with_further(further, call, normed_BSD, objective, batch)
        batch.cross_entropy, batch.recorded = terms.cross_entropy, recorded
        if batch.dataset_B is not None and terms.each_T is not None:
            batch.row_losses = RowLosses.of(batch.dataset_B, batch.labels_BS, terms.each_T)
        if batch.each and terms.each_T is not None:
            batch.losses_BS = terms.each_T.view_as(batch.labels_BS)
        return torch.stack((objective,))  # FSDP accepts no view

    @staticmethod
    def _of_sampler(batch: ModelBatch) -> dict[str, Any]:
        """Return what a head takes from the sampler of these tokens: the tokens that it kept, and its distributions."""
        given: dict[str, Any] = {}
        if KEPT in batch.columns:
            given["kept_TK"] = batch.numbers(KEPT)
        if SEEN in batch.columns and torch.is_grad_enabled():
            batch.apart_BS = torch.zeros(batch.shape, dtype=torch.float64, device=batch.positions_BS.device)
            given["compared"] = ComparedTokens(batch.numbers(SEEN), batch.numbers(SHARES), batch.apart_BS.view(-1))
        return given

    def _with_further(
        self,
        further: list[DecoderBlock],
        call: Callable[..., Tensor],
        x_BSD: Tensor,
        objective: Tensor,
        batch: ModelBatch,
    ) -> tuple[Tensor, Tensor]:
        """Return the objective plus the weighted mean loss of modules that predict further tokens, and the recorded
        values: the objective and the loss of each. x_BSD: input of the head."""
        head, losses = evolve(self._head(), z_weight=0.0), list[Tensor]()
        for depth, block in enumerate(further, start=1):
            x_BSD = call(block, x_BSD, batch.columns[f"{LATER}/{depth}"])
            hidden_TD = column_parallel_input(x_BSD, self.axes.tensor).flatten(0, 1)
            labels_T = batch.columns[f"{LATER_LABELS}/{depth}"].flatten()
            factors = self._head_factors(batch, len(hidden_TD))
            terms = token_losses(hidden_TD, self.head_weight(), labels_T, head, factors=factors)
            del hidden_TD  # if it is another tensor than the next module's input
            objective = objective + self.further_weight / len(further) * terms.objective
            losses.append(terms.cross_entropy)
        return objective, torch.stack((objective.detach(), *losses))

    def _rewarded(self, x_BSD: Tensor, batch: ModelBatch) -> Tensor:
        """Return the objective [1] of a reward head; only the positions that it reads are normalized."""
        term, units, positions = self.head.term, batch.units, batch.shape[1]
        assert isinstance(term, RewardTerm) and units is not None
        weight_1D = local(self.score.weight, partial=self.score.partial)
        reward_N = rewards(x_BSD, self.last_norm, weight_1D, units, positions, self.axes)
        exact = torch.float64 if x_BSD.dtype == torch.float64 else torch.float32
        objective, recorded, loss_U = reward_losses(reward_N, term, units, self.axes, exact)
        batch.cross_entropy, batch.recorded = recorded[0], recorded
        if batch.dataset_B is not None:
            batch.row_losses = row_losses(loss_U, units, batch.dataset_B, positions)
        return torch.stack((objective,))

    def _keys(self, batch: ModelBatch, device: torch.device) -> Tensor:
        """Return the numbers of a run's tokens, int64 [B, S]."""
        assert batch.place_B is not None
        in_row_BS = torch.arange(batch.shape[1]) if batch.in_row_BS is None else batch.in_row_BS
        return token_keys(batch.place_B.to(device, non_blocking=True), in_row_BS.to(device, non_blocking=True))

    def head_weight(self) -> Tensor:
        """Return the weight [V, D] of this rank's piece of the vocabulary."""
        return local((self.embed_tokens if self.arch.tie_embeddings else self.lm_head).weight)

    def _head_factors(self, batch: ModelBatch, tokens: int) -> tuple[HeadFactors, ...]:
        """Return the adapters' summands of the logits of `tokens` tokens, equally many per row."""
        if not self.arch.head_matrices or self.axes.without_adapter:
            return ()
        head, routing, rows = self.lm_head, self.axes.tasks, batch.shape[0]
        if isinstance(head, TaskLinear) and routing is not None:
            counts = routing.of_rows(batch.datasets, rows)
            return tuple(head.factors_of(counts, tokens // rows)) if counts else ()
        return (head.factors(0, tokens),)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    def _head(self) -> Head:
        return evolve(self.head, tensor=self.axes.tensor, twice=self.splits_backward)


@frozen(eq=False)
class QuantisedParameter:
    """A parameter that a module stores as bytes. name: in the whole model; key: in the module."""

    name: str
    module: nn.Module
    key: str
    matrix: QuantisedMatrix

    @property
    def parameter(self) -> nn.Parameter:
        """The current parameter, as FSDP may have replaced it."""
        return self.module.get_parameter(self.key)


@frozen(eq=False)
class ModelParts:
    """Parts of the model in the order of the pipeline; parameters have their names in the whole model.

    group: parameter group whose own optimizer is being built; empty for the others' optimizer.
    """

    parts: tuple[Transformer, ...]
    axes: Axes
    group: str = ""

    @property
    def whole(self) -> Transformer:
        """The model, if it is not cut into stages."""
        (model,) = self.parts
        return model

    @property
    def recorded(self) -> int:
        """Number of loss sums per microbatch: of the cross-entropy, and of the objective and metrics."""
        head = self.parts[0].head
        return 1 if head.term is None and not head.z_weight and not self.measured else 2 + len(self.measured)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the loss's metrics."""
        term = self.parts[0].head.term
        if further := self.parts[0].arch.mtp:
            return further_metrics(further)
        return () if term is None else term.metrics

    @property
    def measures_units(self) -> bool:
        """True if these metrics are over sequences or pairs, not tokens."""
        return isinstance(self.parts[0].head.term, UnitTerm | RewardTerm)

    @property
    def predicts(self) -> bool:
        """True if its head gives logits, and so a cross-entropy; otherwise it gives rewards."""
        return self.parts[0].arch.has_logits

    def minimise(self, term: Objective) -> None:
        """Make `term` the loss of each token, or of each sequence or pair."""
        for part in self.parts:
            part.head = evolve(part.head, term=term)

    def with_adapter_of(self, task: str | None) -> AbstractContextManager[None]:
        """Route rows without dataset numbers through the adapter of a task within the block; None: through none."""
        return nullcontext() if self.axes.tasks is None else self.axes.tasks.all_of(task)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Compute the model without adapters within the block."""
        self.axes.without_adapter = True
        try:
            with self.with_adapter_of(None):
                yield
        finally:
            self.axes.without_adapter = False

    def modules(self) -> Iterator[nn.Module]:
        for part in self.parts:
            yield from part.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for part in self.parts:
            yield from part.named_modules()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters with gradients, by name."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def quantised(self) -> Iterator[QuantisedParameter]:
        """Yield the parameters that are stored in blocks of codes."""
        for path, module in self.named_modules():
            if isinstance(module, Linear) and module.quantised is not None:
                yield QuantisedParameter(f"{path}.weight", module, "weight", module.quantised)
            elif isinstance(module, Experts):
                for key, matrix in module.quantised.items():
                    yield QuantisedParameter(f"{path}.{key}", module, key, matrix)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part.named_buffers()

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)
