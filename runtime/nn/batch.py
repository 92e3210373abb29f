"""Microbatches as the model takes them, sampled completions, and the current optimizer step.

A microbatch has the places of its documents, and a key-value cache where texts are generated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from xtrain.dsl.schema.losses import ADVANTAGES, OLD
from xtrain.dsl.schema.policy import EXPERTS
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, DocumentSums, Microbatch, Units
from xtrain.runtime.feed.packing.stored_rows import RawRow


class LayerCache(Protocol):
    """Cache of tensors of earlier positions, for layers. length: capacity in positions of a row. filled: earlier
    positions; 0 while prompts are computed. one_text: the rows are consecutive positions of one text, which has one
    state."""

    length: int
    filled: int
    one_text: bool

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Add tensors of new positions, and return those of all positions that the layer sees."""
        ...

    def seen(self, count: int, window: int | None) -> Tensor | None:
        """Return which of the last `count` positions each row sees, bool [B, 1, 1, count]; None: all."""
        ...

    def keep(self, layer: nn.Module, state: tuple[Tensor, ...]) -> None:
        """Keep the states of a layer after the newest positions."""
        ...

    def kept(self, layer: nn.Module) -> tuple[Tensor, ...]:
        """Return the states of a layer. They may be overwritten, and are kept again afterwards."""
        ...


@define(eq=False)
class KeyValueCache:
    """Cached tensors of earlier positions, for every layer of this rank that uses the cache.

    length: capacity in positions of a row. filled: positions before those of the current forward. seen_B11L: bool,
    positions that belong to each row; None: all. A layer that sees only the `window` newest positions keeps these
    alone: position p is stored at p modulo window, over one that no later position sees. A layer with states keeps
    these instead.
    """

    length: int
    filled: int = 0
    one_text: bool = field(default=False, init=False)
    seen_B11L: Tensor | None = None
    _tensors: dict[nn.Module, tuple[Tensor, ...]] = field(factory=dict, init=False)

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Add tensors [B, K, S, A] of a layer. Prompts come first and are returned unchanged; later S = 1, and views
        [B, K, filled + 1 or window, A] of all kept positions are returned."""
        room = self.length if window is None else min(window, self.length)
        known = self._tensors.get(layer)
        if known is None:
            known = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in new)
            self._tensors[layer] = known
        count = new[0].shape[2]
        assert self.filled == 0 or count == 1, "after prompts there is one position at a time"
        for tensor, x in zip(known, new, strict=True):
            if count > room:
                tensor.copy_(x[:, :, -room:].roll(count, 2))
            else:
                tensor.narrow(2, self.filled % room, count).copy_(x)
        return new if self.filled == 0 else [tensor.narrow(2, 0, min(self.filled + 1, room)) for tensor in known]

    def seen(self, count: int, window: int | None) -> Tensor | None:
        """Return the mask of `LayerCache`, in the storage order of a layer that keeps `count` positions."""
        if self.seen_B11L is None:
            return None
        end = self.filled + 1
        return self.seen_B11L[..., end - count : end].roll(end - count, -1)

    def keep(self, layer: nn.Module, state: tuple[Tensor, ...]) -> None:
        """Keep the states of a layer after the newest positions."""
        self._tensors[layer] = state

    def kept(self, layer: nn.Module) -> tuple[Tensor, ...]:
        """Return the states of a layer."""
        return self._tensors[layer]

    @property
    def bytes(self) -> int:
        """Allocated bytes."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)


@frozen(eq=False)
class DocumentLayout:
    """Layout of the documents of a microbatch.

    segments: (row, first position, length) of every document, in order; together they cover every position.
    document_BS: int32, a unique number for every document of the microbatch. single: every row is one document.
    block_masks: masks of flex by window, made once for all layers. bounds: int32 [documents + 1], the first position of
    every document in the flattened rows, and their end, for FlashAttention. cached: cache of earlier positions; these
    rows are the newest positions. task_rows: number of consecutive rows for the adapter of each task; empty: none.
    """

    segments: tuple[tuple[int, int, int], ...]
    document_BS: Tensor
    single: bool
    block_masks: Mapping[int | None, Any] = field(factory=dict)
    bounds: Tensor | None = None
    cached: LayerCache | None = None
    task_rows: tuple[int, ...] = ()

    @classmethod
    def from_lengths(
        cls, cumulative_lengths: Tensor, rows: int, sequence: int, device: torch.device
    ) -> "DocumentLayout":
        """Build the layout. `cumulative_lengths` int32 [documents + 1] over the flattened B·S positions; no document
        crosses a row."""
        bounds = cumulative_lengths.tolist()
        segments = tuple((first // sequence, first % sequence, last - first) for first, last in pairwise(bounds))
        lengths = cumulative_lengths.diff().to(device, non_blocking=True)
        numbers = torch.arange(len(segments), device=device, dtype=torch.int32)
        document_T = numbers.repeat_interleave(lengths, output_size=rows * sequence)
        return cls(segments=segments, document_BS=document_T.view(rows, sequence), single=len(segments) == rows)

    @property
    def longest(self) -> int:
        """Positions of the longest document."""
        return max(length for _, _, length in self.segments)


# Name of the column that turns a sum over tokens into a sum of the means of their sequences.
SHARE: Final = "share"


@frozen(kw_only=True, eq=False)
class RowLosses:
    """Sums over this rank's positions of each row, for losses per dataset.

    dataset_B: int64, number of the row's dataset. cross_entropy_B, valid_B: float64, sum over its valid tokens and
    their number; with a reward head the losses of its sequences or pairs, and their number.
    """

    dataset_B: Tensor
    cross_entropy_B: Tensor
    valid_B: Tensor

    @classmethod
    def of(cls, dataset_B: Tensor, labels_BS: Tensor, each_T: Tensor) -> "RowLosses":
        """Sum per row. `each_T`: cross-entropies of all positions, rows one after the other, 0 without label."""
        return cls(
            dataset_B=dataset_B,
            cross_entropy_B=each_T.view_as(labels_BS).sum(1, dtype=torch.float64),
            valid_B=(labels_BS != IGNORE_INDEX).sum(1, dtype=torch.float64),
        )


@define(kw_only=True, eq=False)
class ModelBatch:
    """A microbatch on the device. Every pipeline stage has all of it but the tokens, which only the first and last
    need.

    cache: in generation, the cache to which these positions are added; the model then returns the logits after the last
    position of every row, and no losses. cross_entropy: sum over this batch's valid tokens, set by the last stage; with
    a reward head the minimized loss. dataset_B: number of each row's dataset with several training datasets; datasets:
    the same on the host. row_losses: set by the last stage then. measures: in evaluation, also compute the minimized
    loss, not only the cross-entropy. labels_BS: in a server's microbatch [B, S, K], K labels for each position, and so
    are its losses; its columns are [B, S · K]. each: also compute the cross-entropy of every token. losses_BS: set by
    the last stage then, 0 without label. apart_BS: divergences from the sampler, fp64, set by the last stage if its
    distributions are columns. as_sampled: in a forward without gradients too, use logits / temperature for
    the cross-entropy, if the run samples at another temperature than 1. recorded: [1 + metrics], the minimized loss if
    it is not the cross-entropy alone, and further metrics; set by the last stage. text_BS, place_B, in_row_BS, columns,
    units: see `Microbatch`.
    """

    input_ids_BS: Tensor | None
    labels_BS: Tensor | None
    positions_BS: Tensor
    real_BS: Tensor
    packing: DocumentLayout
    cache: LayerCache | None = None
    cross_entropy: Tensor | None = None
    recorded: Tensor | None = None
    dataset_B: Tensor | None = None
    datasets: tuple[int, ...] | None = None
    row_losses: RowLosses | None = None
    measures: bool = False
    each: bool = False
    losses_BS: Tensor | None = None
    apart_BS: Tensor | None = None
    as_sampled: bool = False
    text_BS: Tensor | None = None
    columns: dict[str, Tensor] = field(factory=dict)
    units: Units | None = None
    place_B: Tensor | None = None
    in_row_BS: Tensor | None = None

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> "ModelBatch":
        """Move a microbatch to `device`; its segments remain those of whole rows."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        rows = batch.positions_BS.shape[0]
        return cls(
            input_ids_BS=moved(batch.input_ids_BS),
            labels_BS=moved(batch.labels_BS),
            positions_BS=batch.positions_BS.to(device, non_blocking=True),
            real_BS=batch.real_BS.to(device, non_blocking=True),
            packing=DocumentLayout.from_lengths(batch.cumulative_lengths, rows, batch.sequence, device),
            dataset_B=moved(batch.dataset_B),
            datasets=None if batch.dataset_B is None else tuple(batch.dataset_B.tolist()),
            text_BS=moved(batch.text_BS),
            columns={name: column.to(device, non_blocking=True) for name, column in batch.columns.items()},
            units=None if batch.units is None else batch.units.to(device),
            place_B=batch.place_B,  # moved where they are needed
            in_row_BS=batch.in_row_BS,
        )

    @property
    def sums(self) -> Tensor:
        """Cross-entropy and further recorded sums: [1] or [2 + metrics]; on the last stage."""
        assert self.cross_entropy is not None
        first = self.cross_entropy[None]
        return first if self.recorded is None else torch.cat((first, self.recorded))

    def numbers(self, name: str) -> Tensor:
        """Return a column [T], or [T, width] with several numbers per token, rows one after the other.

        `SHARE`: 1 / number of labels of each position's sequence.
        """
        if name != SHARE:
            return self.columns[name].flatten(0, 1)
        assert self.units is not None
        return self.units.share_BS.flatten()

    @property
    def shape(self) -> tuple[int, int]:
        rows, positions = self.positions_BS.shape
        return rows, positions


@frozen(kw_only=True, eq=False)
class Prompt:
    """A prompt of a rollout.

    ids: int64 [P]. answer: the dataset's text after it; rest: int64, the document's tokens after it. place: number of
    rows of the run before it. values: numbers of its document. dataset: its number among the training datasets.
    """

    ids: np.ndarray
    text: str
    answer: str
    rest: np.ndarray
    values: Mapping[str, float]
    dataset: int
    place: int


@frozen(kw_only=True)
class Completion:
    """A sampled completion.

    tokens [C]: with the end token. logprobs [C]: of logits / temperature, before any are left out, or of the tokens
    that are left. left_out: sum over its tokens of the left-out probability. columns: further numbers of its tokens, by
    the name of their column, [C, width]. text: without the end token. cut: it has no end token, because it reached
    the largest length. experts: int32 [P + C, width], the column `EXPERTS` of prompt and completion, if recorded.

    Of an episode: tokens [C]: the whole conversation, from its first message on, without the prompt. sampled [C]: 1
    for the tokens of the model's turns; the logprobs of others are 0. experts: int32 [C, width]. cut: its last turn
    was, or there was no room for another one. rewards: of its turns and its end. lost: a call exceeded its limits.

    version: of an engine, the step before which the weights that sampled it were taken.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str
    cut: bool
    left_out: float = 0.0
    columns: Mapping[str, np.ndarray] = field(factory=dict, eq=False)
    experts: np.ndarray | None = field(default=None, eq=False)
    sampled: Sequence[int] | None = None
    rewards: Sequence[float] = ()
    turns: int = 0
    lost: bool = False
    version: int | None = None

    @property
    def count(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens) if self.sampled is None else sum(self.sampled)


@define(eq=False)
class SampledGroup:
    """The completions of a prompt. rewards, advantages: float64 [G], once they are known; empty
    without a reward."""

    prompt: Prompt
    completions: Sequence[Completion]
    rewards: np.ndarray = field(factory=lambda: np.empty(0))
    advantages: np.ndarray = field(factory=lambda: np.empty(0))

    def rewards_of_episodes(self) -> np.ndarray:
        """Return the sum of the rewards of each episode, float64 [G]."""
        return np.array([sum(completion.rewards) for completion in self.completions], np.float64)

    def row(self, *, mask_truncated: bool = False) -> RawRow:
        """Return one document per completion, whose sampled tokens are predicted, unless it is cut or lost and
        `mask_truncated`."""
        heads = [self.prompt.ids if each.sampled is None else self.prompt.ids[:0] for each in self.completions]
        experts = [completion.experts for completion in self.completions if completion.experts is not None]

        def column(numbers: Iterable[Sequence[float] | np.ndarray]) -> list[np.ndarray]:
            pairs = zip(heads, numbers, strict=True)
            return [np.concatenate((np.zeros(len(head)), values)).astype(np.float32) for head, values in pairs]

        def wide(name: str) -> list[np.ndarray]:
            pairs = zip(heads, (completion.columns[name] for completion in self.completions), strict=True)
            return [np.concatenate((np.zeros((len(head), own.shape[1]), own.dtype), own)) for head, own in pairs]

        masks = [_sampled(completion) for completion in self.completions]
        learned = [not (mask_truncated and (each.cut or each.lost)) for each in self.completions]
        trained = column(mask * on for mask, on in zip(masks, learned, strict=True))
        advantages = (a * mask for a, mask in zip(self.advantages, masks, strict=True))
        return RawRow(
            segments=[np.concatenate((head, each.tokens)) for head, each in zip(heads, self.completions, strict=True)],
            trained=[mask.astype(np.uint8) for mask in trained],
            columns={
                OLD: column(completion.logprobs for completion in self.completions),
                **({ADVANTAGES: column(advantages)} if len(self.advantages) else {}),
                **({EXPERTS: experts} if len(experts) == len(masks) else {}),
                **{name: wide(name) for name in self.completions[0].columns},
            },
            values={name: [value] * len(masks) for name, value in self.prompt.values.items()},
            dataset=self.prompt.dataset,
            position=self.prompt.place,
        )


def _sampled(completion: Completion) -> np.ndarray:
    """Return 1 for each token of a completion that was sampled, float64 [C]."""
    return np.ones(len(completion.tokens)) if completion.sampled is None else np.array(completion.sampled, np.float64)


def advantages_of(rewards: np.ndarray, scale: str) -> np.ndarray:
    """Return rewards minus their mean; with `group` divided by their sample standard deviation + 1e-4, as in TRL (arXiv
    2402.03300, §4.1.2). float64 [G] both."""
    apart = rewards - rewards.mean()
    return apart / (rewards.std(ddof=1) + 1e-4) if scale == "group" else apart


def overlong_rewards(lengths: np.ndarray, longest: int, tokens: int) -> np.ndarray:
    """Return the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), float64 [G]: 0 up to `longest` −
    `tokens` tokens, then falling to −1 at `longest`. lengths: int64 [G]."""
    return -np.clip((lengths - (longest - tokens)) / tokens, 0.0, 1.0)


@define(kw_only=True)
class Step:
    """State of an optimizer step. `index` counts from 0; sums are over valid tokens of all ranks once reduced."""

    index: int
    rows: int = 0
    """Its rows on all ranks, of the replica groups that take part."""
    share: float = 1.0
    """Its rows as a share of a step's rows after the ramp."""
    phase: str = ""
    """The name of its phase."""
    microbatches: list[Microbatch] = field(factory=list)
    groups: list[list[SampledGroup]] = field(factory=list)
    """Groups sampled for each of its microbatches, in a run with rollouts."""
    sample: "Callable[[list[Prompt]], list[SampledGroup]] | None" = None
    """Samples a group of each prompt with the current weights, in a run with rollouts. Collective over all ranks, which
    need the same number of prompts each."""
    sampled: bool = False
    """True if they were sampled in this step by the current weights, not earlier for several steps."""
    valid_tokens: int = 0
    units: int = 0
    """Divisor of the loss: valid tokens, sequences or pairs of all ranks."""
    documents: DocumentSums = field(factory=DocumentSums)
    loss_sums: Tensor | None = None
    """Sums of this rank: cross-entropy, and the objective if it differs."""
    row_losses: list[RowLosses] = field(factory=list)
    batches: list[ModelBatch] = field(factory=list)
    """Its microbatches with the cross-entropy of each token, if nodes after the forward need them."""
    loss: float = float("nan")
    objective: float | None = None
    reward: float | None = None
    """Mean over the completions that it has sampled; None without any."""
    metrics: dict[str, float] = field(factory=dict)
    """Metrics of its rollout and loss: means over tokens, sequences or pairs; by name."""
    grad_norm: float = float("nan")
    loss_scale: float = 1.0
    """Factor of the loss in the backward, and so of gradients until they are divided by it."""
    clipped: float = 1.0
    """Factor that its gradients were scaled by."""
    task_norms: dict[str, float] = field(factory=dict)
    """`grad_norm` of each of several tasks."""
    left_out: frozenset[str] = frozenset()
    """Tasks that do not learn from it."""
    lr: float = 0.0
    began: float = 0.0
    warms_up: bool = False
    """True for the first computed step of this start: it compiles and fills caches, so averages of times leave it out.
    """
    waited: float = 0.0
    """Seconds this rank had waited for others, in total, when the step began."""
    data_seconds: float = 0.0
    stop: str = ""
    """Reason to stop the run after it, agreed by all ranks; empty: none."""
    taken: dict[str, Any] = field(factory=dict)
    """Values that its nodes have collected for later ticks, by the op of the tick; dropped after these."""

    @property
    def minimised(self) -> float:
        """The minimized loss: the objective, or the cross-entropy without one."""
        return self.loss if self.objective is None else self.objective

    def record(self, measured: Sequence[str], sums: Sequence[float], count: int) -> None:
        """Record the minimized loss and the `measured` metrics from sums over all ranks; does nothing without sums.

        count: number of tokens, sequences or pairs of the metrics.
        """
        if sums:
            objective, *others = sums
            self.objective = objective / self.units
            self.metrics |= {name: total / count for name, total in zip(measured, others, strict=True)}

    def release(self) -> None:
        """Drop microbatches, losses and samples to free their memory."""
        self.microbatches, self.loss_sums, self.row_losses = [], None, []
        self.groups, self.batches = [], []


StepCall = Callable[[Step], None]
"""A node of the loop after its op is bound; it runs on the current step."""


class Halt(Exception):
    """All ranks have agreed to leave the loop before this step because of `event` (`sigterm`, `time_limit`, …).

    reason: the cause, as a sentence.
    """

    def __init__(self, event: str, reason: str) -> None:
        super().__init__(f"{event}: {reason}")
        self.event, self.reason = event, reason


class StepAgain(Exception):
    """No rank of this replica group learned from this step: it is repeated, or the group continues at another group's
    step.

    moved: its state came from another group. agreed: ranks had agreed on the actions after it.
    """

    def __init__(self, reason: str, *, moved: bool = False, agreed: bool = False) -> None:
        super().__init__(reason)
        self.moved, self.agreed = moved, agreed


class RunIsOver(Exception):
    """Other groups have finished the run, and nothing is left to do."""


class SkipStep(Exception):
    """Nothing is learned from this step; it is counted and the next one follows. fields: of the event that
    reports it."""

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(reason)
        self.fields = fields


class NonFinite(Exception):
    """Loss or gradient norm is not finite, on all ranks, in as many steps as the plan tolerates.

    `report`: a message, if this step's values are not enough.
    """

    agreed = True

    def __init__(self, step: int, loss: float, grad_norm: float, report: str = "") -> None:
        super().__init__(report or f"step {step}: loss {loss}, gradient norm {grad_norm}")
        self.step, self.loss, self.grad_norm = step, loss, grad_norm


class NothingLearned(Exception):
    """Too many steps in a row, or all steps of the run, had nothing to learn from, on all ranks."""

    agreed = True
