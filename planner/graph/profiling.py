"""Profiles and memory snapshots of a plan: which ranks and steps they are about, and rules for where they stand."""

from collections.abc import Iterator
from itertools import combinations
from math import lcm
from typing import Any, Final, Literal

from attrs import frozen

from ...dsl.schema.actions import Action, MemorySnapshotAction, ProfileAction, StopAction, Tick
from ...dsl.schema.setting import Auto
from ...dsl.spec import Spec
from ..findings import Findings
from ..mesh.cluster import device_kind
from ..resolved import Resolved
from ..schedule.arithmetic import Arithmetic
from ..schedule.stops import ENDINGS, counted
from ..units import plural

# So many ranks say what all of them do, and their traces can be looked at.
MOST_BY_ITSELF: Final = 8


def recorded_ranks(ranks: int | Literal["first", "all"] | Auto, world: int, pipeline: int) -> list[int] | None:
    """Ranks evenly spread over all of them, the first one among them; None: all.

    pipeline: pipeline coordinates, which are the outermost axis: of so many ranks or more each has one.
    """
    if ranks == "all":
        return None
    number = max(MOST_BY_ITSELF, pipeline) if isinstance(ranks, Auto) else 1 if ranks == "first" else int(ranks)
    return None if number >= world else [index * world // number for index in range(number)]


def profile_args(action: ProfileAction, run: Resolved) -> dict[str, Any]:
    """Arguments of a profile without its schedule."""
    return {
        "ranks": _ranks(action, run),
        "shapes": action.shapes,
        "stacks": action.stacks,
        "memory": action.memory,
    }


def profile_text(action: ProfileAction, run: Resolved, steps: str) -> str:
    """What it does, in a line. steps: which ones."""
    more = [name for name in ("shapes", "stacks", "memory") if getattr(action, name)]
    beside = f", with {' and '.join(more)}" if more else ""
    return f"time every operation of {steps} on {_who(action, run)}{beside}: a trace and a summary of each"


def scheduled(action: ProfileAction) -> str:
    """`3 steps, behind 1 that passes and 1 to warm up`."""
    before = [f"{action.wait} that {'passes' if action.wait == 1 else 'pass'}"] if action.wait else []
    before += [f"{action.warmup} to warm up"] if action.warmup else []
    return plural(action.active, "step") + (f", behind {' and '.join(before)}," if before else "")


def snapshot_args(action: MemorySnapshotAction, run: Resolved, *, ends: bool) -> dict[str, Any]:
    """ends: the run ends behind it, and has no steps left to watch."""
    return {"ranks": _ranks(action, run), "history": 0 if ends else history_steps(action, run.spec)}


def snapshot_text(action: MemorySnapshotAction, run: Resolved, *, ends: bool) -> str:
    """What it does, in a line."""
    history = 0 if ends else history_steps(action, run.spec)
    watched = f", behind {plural(history, 'step')} of what a GPU's allocator does" if history else ""
    return f"what {_who(action, run)} hold{'s' if _count(action, run) == 1 else ''}, beside the plan's figures{watched}"


def history_steps(action: MemorySnapshotAction, spec: Spec) -> int:
    """Steps that are watched before a snapshot; on a cpu there is nobody who writes down what is allocated."""
    if device_kind(spec) == "cpu":
        return 0
    return 1 if isinstance(action.history, Auto) else action.history


def _ranks(action: ProfileAction | MemorySnapshotAction, run: Resolved) -> list[int] | None:
    return recorded_ranks(action.ranks, run.layout.mesh.world_size, run.size("pp"))


def _count(action: ProfileAction | MemorySnapshotAction, run: Resolved) -> int:
    ranks = _ranks(action, run)
    return run.layout.mesh.world_size if ranks is None else len(ranks)


def _who(action: ProfileAction | MemorySnapshotAction, run: Resolved) -> str:
    count, world = _count(action, run), run.layout.mesh.world_size
    if world == 1:
        return "the rank"
    if count == world:
        return f"all {world} ranks" if world > 2 else "both ranks"
    return "the first rank" if count == 1 else f"{count} of {world:,} ranks"


# Rules ----------------------------------------------------------------------------------------------------------------


@frozen
class ProfiledSteps:
    """A tick whose action goes on with the steps behind it. period: the fewest steps between two of its starts."""

    path: str
    every: str
    action: str
    period: int
    length: int


def check_profiles(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Who looks at the steps that follow needs steps that follow, and is alone with them."""
    places = [(f"every.{number}", "a tick", tick.actions) for number, tick in enumerate(spec.ticks)]
    places += [(f"on.{number}", f"on {each.event}", each.actions) for number, each in enumerate(spec.events)]
    for path, what, actions in places:
        ends = any(isinstance(action, StopAction) for action in actions) or what.removeprefix("on ") in ENDINGS
        for action in actions:
            if ends and (name := _needs_steps(action)) is not None:
                message = f"{what} has a {name} of the next steps, and the run ends there"
                hint = "remove it" if name == "profile" else "write `memory_snapshot` without `history`"
                found.fail(f"schedule.{path}.ends", "X614", path, message, f"{hint}, or use a tick of its own")
    spans = list(_spans(spec, batch))
    for span in spans:
        rule = f"schedule.{span.path}.length"
        if span.period < span.length:
            message = f"every {span.every} {span.action}: it takes {plural(span.length, 'step')}, and the next one is "
            message += f"due after {span.period}"
            found.fail(rule, "X615", span.path, message, f"use a period of {span.length} steps or more")
        else:
            found.passed(rule, f"{span.action} takes {span.length} of every {plural(span.period, 'step')}")
    sound = [span for span in spans if span.period >= span.length]
    told: set[str] = set()
    for one, other in combinations(sound, 2):
        step = meeting(one, other, batch.steps) if one.action == other.action else None
        if step is not None and other.path not in told:
            told.add(other.path)
            message = f"every {other.every} {other.action}: that of every {one.every} is still recording then"
            message += f", after step {step:,} for the first time"
            found.fail(f"schedule.{other.path}.alone", "X615", other.path, message, "keep one of them")


def _needs_steps(action: Action) -> str | None:
    if isinstance(action, ProfileAction):
        return "profile"
    watched = isinstance(action, MemorySnapshotAction) and not isinstance(action.history, Auto) and action.history
    return "history" if watched else None


def _spans(spec: Spec, batch: Arithmetic) -> Iterator[ProfiledSteps]:
    """Those whose period can be counted; of a clock the run sees what it does."""
    for number, tick in enumerate(spec.ticks):
        period = _steps_between(tick, batch)
        if any(isinstance(action, StopAction) for action in tick.actions):
            continue
        for action in tick.actions:
            length, name = 0, ""
            if isinstance(action, ProfileAction):
                length, name = action.wait + action.warmup + action.active, "profile"
            elif isinstance(action, MemorySnapshotAction):
                length, name = history_steps(action, spec), "memory_snapshot"
            if length and period:
                yield ProfiledSteps(f"every.{number}", str(tick.every), name, period, length)


def _steps_between(tick: Tick, batch: Arithmetic) -> int:
    every = counted(tick.every, batch)
    if every is None or every.unit == "seconds":
        return 0
    return int(every.value) if every.unit == "steps" else max(int(every.value) // batch.tokens_per_step, 1)


def meeting(one: ProfiledSteps, other: ProfiledSteps, steps: int | None) -> int | None:
    """The first step after which one begins while the other is under way; None: never."""
    often, rare = sorted((one, other), key=lambda span: span.period)
    whole = lcm(often.period, rare.period)  # from there on it is all the same again
    last = whole if steps is None else min(whole, steps)
    for at in range(rare.period, last + 1, rare.period):
        behind = at % often.period
        following = at + often.period - behind
        if behind < often.length and at > behind:
            return at
        if following < at + rare.length and (steps is None or following <= steps):
            return following
    return None
