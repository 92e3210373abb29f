"""Prompts of rollouts, step by step (`setup.prompts`), their success rates (`setup.prompt_rates`), and completions that
several steps train on."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, evolve, field, frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.chat.template import load_template
from xtrain.runtime.feed.loader import RowLoader, StepRows
from xtrain.runtime.feed.packing.stored_rows import RawRow, RowReader
from xtrain.runtime.feed.records import named_values
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import Completion, Prompt, SampledGroup, Step, StepCall
from xtrain.runtime.nn.texts import Chat, TextEnds
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.sampler import COLUMNS

Prompted = tuple[str, int]
"""Dataset and row of a prompt."""
WEIGHTS: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "unsolved": lambda rates: 1 - rates,
    "learnable": lambda rates: rates * (1 - rates),
}
"""Weights of prompts by the share of their completions that succeeded: Kimi k1.5 (arXiv 2501.12599, section 2.3.4), and
the variance of a success (arXiv 2502.12272)."""


@define(kw_only=True, eq=False)
class PromptRates:
    """Success rates of the prompts that the run has sampled, the same on all ranks and part of checkpoints.

    share: places of a step that are drawn by rate, the first ones; fewer while fewer prompts have a weight above 0.
    difficulty: of WEIGHTS. rates: share of the newest completions of a prompt that succeeded.
    """

    rank: Rank
    share: float
    difficulty: str
    seed: int
    name: str = "prompt_rates.npz"
    rates: dict[Prompted, float] = field(factory=dict)
    drawn: int = 0
    """Places of the current step that were drawn."""
    _prompts: dict[int, Prompted] = field(factory=dict, init=False)
    """Prompts of this rank in the current step, by their place in the run."""

    def rows(self, loader: RowLoader, step: int) -> list[list[RawRow]]:
        """Return the rows of each microbatch of this rank in a step."""
        taken, first = loader.step_rows(step), loader.curriculum.rows_before(step)
        datasets, rows = taken.datasets.copy(), taken.rows.copy()
        names = [dataset.name for dataset in loader.datasets]
        drawn = self._draw(loader, step, names)
        for number, (name, row) in enumerate(drawn):
            here = taken.places == first + number
            datasets[here], rows[here] = names.index(name), row
        self.drawn = len(drawn)
        triples = zip(*(each.ravel().tolist() for each in (taken.places, datasets, rows)), strict=True)
        self._prompts = {place: (names[dataset], row) for place, dataset, row in triples}
        return loader.read(StepRows(datasets, rows, taken.places))

    def _draw(self, loader: RowLoader, step: int, names: list[str]) -> list[Prompted]:
        """Draw prompts without replacement, none that the step has anyway: the largest log(u) / weight (Efraimidis and
        Spirakis 2006)."""
        own_datasets, own_rows = loader.taken(step)
        own = {(names[dataset], row) for dataset, row in zip(own_datasets.tolist(), own_rows.tolist(), strict=True)}
        known = sorted(each for each in self.rates if each not in own and each[0] in names)
        weights = WEIGHTS[self.difficulty](np.array([self.rates[each] for each in known], np.float64))
        shares = np.random.default_rng((self.seed, step)).random(len(known))
        (possible,) = np.nonzero(weights > 0)
        order = np.argsort(-np.log(shares[possible]) / weights[possible], kind="stable")
        return [known[number] for number in possible[order[: int(self.share * len(own_rows))]]]

    def remember(self, rates: dict[int, float]) -> dict[int, float]:
        """Take the success rates of this rank's prompts, by their place, and return those of all ranks. Collective."""
        told: list[Any] = [{place: (self._prompts[place], rate) for place, rate in rates.items()}]
        if self.rank.world_size > 1:
            own, told = told[0], [None] * self.rank.world_size
            dist.all_gather_object(told, own)
        found = {place: pair for part in told for place, pair in part.items()}
        self.rates |= dict(found.values())
        return {place: found[place][1] for place in sorted(found)}

    def packed(self, step: int) -> bytes | None:
        """Return the content of the file of a checkpoint."""
        if not self.rates or not self.rank.is_first:
            return None
        known = sorted(self.rates)
        names = sorted({name for name, _ in known})
        file = io.BytesIO()
        np.savez(
            file,
            names=np.frombuffer(json.dumps(names).encode(), np.uint8),
            datasets=np.array([names.index(name) for name, _ in known], np.int64),
            rows=np.array([row for _, row in known], np.int64),
            rates=np.array([self.rates[each] for each in known], np.float64),
        )
        return file.getvalue()

    def take(self, content: bytes | None) -> None:
        """Restore the rates of a checkpoint; None if it has none."""
        self.rates = {}
        if content is not None:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                names = json.loads(arrays["names"].tobytes())
                triples = zip(*(arrays[name].tolist() for name in ("datasets", "rows", "rates")), strict=True)
                self.rates = {(names[dataset], row): rate for dataset, row, rate in triples}


@frozen(kw_only=True, eq=False)
class PromptReader:
    """Reader of a step's prompts. ends: of each training dataset, what ends the completions of its prompts. rates: some
    prompts are drawn by them."""

    loader: RowLoader
    tokenizer: TextTokenizer
    ends: tuple[TextEnds, ...]
    rates: PromptRates | None = None

    def of_step(self, step: int) -> list[list[Prompt]]:
        """Return the prompts of each microbatch of this rank in optimizer step `step`, from 0."""
        found = self.loader.rows(step) if self.rates is None else self.rates.rows(self.loader, step)
        return [[prompt_of(row, self.tokenizer) for row in rows] for rows in found]

    def instead_of(self, place: int, step: int, other: int) -> Prompt:
        """Return the prompt of step `other` that has the number that the prompt of `place` has in `step`."""
        number = place - self.loader.curriculum.rows_before(step)
        return prompt_of(self.loader.row(other, number), self.tokenizer)

    def ends_of(self, prompt: Prompt) -> TextEnds:
        """Return what ends a completion of a prompt."""
        return self.ends[max(0, prompt.dataset)]


def prompt_of(row: RawRow, tokenizer: TextTokenizer) -> Prompt:
    """Return the prompt of a row, which holds one document."""
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
    """Return the bounds of the last run of predicted tokens; uint8 [tokens], not all 0."""
    end = int(np.flatnonzero(trained)[-1]) + 1
    before = np.flatnonzero(trained[:end] == 0)
    return (int(before[-1]) + 1 if len(before) else 0), end


@op("setup.prompt_rates", gives="prompt_rates", traced=False)
def keep_rates(rank: Rank, share: float, difficulty: str, seed: int) -> PromptRates:
    """Keep the success rates of prompts, and draw the `share` of the prompts of each step by their `difficulty`."""
    return PromptRates(rank=rank, share=share, difficulty=difficulty, seed=seed)


@op("rollout.remember")
def remember(prompt_rates: PromptRates, solved: float) -> StepCall:
    """Remember which share of the completions of each prompt has a reward of at least `solved`."""

    def remember_rates(step: Step) -> None:
        groups = [group for microbatch in step.groups for group in microbatch]
        rates = {group.prompt.place: float((group.rewards >= solved).mean()) for group in groups}
        known = prompt_rates.remember(rates)
        step.metrics["rollout/solved"] = sum(known.values()) / len(known)
        step.metrics["rollout/replayed"] = prompt_rates.drawn / len(known)

    return remember_rates


@op("setup.prompts", gives="prompts", traced=False)
def find_prompts(
    plan: Plan,
    feed: Feed,
    tokenizer: TextTokenizer,
    positions: int,
    max_tokens: int,
    prompt_rates: PromptRates | None = None,
) -> PromptReader:
    """Read prompts: the tokens of a document before its last answer.

    Raises DataError for a document without prompt or answer, and for a prompt that leaves less than `max_tokens` of the
    `positions` that a prompt and its completion share.
    """
    for dataset in feed.loader.datasets:
        check_prompts(dataset.name, dataset.reader, positions + 1 - max_tokens, max_tokens)
    ends = tuple(ends_of(plan, dataset.name, tokenizer) for dataset in feed.loader.datasets)
    return PromptReader(loader=feed.loader, tokenizer=tokenizer, ends=ends, rates=prompt_rates)


def ends_of(plan: Plan, dataset: str, tokenizer: TextTokenizer) -> TextEnds:
    """Return what ends the completions of a dataset's prompts: eos, and in conversations the template's end of an
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
    """Check the prompts of a dataset. name: of the dataset. longest: tokens of a prompt at most. Raises DataError as
    `find_prompts` does."""
    store, rows = reader.store, reader.rows
    documents = reader.documents[rows.document[: rows.row_offsets[-1]]]
    lengths = prompt_lengths(store.trained, store.offsets)[documents]
    remedy = "A document needs a prompt followed by an answer that is trained on."
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
    """Return the tokens before the last answer of each document, int64 [documents]; -1 without an answer.

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
"""Groups of each microbatch of a step."""


@frozen(kw_only=True)
class StoredGroup:
    """Completions of a prompt in a checkpoint, stored by the prompt's place. prompt: CRC-32 of its tokens."""

    prompt: int
    completions: tuple[Completion, ...]


@define(kw_only=True, eq=False)
class KeptCompletions:
    """Completions of this rank's prompts that later steps train on. end: the step after the last one with
    completions."""

    rank: Rank
    records: Records
    name: str = "completions.npz"
    end: int = 0
    _steps: dict[int, Groups] = field(factory=dict, init=False)
    _coming: dict[int, Callable[[], Groups]] = field(factory=dict, init=False)
    """Functions that wait for the completions that an engine still samples, by step."""
    _stored: Mapping[int, StoredGroup] = field(factory=dict, init=False)
    """Completions of a checkpoint, until they are known to fit the resumed run."""

    def keep(self, step: int, groups: Groups) -> None:
        """Keep the completions that `step` trains on."""
        self._steps[step], self.end = groups, step + 1

    def await_(self, step: int, groups: Callable[[], Groups]) -> None:
        """Keep the completions that `step` trains on once they are needed."""
        self._coming[step], self.end = groups, step + 1

    def settle(self, step: int | None = None) -> None:
        """Wait for the completions of a step, None: of all steps, if an engine still samples them. Collective."""
        for number in [each for each in self._coming if step in (None, each)]:
            self._steps[number] = self._coming.pop(number)()

    def has(self, step: int) -> bool:
        """Return True if completions of a step are known or asked for."""
        return step in self._steps or step in self._coming

    def of(self, step: int) -> Groups | None:
        """Return the completions of a step; None without any. Collective with an engine."""
        self.settle(step)
        self._steps = {number: groups for number, groups in self._steps.items() if number >= step}
        return self._steps.get(step)

    def find(
        self,
        step: int,
        prompts: PromptReader,
        *,
        group: int,
        most: int,
        experts: bool,
        widths: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take the checkpoint's completions for `step` and later steps if they fit: `group` of each prompt, of at most
        `most` tokens, with `experts` if needed, and columns of these widths. Collective."""
        stored, self._stored = self._stored, {}
        if step >= self.end or self.has(step):
            return
        groups_by_step: dict[int, Groups] = {}

        def group_of(prompt: Prompt) -> SampledGroup:
            known = stored.get(prompt.place)
            if known is None or known.prompt != crc32(prompt.ids.tobytes()) or len(known.completions) != group:
                raise LookupError
            if any(
                len(completion.tokens) > most
                or (completion.experts is not None) != experts
                or {name: column.shape[1] for name, column in completion.columns.items()} != widths
                for completion in known.completions
            ):
                raise LookupError
            return SampledGroup(prompt, known.completions)

        try:
            for number in range(step, self.end):
                groups_by_step[number] = [[group_of(prompt) for prompt in some] for some in prompts.of_step(number)]
            fits = True
        except LookupError:
            fits = False
        agreed = torch.tensor(fits, dtype=torch.int32, device=self.rank.device)
        if self.rank.world_size > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if agreed.item():
            self._steps = groups_by_step
        else:
            message = "the completions of the checkpoint do not fit the prompts of the resumed run or the settings "
            self.records.warn(message + "of the rollout: they are sampled again", step=step)

    def packed(self, step: int) -> bytes | None:
        """Return the completions that a checkpoint after `step` steps keeps, on the first rank; None if later steps
        have none. Collective."""
        rank = self.rank
        self.settle()
        coming = (some for number, some in self._steps.items() if number >= step)
        own = list(
            {group.prompt.place: group for some in coming for microbatch in some for group in microbatch}.values()
        )
        # tp and cp ranks have the same completions; each stage knows the experts of its own layers.
        told = own if rank.coordinates["tp"] == rank.coordinates["ring"] == rank.coordinates["ulysses"] == 0 else []
        parts: list[Any] = [[(group.prompt, group.completions) for group in told]]
        if rank.world_size > 1:
            sent, parts = parts[0], [None] * rank.world_size
            dist.gather_object(sent, parts if rank.is_first else None, dst=0)
        if not own or not rank.is_first:
            return None
        return pack([group for part in parts for group in part], self.end)

    def take(self, content: bytes | None) -> None:
        """Restore the completions of a checkpoint; None if it has none."""
        self._steps, self._coming, self._stored, self.end = {}, {}, {}, 0
        if content is not None:
            self._stored, self.end = unpacked(content)


@op("setup.completions", gives="kept_completions", traced=False)
def keep_completions(rank: Rank, records: Records, steps: int, updates: int = 1, stale: int = 0) -> KeptCompletions:
    """Keep the completions that `rollout.generate` samples for `steps` steps until `updates` steps have trained on
    each, or asks an engine for `stale` steps ahead; they are part of checkpoints."""
    assert steps * updates > 1 or stale
    return KeptCompletions(rank=rank, records=records)


def pack(groups: Sequence[tuple[Prompt, Sequence[Completion]]], end: int) -> bytes:
    """Return an archive of numpy arrays, without pickles. Experts of a prompt on several stages are combined."""
    known: dict[int, tuple[Prompt, list[Completion]]] = {}
    experts: dict[tuple[int, int], np.ndarray] = {}
    for prompt, completions in groups:
        known.setdefault(prompt.place, (prompt, list(completions)))
        for number, completion in enumerate(completions):
            if completion.experts is not None:
                before = experts.get((prompt.place, number))
                experts[prompt.place, number] = (
                    completion.experts if before is None else np.maximum(before, completion.experts)
                )
    flat = [completion for _, completions in known.values() for completion in completions]
    arrays: dict[str, Any] = {
        "end": np.int64(end),
        "places": np.array(list(known), np.int64),
        "prompts": np.array([crc32(prompt.ids.tobytes()) for prompt, _ in known.values()], np.int64),
        "counts": np.array([len(completions) for _, completions in known.values()], np.int64),
        "lengths": np.array([len(completion.tokens) for completion in flat], np.int64),
        "tokens": np.array([token for completion in flat for token in completion.tokens], np.int64),
        "logprobs": np.array([chance for completion in flat for chance in completion.logprobs], np.float64),
        "cut": np.array([completion.cut for completion in flat], np.bool_),
        "left_out": np.array([completion.left_out for completion in flat], np.float64),
        "texts": np.frombuffer(json.dumps([completion.text for completion in flat]).encode(), np.uint8),
    }
    if any(completion.sampled is not None for completion in flat):
        rewards = [number for completion in flat for number in completion.rewards]
        arrays |= {
            "sampled": np.array([each for completion in flat for each in completion.sampled or ()], np.uint8),
            "rewards": np.array(rewards, np.float64),
            "reward_counts": np.array([len(completion.rewards) for completion in flat], np.int64),
            "turns": np.array([completion.turns for completion in flat], np.int64),
            "lost": np.array([completion.lost for completion in flat], np.bool_),
        }
    for name in flat[0].columns:
        arrays[f"column.{name}"] = np.concatenate([completion.columns[name] for completion in flat])
    if any(completion.version is not None for completion in flat):
        arrays["versions"] = np.array([completion.version for completion in flat], np.int64)
    if experts:
        columns = [experts[place, n] for place, (_, completions) in known.items() for n in range(len(completions))]
        arrays |= {
            "experts": np.concatenate(columns),
            "positions": np.array([len(positions) for positions in columns], np.int64),
        }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpacked(content: bytes) -> tuple[dict[int, StoredGroup], int]:
    """Return the groups by the place of their prompt, and the step before which they are used."""
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
        completed = [
            Completion(
                tokens=ids.tolist(), logprobs=chances.tolist(), text=text, cut=cut, left_out=missing, experts=own
            )
            for ids, chances, text, cut, missing, own in parts
        ]
        if "sampled" in arrays:
            completed = _episodes(arrays, completed)
        columns = {name: arrays[f"column.{name}"] for name in COLUMNS if f"column.{name}" in arrays}
        if columns:
            parts = {name: np.split(column, np.cumsum(arrays["lengths"])[:-1]) for name, column in columns.items()}
            completed = [
                evolve(completion, columns={name: parts[name][place] for name in parts})
                for place, completion in enumerate(completed)
            ]
        if "versions" in arrays:
            pairs = zip(completed, arrays["versions"].tolist(), strict=True)
            completed = [evolve(completion, version=version) for completion, version in pairs]
        completions = iter(completed)
        known = zip(*(arrays[name].tolist() for name in ("places", "prompts", "counts")), strict=True)
        groups = {
            place: StoredGroup(prompt=prompt, completions=tuple(next(completions) for _ in range(count)))
            for place, prompt, count in known
        }
        return groups, int(arrays["end"])


def _episodes(arrays: Mapping[str, np.ndarray], completed: Sequence[Completion]) -> list[Completion]:
    """Return completions with what an archive knows of their episodes."""
    masks = np.split(arrays["sampled"], np.cumsum(arrays["lengths"])[:-1])
    rewards = np.split(arrays["rewards"], np.cumsum(arrays["reward_counts"])[:-1])
    parts = zip(completed, masks, rewards, arrays["turns"].tolist(), arrays["lost"].tolist(), strict=True)
    return [
        evolve(completion, sampled=mask.tolist(), rewards=tuple(numbers.tolist()), turns=turns, lost=lost)
        for completion, mask, numbers, turns, lost in parts
    ]
