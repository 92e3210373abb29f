"""Pipeline parallelism: layers of each stage, stages of each rank, and the order of computations on a rank.

Orders follow torch.distributed.pipelining 2.13, computed without torch. p ranks, v stages on each, m microbatches. Rank
r runs some forwards ahead of its first backward, then alternates forward and backward, then runs the remaining
backwards. Forwards ahead:

    gpipe             m: all of them
    1f1b              p - r - 1
    interleaved_1f1b  (v - 1) · g + 2 · (p - r - 1), in rounds of g microbatches on each stage (arXiv 2104.04473)
    zero_bubble       (v - 1) · g + (p - r - 1), and backwards in two parts: for inputs now, for weights r later
                      (arXiv 2401.10241, ZB-H1)
    zbv               the V of stages r and 2p - 1 - r of the same paper, section 6
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from attrs import field

from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING, Architecture, ParameterSpec, name_in_block

SINGLE = ("gpipe", "1f1b")  # one stage per rank
TWO_STAGES = ("interleaved_1f1b", "zbv")  # two stages per rank by default
ZERO_BUBBLE = ("zero_bubble", "zbv")  # backward in two parts, the second of which comes later


@frozen(kw_only=True)
class Pipeline:
    """Stages of a model. Without a pipeline there is one stage on one coordinate.

    spans: [first, last] layer of every stage, both included. owners: the stages of every pipeline coordinate, in the
    order in which a microbatch visits them.
    """

    spans: tuple[tuple[int, int], ...]
    owners: tuple[tuple[int, ...], ...]

    @property
    def readers(self) -> list[int]:
        """Coordinates that read rows: the first stage takes inputs, the last one labels."""
        return sorted({self.owner(0), self.owner(len(self.spans) - 1)})

    def owner(self, stage: int) -> int:
        return next(pp for pp, stages in enumerate(self.owners) if stage in stages)

    def layers(self, pp: int) -> list[int]:
        """Return the numbers of the layers on a coordinate."""
        spans = (self.spans[stage] for stage in self.owners[pp])
        return [layer for first, last in spans for layer in range(first, last + 1)]

    def blocks(self) -> list[int]:
        """Return the number of blocks on each coordinate."""
        return [len(self.layers(pp)) for pp in range(len(self.owners))]

    def holds_first(self, pp: int) -> bool:
        return 0 in self.owners[pp]

    def holds_last(self, pp: int) -> bool:
        return len(self.spans) - 1 in self.owners[pp]


def pipeline_of(counts: list[int], size: int, schedule: str) -> Pipeline:
    """Return the pipeline whose stages have `counts` layers each, on `size` ranks."""
    spans, first = [], 0
    for count in counts:
        spans.append((first, first + count - 1))
        first += count
    turns = len(counts) // size
    owners = tuple(tuple(stages_of_rank(pp, size, turns, schedule)) for pp in range(size))
    return Pipeline(spans=tuple(spans), owners=owners)


def stages_of_rank(pp: int, size: int, stages_per_rank: int, schedule: str) -> list[int]:
    """Return the stages of pipeline coordinate `pp`.

    Stages are assigned in turn, so that a microbatch visits every rank in each round. `zbv` returns in the opposite
    order, so that the first and last stage are on one rank (Qi et al., arXiv 2401.10241).
    """
    if schedule == "zbv" and stages_per_rank == 2:
        return [pp, 2 * size - 1 - pp]
    return [pp + size * turn for turn in range(stages_per_rank)]


def balance(layers: int, stages: int, embedding_cost: float = 0.0, head_cost: float = 0.0) -> list[int]:
    """Return the layers of every stage, at least one each, minimizing the cost of the most expensive stage.

    A layer costs 1; the ends of the model have the given costs. Each stage gets one layer; the others go one by one to
    the cheapest stage so far. Ties go to the middle, then to the first, then to the last stage, because the ends also
    wait longest (Llama 3, arXiv 2407.21783, section 3.3.2). `layers` must be at least `stages`.
    """
    costs = [1.0] * stages
    costs[0] += embedding_cost
    costs[-1] += head_cost
    counts = [1] * stages
    middle_first = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    for _ in range(layers - stages):
        cheapest = min(middle_first, key=costs.__getitem__)
        costs[cheapest] += 1
        counts[cheapest] += 1
    return counts


def balance_unequal(costs: Sequence[float], stages: int, embedding_cost: float, head_cost: float) -> list[int]:
    """Return the layers of every stage for layers of unequal `costs`, in layer order, at least one for each stage. The
    most expensive stage is as cheap as possible; given that, each end of a stage is as near as possible to an even
    share of the remaining cost."""
    sums = [0.0, *accumulate(costs)]
    ends = [embedding_cost * (stage == 0) + head_cost * (stage == stages - 1) for stage in range(stages)]
    low, high = 0.0, sums[-1] + sum(ends)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if _first_layers(sums, ends, middle) is not None else (middle, high)
    most = high * (1 + 1e-12)
    firsts = _first_layers(sums, ends, most)
    assert firsts is not None
    counts, first = [], 0
    for stage in range(stages - 1):
        share = (sums[-1] - sums[first] + sum(ends[stage:])) / (stages - stage)
        target = sums[first] + share - ends[stage]
        least = max(first + 1, firsts[stage + 1])
        last = min(len(costs) - (stages - 1 - stage), bisect_right(sums, sums[first] + most - ends[stage]) - 1)
        place = min(max(bisect_left(sums, target), least), last)
        before = max(place - 1, least)
        end = before if abs(sums[before] - target) <= abs(sums[place] - target) else place
        counts.append(end - first)
        first = end
    return [*counts, len(costs) - first]


def _first_layers(sums: list[float], ends: list[float], most: float) -> list[int] | None:
    """Return the first layer of every stage if each stage, from the last one on, takes as many layers as cost at most
    `most`; None if some layers are left."""
    found, last = [], len(sums) - 1
    for stage in reversed(range(len(ends))):
        first = max(stage, bisect_left(sums, sums[last] + ends[stage] - most))
        if first >= last:
            return None
        found.append(first)
        last = first
    return found[::-1] if not last else None


def by_coordinate(
    parameters: Iterable[ParameterSpec], architecture: Architecture, pipeline: Pipeline
) -> tuple[list[ParameterSpec], ...]:
    """Return the parameters on every coordinate of a pipeline, in their order. An embedding that the last stage also
    reads is listed twice."""
    found: tuple[list[ParameterSpec], ...] = tuple([] for _ in pipeline.owners)
    homes: dict[str, list[int]] = {}
    for pp in range(len(found)):
        for name in end_names(architecture, pipeline, pp):
            homes.setdefault(name, []).append(pp)
        homes |= {str(layer): [pp] for layer in pipeline.layers(pp)}
    for parameter in parameters:
        for pp in homes[parameter.name.split(".")[1] if name_in_block(parameter.name) else parameter.name]:
            found[pp].append(parameter)
    return found


def end_names(architecture: Architecture, pipeline: Pipeline, pp: int) -> list[str]:
    """Return the parameters outside blocks on a coordinate, in the order of the inventory.

    A tied head on another rank than the embedding is a copy of it under the same name, and so is the embedding of
    modules that predict further tokens.
    """
    names = (name for stage in pipeline.owners[pp] for name in stage_end_names(architecture, pipeline, stage))
    return list(dict.fromkeys(names))


def stage_end_names(architecture: Architecture, pipeline: Pipeline, stage: int) -> list[str]:
    """Return the parameters outside blocks of one stage."""
    first, last = stage == 0, stage == len(pipeline.spans) - 1
    names = [f"{EMBEDDING}.weight"] if first or (architecture.embeds_behind and last) else []
    before = architecture.ends.before
    names += [name for name, _ in architecture.other_ends if (first if name in before else last)]
    if last:
        names += [] if architecture.tie_embeddings else [f"{architecture.head_module}.weight"]
        names += [each.name for each in architecture.head_adapters()]
    return names


# forward, whole backward, its part for inputs, its part for weights
Kind = Literal["F", "B", "I", "W"]


@frozen
class PipelineAction:
    """One computation of a rank: its kind, stage and microbatch."""

    kind: Kind
    stage: int
    microbatch: int


@lru_cache(maxsize=512)
def order(schedule: str, rank: int, ranks: int, stages: tuple[int, ...], microbatches: int) -> list[PipelineAction]:
    """Return the computations of pipeline rank `rank`, which owns `stages`, in order and without waits."""
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
    """Yield forwards ahead, then alternating forwards and backwards, then backwards."""
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
    """Yield (stage, microbatch): `each` microbatches through every stage, then the next ones."""
    for first in range(0, microbatches, each):
        for stage in stages:
            for number in range(first, first + each):
                yield stage, number


def _at_most_one(pairs: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    found = next(pairs, None)
    return [] if found is None else [found]


def _v_shaped(rank: int, ranks: int, stages: tuple[int, ...], microbatches: int) -> Iterator[PipelineAction]:
    """Return the V order, laid out for as many microbatches as fill the pipeline; missing microbatches are left out."""
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


def gathered_stages(actions: list[PipelineAction]) -> Iterator[tuple[int, bool] | PipelineAction]:
    """Yield the actions, each preceded by the stages that are gathered (stage, True) and freed (stage, False) for it.

    torch gathers the stages of the next computations, at most three at a time, and frees the others. It does so for
    every schedule except gpipe and 1f1b, whose only stage is gathered as it runs.
    """
    active: list[int] = []
    for action, ahead in zip(actions, _stages_ahead(actions), strict=True):
        wanted = ahead[:3]
        for stage in [each for each in active if each not in wanted]:
            active.remove(stage)
            yield stage, False
        for stage in [each for each in wanted if each not in active]:
            active.append(stage)
            yield stage, True
        yield action


def _stages_ahead(actions: list[PipelineAction]) -> list[list[int]]:
    """Return, for every action, the stages computed from there on, ordered by first use."""
    ahead: list[int] = []
    found = []
    for action in reversed(actions):
        ahead = [action.stage, *(stage for stage in ahead if stage != action.stage)]
        found.append(ahead)
    return found[::-1]


@frozen(kw_only=True)
class StageAssignment:
    """Pipeline, stages per rank, and the reason and value of derived settings (by path in the spec)."""

    pipeline: Pipeline
    stages_per_rank: int
    reasons: dict[str, tuple[object, str]] = field(factory=dict)
