"""`setup.prompts`: the prompts of the datasets that are trained on, step by step."""

from pathlib import Path

import numpy as np
from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.runtime.data.documents.chat_template import load_template
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loading.loader import RowLoader
from xtrain.runtime.data.packing.row_reader import RawRow, RowReader
from xtrain.runtime.data.records.records import named_values
from xtrain.runtime.generation.chat import Chat
from xtrain.runtime.generation.continuation import TextEnds
from xtrain.runtime.input.feed import Feed
from xtrain.runtime.ops import op
from xtrain.runtime.rollout.groups import Prompt


@frozen(kw_only=True, eq=False)
class PromptReader:
    """ends: of each dataset that is trained on, what ends the completions of its prompts."""

    loader: RowLoader
    tokenizer: TextTokenizer
    ends: tuple[TextEnds, ...]

    def of_step(self, step: int) -> list[list[Prompt]]:
        """Those of each microbatch of this rank in optimizer step `step`, from 0."""
        return [[prompt_of(row, self.tokenizer) for row in rows] for rows in self.loader.rows(step)]

    def ends_of(self, prompt: Prompt) -> TextEnds:
        """What ends a completion."""
        return self.ends[max(0, prompt.dataset)]


def prompt_of(row: RawRow, tokenizer: TextTokenizer) -> Prompt:
    """That of a row, which holds one document."""
    assert row.trained is not None, "there is no document without an answer"
    (tokens,), (trained,) = row.segments, row.trained
    first, end = last_run(trained)
    ids = tokens[:first].astype(np.int64)
    return Prompt(
        ids=ids,
        text=tokenizer.decode(ids),
        answer=tokenizer.decode(tokens[first:end]).strip(),
        rest=tokens[end:].astype(np.int64),
        values={name: value for name, (value,) in row.values.items()},
        dataset=row.dataset,
        place=row.position,
    )


def last_run(trained: np.ndarray) -> tuple[int, int]:
    """Bounds of the last tokens in a row that are to be predicted; uint8 [tokens], not all 0."""
    end = int(np.flatnonzero(trained)[-1]) + 1
    before = np.flatnonzero(trained[:end] == 0)
    return (int(before[-1]) + 1 if len(before) else 0), end


@op("setup.prompts", gives="prompts")
def find_prompts(plan: Plan, feed: Feed, tokenizer: TextTokenizer, positions: int, max_tokens: int) -> PromptReader:
    """The prompt of a document is what comes before its last answer.

    Raises DataError for a document without prompt or answer, and for a prompt that leaves less than `max_tokens` tokens
    of the `positions` that a completion and its prompt have.
    """
    for dataset in feed.loader.datasets:
        check_prompts(dataset.name, dataset.reader, positions + 1 - max_tokens, max_tokens)
    ends = tuple(ends_of(plan, dataset.name, tokenizer) for dataset in feed.loader.datasets)
    return PromptReader(loader=feed.loader, tokenizer=tokenizer, ends=ends)


def ends_of(plan: Plan, dataset: str, tokenizer: TextTokenizer) -> TextEnds:
    """What ends the completions of a dataset's prompts: eos, and of conversations what the template writes behind an
    answer."""
    reads = {node.args["dataset"]: node.args["reads"] for node in plan.nodes if node.op == "setup.data"}
    template = reads[dataset].get("template")
    if template is None:
        return TextEnds.of(tokenizer)
    arguments = named_values(reads[dataset].get("template_arguments", {}))
    loaded = load_template(template, tokenizer, Path.cwd(), arguments)
    closing = Chat(template=loaded, tokenizer=tokenizer).closing
    return TextEnds.of(tokenizer, [closing] if closing else [])


def check_prompts(name: str, reader: RowReader, longest: int, max_tokens: int) -> None:
    """name: of the dataset. longest: tokens of a prompt at most. Raises DataError as `find_prompts` says."""
    store, rows = reader.store, reader.rows
    documents = reader.documents[rows.document[: rows.row_offsets[-1]]]
    lengths = prompt_lengths(store.trained, store.offsets)[documents]
    remedy = "A document needs a prompt and behind it an answer that is trained on."
    if (none := np.count_nonzero(lengths <= 0)) > 0:
        raise DataError(f"dataset {name}: {none:,} documents have no prompt with an answer", remedy=remedy)
    if (long := np.count_nonzero(lengths > longest)) > 0:
        most = f"{longest:,} tokens, the longest {lengths.max():,}"
        raise DataError(
            f"dataset {name}: {long:,} prompts are longer than {most}",
            remedy=f"Lengthen the rows (batch.sequence), which hold a whole group with {max_tokens:,} tokens for each "
            "completion, or lower rollout.max_tokens or rollout.group.",
        )


def prompt_lengths(trained: np.ndarray | None, offsets: np.ndarray) -> np.ndarray:
    """Tokens before the last answer of each document, int64 [documents]; -1 where there is none.

    trained: uint8 [tokens]. offsets: int64 [documents + 1].
    """
    if trained is None:
        return np.full(len(offsets) - 1, -1)
    begins = np.asarray(trained, dtype=np.bool_).copy()
    inner = np.ones(len(begins), dtype=np.bool_)
    inner[offsets[:-1]] = False
    begins[1:] &= ~(np.asarray(trained[:-1], dtype=np.bool_) & inner[1:])
    (starts,) = np.nonzero(begins)
    place = np.searchsorted(starts, offsets[1:]) - 1
    last = np.where(place >= 0, starts[place] if len(starts) else -1, -1)
    return np.where(last >= offsets[:-1], last - offsets[:-1], -1)
