"""What a dataset is made of, and what stands in its rows: for people, from what a run reads. Without torch."""

from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from ...planner.plan import Node, Plan
from .order import RowOrder
from .prepared import PreparedDataset, prepare
from .row_reader import RowReader
from .sources import open_source
from .store import build_store
from .tokenizers import Tokenizer, load_tokenizer

QUANTILES = {"least": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}


@frozen(kw_only=True)
class Segment:
    """A run of tokens of one document in a row. The first one is read and never predicted."""

    document: int
    """Index in the store."""
    start: int
    """Position of the document it begins at."""
    tokens: int
    """Tokens that are predicted: one less than are read."""
    before: str
    """The token that is read first, as text; empty if it is bos."""
    text: str
    """The tokens that are predicted, as text, special ones left out."""
    ends: bool
    """Whether it ends with eos."""


@frozen(kw_only=True)
class Row:
    """A packed row, written out."""

    index: int
    capacity: int
    """Positions."""
    segments: tuple[Segment, ...]

    @property
    def filled(self) -> int:
        """Positions that are trained on."""
        return sum(segment.tokens for segment in self.segments)


def tokenizer_of(plan: Plan) -> Tokenizer:
    """The plan's tokenizer. Raises DataError if it cannot be read."""
    return load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())


def data_nodes(plan: Plan) -> dict[str, Node]:
    """Dataset name → the node that prepares it, the one that is trained on first."""
    return {node.args["dataset"]: node for node in plan.nodes if node.op == "setup.data"}


def prepared(plan: Plan, node: Node, tokenizer: Tokenizer) -> PreparedDataset:
    """The dataset of a node, as a run prepares it: tokenised and packed now, if that is not in the cache.

    Raises DataError for whatever of the data cannot be used.
    """
    args = dict(node.args)
    kind, patterns = args.pop("kind"), tuple(args.pop("patterns"))
    field, limit = args.pop("text_field"), args.pop("bad_records")
    source = open_source(kind, patterns=patterns, text_field=field, base=Path.cwd(), bad_record_limit=limit)
    cache = Path(plan.workspace["root"]) / "cache"
    return prepare(build_store(source, tokenizer, cache / "tokens"), cache=cache / "rows", **args)


def statistics(plan: Plan, data: PreparedDataset) -> dict[str, Any]:
    """Counts and lengths of a dataset and its parts, as JSON values; an empty part has no lengths."""
    loader = plan.node("setup.loader").args
    trained = loader["dataset"] == data.name
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
            "documents_cut": rows.num_truncated,
            "documents_left_out": rows.num_skipped,
            "tokens_lost": rows.num_dropped_positions,
        }
        if trained and part == "training":
            parts[part]["steps_an_epoch"] = round(rows.num_rows / loader["rows"], 2)
    return {
        "dataset": data.name,
        "store": data.store.key,
        "files": data.store.num_files,
        "documents": data.store.num_documents,
        "tokens": data.store.num_tokens,
        "bad_records": data.store.bad_records.count,
        "parts": parts,
    }


def rows_of_step(plan: Plan, reader: RowReader, step: int, count: int) -> list[int]:
    """The first `count` rows from optimizer step `step` (from 0) on, in the order in which they are trained on.

    Raises DataError if there are no rows.
    """
    loader = plan.node("setup.loader").args
    order = RowOrder(num_rows=reader.rows.num_rows, seed=loader["seed"])
    return order.rows(step * loader["rows"], count).tolist()


def written_out(reader: RowReader, index: int, tokenizer: Tokenizer) -> Row:
    """Row `index` with its text."""
    rows = reader.rows
    segments = slice(int(rows.row_offsets[index]), int(rows.row_offsets[index + 1]))
    documents, starts = reader.documents[rows.document[segments]].tolist(), rows.starts(segments).tolist()
    found = [
        Segment(
            document=document,
            start=start,
            tokens=len(tokens) - 1,
            before=tokenizer.decode(tokens[:1]),
            text=tokenizer.decode(tokens[1:]),
            ends=int(tokens[-1]) == tokenizer.eos,
        )
        for document, start, tokens in zip(documents, starts, reader.row(index), strict=True)
    ]
    return Row(index=index, capacity=rows.capacity, segments=tuple(found))
