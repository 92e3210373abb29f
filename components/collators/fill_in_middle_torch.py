"""`fill_in_middle`: move the middle of documents after their end."""

# shapes: L positions of a sample

from pathlib import Path

import numpy as np
import torch
from attrs import define, evolve
from torch import Tensor

from xtrain.dsl.schema.data_components import TOKEN_SAMPLES
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.ops import op
from xtrain.runtime.feed.collate import Stage, numbered_in_rows
from xtrain.runtime.feed.microbatch import Sample, Samples
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN
from xtrain.runtime.feed.tokenizers import load_tokenizer

# First word of the random seed, so that collators draw independent numbers.
_STREAM = 0xF111


@define(kw_only=True, frozen=True)
class MiddleMoved:
    """Fill-in-the-middle reordering of samples. The draw depends on the seed, the row's position in the run, and the
    sample's number in the row."""

    rate: float
    suffix_first: float
    prefix: int
    suffix: int
    middle: int
    eos: int
    seed: int
    reads: frozenset[str] = frozenset()
    """The numbers of documents and their tokens that the loss reads."""

    def __call__(self, value: Samples) -> Samples:
        samples = tuple(self._changed(sample, number) for number, sample in numbered_in_rows(value))
        return Samples(num_rows=value.num_rows, samples=samples)

    def _changed(self, sample: Sample, number: int) -> Sample:
        if sample.position == UNKNOWN or sample.trained is not None or self.reads & {*sample.columns, *sample.values}:
            return sample
        tokens = sample.tokens
        ends = int(tokens[-1]) == self.eos
        body = tokens[1 : len(tokens) - ends]
        room = len(body) - 3
        if room < 1:
            return sample
        random = np.random.default_rng([_STREAM, self.seed, sample.position, number])
        chosen, order = random.random(2)
        first, second = np.sort(random.integers(0, room + 1, 2)).tolist()
        if chosen >= self.rate:
            return sample
        prefix, middle, suffix = body[:first], body[first:second], body[second:room]
        if order < self.suffix_first:
            parts = (self._mark(self.prefix), self._mark(self.suffix), suffix, self._mark(self.middle), prefix, middle)
        else:
            parts = (self._mark(self.prefix), prefix, self._mark(self.suffix), suffix, self._mark(self.middle), middle)
        return evolve(sample, tokens=torch.cat([tokens[:1], *parts, tokens[len(tokens) - ends :]]))

    def _mark(self, token: int) -> Tensor:
        return torch.tensor([token], dtype=torch.int64)


@op("collate.fill_in_middle", gives="stages")
def append_fill_in_middle(
    plan: Plan, stages: list[Stage], rate: float, suffix_first: float, tokens: list[str]
) -> list[Stage]:
    """Append the stage. Raises DataError if the tokenizer has no such special tokens."""
    tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())
    ids = []
    for name in tokens:
        if name not in tokenizer.special_names:
            remedy = "Set `prefix`, `suffix` and `middle` of `fill_in_middle` to the special tokens it has for them."
            raise DataError(f"tokenizer {tokenizer.name} has no special token {name}", remedy=remedy)
        ids.append(tokenizer.special_names[name])
    prefix, suffix, middle = ids
    packed = plan.node("collate.pack").args
    reads = frozenset(name for given in ("columns", "values", "wide") for name in packed.get(given, ()))
    moved = MiddleMoved(
        rate=rate, suffix_first=suffix_first, prefix=prefix, suffix=suffix, middle=middle, eos=tokenizer.eos,
        seed=plan.seed, reads=reads,
    )  # fmt: skip
    return [*stages, Stage(name="fill_in_middle", takes=TOKEN_SAMPLES, gives=TOKEN_SAMPLES, function=moved)]
