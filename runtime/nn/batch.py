"""Microbatches as the model takes them, sampled completions, and the optimizer step under way.

A microbatch has the places of its documents, and a key-value cache where texts are generated.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from xtrain.dsl.schema.policy import EXPERTS
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, DocumentSums, Microbatch, Units
from xtrain.runtime.feed.packing.stored_rows import RawRow


class LayerCache(Protocol):
    """What layers ask for what they have computed of earlier positions. length: positions of a row that there is room
    for. filled: positions that have been; 0: prompts are computed."""

    length: int
    filled: int

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Keep tensors of new positions, and give those of all that the layer sees."""
        ...

    def seen(self, count: int, window: int | None) -> Tensor | None:
        """Bool [B, 1, 1, count], which of so many positions that `extended` gives a layer each row sees; None: all."""
        ...


@define(eq=False)
class KeyValueCache:
    """Tensors of the positions so far, for every layer of this rank that asks for it.

    length: positions of a row that there is memory for. filled: positions that have been, in front of those of the
    forward that is under way. seen_B11L: bool, which of the positions of a row are its own; None: all. A layer that
    sees no more than the `window` newest positions keeps these alone: position p is the p modulo window, in the place
    of one that no later position sees.
    """

    length: int
    filled: int = 0
    seen_B11L: Tensor | None = None
    _tensors: dict[nn.Module, tuple[Tensor, ...]] = field(factory=dict, init=False)

    def extended(self, layer: nn.Module, *new: Tensor, window: int | None = None) -> Sequence[Tensor]:
        """Each of the tensors [B, K, S, A] of a layer: those of the prompts, which come first, as they are; with those
        of one position behind them, S = 1, views [B, K, filled + 1 or window, A] of all that the layer keeps."""
        room = self.length if window is None else min(window, self.length)
        known = self._tensors.get(layer)
        if known is None:
            known = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in new)
            self._tensors[layer] = known
        count = new[0].shape[2]
        assert self.filled == 0 or count == 1, "behind prompts there is one position at a time"
        for tensor, x in zip(known, new, strict=True):
            if count > room:
                tensor.copy_(x[:, :, -room:].roll(count, 2))
            else:
                tensor.narrow(2, self.filled % room, count).copy_(x)
        return new if self.filled == 0 else [tensor.narrow(2, 0, min(self.filled + 1, room)) for tensor in known]

    def seen(self, count: int, window: int | None) -> Tensor | None:
        """As of `LayerCache`, in the order in which a layer has them that keeps so many."""
        if self.seen_B11L is None:
            return None
        end = self.filled + 1
        return self.seen_B11L[..., end - count : end].roll(end - count, -1)

    @property
    def bytes(self) -> int:
        """What it has allocated."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)


@frozen(eq=False)
class DocumentLayout:
    """Where the documents of a microbatch lie.

    segments: (row, first position, length) of every document, in order; together they cover every position.
    document_BS: int32, a number of its own for every document of the microbatch.
    single: every row is one document. block_masks: what flex wants to know, by window, made once for all layers.
    cached: keys and values of earlier positions lie in a cache (`cache.py`), and these rows are the newest positions.
    task_rows: how many of the rows go through the adapter of each task, one behind the other; empty: none does.
    """

    segments: tuple[tuple[int, int, int], ...]
    document_BS: Tensor
    single: bool
    block_masks: Mapping[int | None, Any] = field(factory=dict)
    cached: LayerCache | None = None
    task_rows: tuple[int, ...] = ()

    @classmethod
    def from_lengths(
        cls, cumulative_lengths: Tensor, rows: int, sequence: int, device: torch.device
    ) -> "DocumentLayout":
        """`cumulative_lengths` int32 [documents + 1] over the flattened B·S positions; no document crosses a row."""
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


# Among the columns of a term: what makes a sum over tokens a sum of the means of their sequences.
SHARE: Final = "share"


@frozen(kw_only=True, eq=False)
class RowLosses:
    """What the losses of different datasets are made of: sums over this rank's positions of each row.

    dataset_B: int64, number of the row's dataset. cross_entropy_B, valid_B: float64, over and of its valid tokens; with
    a head of rewards the losses of its sequences or pairs, and their number.
    """

    dataset_B: Tensor
    cross_entropy_B: Tensor
    valid_B: Tensor

    @classmethod
    def of(cls, dataset_B: Tensor, labels_BS: Tensor, each_T: Tensor) -> "RowLosses":
        """`each_T`: cross-entropies of all positions, rows one after the other, 0 where there is no label."""
        return cls(
            dataset_B=dataset_B,
            cross_entropy_B=each_T.view_as(labels_BS).sum(1, dtype=torch.float64),
            valid_B=(labels_BS != IGNORE_INDEX).sum(1, dtype=torch.float64),
        )


@define(kw_only=True, eq=False)
class ModelBatch:
    """Every stage of a pipeline has the whole of it but the tokens, which only the first and the last one need.

    cache: of texts that are generated, to which these positions are added; wanted are then the logits behind the last
    position of every row, and no losses.
    cross_entropy: sum over this batch's valid tokens, left here by the last stage; with a head of rewards what is
    minimised.
    dataset_B: number of each row's dataset, where several are trained on; datasets: the same without asking the device.
    row_losses: left by the last stage then.
    measures: in evaluation, what is minimised is asked for besides the cross-entropy.
    labels_BS: of a server's microbatch [B, S, K], K labels of each position, and so are its losses; its columns are
    [B, S · K].
    each: the cross-entropy of every token is asked for. losses_BS: left by the last stage then, 0 without a label.
    as_sampled: in a forward without gradients too, the cross-entropy is that of logits / temperature, where a run
    samples at another one than 1.
    recorded: [1 + metrics] what is minimised, where that is not the cross-entropy alone, and what is measured
    beside it; left by the last stage.
    text_BS, place_B, in_row_BS, columns, units: as of the microbatch.
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
    as_sampled: bool = False
    text_BS: Tensor | None = None
    columns: dict[str, Tensor] = field(factory=dict)
    units: Units | None = None
    place_B: Tensor | None = None
    in_row_BS: Tensor | None = None

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> "ModelBatch":
        """Move a microbatch to `device`; its segments stay what they are: those of whole rows."""

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
        """Cross-entropy, and behind it what is recorded besides: [1] or [2 + metrics]; of the last stage."""
        assert self.cross_entropy is not None
        first = self.cross_entropy[None]
        return first if self.recorded is None else torch.cat((first, self.recorded))

    def numbers(self, name: str) -> Tensor:
        """A column [T], or [T, width] of one with several numbers a token, all rows one after the other. `SHARE`: 1 /
        the labels of the sequence that a position is of."""
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
    """ids: int64 [P]. answer: the text that the dataset has behind it; rest: int64, tokens of the document behind that.
    place: rows of the run before its own. values: numbers of its document. dataset: its number among those that are
    trained on."""

    ids: np.ndarray
    text: str
    answer: str
    rest: np.ndarray
    values: Mapping[str, float]
    dataset: int
    place: int


@frozen(kw_only=True)
class Completion:
    """tokens [C]: with what ends it. logprobs [C]: of logits / temperature, before anything is left out. left_out: sum
    over its tokens of the probability that was. text: without what ends it. cut: it has no end, as it has the most
    tokens that it may have. experts: int32 [P + C, width], the column `EXPERTS` of the prompt with it, where that is
    recorded."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str
    cut: bool
    left_out: float = 0.0
    experts: np.ndarray | None = field(default=None, eq=False)


@define(eq=False)
class SampledGroup:
    """The completions of a prompt. rewards, advantages: float64 [G], once they are known."""

    prompt: Prompt
    completions: Sequence[Completion]
    rewards: np.ndarray = field(factory=lambda: np.empty(0))
    advantages: np.ndarray = field(factory=lambda: np.empty(0))

    def row(self, *, mask_truncated: bool = False) -> RawRow:
        """One document for each completion, of which the completion is to be predicted, unless it is cut and
        `mask_truncated`."""
        head, sizes = len(self.prompt.ids), [len(each.tokens) for each in self.completions]
        learned = [not (mask_truncated and each.cut) for each in self.completions]

        experts = [each.experts for each in self.completions if each.experts is not None]

        def column(numbers: Sequence[Sequence[float]]) -> list[np.ndarray]:
            return [np.concatenate((np.zeros(head), each)).astype(np.float32) for each in numbers]

        return RawRow(
            segments=[np.concatenate((self.prompt.ids, each.tokens)) for each in self.completions],
            trained=[np.repeat(np.array([0, on], np.uint8), (head, n)) for on, n in zip(learned, sizes, strict=True)],
            columns={
                "logprobs": column([each.logprobs for each in self.completions]),
                "advantages": column([[a] * size for a, size in zip(self.advantages, sizes, strict=True)]),
                **({EXPERTS: experts} if len(experts) == len(sizes) else {}),
            },
            values={name: [value] * len(sizes) for name, value in self.prompt.values.items()},
            dataset=self.prompt.dataset,
            position=self.prompt.place,
        )


def advantages_of(rewards: np.ndarray, scale: str) -> np.ndarray:
    """Rewards less their mean; by `group` divided by their standard deviation, of a sample, + 1e-4, as in TRL
    (arXiv 2402.03300, §4.1.2). float64 [G] both."""
    apart = rewards - rewards.mean()
    return apart / (rewards.std(ddof=1) + 1e-4) if scale == "group" else apart


@define(kw_only=True)
class Step:
    """One optimizer step under way. `index` counts from 0; sums are over valid tokens of all ranks once reduced."""

    index: int
    rows: int = 0
    """Those that it takes, on all ranks, of replica groups those that take part."""
    share: float = 1.0
    """Its rows as a share of those of a step behind the ramp."""
    phase: str = ""
    """The name of the phase that it lies in."""
    microbatches: list[Microbatch] = field(factory=list)
    groups: list[list[SampledGroup]] = field(factory=list)
    """What was sampled for each of its microbatches, in a run with rollouts."""
    sampled: bool = False
    """Whether that was in this step, by the weights as they are, and not for several steps in one before."""
    valid_tokens: int = 0
    units: int = 0
    """What the loss is divided by: valid tokens, sequences or pairs of all ranks."""
    documents: DocumentSums = field(factory=DocumentSums)
    loss_sums: Tensor | None = None
    """Cross-entropy, and behind it the objective where that is something else, of this rank."""
    row_losses: list[RowLosses] = field(factory=list)
    batches: list[ModelBatch] = field(factory=list)
    """Its microbatches with the cross-entropy of each token, where nodes behind the forward ask for them."""
    loss: float = float("nan")
    objective: float | None = None
    reward: float | None = None
    """Mean over the completions that it has sampled; None where it has sampled none."""
    metrics: dict[str, float] = field(factory=dict)
    """What its rollout measures, and its loss beside it: means over tokens, sequences or pairs; by name."""
    grad_norm: float = float("nan")
    clipped: float = 1.0
    """What its gradients were multiplied with."""
    task_norms: dict[str, float] = field(factory=dict)
    """The same as `grad_norm` of each of several tasks."""
    left_out: frozenset[str] = frozenset()
    """The tasks that do not learn from it."""
    lr: float = 0.0
    began: float = 0.0
    warms_up: bool = False
    """The first one that this start of the run has computed: it compiles and fills caches, and no average of times has
    it in."""
    waited: float = 0.0
    """Seconds this rank had waited for others, in all, when the step began."""
    data_seconds: float = 0.0
    stop: str = ""
    """Why the run is to stop behind it, as a tick has found on all ranks alike; empty: it need not."""
    taken: dict[str, Any] = field(factory=dict)
    """What its nodes have taken for the ticks behind it, by the op of the tick; dropped when these have run."""

    @property
    def minimised(self) -> float:
        """The loss that is minimised: the objective, or the cross-entropy where that is all."""
        return self.loss if self.objective is None else self.objective

    def record(self, measured: Sequence[str], sums: Sequence[float], count: int) -> None:
        """Take what was minimised and `measured` beside it, summed over all ranks; nothing where that is the loss.
        count: of how many tokens, sequences or pairs it was measured."""
        if sums:
            objective, *others = sums
            self.objective = objective / self.units
            self.metrics |= {name: total / count for name, total in zip(measured, others, strict=True)}

    def let_go(self) -> None:
        """Forget what it was computed of."""
        self.microbatches, self.loss_sums, self.row_losses = [], None, []
        self.groups, self.batches = [], []


StepCall = Callable[[Step], None]
"""What a node of the loop is once its op is bound: it runs on the step under way."""


class Halt(Exception):
    """All ranks have agreed to leave the loop before this step because of `event` (`sigterm`, `time_limit`, …).

    reason: what made it occur, as a sentence.
    """

    def __init__(self, event: str, reason: str) -> None:
        super().__init__(f"{event}: {reason}")
        self.event, self.reason = event, reason


class StepAgain(Exception):
    """Nothing was learned from this step, on no rank of this replica group: it begins anew, or the one does that the
    group has come to by the state of another one. moved: it has. agreed: ranks had agreed on what is due behind it."""

    def __init__(self, reason: str, *, moved: bool = False, agreed: bool = False) -> None:
        super().__init__(reason)
        self.moved, self.agreed = moved, agreed


class RunIsOver(Exception):
    """Others have come to the end of the run, and nothing is left to do."""


class SkipStep(Exception):
    """Nothing is learned from this step; it is counted and the next one follows. fields: of the event that says so."""

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(reason)
        self.fields = fields


class NonFinite(Exception):
    """The loss or the gradient norm is not a number, on all ranks alike, and in as many steps as the plan bears.

    `report`: what is to be said of it, where the numbers of this step are not all.
    """

    agreed = True

    def __init__(self, step: int, loss: float, grad_norm: float, report: str = "") -> None:
        super().__init__(report or f"step {step}: loss {loss}, gradient norm {grad_norm}")
        self.step, self.loss, self.grad_norm = step, loss, grad_norm


class NothingLearned(Exception):
    """So many steps in a row, or all that a run has made, had nothing to learn from, on all ranks alike."""

    agreed = True
