"""Statistics of datasets and content of their rows, for `xtrain data stats` and `xtrain data show`. Without torch."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from xtrain.plan.plan import Node, Plan
from xtrain.plan.timeline import epoch_rows
from xtrain.runtime.feed.curriculum import Curriculum, RowOrder, curriculum_of
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.prepared import PreparedDataset, cache_of
from xtrain.runtime.feed.records import MOST_SHOWN
from xtrain.runtime.feed.token_store import BAD, TokenStore
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer, pieces, written

SIDES = ("chosen", "rejected")
QUANTILES = {"least": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}


@frozen(kw_only=True)
class DocumentSpan:
    """Consecutive tokens of a document that are all trained on or all only read."""

    trained: bool
    ids: tuple[int, ...]
    text: str
    """Text with special tokens by name; a backslash precedes characters that spell one."""
    pieces: tuple[str, ...]
    """Text of each token, if requested."""


@frozen(kw_only=True)
class SegmentInRow:
    """A segment of a row after the user's collators."""

    ids: list[int]
    trained: list[bool]
    """True for tokens that are predicted; never for the first one."""
    positions: int
    other: int
    """Number of labels that differ from the next token."""


@frozen(kw_only=True)
class Segment:
    """Consecutive tokens of one document in a row. The first one is read and never predicted."""

    document: int | None
    """Index in the store; None if the user's collators may have mixed documents."""
    start: int
    """First position in the document."""
    tokens: int
    """Number of positions: one less than tokens are read."""
    trained: int
    """Number of predicted tokens."""
    other: int
    """Number of labels that differ from the next token, set by the user's collators."""
    before: str
    """First token as text; empty for bos."""
    text: str
    """Further tokens as text, without special ones."""
    ends: bool
    """True if it ends with eos."""
    stretches: tuple[DocumentSpan, ...]
    """All its tokens, including the first one."""
    side: str = ""
    """`chosen` or `rejected` for a pair."""
    values: dict[str, float] = field(factory=dict)
    """Numbers of its document."""


@frozen(kw_only=True)
class ShownRow:
    """A packed row as text."""

    dataset: str
    index: int
    place: int | None
    """Number of rows of the run before it; None if it is not trained on."""
    capacity: int
    """Positions."""
    segments: tuple[Segment, ...]

    @property
    def filled(self) -> int:
        """Number of positions with a token of a document."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def trained(self) -> int:
        """Number of positions with a loss."""
        return sum(segment.trained for segment in self.segments)


def tokenizer_of(plan: Plan) -> TextTokenizer:
    """Return the plan's tokenizer. Raises DataError if it cannot be read."""
    return load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())


def data_nodes(plan: Plan) -> dict[str, Node]:
    """Return dataset name → the node that prepares it, training datasets first."""
    return {node.args["dataset"]: node for node in plan.nodes if node.op == "setup.data"}


def statistics(plan: Plan, data: PreparedDataset) -> dict[str, Any]:
    """Return counts and lengths of a dataset and its parts, as JSON values; an empty part has no lengths.

    Where only some tokens are predicted, each part has `trained_tokens`; datasets of questions, whose documents are
    choices, have `questions`; datasets of pairs have `pairs`. If the run trains on this dataset alone, the training
    part has `steps_an_epoch`; for several datasets see `sampling`.
    """
    loader = plan.node("setup.loader").args
    alone = loader["datasets"] == [data.name]
    tokens = cache_of(plan) / "tokens"
    oversized = plan.node(f"setup.data.{data.name}").args["oversized"]
    parts = {}
    for part, reader in data.parts.items():
        rows = reader.rows
        parts[part] = {
            "documents": len(reader.documents),
            "tokens": int((lengths := data.store.lengths_of(reader.documents)).sum()),
            "lengths": {name: round(float(np.quantile(lengths, q))) for name, q in QUANTILES.items()}
            if len(lengths)
            else {},
            "rows": rows.num_rows,
            "capacity": rows.capacity,
            "fill": round(rows.fill, 6),
            "documents_split": len(np.unique(rows.document[rows.cut_segments])) if oversized == "split" else 0,
            "documents_cut": rows.num_truncated,
            "documents_left_out": rows.num_skipped,
            "tokens_lost": rows.num_dropped_positions,
        }
        if data.store.trained is not None:
            parts[part]["trained_tokens"] = int(data.store.predicted()[reader.documents].sum())
            if rows.num_truncated and data.store.choices is None and data.store.firsts is None:
                parts[part]["documents_unanswered"] = _unanswered(data.store, reader.documents, rows.capacity)
        if data.store.choices is not None:
            parts[part]["questions"] = int((data.store.choices[reader.documents, 0] == 0).sum())
        if data.store.firsts is not None:
            parts[part]["pairs"] = len(reader.documents)
        if alone and part == "training":
            parts[part]["steps_an_epoch"] = epoch(plan, {data.name: rows.num_rows})["steps"]
    return {
        "dataset": data.name,
        "store": data.store.folder,
        "files": data.store.num_files,
        "documents": data.store.num_documents,
        "tokens": data.store.num_tokens,
        "bad_records": data.store.bad_records.count,
        "oversized": oversized,
        **(
            {"repeated": len(data.left_out.repeated), "contaminated": len(data.left_out.contaminated)}
            if data.left_out is not None
            else {}
        ),
        **({"lost": dict(data.store.lost)} if data.store.lost else {}),
        **({"bad_reasons": reasons} if (reasons := _reasons(tokens / data.store.folder / BAD)) else {}),
        "parts": parts,
        **({"numbers": numbers} if (numbers := _numbers(data.store)) else {}),
    }


def _unanswered(store: TokenStore, documents: np.ndarray, capacity: int) -> int:
    """Return how many documents have no predicted token in their first `capacity` positions and are longer."""
    assert store.trained is not None
    longer = documents[store.lengths_of(documents) > capacity + 1]
    starts = store.offsets[longer]
    return sum(not store.trained[start : start + capacity + 1].any() for start in starts)


def _reasons(listed: Path) -> dict[str, int]:
    """Return the most frequent reasons for left-out records, with their numbers of records."""
    if not listed.is_file():
        return {}
    with listed.open(encoding="utf-8", errors="surrogateescape") as lines:
        reasons = Counter(str(json.loads(line)["reason"]) for line in lines)
    return dict(reasons.most_common(MOST_SHOWN))


def _numbers(store: TokenStore) -> dict[str, dict[str, float]]:
    """Return least, mean and most of every column, over predicted tokens, and of every value of documents."""
    figures = {}
    for names, predicted in ((store.columns, store.trained), (store.values, None)):
        for name, numbers in names.items():
            counted = numbers if predicted is None else numbers[predicted != 0]
            if len(counted):
                least, most = float(counted.min()), float(counted.max())
                figures[name] = {"least": least, "mean": float(counted.mean(dtype=np.float64)), "most": most}
    return figures


def sampling(plan: Plan, rows: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return the amounts that a run takes of each training dataset, as JSON values, by name.

    rows: number of rows of each dataset. Per dataset: `shares` of rows by phase, `rows` that the whole run takes, and
    the number of `epochs`.
    """
    curriculum = curriculum_of(plan, rows)
    taken, again = curriculum.uses(curriculum.steps), plan.node("setup.loader").args.get("again", {"turns": 1})
    return {
        name: {
            "shares": {phase.name: round(phase.shares.get(name, 0.0), 6) for phase in curriculum.phases},
            "rows": taken.get(name, 0),
            "epochs": round(taken.get(name, 0) / rows[name] / again["turns"], 4) if rows[name] else None,
        }
        for name in curriculum.datasets
    }


def epoch(plan: Plan, rows: dict[str, int]) -> dict[str, float]:
    """Return the `rows` of an epoch and the `steps` that take them, as JSON values."""
    epoch_count = epoch_rows(plan, rows)
    steps = epoch_count / plan.node("setup.loader").args["rows"]
    return {"rows": round(float(epoch_count), 2), "steps": round(float(steps), 2)}


def rows_from(curriculum: Curriculum, rows: Mapping[str, int], step: int) -> Iterator[tuple[str, int, int]]:
    """Yield (dataset, row, rows of the run before it) from optimizer step `step` (from 0) to the end of the run.

    The order is the training order; only datasets in `rows`, which has their numbers of rows, are yielded. Raises
    DataError if a sampled dataset has no rows.
    """
    taken, before = (curriculum.uses(at) for at in (curriculum.steps, min(step, curriculum.steps)))
    left = sum(taken.get(name, 0) - before.get(name, 0) for name in rows)
    orders: dict[str, RowOrder] = {}
    while left:
        place = curriculum.rows_before(step)
        for number, cursor in zip(*(numbers.tolist() for numbers in curriculum.rows(step)), strict=True):
            name = curriculum.datasets[number]
            if name in rows:
                orders[name] = orders.get(name) or RowOrder(rows[name], curriculum.seed)
                yield name, orders[name].row(cursor)[1], place
                left -= 1
            place += 1
        step += 1


def written_out(
    reader: RowReader,
    index: int,
    tokenizer: TextTokenizer,
    *,
    dataset: str,
    place: int | None = None,
    each: bool = False,
) -> ShownRow:
    """Return row `index` of a dataset as text; `each`: also the text of each token.

    `place`: number of rows of the run before it, if it is trained on.
    """
    rows, raw = reader.rows, reader.row(index)
    segments = slice(int(rows.row_offsets[index]), int(rows.row_offsets[index + 1]))
    documents, starts = reader.documents[rows.document[segments]].tolist(), rows.starts(segments).tolist()
    if reader.store.firsts is not None:
        documents, starts = np.repeat(documents, 2).tolist(), [0] * len(raw.segments)
    masks = raw.trained or [np.ones(len(tokens), dtype=np.uint8) for tokens in raw.segments]
    row_segments = []
    for number, (document, start, tokens, mask) in enumerate(zip(documents, starts, raw.segments, masks, strict=True)):
        trained = [False, *(mask[1:] != 0).tolist()]
        laid = SegmentInRow(ids=tokens.tolist(), trained=trained, positions=len(tokens) - 1, other=0)
        row_segments.append(
            evolve(
                _segment(tokenizer, laid, document, start, each),
                side="" if raw.sides is None else SIDES[raw.sides[number]],
                values={name: numbers[number] for name, numbers in raw.values.items()},
            )
        )
    return ShownRow(dataset=dataset, index=index, place=place, capacity=rows.capacity, segments=tuple(row_segments))


def laid_out(row: ShownRow, laid: Iterable[SegmentInRow], tokenizer: TextTokenizer, *, each: bool = False) -> ShownRow:
    """Return `row` with its segments after the user's collators."""
    return evolve(row, segments=tuple(_segment(tokenizer, one, None, 0, each) for one in laid))


def _segment(tokenizer: TextTokenizer, laid: SegmentInRow, document: int | None, start: int, single: bool) -> Segment:
    return Segment(
        document=document,
        start=start,
        tokens=laid.positions,
        trained=sum(laid.trained),
        other=laid.other,
        before=tokenizer.decode(laid.ids[:1]),
        text=tokenizer.decode(laid.ids[1:]),
        ends=laid.ids[-1] == tokenizer.eos,
        stretches=_stretches(tokenizer, laid.ids, laid.trained, single),
    )


def _stretches(tokenizer: TextTokenizer, ids: list[int], trained: list[bool], single: bool) -> tuple[DocumentSpan, ...]:
    spans: list[DocumentSpan] = []
    every = pieces(tokenizer, ids) if single else []
    first = 0
    for kind, group in groupby(trained):
        end = first + len(list(group))
        spans.append(
            DocumentSpan(
                trained=kind,
                ids=tuple(ids[first:end]),
                text=written(tokenizer, ids[first:end], ids[first - 1] if first else None),
                pieces=tuple(every[first:end]),
            )
        )
        first = end
    return tuple(spans)
