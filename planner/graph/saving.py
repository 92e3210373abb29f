"""Nodes and rules of saved state: start, checkpoints, averaged weights, and reactions to steps that are not finite."""

from collections.abc import Sequence
from typing import Any, Final

from xtrain.dsl.schema.actions import Action, stopping
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.amounts import actions_on, only_informs
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.canonical import portable
from xtrain.plan.estimates import Estimates
from xtrain.plan.findings import Findings, checks
from xtrain.plan.graph import INITIAL, Builder, Rule, learns, resumes, stays
from xtrain.plan.mesh import AXES, device_kind
from xtrain.plan.parameters import weight_bytes
from xtrain.plan.resolved import Resolved
from xtrain.plan.timeline import next_due
from xtrain.planner.graph.timeline import Schedule, recurring
from xtrain.text.units import bytes_text, count_text, plural

FORMS: Final = "write `on nan(10) skip`, `on nan(3) rollback` or `on nan stop`"


@frozen
class OnNan:
    """Reaction to bad steps. limit: the `limit`-th bad step in a row triggers the action; the earlier ones are
    skipped."""

    limit: int
    action: Action

    @property
    def bears(self) -> bool:
        """True if the run continues after a bad step."""
        return self.limit > 1


def on_nan(spec: Spec) -> OnNan:
    """Return the reaction of a spec that passed `check_nan`, or the default: the first bad step ends the run."""
    action = next(iter(_deciding(actions_on(spec.events, "nan"))), stopping())
    assert action.nan_limit is not None
    deciding = (event for event in spec.events if event.event == "nan" and not only_informs(event.actions))
    count = next((event.count for event in deciding), None)
    return OnNan(action.nan_limit if count is None else count, action)


def _deciding(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.nan_limit is not None]


def bad_step_text(policy: OnNan) -> str:
    """Return the description of `step.check_finite`."""
    bad = "loss or gradient norm is not finite"
    if policy.action.goes_back:
        end = "rolls back to a checkpoint"
        return f"skip the step if {bad}; the {_nth(policy.limit)} in a row {end}" if policy.bears else (
            f"roll back to a checkpoint if {bad}, before the weights change"
        )  # fmt: skip
    if policy.bears:
        return f"skip the step if {bad}; the {_nth(policy.limit)} in a row stops the run"
    return f"stop if {bad}, before the weights change"


def _nth(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


# Rules ----------------------------------------------------------------------------------------------------------------


@checks("schedule.*.nan", reads="{}.event {}.actions")
@checks("schedule.nan", reads="on.*.event on.*.actions on.*.count")
def check_nan(spec: Spec, schedule: Schedule, batch: Arithmetic, found: Findings) -> None:
    """Check that exactly one reaction to bad steps is declared, at their own event, and that a rollback has a
    checkpoint."""
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
    """Return (path, actions) of ticks and of all events but `nan`."""
    ticks = [(f"every.{number}", tick.actions) for number, tick in enumerate(spec.ticks)]
    return ticks + [(f"on.{number}", each.actions) for number, each in enumerate(spec.events) if each.event != "nan"]


def _wrong(actions: tuple[Action, ...]) -> tuple[str, str] | None:
    """Return (message, hint) unless exactly one reaction is declared; notifications do not count."""
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


@checks(
    "checkpoint.rollback",
    reads="on.*.event on.*.actions every.*.actions every.*.every checkpoint.enabled checkpoint.keep {steps}",
)
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
    """Return True if a checkpoint is saved before the end of the run."""
    for tick in schedule.ticks:
        known = recurring(tick, batch)
        in_steps = known.steps is not None or known.tokens is not None
        late = in_steps and batch.steps is not None and next_due(known, 0, batch.sizes) >= batch.steps
        if any(a.saves for a in tick.actions) and not any(a.stops for a in tick.actions) and not late:
            return True
    return False


UNDER_ADAPTER: Final = f"{INITIAL}; under an adapter the weights that it reads must be the same"


@resumes(
    "setup.ema",
    "format",
    decay=learns("ema.decay", "the averaged weights move by it from here on"),
    every=learns("ema.every", "the averaged weights move at this interval from here on"),
    eval=stays("ema.eval", "other weights are evaluated"),
    publish=stays("ema.publish", "other weights are published"),
)
def add_average(graph: Builder, resolved: Resolved, model: str) -> list[tuple[str, str]]:
    """Add the node of averaged weights; return its id and the value taken from it, or nothing without averages."""
    ema = resolved.spec.ema
    if ema is None:
        return []
    args: dict[str, Any] = {
        "decay": ema.decay,
        "every": ema.every,
        "format": resolved.formats.averages,
        "eval": ema.eval,
        "publish": ema.publish,
    }
    size = bytes_text(
        weight_bytes(resolved.saved, resolved.formats.averages, resolved.formats.frozen, resolved.cuts.base)
    )
    wider = (
        ""
        if resolved.formats.averages == resolved.formats.params
        else f", because {resolved.formats.params} would round updates away"
    )
    does = f"start averaging the weights, sharded like them: {size} in {resolved.formats.averages}{wider}"
    if ema.publish:
        does += "; the average is published"
    return [(graph.add("setup", "setup.ema", does, args=args, after=((model, "model"),)), "averages")]


@checks("ema.every", reads="ema.every {steps}")
def check_average(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Check that the average is updated before the run ends."""
    if spec.ema is None or batch.steps is None:
        return
    every, steps = spec.ema.every, batch.steps
    if every > steps:
        message = (
            f"every {every:,} steps is never reached: the run has {steps:,} steps, and the average is never updated"
        )
        found.warn("ema.every", "W605", "ema.every", message, f"use {steps} or fewer")
    else:
        found.passed("ema.every", f"the average has {plural(steps // every, 'update')}")


def update_text(resolved: Resolved) -> str:
    """Return the description of `step.ema`."""
    ema = resolved.spec.ema
    assert ema is not None
    often = "" if ema.every == 1 else f"after every {plural(ema.every, 'step')}, "
    return f"{often}update the averaged weights, which keep {ema.decay:g} of their value"


# Settings that a run without saves does not need.
OF_WRITING: Final = ("backend", "mode", "overlap", "keep", "best", "best_is", "model", "failures")


def pretrained(spec: Spec) -> str | None:
    """Return the checkpoint whose weights a run starts from. A full state replaces them, unless it is only an
    adapter's."""
    chosen = spec.checkpoint
    return chosen.pretrained if chosen.from_ is None or spec.is_adapted else None


# Saves of one file that must be kept and wait while another is written; the next one waits for space.
WAITING: Final = 2


def copies(spec: Spec) -> int:
    """Return the maximum number of copies of a rank's state in memory for saves that are not written yet."""
    chosen = spec.checkpoint
    if chosen.mode == "sync":
        return 0
    if chosen.backend == "dcp":
        return 1
    newest = chosen.overlap == "latest"
    return 1 + newest + (WAITING if chosen.best is not None or not newest else 0)


def saves_beside(spec: Spec, schedule: Schedule) -> bool:
    """Return True if the state is copied during the next step. The save at the end of the run is not: the run waits for
    it.

    A single file is copied before that step begins, so that several copies can wait to be written.
    """
    ticks = (t for t in schedule.ticks if not any(action.stops for action in t.actions))
    beside = spec.checkpoint.mode != "sync" and spec.checkpoint.backend == "dcp"
    return beside and any(action.saves for tick in ticks for action in tick.actions)


def puts_off(spec: Spec, schedule: Schedule) -> bool:
    """Return True if a save that is due during another save, or after a bad step, is made later."""
    return bool(put_off_text(spec, schedule))


def put_off_text(spec: Spec, schedule: Schedule) -> str:
    """Return the description of `step.put_off_save`; empty if no save is put off."""
    ticks = (t for t in schedule.ticks if not any(action.stops for action in t.actions))
    along = any(action.saves for tick in ticks for action in tick.actions)
    causes = ["after a bad step"] if along and on_nan(spec).bears else []
    if spec.checkpoint.overlap == "latest" and saves_beside(spec, schedule):
        causes.insert(0, "while another checkpoint was being written")
    return f"make a save that was due {' or '.join(causes)}, once that is over" if causes else ""


@resumes("setup.pretrained", switch=True, path=learns("checkpoint.pretrained", UNDER_ADAPTER))
def add_pretrained(graph: Builder, resolved: Resolved, last: str) -> str:
    path = pretrained(resolved.spec)
    if path is None:
        return last
    does = f"start from the weights of {path}; a resumed run reads its own checkpoint instead"
    does += "; a reward head missing there keeps its initial values" if not resolved.architecture.has_logits else ""
    return graph.add("setup", "setup.pretrained", does, args={"path": portable(path)}, after=((last, "model"),))


@resumes("setup.base", "parameters")
def add_base(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the node that identifies parameters outside checkpoints by their content, after all of them have their
    values."""
    if resolved.saves_base:
        return last
    count = resolved.inventory.total - resolved.inventory.trained
    does = f"hash {count_text(count)} frozen parameters; a checkpoint has their digest "
    does += "instead of their values, and is refused on another base"
    args = {"parameters": count}
    return graph.add("setup", "setup.base", does, args=args, axes=resolved.wide(*AXES), after=((last, "model"),))


@resumes(
    "setup.resume",
    "resume",
    harmless="checkpoint.verify",
    origin=Rule("checkpoint.from", "none", "it only affects the start of a run"),
)
def add_resume(
    graph: Builder, resolved: Resolved, estimates: Estimates, after: tuple[str | tuple[str, str], ...]
) -> str:
    """Add the nodes that read and prepare to write a full state; return the last node of the setup."""
    chosen = resolved.spec.checkpoint
    own = "resume from the latest checkpoint of this run"
    origin = f"the state of {chosen.from_}" if chosen.from_ is not None else "step 0"
    start = f"{own}, if any, else start from {origin}" if chosen.resume else f"start from {origin}"
    if chosen.from_ is None:
        start = f"{own}, if any" if chosen.resume else "start at step 0"
    args: dict[str, Any] = {
        "resume": chosen.resume,
        "origin": None if chosen.from_ is None else portable(chosen.from_),
        "verify": chosen.verify,
    }
    does = f"{start}; verify {'checksums' if chosen.verify == 'content' else 'file sizes'}"
    last = graph.add("setup", "setup.resume", does, args=args, axes=resolved.wide(*AXES), after=after)
    last = _residual(graph, resolved, last)
    return _saving(graph, resolved, estimates, last) if chosen.enabled else last


@resumes("setup.residual", "matrices")
def _residual(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the node that subtracts an adapter's initial part from its matrices, whatever its source."""
    adapter = resolved.architecture.adapter
    if adapter is None or not adapter.decomposes:
        return last
    names = {tensor.adapter for tensor in resolved.inventory.tensors if tensor.begun}
    does = f"replace {plural(len(names), 'matrix')} by W − s · B · A, with the adapter's initial A and B"
    if any(tensor.quantised for tensor in resolved.inventory.tensors if tensor.name in names):
        does += "; a quantized W is read or drawn again, and the difference is stored instead"
    args = {"matrices": len(names)}
    return graph.add("setup", "setup.residual", does, args=args, axes=resolved.wide(*AXES), after=(last,))


@resumes(
    "setup.checkpoint",
    switch=True,
    harmless="checkpoint.backend checkpoint.keep checkpoint.mode checkpoint.overlap checkpoint.best "
    "checkpoint.failures copies=checkpoint.mode highest=checkpoint.best_is",
)
def _saving(graph: Builder, resolved: Resolved, estimates: Estimates, last: str) -> str:
    chosen, on_cpu = resolved.spec.checkpoint, device_kind(resolved.spec) == "cpu"
    keep = chosen.keep
    newest = "keep one checkpoint" if keep == 1 else f"keep the newest {keep} checkpoints"
    parts = ["keep every checkpoint" if keep is None else newest]
    if chosen.best is not None:
        parts.append(f"and the one with the {'highest' if chosen.best_is_highest else 'lowest'} {chosen.best}")
    if chosen.backend == "file":
        parts.append("each one file, also named by latest.pt, best.pt and model.pt")
    if chosen.mode != "sync":
        share = estimates.copy_bytes
        locked = "page-locked" if chosen.mode == "async_pinned" and not on_cpu else "host"
        number = copies(resolved.spec)
        beside = f"a copy in {locked} memory, about {bytes_text(share)} a rank"
        if chosen.backend == "file":
            beside = f"at most {number} copies in {locked} memory, about {bytes_text(number * share)} together"
        parts.append(f"written during training from {beside}")
    args: dict[str, Any] = {
        "backend": chosen.backend,
        "keep": keep,
        "mode": "async" if chosen.mode == "async_pinned" and on_cpu else chosen.mode,
        "copies": copies(resolved.spec),
        "overlap": "wait" if chosen.mode == "sync" else chosen.overlap,  # no save comes during another one
        "best": None if chosen.best is None else chosen.best.key,
        "failures": chosen.failures,
        **({"highest": True} if chosen.best is not None and chosen.best_is_highest else {}),
    }
    return graph.add("setup", "setup.checkpoint", ", ".join(parts), args=args, axes=resolved.wide(*AXES), after=(last,))


# Rules ----------------------------------------------------------------------------------------------------------------


@checks("checkpoint.backend", reads="checkpoint.backend checkpoint.enabled {world}")
def check_backend(spec: Spec, world: int, found: Findings) -> None:
    """Check that a single file has a single writer."""
    rule = path = "checkpoint.backend"
    if spec.checkpoint.backend != "file" or not spec.checkpoint.enabled:
        return
    if world > 1:
        message = f"a checkpoint of one file is written by one process, and this run has {world:,} ranks"
        found.fail(rule, "X621", path, message, "use `backend = dcp`, where every rank writes a part")
    else:
        found.passed(rule, "one process writes the one file")
