"""What a run does about steps whose loss or gradient norm is not a number: `on nan(n) …`, its default and its rules."""

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from xtrain.dsl.schema.actions import Action, stopping
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.graph.timeline import Schedule
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.stops import actions_on, counted, only_informs

FORMS: Final = "write `on nan(10) skip`, `on nan(3) rollback` or `on nan stop`"


@frozen
class OnNan:
    """limit: the `limit`-th bad step in a row brings about the action; those before it are left out."""

    limit: int
    action: Action

    @property
    def bears(self) -> bool:
        """Whether the run goes on after a bad step."""
        return self.limit > 1


def on_nan(spec: Spec) -> OnNan:
    """What a spec that has passed `check_nan` says, or the default: the first bad step ends the run."""
    action = next(iter(_deciding(actions_on(spec.events, "nan"))), stopping())
    assert action.nan_limit is not None
    deciding = (event for event in spec.events if event.event == "nan" and not only_informs(event.actions))
    count = next((event.count for event in deciding), None)
    return OnNan(action.nan_limit if count is None else count, action)


def _deciding(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.nan_limit is not None]


def bad_step_text(policy: OnNan) -> str:
    """What `step.check_finite` does, in a line."""
    bad = "loss or gradient norm is not a number"
    if policy.action.goes_back:
        end = "goes back to a checkpoint"
        return f"leave the step out if {bad}; the {_nth(policy.limit)} in a row {end}" if policy.bears else (
            f"go back to a checkpoint if {bad}, before it reaches the weights"
        )  # fmt: skip
    if policy.bears:
        return f"leave the step out if {bad}; the {_nth(policy.limit)} in a row ends the run"
    return f"stop if {bad}, before it reaches the weights"


def _nth(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


# Rules ----------------------------------------------------------------------------------------------------------------


def check_nan(spec: Spec, schedule: Schedule, batch: Arithmetic, found: Findings) -> None:
    """One thing is done about bad steps, at their own event; who goes back needs something to go back to."""
    for path, actions in _elsewhere(spec):
        wrong = next((action for action in actions if action.only_nan), None)
        if wrong is not None:
            name = wrong.kind
            message = f"{name} concerns non-finite steps, and is only allowed after `on nan`"
            found.fail(f"schedule.{path}.nan", "X612", path, message, f"write `on nan(3) {name}`")
    places = [f"on.{number}" for number, event in enumerate(spec.events) if event.event == "nan"]
    if not places:
        return
    path, actions = places[-1], actions_on(spec.events, "nan")
    if (wrong := _wrong(actions)) is not None:
        found.fail("schedule.nan", "X612", path, *wrong)
        return
    policy = on_nan(spec)
    if policy.action.skips and not policy.bears:
        message = f"on nan(1) {policy.action.kind}: the first bad step would end the run, and no step would be skipped"
        found.fail("schedule.nan", "X612", path, message, "write `on nan(2) skip` or more, or `on nan stop`")
        return
    if late := [count for count in schedule.bad_steps if count is not None and count > policy.limit]:
        message = f"on nan({late[0]}) notify never happens: {bad_step_text(policy)}"
        found.fail("schedule.nan", "X612", path, message, f"write `on nan({policy.limit}) notify(…)`, or fewer")
        return
    found.passed("schedule.nan", bad_step_text(policy))
    if policy.action.goes_back:
        _check_rollback(spec, schedule, batch, path, found)


def _elsewhere(spec: Spec) -> list[tuple[str, tuple[Action, ...]]]:
    """Actions of ticks and of other events, with where they stand."""
    ticks = [(f"every.{number}", tick.actions) for number, tick in enumerate(spec.ticks)]
    return ticks + [(f"on.{number}", each.actions) for number, each in enumerate(spec.events) if each.event != "nan"]


def _wrong(actions: tuple[Action, ...]) -> tuple[str, str] | None:
    """(message, hint) if not exactly one thing is done; who is told beside it is another matter."""
    if actions and only_informs(actions):
        return None
    actions = tuple(action for action in actions if not action.informs)
    if any(action.saves for action in actions):
        message = "on nan has `checkpoint`: the weights may be damaged, and `latest` would name them"
        return message, f"remove `checkpoint`; the last good checkpoint stays the latest. {FORMS.capitalize()}"
    deciding = _deciding(actions)
    if not deciding:
        return "on nan lacks skip, rollback or stop", FORMS
    if other := next((action.kind for action in actions if action not in deciding), None):
        return f"on nan has `{other}`, which does nothing about a bad step", f"remove `{other}`"
    if len(actions) > 1:
        return "on nan has exactly one of skip, rollback and stop; bad steps are reported in any case", FORMS
    return None


def _check_rollback(spec: Spec, schedule: Schedule, batch: Arithmetic, path: str, found: Findings) -> None:
    rule = "checkpoint.rollback"
    if not spec.checkpoint.enabled:
        message = "on nan rollback needs a checkpoint, and with checkpoint.enabled = false none is saved"
        found.fail(rule, "X613", path, message, "set checkpoint.enabled = true, or write `on nan(10) skip`")
    elif not saves_periodically(schedule, batch):
        message = "on nan rollback needs a checkpoint, and none is saved during the run"
        found.warn(
            rule,
            "W604",
            path,
            message,
            "add a tick that comes before the end of the run, such as `every 500 steps checkpoint`",
        )
    elif spec.checkpoint.keep == 1:
        message = "on nan rollback has only one checkpoint to go back to: if that is affected, there is no older one"
        found.warn(rule, "W604", path, message, "set checkpoint.keep = 2 or more")
    else:
        found.passed(rule, "checkpoints are saved during the run, and more than one is kept")


def saves_periodically(schedule: Schedule, batch: Arithmetic) -> bool:
    """Whether a checkpoint is saved that the run does not end with."""
    for tick in schedule.ticks:
        every = counted(tick.every, batch)
        late = every is not None and every.unit == "steps" and batch.steps is not None and every.value >= batch.steps
        if any(a.saves for a in tick.actions) and not any(a.stops for a in tick.actions) and not late:
            return True
    return False
