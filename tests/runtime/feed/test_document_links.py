"""Links of `collate` that change documents: `fill_in_middle` and `document_prefix`."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from attrs import evolve

from xtrain.components.collators.document_prefix_torch import PrefixRead
from xtrain.components.collators.fill_in_middle_torch import MiddleMoved
from xtrain.runtime.feed.microbatch import Sample, Samples
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN

BOS, EOS, PRE, SUF, MID = 90, 91, 92, 93, 94


def samples(*lengths: int, position: int = 7, ends: bool = True, row: int = 0, **more) -> Samples:
    """Documents 0 1 2 …, between bos and eos."""
    made = [
        Sample(row=row, tokens=torch.tensor([BOS, *range(length), *([EOS] if ends else [])]), position=position, **more)
        for length in lengths
    ]
    return Samples(num_rows=row + 1, samples=tuple(made))


def moved(rate: float = 1.0, suffix_first: float = 0.0, seed: int = 3) -> MiddleMoved:
    return MiddleMoved(rate=rate, suffix_first=suffix_first, prefix=PRE, suffix=SUF, middle=MID, eos=EOS, seed=seed)


def parts(tokens: list[int], *marks: int) -> list[list[int]]:
    """What stands behind each of some marks."""
    places = [*(tokens.index(mark) for mark in marks), len(tokens)]
    return [tokens[first + 1 : end] for first, end in pairwise(places)]


@pytest.mark.parametrize("ends", [True, False])
def test_the_three_parts_are_the_document_without_its_last_three_tokens(ends: bool):
    for position in range(20):
        given = samples(40, position=position, ends=ends)
        ((one,), (other,)) = (moved(suffix_first=first)(given).samples for first in (0.0, 1.0))
        assert len(one.tokens) == len(other.tokens) == len(given.samples[0].tokens)
        tokens = one.tokens.tolist()
        assert tokens[0] == BOS and (tokens[-1] == EOS) is ends
        prefix, suffix, middle = parts(tokens[1 : len(tokens) - ends], PRE, SUF, MID)
        assert prefix + middle + suffix == list(range(37))
        # The other order has the same parts: the beginning and the middle behind each other.
        behind = other.tokens.tolist()
        assert behind[1:3] == [PRE, SUF]
        assert parts(behind[2 : len(behind) - ends], SUF, MID) == [suffix, prefix + middle]


def test_so_many_documents_are_changed_in_so_many_places():
    given = [samples(30, 30, position=position) for position in range(300)]
    found = [moved(rate=0.3)(each) for each in given]
    pairs = [
        (a, b) for one, other in zip(given, found, strict=True) for a, b in zip(one.samples, other.samples, strict=True)
    ]
    changed = [b.tokens.tolist() for a, b in pairs if not torch.equal(a.tokens, b.tokens)]
    assert 0.25 < len(changed) / len(pairs) < 0.35
    firsts = {tokens.index(SUF) for tokens in changed}
    assert len(firsts) > 20  # the beginning has any length from 0 to 27
    # Two documents of a row are not cut alike, and another seed cuts them otherwise.
    assert sum(torch.equal(*(s.tokens for s in one.samples)) for one in map(moved(), given)) < 30
    assert not torch.equal(moved(seed=3)(given[0]).samples[0].tokens, moved(seed=4)(given[0]).samples[0].tokens)


def test_what_is_drawn_does_not_depend_on_the_microbatch():
    """The same row in another place of another microbatch."""
    alone, below = samples(20, 25, position=11), samples(20, 25, position=11, row=2)
    others = samples(9, position=4)
    mixed = Samples(num_rows=3, samples=(*others.samples, *below.samples))
    for link in (moved(rate=0.7), PrefixRead(most=0.5, seed=3)):
        expected, found = link(alone).samples, link(mixed).samples[1:]
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.tokens, other.tokens) and other.row == 2
            assert (one.trained is None) == (other.trained is None)
            assert one.trained is None or torch.equal(one.trained, other.trained)


def test_documents_that_stay_as_they_are():
    mask = torch.tensor([False] * 11 + [True])
    numbers = torch.zeros(12)
    stays = [
        samples(10, position=UNKNOWN), samples(10, trained=mask), samples(10, columns={"weights": numbers}),
        samples(10, values={"margin": 1.0}), samples(3), samples(1),
    ]  # fmt: skip
    link = evolve(moved(), reads=frozenset({"weights", "margin"}))
    for given in stays:
        assert link(given).samples[0] is given.samples[0]
    # Numbers that the loss does not read keep no document as it is.
    for given in stays[2:4]:
        assert moved()(given).samples[0] is not given.samples[0]
    assert not torch.equal(moved()(samples(4)).samples[0].tokens, samples(4).samples[0].tokens)
    assert PrefixRead(most=1.0, seed=0)(samples(10, position=UNKNOWN)).samples[0].trained is None


def test_a_beginning_is_only_read():
    read = []
    for position in range(400):
        (sample,) = PrefixRead(most=0.5, seed=1)(samples(98, position=position)).samples
        assert sample.trained is not None
        first = int(sample.trained.to(torch.int8).argmax())
        assert not sample.trained[:first].any() and sample.trained[first:].all()
        read.append(first)
    # Evenly from 1 token, the first, to half of them.
    assert 1 <= min(read) < 4 and 47 < max(read) <= 50 and 23 < np.mean(read) < 28
    # What the data says is not predicted is not predicted.
    mask = torch.tensor([False, True] * 6)
    (sample,) = PrefixRead(most=0.5, seed=1)(samples(10, trained=mask)).samples
    assert sample.trained is not None and not (sample.trained & ~mask).any() and sample.trained[-1]
    # Something of a conversation always is, also where a question ends it.
    mask = torch.tensor([False] * 3 + [True] * 2 + [False] * 7)
    for position in range(50):
        (sample,) = PrefixRead(most=1.0, seed=1)(samples(10, trained=mask, position=position)).samples
        assert sample.trained is not None and sample.trained[4] and not (sample.trained & ~mask).any()
    (sample,) = PrefixRead(most=1.0, seed=1)(samples(10, trained=torch.zeros(12, dtype=torch.bool))).samples
    assert sample.trained is not None and not sample.trained.any()
    (sample,) = PrefixRead(most=1.0, seed=1)(samples(0)).samples
    assert sample.trained is not None and sample.trained.tolist() == [False, True]
