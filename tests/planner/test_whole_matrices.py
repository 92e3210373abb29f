"""Matrices are dealt out to the ranks that share them: every one to one, as much work to each, no message lost."""

from collections import Counter
from itertools import product
from math import prod

import pytest

from xtrain.plan.mesh import MatrixCut, batches

TP, FSDP = MatrixCut("tp", 2, 2), MatrixCut("fsdp", 3, 1)


@pytest.mark.parametrize("cuts", [(), (TP,), (FSDP,), (TP, FSDP), (MatrixCut("tp", 2, 1), FSDP)])
def test_each_has_one_owner_and_every_rank_as_many(cuts: tuple[MatrixCut, ...]):
    stacks = [(f"layers.{n}", (1, 7, 10), cuts) for n in range(12)]
    owners = Counter()
    seen: list[str] = []
    for batch in batches(stacks):
        assert batch.cuts == cuts
        owners.update(stack.owner for stack in batch.stacks)
        seen += [stack.name for stack in batch.stacks]
    assert sorted(seen) == sorted(name for name, _, _ in stacks)
    assert set(owners) == set(product(*(range(cut.ranks) for cut in cuts))) and len(set(owners.values())) == 1


def test_a_large_stack_is_shared():
    """Of 128 experts each of three ranks gets 42 or 43, one behind the other; of two experts, two ranks get one."""
    (batch,) = batches([("experts", (128, 4, 8), (FSDP,)), ("few", (2, 4, 8), (FSDP,))])
    shares, ends = Counter(), Counter()
    for stack in batch.stacks:
        assert stack.first == ends[stack.name]
        ends[stack.name] += stack.shape[0]
        shares[stack.name, stack.owner[0]] += stack.shape[0]
    assert ends == {"experts": 128, "few": 2}
    assert sorted(shares["experts", rank] for rank in range(3)) == [42, 42, 44]
    assert sorted(shares["few", rank] for rank in range(3)) == [0, 1, 1]


@pytest.mark.parametrize("first", [MatrixCut("tp", 2, 1), TP])
def test_what_one_rank_sends_the_others_receive(first: MatrixCut):
    """Along every cut, of pieces of uneven sizes: what goes to an owner makes up its whole matrices."""
    (batch,) = batches((f"layers.{n}", (1, 7, 5), (first, FSDP)) for n in range(7))
    places = list(product(range(2), range(3)))
    for cut in (1, 0):
        came = Counter()
        for place in places:
            for stack in batch.passing(cut, place):
                owner = (*place[:cut], stack.owner[cut], *place[cut + 1 :])
                came[owner, stack.name] += prod(stack.at(cut, place))
        for place in places:
            for stack in batch.passing(cut, place):
                if stack.owner[cut] == place[cut]:
                    assert came[place, stack.name] == prod(stack.at(cut - 1, place))
    wholes = [stack.name for place in places for stack in batch.stacks if stack.owner == place]
    assert sorted(wholes) == sorted(stack.name for stack in batch.stacks)


def test_large_matrices_travel_a_few_at_a_time():
    cut = MatrixCut("fsdp", 4, 1)
    found = batches([(f"layers.{n}", (1, 4096, 4096), (cut,)) for n in range(16)])
    assert [len(batch.stacks) for batch in found] == [4, 4, 4, 4]
    assert all(sorted(stack.owner for stack in batch.stacks) == [(0,), (1,), (2,), (3,)] for batch in found)
    sent = [size for batch in found for _, size in batch.sent((0,))]
    assert sent == [4096 * 4096] * 8  # a quarter of four there, and back
