"""Rules on the course of a run: its checkpoint, first step and budget, its phases, metrics that decide about
checkpoints and ends, and profiles that span steps."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from math import ceil, floor, lcm
from pathlib import Path
from typing import Final

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.actions import ENDINGS, Action, Tick
from xtrain.dsl.schema.component import planned
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import MeasuredNumber
from xtrain.lazy_attrs import frozen
from xtrain.plan.amounts import build_phases, counted, limit_args, start_of, trainable
from xtrain.plan.arithmetic import Arithmetic, rows_of_step
from xtrain.plan.checkpoints import ALIAS, FOLDER, FULL, STATE, look_at
from xtrain.plan.findings import Findings, checks
from xtrain.plan.plan import PlanPhase
from xtrain.plan.step_sizes import StepSizes, past_of
from xtrain.plan.timeline import is_due, steps_due, times_due
from xtrain.planner.data.training import is_measured
from xtrain.planner.graph.saving import pretrained
from xtrain.planner.graph.timeline import Schedule, recurring
from xtrain.regular_files import read_json, read_regular
from xtrain.text.units import amount_in_epochs, plural

# Pointers to a full checkpoint.
NAMES: Final = ("latest", "best")


@frozen
class CheckpointState:
    """State that `checkpoint.from` names: its step, and the rows of the steps before it, None if unknown."""

    step: int
    past: StepSizes | None


def begins_at(path: Path) -> CheckpointState | None:
    """Return the state that `checkpoint.from` names: a checkpoint, a pointer to one, or the latest of a folder of
    checkpoints or of a run. None if names do not tell; the run checks that it is intact."""
    if path.suffix == ALIAS:
        path = path.with_suffix("") if path.stem in NAMES else path.parent
    try:
        for pointer in (path, path / "latest", path / "checkpoints" / "latest"):
            if pointer.name in NAMES and pointer.is_file():
                path = pointer.parent / read_regular(pointer, 1000).decode().strip()
                match = FULL.fullmatch(path.name)
                return CheckpointState(int(match[1]), _past(path)) if match else None
        match = FULL.fullmatch(path.name)
        return CheckpointState(int(match[1]), _past(path)) if match and path.is_dir() else None
    except (OSError, UnicodeDecodeError):
        return None


def _past(checkpoint: Path) -> StepSizes | None:
    try:
        return past_of(read_json(checkpoint / STATE))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def resumed_batch(spec: Spec, batch: Arithmetic) -> Arithmetic:
    """Return the steps of a run that resumes with another batch, otherwise `batch`.

    Lengths must fit into the remaining steps. `workspace.run` or `checkpoint.from` names a run with another batch.
    """
    beginning, workspace = None, spec.workspace
    if batch.done_steps or not batch.rows:
        return batch
    if workspace.run is not None and spec.checkpoint.resume:
        beginning = begins_at(Path(workspace.root) / (workspace.lineage or spec.experiment.name) / workspace.run)
    if beginning is None and spec.checkpoint.from_ is not None:
        beginning = begins_at(Path(spec.checkpoint.from_))
    if beginning is None or beginning.past is None:
        return batch
    ahead = batch.resumed(beginning.past, beginning.step, beginning.past.before(beginning.step))
    return batch if ahead.past is None else ahead


def check_beginning(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Check that a run starts from a checkpoint, and that its steps continue the steps of a full state."""
    for setting, named in (("from", spec.checkpoint.from_), ("pretrained", pretrained(spec))):
        if named is not None:
            _check_place(spec, setting, named, found)
    _check_step(spec, batch, found)


@checks("checkpoint.*.place", reads="checkpoint.from checkpoint.{} checkpoint.resume workspace.* experiment.name")
def _check_place(spec: Spec, setting: str, named: str, found: Findings) -> None:
    """Check the path of a checkpoint. A missing one may appear later, or exist on the machines that run; an existing
    one must be a checkpoint."""
    rule, path, there = f"checkpoint.{setting}.place", f"checkpoint.{setting}", look_at(Path(named))
    if there == "full" or (there == "weights" and setting == "pretrained"):
        found.passed(rule, f"{named} holds {'weights' if there == 'weights' else 'a checkpoint'}")
        return
    if there in ("missing", "later"):
        message = f"{path}: {named} does not exist" if there == "missing" else f"{path}: {named} has no checkpoint yet"
        found.warn(rule, "W501", path, message, "paths are relative to the working folder; the run looks again")
        return
    message, hint = (
        f"{path}: {named} is neither a checkpoint nor a run",
        "give a run, or a checkpoint `ckpt-s…` of a run",
    )
    if there == "weights":
        message = f"{path}: {named} holds only weights"
        hint = "use `pretrained` for weights only, or give a full checkpoint (`ckpt-s…`)"
    if _may_go_on(spec):
        found.warn(rule, "W501", path, message, f"{hint}; a resumed run does not need it")
    else:
        found.fail(rule, "X720", path, message, hint)


def _may_go_on(spec: Spec) -> bool:
    """Return True if a run of this name has saved something that it may resume from; whether it is this run depends on
    the code too."""
    runs = Path(spec.workspace.root) / (spec.workspace.lineage or spec.experiment.name)
    return spec.checkpoint.resume and next(runs.glob(f"*/{FOLDER}/ckpt-s*"), None) is not None


@checks("checkpoint.from", reads="checkpoint.from {steps}")
@checks("checkpoint.from.stop_at", reads="checkpoint.from launch.stop_at {steps} {tokens}")
def _check_step(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Check that steps are left after the steps of the state that a run starts from.

    Only a warning: a run with checkpoints of its own resumes from these, however far the other run is by now.
    """
    origin = spec.checkpoint.from_
    beginning = begins_at(Path(origin)) if origin is not None else None
    if beginning is None:
        return
    step, counts, more = beginning.step, "steps", f"{beginning.step + (batch.steps or 0)} steps"
    batch = resumed_batch(spec, batch)
    if batch.budget_tokens is not None and beginning.past is not None:
        tokens = batch.budget_tokens + beginning.past.before(step) * batch.sequence
        counts, more = "tokens", f"{tokens} tokens"
    begins = f"{origin} is a checkpoint of step {step:,}"
    if batch.steps is not None and step >= batch.steps:
        message = f"{begins} and the budget ends with step {batch.steps:,}: nothing is left to train"
        hint = (
            f"the {counts} of the checkpoint count: use more, such as `budget = {more}`; "
            "for the weights alone, from step 0: checkpoint.pretrained"
        )
        found.warn("checkpoint.from", "W608", "experiment.budget", message, hint)
    stop = limit_args(spec.launch, batch).get("stop_at")
    if stop is not None and step >= stop:
        message = f"{begins} and stop_at is step {stop:,}: the run stops before its first step"
        found.warn("checkpoint.from.stop_at", "W608", "launch.stop_at", message, f"use more than {step} steps")


def check_phases(spec: Spec, batch: Arithmetic, found: Findings) -> tuple[PlanPhase, ...]:
    """Check the starts of phases; return the phases of the run in order, valid only if nothing failed."""
    for name in spec.phases:
        _check_start(spec, name, batch, found)
    _check_order(spec, batch, found)
    phases = build_phases(spec, batch)
    _check_exact(spec, phases, batch, found)
    _check_idle(spec, phases, found)
    return phases


@checks("schedule.phase.*.start", reads="phase.{}.from {steps} batch.sequence {rows}")
def _check_start(spec: Spec, name: str, batch: Arithmetic, found: Findings) -> None:
    """Check that a phase begins before the run ends."""
    start, rule, path = spec.phases[name].from_, f"schedule.phase.{name}.start", f"phase.{name}.from"
    first = start_of(start, batch)
    hint = "use `from = 90%`, or remove the phase"
    if start.unit == "%" and start.fraction >= 1:
        found.fail(rule, "X607", path, f"phase {name} begins at {start} of the budget, when the run is over", hint)
    elif start.unit == "epochs" and batch.epochs is not None and start.value >= batch.epochs:
        message = f"phase {name} begins at {start}, and the run has {amount_in_epochs(batch.epochs)}"
        found.fail(rule, "X607", path, message, hint)
    elif first is None or batch.steps is None:
        found.unknown(rule, f"{name} begins at {start}: the number of steps is unknown until the data is counted")
    elif first >= batch.steps:
        where = f"{start}, before step {first + 1:,}" if start.unit != "steps" else f"{start}"
        message = f"phase {name} begins at {where}, and the run has {plural(batch.steps, 'step')}"
        found.fail(rule, "X607", path, message, hint)
    else:
        found.passed(rule, f"{name} begins at {start}, with step {first + 1:,} of {batch.steps:,}")


@checks("schedule.phases", reads="phase.*.from {steps}")
@checks("schedule.phase.*.order", reads="phase phase.*.from {steps} batch.sequence {rows}")
def _check_order(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Check that no two phases begin with the same step; starts in uncounted amounts are compared only if equal."""
    seen: dict[tuple[str, float], str] = {}
    units: set[str] = set()
    for name, phase in spec.phases.items():
        rule, path = f"schedule.phase.{name}.order", f"phase.{name}.from"
        first = start_of(phase.from_, batch)
        at = ("step", float(first)) if first is not None else (phase.from_.unit, float(phase.from_.value))
        earlier = seen.setdefault(at, name)
        if earlier != name:
            step = f"step {first + 1:,}" if first is not None else f"{phase.from_}"
            message = f"phases {earlier} and {name} both begin with {step}"
            found.fail(rule, "X606", path, message, "start one of them later, or merge them")
            continue
        if at[1]:  # the start of the run is the same in any unit
            units.add(at[0])
    if len(units) > 1:
        rule = "schedule.phases"
        found.unknown(rule, "which phase comes first is unknown until the data is counted")


@checks("data.exact", reads="{datasets} mixture.* phase phase.*.mix batch.*")
@checks("idle.mixture.exact", reads="{datasets} mixture.* phase phase.*.mix")
def _check_exact(spec: Spec, phases: tuple[PlanPhase, ...], batch: Arithmetic, found: Findings) -> None:
    """Check that each dataset has whole rows in every step with `exact`."""
    if not spec.mixture.exact:
        return
    rule, path = "data.exact", "mixture.exact"
    if any(phase.passes is not None for phase in phases):
        message = "exact shares of a step need weights as shares, and these are in epochs"
        found.fail(rule, "X526", path, message, "leave it out, or give weights without `epochs`")
    elif batch.ramp:
        message = "exact shares need the same number of rows in every step, and a ramp changes it"
        found.fail(rule, "X526", path, message, "leave out `exact`, or `ramp_from` of batch")
    elif phases[0].exact_rows is None:
        message = "exact changes nothing, because only one dataset is trained on"
        found.warn("idle.mixture.exact", "W401", path, message, "remove it")
    else:
        for phase in phases:
            taken = dict(zip(phase.shares, rows_of_step(phase, tuple(phase.shares), batch.rows), strict=True))
            if (odd := next((name for name, rows in taken.items() if rows.denominator != 1), None)) is not None:
                message = f"{phase.shares[odd]:.4g} of {plural(batch.rows, 'row')} a step, the share of {odd}, "
                message += f"is {float(taken[odd]):.4g} rows"
                found.fail(rule, "X526", path, message, "choose weights or `batch { rows }` so that they are whole")
                return
        found.passed(rule, "every dataset has whole rows in every step")


def _learned_by(phase: PlanPhase) -> tuple[object, ...]:
    return phase.shares, phase.passes, *phase.learned


def _check_idle(spec: Spec, phases: tuple[PlanPhase, ...], found: Findings) -> None:
    """Warn of a phase that is equal to the one before it."""
    if found.failed or not trainable(spec):
        return
    for before, phase in pairwise(phases):
        if _learned_by(before) == _learned_by(phase):
            message = f"phase {phase.name} changes nothing: shares and learning rate equal the ones of {before.name}"
            hint = "give it a `mix` or an `lr_scale`, or remove it"
            found.warn(f"idle.phase.{phase.name}", "W401", f"phase.{phase.name}", message, hint)


MOST_STARTS: Final = 100_000  # starts of one kind of action that are compared with each other


@frozen
class ProfiledSteps:
    """Tick whose action spans the following steps. period: in steps, rarely whole for tokens or epochs; at least 1."""

    path: str
    every: str
    action: str
    period: Fraction
    length: int

    def start(self, number: int) -> int:
        """Return the step after which it begins for the n-th time, from 1."""
        return -(-number * self.period.numerator // self.period.denominator)

    def first_overlap(self) -> tuple[int, int] | None:
        """Return the first two consecutive starts with too few steps between them; None if there are none."""
        if self.length <= floor(self.period):
            return None
        # With a fractional period some gaps are a step shorter than the others: the first of these ends where the
        # roundings of the starts add up to a whole step.
        short = ceil(self.period) - self.period
        second = 2 if self.length > ceil(self.period) else ceil(1 / short)
        return self.start(second - 1), self.start(second)


@checks("schedule.*.ends", reads="{}.event {}.actions {}.actions.*")
@checks("schedule.*.length", reads="{}.every {}.actions {}.actions.* launch.device cluster.preset {tokens}")
@checks(
    "schedule.*.alone",
    reads="every.*.every every.*.actions every.*.actions.* launch.device cluster.preset {steps} {tokens}",
)
def check_profiles(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Check that profiles have following steps to record, and do not overlap."""
    places = [(f"every.{number}", "a tick", tick.actions) for number, tick in enumerate(spec.ticks)]
    places += [(f"on.{number}", f"on {each.event}", each.actions) for number, each in enumerate(spec.events)]
    for path, what, actions in places:
        ends = any(action.stops for action in actions) or what.removeprefix("on ") in ENDINGS
        for action in actions:
            if ends and (needed := action.needs_steps()) is not None:
                name, hint = needed
                message = f"{what} has a {name} of the next steps, and the run ends there"
                found.fail(f"schedule.{path}.ends", "X614", path, message, f"{hint}, or use a tick of its own")
    spans = list(_spans(spec, batch))
    possible = []
    for span in spans:
        rule, overlap = f"schedule.{span.path}.length", span.first_overlap()
        if overlap is not None and (batch.steps is None or overlap[1] <= batch.steps):
            first, second = overlap
            message = f"every {span.every} {span.action}: it takes {plural(span.length, 'step')}, and the next one is "
            message += f"due after {second - first}"
            found.fail(rule, "X615", span.path, message, f"use a period of {span.length} steps or more")
        else:
            possible.append(span)
            shown = plural(int(span.period), "step")
            found.passed(rule, f"{span.action} takes {span.length} of every {shown}")
    for action in dict.fromkeys(span.action for span in possible):
        same = [span for span in possible if span.action == action]
        for other, one, step in meetings(same, batch.steps):
            message = f"every {other.every} {action}: the one of every {one.every} is still recording then"
            message += f", after step {step:,} for the first time"
            found.fail(f"schedule.{other.path}.alone", "X615", other.path, message, "keep one of them")


def _spans(spec: Spec, batch: Arithmetic) -> Iterator[ProfiledSteps]:
    """Yield the ticks whose period can be counted; ticks by the clock are handled by the run."""
    for number, tick in enumerate(spec.ticks):
        period = _steps_between(tick, batch)
        if any(action.stops for action in tick.actions):
            continue
        for action in tick.actions:
            if (length := planned(action, PlannedAction).length(spec)) and period:
                yield ProfiledSteps(f"every.{number}", str(tick.every), action.kind, period, length)


def _steps_between(tick: Tick, batch: Arithmetic) -> Fraction | None:
    every = counted(tick.every, batch)
    if every is None or every.unit == "seconds":
        return None
    # Steps of a ramp have fewer tokens, so more of them lie between.
    return max(Fraction(every.value) / (1 if every.unit == "steps" else batch.tokens_per_step), Fraction(1))


def meetings(spans: Sequence[ProfiledSteps], steps: int | None) -> Iterator[tuple[ProfiledSteps, ProfiledSteps, int]]:
    """Yield each span that meets an earlier one of the list, that one, and the first step after which one of them
    begins while the other is running, within the examined starts. A yielded span is left out from that step on."""
    whole = lcm(*(span.period.numerator for span in spans))  # from there on everything repeats
    last = whole if steps is None else min(whole, steps)
    upcoming = [(span.start(1), place, 1) for place, span in enumerate(spans)]
    heapify(upcoming)
    left, running, end = set(range(len(spans))), -1, 0
    for _ in range(MOST_STARTS):
        if len(left) < 2 or upcoming[0][0] > last:
            return
        at, place, number = upcoming[0]
        if place in left and at < end and running not in (place, -1):
            earlier, later = sorted((running, place))
            yield spans[later], spans[earlier], at
            left.remove(later)
        if place not in left:
            heappop(upcoming)
            continue
        heapreplace(upcoming, (spans[place].start(number + 1), place, number + 1))
        running, end = place, at + spans[place].length


@checks("checkpoint.best.direction", reads="checkpoint.best checkpoint.best_is checkpoint.enabled")
@checks(
    "checkpoint.best",
    reads="checkpoint.best checkpoint.best_is hook.* checkpoint.enabled dataset dataset.*.name every.*.actions "
    "every.*.every on.*.event on.*.actions {steps}",
)
@checks(
    "checkpoint.best.objective",
    reads="checkpoint.best every.*.actions dataset dataset.* loss.* rollout.* evaluation_step.* collate",
)
def check_saving(spec: Spec, schedule: Schedule, batch: Arithmetic, found: Findings) -> None:
    """Check that the metric of the best checkpoint is measured at steps that save."""
    chosen = spec.checkpoint
    if chosen.best is not None and chosen.enabled:
        use = MetricUse("checkpoint.best", "checkpoint.best", "best", chosen.best, chosen.best_is)
        without = "a checkpoint is saved, so no checkpoint is the best", "checkpoints are saved"
        _check_metric(spec, schedule, batch, use, lambda action: action.saves, without, found)


@checks("every.metric.direction", reads="every.*.actions")
@checks(
    "every.metric",
    reads="hook.* dataset dataset.*.name every.*.actions every.*.every on.*.event on.*.actions {steps}",
)
@checks("every.metric.objective", reads="every.*.actions dataset dataset.* loss.* rollout.* evaluation_step.* collate")
def check_awaited(spec: Spec, schedule: Schedule, batch: Arithmetic, found: Findings) -> None:
    """Check that metrics that decide about an action are measured in its steps."""
    for path, action in spec.actions:
        if (metric := action.awaits()) is not None:
            use = MetricUse("every.metric", f"{path}.metric", "metric", metric[0], metric[1])
            without = f"{action.kind} is due, so it does nothing", f"{action.kind} is due"
            _check_metric(spec, schedule, batch, use, lambda other, this=action: other == this, without, found)


@frozen
class MetricUse:
    """Use of a measured metric by a setting. path: place of the setting. name: its name. is_: `lowest`, `highest` or
    `auto`, as the setting `NAME_is` says."""

    rule: str
    path: str
    name: str
    metric: MeasuredNumber
    is_: str


def _check_metric(
    spec: Spec,
    schedule: Schedule,
    batch: Arithmetic,
    use: MetricUse,
    uses: Callable[[Action], bool],
    without: tuple[str, str],
    found: Findings,
) -> None:
    """Check that a metric exists, that its better values are known, and that it is measured in a step with an action
    that `uses` it. without: (what else never happens, when to evaluate), in words."""
    metric, rule, path = use.metric, use.rule, use.path
    if use.is_ == "auto" and metric.better is None:
        message = f"it is unknown whether a low or a high {metric} is better"
        found.fail(f"{rule}.direction", "X620", path, message, f"add `{use.name}_is = highest`, or `lowest`")
    if metric.hook is not None:
        _check_hook(spec, metric.hook, use, found)
        return
    assert metric.dataset is not None
    measures = [t for t in schedule.ticks if any(action.held_out() == metric.dataset for action in t.actions)]
    if metric.dataset not in spec.datasets:
        hint = did_you_mean(metric.dataset, spec.datasets) or f"datasets: {', '.join(spec.datasets)}"
        message = f"{use.name} uses {metric.what} on {metric.dataset}, and there is no such dataset"
        found.fail(rule, "X620", path, message, hint)
    elif not measures:
        hint = f"add `every 500 steps eval {metric.dataset}`"
        found.fail(rule, "X620", path, f"{use.name} uses {metric}, and no tick evaluates it", hint)
    elif metric.what not in (known := _measured(spec, metric.dataset, measures)):
        message = f"{use.name} uses {metric}, and evaluations of {metric.dataset} measure {', '.join(known)}"
        other = did_you_mean(metric.what, known) or f"write `{use.name} = eval.{metric.dataset}.{known[0]}`"
        found.fail(f"{rule}.objective", "X620", path, message, other)
    elif batch.steps is not None and not _meet(schedule, measures, metric.dataset, batch, uses):
        message = f"{metric} is never evaluated in a step in which {without[0]}"
        found.warn(rule, "W602", path, message, f"evaluate {metric.dataset} as often as {without[1]}")
    else:
        found.passed(rule, f"{metric} is measured where {without[1]}")


def _measured(spec: Spec, name: str, ticks: list[Tick]) -> list[str]:
    """Return the metrics of the evaluations of a dataset; only the run knows the number of bytes of its text."""
    dataset, loss = spec.datasets[name], spec.loss
    if dataset.choices is not None:
        return ["loss", "acc", "acc_norm", "acc_bytes"]
    answered = any(action.asks() is not None for tick in ticks for action in tick.actions if action.held_out() == name)
    found = ["loss", *(["reward"] if answered else [])]
    if spec.evaluation_step is not None:
        return found
    return [*found, "bits_per_byte", *(("objective", *loss.measured) if is_measured(spec, name) else ())]


def _check_hook(spec: Spec, name: str, use: MetricUse, found: Findings) -> None:
    """Check that a hook whose metric decides is called before the actions of the same step."""
    rule, path = use.rule, use.path
    hook = spec.hooks.get(name)
    if hook is None:
        hint = did_you_mean(name, spec.hooks) or f"hooks: {', '.join(spec.hooks) or 'none'}"
        found.fail(rule, "X620", path, f"{use.name} uses a metric of the hook {name}, and there is no such hook", hint)
    elif (place := hook.declared["place"]) not in ("after_step", "after_evaluation"):
        message = f"{use.name} uses a metric of the hook {name}, which is called {place}"
        found.fail(rule, "X620", path, message, 'use a hook of "after_evaluation" or "after_step"')
    else:
        found.passed(rule, f"the hook {name} may measure it {place}")


def _meet(
    schedule: Schedule, measures: list[Tick], dataset: str, batch: Arithmetic, uses: Callable[[Action], bool]
) -> bool:
    """Return True if a measurement ever falls into a step with an action that `uses` it, or into the end of the run if
    that has one. True if that depends on the clock."""
    assert batch.steps is not None
    ticks = [t for t in schedule.ticks if any(map(uses, t.actions))]
    first = next(action for action in measures[0].actions if action.held_out() == dataset)
    measures = [t for t in measures if any(action.measures_like(first, batch.steps) for action in t.actions)]
    if any(_share_a_step(one, other, batch) for one in measures for other in ticks):
        return True
    if not any(map(uses, schedule.events["finish"])):
        return False
    ends = any(action.measures_like(first, batch.steps) for action in schedule.events["finish"])
    known = [tick for each in measures if (tick := recurring(each, batch)).steps or tick.tokens]
    return ends or any(is_due(tick, batch.steps, batch.sizes) for tick in known)


def _share_a_step(one: Tick, other: Tick, batch: Arithmetic) -> bool:
    """Return True if two ticks ever fire in the same step, or if that depends on the clock."""
    steps, each = batch.steps or 0, batch.sizes
    known = [tick for tick in (recurring(one, batch), recurring(other, batch)) if tick.steps or tick.tokens]
    if len(known) < 2:
        return True
    combined = steps_due(known, steps, each)
    return combined is None or combined < sum(times_due(tick, steps, each) for tick in known)
