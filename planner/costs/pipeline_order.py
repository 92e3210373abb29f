"""In which order a pipeline rank computes: the schedules of torch.distributed.pipelining 2.13, in our own words.

p ranks, v stages on each, m microbatches. Rank r runs forwards ahead of the first backward, then one of each in turn,
then the backwards that are left. How far it runs ahead is what tells the schedules apart:

gpipe             m: all of them
1f1b              p - r - 1
interleaved_1f1b  (v - 1) · g + 2 · (p - r - 1), in rounds of g microbatches on each stage (arXiv 2104.04473)
zero_bubble       (v - 1) · g + (p - r - 1), and backwards in two parts: for inputs now, for weights r later
                  (arXiv 2401.10241, ZB-H1)
zbv               the V of stages r and 2p - 1 - r of the same paper, section 6
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from attrs import frozen

# forward, whole backward, its part for inputs, its part for weights
Kind = Literal["F", "B", "I", "W"]


@frozen
class PipelineAction:
    """One computation of a rank: its kind, the stage and the microbatch."""

    kind: Kind
    stage: int
    microbatch: int


@lru_cache(maxsize=512)
def order(schedule: str, rank: int, ranks: int, stages: tuple[int, ...], microbatches: int) -> list[PipelineAction]:
    """What pipeline rank `rank`, which owns `stages`, computes, in order; without waits."""
    if schedule == "gpipe":
        (stage,) = stages
        kinds: tuple[Kind, ...] = ("F", "B")
        return [PipelineAction(kind, stage, number) for kind in kinds for number in range(microbatches)]
    if schedule == "zbv":
        return list(_v_shaped(rank, ranks, stages, microbatches))
    return list(_in_turn(schedule, rank, ranks, stages, microbatches))


def _in_turn(
    schedule: str, rank: int, ranks: int, stages: tuple[int, ...], microbatches: int
) -> Iterator[PipelineAction]:
    """Forwards ahead, then a forward and a backward in turn, then backwards."""
    split, total = schedule == "zero_bubble", len(stages) * microbatches
    each = microbatches if schedule == "1f1b" else microbatches // max(1, microbatches // ranks)
    hop = 2 if schedule == "interleaved_1f1b" else 1
    ahead = min((len(stages) - 1) * each + hop * (ranks - 1 - rank), total)
    forwards = _by_rounds(stages, each, microbatches)
    backwards = list(_by_rounds(stages[::-1], each, microbatches))
    weights = iter(backwards)
    for stage, number in (next(forwards) for _ in range(ahead)):
        yield PipelineAction("F", stage, number)
    for place, (stage, number) in enumerate(backwards):
        for forward in _at_most_one(forwards):
            yield PipelineAction("F", *forward)
        yield PipelineAction("I" if split else "B", stage, number)
        if split and place >= rank:
            yield PipelineAction("W", *next(weights))
    if split:
        yield from (PipelineAction("W", *left) for left in weights)


def _by_rounds(stages: tuple[int, ...], each: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """(stage, microbatch): `each` microbatches through every stage, then the next ones."""
    for first in range(0, microbatches, each):
        for stage in stages:
            for number in range(first, first + each):
                yield stage, number


def _at_most_one(pairs: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    found = next(pairs, None)
    return [] if found is None else [found]


def _v_shaped(rank: int, ranks: int, stages: tuple[int, ...], microbatches: int) -> Iterator[PipelineAction]:
    """Laid out for as many microbatches as fill the pipeline; those that are not there are left out."""
    return (action for action in _full_v(rank, ranks, stages, microbatches) if action.microbatch < microbatches)


def _full_v(rank: int, ranks: int, stages: tuple[int, ...], microbatches: int) -> Iterator[PipelineAction]:
    there, back = stages
    count = max(2 * ranks - 1, microbatches)
    done = {(kind, stage): 0 for kind in ("F", "I", "W") for stage in stages}

    def do(kind: Kind, stage: int) -> PipelineAction:
        done[kind, stage] += 1
        return PipelineAction(kind, stage, done[kind, stage] - 1)

    for _ in range(2 * (ranks - rank) - 1):
        yield do("F", there)
    for _ in range(rank):
        yield do("F", back)
        yield do("F", there)
    for _ in range(ranks - rank):
        yield do("F", back)
        yield do("I", back)
        yield do("W", back)
    while done["F", back] < done["F", there] or done["F", there] < count:
        if done["F", there] < count:
            yield do("F", there)
        yield do("I", there)
        yield do("W", there)
        yield do("F", back)
        yield do("I", back)
        yield do("W", back)
    for _ in range(rank):
        yield do("I", there)
        yield do("I", back)
    for _ in range(ranks - rank):
        yield do("I", there)
        yield do("W", there)
    for stage in (back, there):
        while done["W", stage] < done["I", stage]:
            yield do("W", stage)


def gathered_stages(actions: list[PipelineAction], most: int = 3) -> Iterator[tuple[int, bool] | PipelineAction]:
    """The actions, and before each of them which stages are gathered (stage, True) and let go (stage, False).

    torch gathers the stages of the next computations, at most three at a time, and lets go of the others; it does so
    for every schedule but gpipe and 1f1b, whose one stage is gathered as it runs.
    """
    active: list[int] = []
    for action, ahead in zip(actions, _stages_ahead(actions), strict=True):
        wanted = ahead[:most]
        for stage in [each for each in active if each not in wanted]:
            active.remove(stage)
            yield stage, False
        for stage in [each for each in wanted if each not in active]:
            active.append(stage)
            yield stage, True
        yield action


def _stages_ahead(actions: list[PipelineAction]) -> list[list[int]]:
    """Before every action, the stages that are computed from there on, by when they first are."""
    ahead: list[int] = []
    found = []
    for action in reversed(actions):
        ahead = [action.stage, *(stage for stage in ahead if stage != action.stage)]
        found.append(ahead)
    return found[::-1]
