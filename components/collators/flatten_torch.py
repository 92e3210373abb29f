"""`flatten`: rows as one list of samples."""

from xtrain.dsl.schema.data_components import TENSOR_ROWS, TOKEN_SAMPLES
from xtrain.runtime.base.ops import op
from xtrain.runtime.feed.collate import Stage, TensorRow
from xtrain.runtime.feed.microbatch import Sample, Samples


def flatten() -> Stage:
    """Flatten nested rows to one list of samples, each with its row."""
    return Stage(name="flatten", takes=TENSOR_ROWS, gives=TOKEN_SAMPLES, function=_unnest, one_pass=True)


def _unnest(rows: list[TensorRow]) -> Samples:
    samples = (
        Sample(
            row=index,
            tokens=tokens,
            trained=None if row.trained is None else row.trained[number],
            columns={name: parts[number] for name, parts in row.columns.items()},
            values={name: numbers[number] for name, numbers in row.values.items()},
            side=0 if row.sides is None else row.sides[number],
            dataset=row.dataset,
            position=row.position,
        )
        for index, row in enumerate(rows)
        for number, tokens in enumerate(row.segments)
    )
    return Samples(num_rows=len(rows), samples=tuple(samples))


@op("collate.flatten", gives="stages")
def append_flatten(stages: list[Stage]) -> list[Stage]:
    """Append the stage."""
    return [*stages, flatten()]
