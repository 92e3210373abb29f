"""`to_tensor`: token arrays as tensors."""

import numpy as np
import torch

from xtrain.dsl.schema.data_components import RAW_ROWS, TENSOR_ROWS
from xtrain.runtime.base.ops import op
from xtrain.runtime.feed.collate import Stage, TensorRow
from xtrain.runtime.feed.packing.stored_rows import RawRow


def to_tensor() -> Stage:
    """Convert token arrays of any unsigned type to int64 tensors with memory of their own."""
    return Stage(name="to_tensor", takes=RAW_ROWS, gives=TENSOR_ROWS, function=_convert, one_pass=True)


def _convert(rows: list[RawRow]) -> list[TensorRow]:
    return [
        TensorRow(
            segments=[torch.from_numpy(segment.astype(np.int64)) for segment in row.segments],
            trained=None if row.trained is None else [torch.from_numpy(mask.astype(np.bool_)) for mask in row.trained],
            columns={name: [torch.tensor(part) for part in parts] for name, parts in row.columns.items()},
            values=row.values,
            sides=row.sides,
            dataset=row.dataset,
            position=row.position,
        )
        for row in rows
    ]


@op("collate.to_tensor", gives="stages")
def append_to_tensor(stages: list[Stage]) -> list[Stage]:
    """Append the stage."""
    return [*stages, to_tensor()]
