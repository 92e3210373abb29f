"""`document_prefix`: beginnings of documents without labels."""

# shapes: L positions of a sample

import numpy as np
import torch
from attrs import define, evolve

from xtrain.dsl.schema.data_components import TOKEN_SAMPLES
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.feed.collate import Stage, numbered_in_rows
from xtrain.runtime.feed.microbatch import Sample, Samples
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN

# First word of the random seed, so that collators draw independent numbers.
_STREAM = 0xD0C


@define(kw_only=True, frozen=True)
class PrefixRead:
    """Loss masking of a random document prefix. The draw depends on the seed, the row's position in the run, and the
    sample's number in the row."""

    most: float
    seed: int

    def __call__(self, value: Samples) -> Samples:
        samples = tuple(self._changed(sample, number) for number, sample in numbered_in_rows(value))
        return Samples(num_rows=value.num_rows, samples=samples)

    def _changed(self, sample: Sample, number: int) -> Sample:
        if sample.position == UNKNOWN:
            return sample
        length = len(sample.tokens)
        random = np.random.default_rng([_STREAM, self.seed, sample.position, number])
        # The first token is never predicted, and the last predictable one always is.
        last = length - 1 if sample.trained is None else max(sample.trained.nonzero().flatten().tolist(), default=0)
        read = min(1 + int(random.random() * self.most * length), last)
        predicted = torch.arange(length) >= read
        return evolve(sample, trained=predicted if sample.trained is None else sample.trained & predicted)


@op("collate.document_prefix", gives="stages")
def append_document_prefix(plan: Plan, stages: list[Stage], most: float) -> list[Stage]:
    """Append the stage."""
    read = PrefixRead(most=most, seed=plan.seed)
    return [*stages, Stage(name="document_prefix", takes=TOKEN_SAMPLES, gives=TOKEN_SAMPLES, function=read)]
