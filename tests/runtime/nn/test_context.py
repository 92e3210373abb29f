"""`setup.parallel.cp` and `collate.shard`: the right layers, the right groups, the right part of the rows."""

import numpy as np
import pytest
from one_rank import AXES, one_rank
from torch import nn

from xtrain.plan.plan import Node
from xtrain.runtime.base.ops import PlanMismatch, op_of
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed import collate as collators
from xtrain.runtime.feed import setup as feed  # noqa: F401  (registers its ops)
from xtrain.runtime.feed.packing.stored_rows import RawRow
from xtrain.runtime.nn.attention import by_document
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.block import Attention
from xtrain.runtime.nn.parallelize import ContextKernel, spread_attention


def rank_at(**coordinates: int) -> Rank:
    places = {**dict.fromkeys(AXES, 0), **coordinates}
    return one_rank(pipeline_ranks=2, coordinates=places)


class Layer(Attention):
    """An attention layer without weights."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.kernel = by_document


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.axes = nn.ModuleList([Layer(), nn.Identity(), Layer()]), Axes()


class Groups:
    def group(self, axis: str) -> str:
        return f"group of {axis}"


@pytest.mark.parametrize(
    ("ring", "ulysses", "expected"),
    [(2, 1, ("group of ring", None)), (1, 2, (None, "group of ulysses")),
        (2, 4, ("group of ring", "group of ulysses"))],
)  # fmt: skip
def test_every_attention_layer_gets_the_groups(ring: int, ulysses: int, expected: tuple):
    model = TwoLayers()
    spread_attention(model, rank_at(pp=1), Groups(), ring, ulysses, [3, 2])  # pyright: ignore[reportArgumentType]
    assert (model.axes.ring, model.axes.ulysses, model.axes.row) == (*expected, "group of row")
    kernels = [layer.kernel for layer in model.layers if isinstance(layer, Attention)]
    assert len(kernels) == 2
    for kernel in kernels:
        assert isinstance(kernel, ContextKernel)
        assert kernel.inner is by_document and kernel.axes is model.axes


def test_another_number_of_layers_than_planned_is_refused():
    with pytest.raises(PlanMismatch, match="3 attention layers are planned here, and 2 are built"):
        spread_attention(TwoLayers(), rank_at(), Groups(), 2, 1, [3, 2])  # pyright: ignore[reportArgumentType]


def test_the_chain_of_a_plan_keeps_the_part_of_its_rank():
    nodes = {
        "collate.to_tensor": {},
        "collate.flatten": {},
        "collate.shift_tokens": {},
        "collate.pack": {"method": "sequential", "capacity": 16, "align": 4},
        "collate.shard": {"ring": 2, "ulysses": 2},
    }
    stages: list[collators.Stage] = []
    for name, args in nodes.items():
        node = Node(id=name, kind="collate", op=name, does="", args=args)
        stages = op_of(node).bind(node, {"stages": stages, "rank": rank_at(ring=1, ulysses=1)})()
    batch = collators.compose(stages)([RawRow(segments=[np.arange(14, dtype=np.uint8)])])
    assert batch.input_ids_BS is not None and batch.labels_BS is not None
    # 13 positions padded to 16; ring rank 1 holds 4 … 11, and the second half of them is this rank's.
    assert batch.positions_BS.tolist() == [[8, 9, 10, 11]]
    assert batch.input_ids_BS.tolist() == [[8, 9, 10, 11]]
    assert batch.labels_BS.tolist() == [[9, 10, 11, 12]]
    assert (batch.num_valid, batch.sequence) == (4, 16)
