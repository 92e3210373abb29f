"""`shift_tokens`: labels."""

# shapes: L positions of a sample

import torch
from attrs import evolve

from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, TOKEN_SAMPLES
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.ops import op
from xtrain.runtime.feed.collate import Stage
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Sample, Samples


def shift_tokens() -> Stage:
    """Turn L + 1 tokens into L inputs, each labeled with the following token if the loss mask includes it.

    Done per sample and before packing: a label is always the next token of the same document, also at the end of a
    chunk, and the last token of a document (eos) is only ever a label. Per-token numbers move with their token. The
    stage raises DataError for a sample of fewer than two tokens, which has no position.
    """
    return Stage(name="shift_tokens", takes=TOKEN_SAMPLES, gives=LABELLED_SAMPLES, function=_shift_all, one_pass=True)


def _shift_all(value: Samples) -> Samples:
    return Samples(num_rows=value.num_rows, samples=tuple(map(_shift, value.samples)))


def _shift(sample: Sample) -> Sample:
    if len(sample.tokens) < 2:
        raise DataError(f"a sample of {len(sample.tokens)} tokens in row {sample.row} has nothing to predict")
    labels = sample.tokens[1:]
    if sample.trained is not None:
        labels = torch.where(sample.trained[1:], labels, IGNORE_INDEX)
    columns = {name: column[1:] for name, column in sample.columns.items()}
    return evolve(sample, tokens=sample.tokens[:-1], labels=labels, trained=None, columns=columns)


@op("collate.shift_tokens", gives="stages")
def append_shift_tokens(stages: list[Stage]) -> list[Stage]:
    """Append the stage."""
    return [*stages, shift_tokens()]
