"""`setup.completions`: completions that several steps learn from, until these have."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field, frozen

from xtrain.runtime.ops import op
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.rollout.groups import Completion, Prompt, SampledGroup
from xtrain.runtime.rollout.prompts import PromptReader
from xtrain.runtime.state import Rank

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
