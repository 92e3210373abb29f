"""Prompts of rollouts, step by step (`setup.prompts`), and completions that several steps learn from."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field, frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.data_errors import DataError
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.chat.template import load_template
from xtrain.runtime.feed.loader import RowLoader
from xtrain.runtime.feed.packing.stored_rows import RawRow, RowReader
from xtrain.runtime.feed.records import named_values
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import Completion, Prompt, SampledGroup
from xtrain.runtime.nn.texts import Chat, TextEnds
from xtrain.runtime.observe.records import Records


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


Groups = list[list[SampledGroup]]
"""Those of each microbatch of a step."""


@frozen(kw_only=True)
class StoredGroup:
    """The completions of a prompt as a checkpoint has them, by its place. prompt: CRC-32 of its tokens."""

    prompt: int
    completions: tuple[Completion, ...]


@define(kw_only=True, eq=False)
class KeptCompletions:
    """Of this rank's prompts. end: the step before which there are some."""

    rank: Rank
    records: Records
    name: str = "completions.npz"
    end: int = 0
    _steps: dict[int, Groups] = field(factory=dict, init=False)
    _stored: Mapping[int, StoredGroup] = field(factory=dict, init=False)
    """What a checkpoint has had, until it is known that they are completions of what the run goes on with."""

    def keep(self, step: int, groups: Groups) -> None:
        """The completions that `step` is to learn from."""
        self._steps[step], self.end = groups, step + 1

    def of(self, step: int) -> Groups | None:
        """Those of a step; None where there are none."""
        self._steps = {number: groups for number, groups in self._steps.items() if number >= step}
        return self._steps.get(step)

    def find(self, step: int, prompts: PromptReader, *, group: int, most: int, experts: bool) -> None:
        """Take those that a checkpoint has had for `step` and the steps behind it, if they are `group` of each prompt,
        of `most` tokens at most, and with `experts` where these are wanted. Collective."""
        stored, self._stored = self._stored, {}
        if step >= self.end or step in self._steps:
            return
        found: dict[int, Groups] = {}

        def group_of(prompt: Prompt) -> SampledGroup:
            known = stored.get(prompt.place)
            if known is None or known.prompt != crc32(prompt.ids.tobytes()) or len(known.completions) != group:
                raise LookupError
            if any(len(each.tokens) > most or (each.experts is not None) != experts for each in known.completions):
                raise LookupError
            return SampledGroup(prompt, known.completions)

        try:
            for number in range(step, self.end):
                found[number] = [[group_of(each) for each in some] for some in prompts.of_step(number)]
            fits = True
        except LookupError:
            fits = False
        agreed = torch.tensor(fits, dtype=torch.int32, device=self.rank.device)
        if self.rank.world_size > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if agreed.item():
            self._steps = found
        else:
            message = (
                "the completions of the checkpoint do not fit the prompts that the run goes on with, or the settings "
            )
            self.records.warn(message + "of the rollout: they are sampled anew", step=step)

    def packed(self, step: int) -> bytes | None:
        """What a checkpoint behind `step` steps keeps, on the first rank; None where no later step has any.
        Collective."""
        rank = self.rank
        coming = (some for number, some in self._steps.items() if number >= step)
        own = list({group.prompt.place: group for some in coming for each in some for group in each}.values())
        # Ranks of tp and cp have the same; stages know the experts of their own layers.
        told = own if rank.coordinates["tp"] == rank.coordinates["ring"] == rank.coordinates["ulysses"] == 0 else []
        parts: list[Any] = [[(group.prompt, group.completions) for group in told]]
        if rank.world_size > 1:
            sent, parts = parts[0], [None] * rank.world_size
            dist.gather_object(sent, parts if rank.is_first else None, dst=0)
        if not own or not rank.is_first:
            return None
        return pack([each for part in parts for each in part], self.end)

    def take(self, content: bytes | None) -> None:
        """Go on from what a checkpoint holds; None: it has no completions."""
        self._steps, self._stored, self.end = {}, {}, 0
        if content is not None:
            self._stored, self.end = unpacked(content)


@op("setup.completions", gives="kept_completions")
def keep_completions(rank: Rank, records: Records, steps: int, updates: int = 1) -> KeptCompletions:
    """What `rollout.generate` samples for `steps` steps at once waits here until `updates` steps have learned from each
    completion, and is part of checkpoints."""
    assert steps * updates > 1
    return KeptCompletions(rank=rank, records=records)


def pack(groups: Sequence[tuple[Prompt, Sequence[Completion]]], end: int) -> bytes:
    """An archive of numpy arrays, without pickles. Of a prompt that several stages have, experts are put together."""
    known: dict[int, tuple[Prompt, list[Completion]]] = {}
    experts: dict[tuple[int, int], np.ndarray] = {}
    for prompt, completions in groups:
        known.setdefault(prompt.place, (prompt, list(completions)))
        for number, each in enumerate(completions):
            if each.experts is not None:
                before = experts.get((prompt.place, number))
                experts[prompt.place, number] = each.experts if before is None else np.maximum(before, each.experts)
    flat = [each for _, completions in known.values() for each in completions]
    arrays: dict[str, Any] = {
        "end": np.int64(end),
        "places": np.array(list(known), np.int64),
        "prompts": np.array([crc32(prompt.ids.tobytes()) for prompt, _ in known.values()], np.int64),
        "counts": np.array([len(completions) for _, completions in known.values()], np.int64),
        "lengths": np.array([len(each.tokens) for each in flat], np.int64),
        "tokens": np.array([token for each in flat for token in each.tokens], np.int64),
        "logprobs": np.array([chance for each in flat for chance in each.logprobs], np.float64),
        "cut": np.array([each.cut for each in flat], np.bool_),
        "left_out": np.array([each.left_out for each in flat], np.float64),
        "texts": np.frombuffer(json.dumps([each.text for each in flat]).encode(), np.uint8),
    }
    if experts:
        columns = [experts[place, n] for place, (_, each) in known.items() for n in range(len(each))]
        arrays |= {"experts": np.concatenate(columns), "positions": np.array([len(each) for each in columns], np.int64)}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpacked(content: bytes) -> tuple[dict[int, StoredGroup], int]:
    """The groups by the place of their prompt, and the step before which they are used."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        tokens, logprobs = (
            np.split(arrays[name], np.cumsum(arrays["lengths"])[:-1]) for name in ("tokens", "logprobs")
        )
        experts: list[np.ndarray | None] = [None] * len(tokens)
        if "experts" in arrays:
            experts = [*np.split(arrays["experts"], np.cumsum(arrays["positions"])[:-1])]
        parts = zip(
            tokens,
            logprobs,
            json.loads(arrays["texts"].tobytes()),
            arrays["cut"].tolist(),
            arrays["left_out"].tolist(),
            experts,
            strict=True,
        )
        completions = iter(
            [
                Completion(
                    tokens=ids.tolist(), logprobs=each.tolist(), text=text, cut=cut, left_out=missing, experts=own
                )
                for ids, each, text, cut, missing, own in parts
            ]
        )
        known = zip(*(arrays[name].tolist() for name in ("places", "prompts", "counts")), strict=True)
        groups = {
            place: StoredGroup(prompt=prompt, completions=tuple(next(completions) for _ in range(count)))
            for place, prompt, count in known
        }
        return groups, int(arrays["end"])
