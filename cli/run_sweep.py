"""`xtrain run` and `xtrain launch` of a spec with `sweep`: the trials, and the lines that report them.

Each trial is an `xtrain run` of its own, on this machine or in a job.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from xtrain.cli.verb import Refused, counted, report
from xtrain.lazy_attrs import define
from xtrain.records.lines import Event, line_of
from xtrain.records.sweep import (
    SweepEndEvent,
    TrialAskedEvent,
    TrialDecidedEvent,
    TrialFailedEvent,
    TrialMeasuredEvent,
    TrialStartedEvent,
)

if TYPE_CHECKING:
    from xtrain.dsl.schema.cluster import Launcher
    from xtrain.plan.plan import Plan
    from xtrain.planner.compile_sweep import SweepPlan, Trials
    from xtrain.runtime.jobs.trials import JobTrials, LocalTrials, TrialLauncher, TrialStart


@define(eq=False)
class SweepLines:
    """Prints the events of a sweep: `json` as they are written, `none` not at all, otherwise a line each."""

    plan: "SweepPlan"
    ui: str

    def show(self, event: Event) -> None:
        if self.ui == "json":
            sys.stdout.write(line_of(event).decode())
        elif self.ui != "none" and (text := self._text(event)):
            print(text)
        sys.stdout.flush()

    def _text(self, event: Event) -> str:
        match event:
            case TrialAskedEvent(trial=number, same_as=int(same)):
                return f"trial {number:03d}  equal to {same:03d}, which runs instead"
            case TrialAskedEvent(trial=number, reason=reason) if reason:
                return f"trial {number:03d}  has no plan: {reason}"
            case TrialAskedEvent(trial=number, point=point):
                return f"trial {number:03d}  {', '.join(f'{name}={value}' for name, value in point.items())}"
            case TrialStartedEvent(trial=number, rung=None):
                return f"trial {number:03d}  trains to its end"
            case TrialStartedEvent(trial=number, rung=int(rung)):
                return f"trial {number:03d}  trains to {self.plan.rungs[rung]}"
            case TrialMeasuredEvent(trial=number, value=value, trained=steps):
                return f"trial {number:03d}  {self.plan.objective} {value_text(value)} after {steps:,} steps"
            case TrialDecidedEvent(trial=number, goes_on=goes_on, place=place, of=of):
                return f"trial {number:03d}  {'continues' if goes_on else 'is stopped'}: place {place} of {of}"
            case TrialFailedEvent(trial=number, exit_code=code):
                return f"trial {number:03d}  has failed, exit code {code}; logs in {self.plan.folder}/logs"
            case SweepEndEvent(status=status, best=best):
                end = "all trials have ended" if status == "done" else "stopped; the same command resumes it"
                return (
                    end
                    if best is None
                    else f"{end}; the best is trial {best:03d}: xtrain sweep best {quote(self.plan.folder)}"
                )
        return ""


def value_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def table_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with columns as wide as their widest cell."""
    names = list(rows[0]) if rows else []
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines) + "\n" if names else ""


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def drive(arguments: argparse.Namespace) -> int | None:
    """Run a sweep. Return exit status 0 if every trial has ended, 1 if none of them has a value, 75 if the sweep was
    stopped, 2 for an invalid spec, 3 for an unsuitable machine. Return None if the spec has no sweep."""
    from xtrain.planner.load import is_saved
    from xtrain.runtime.base.process import is_worker

    if is_saved(arguments.spec) or is_worker():
        return None
    plan = _compiled(arguments)
    if plan is None:
        return None
    if arguments.accept_drift:
        raise Refused(2, "xtrain run: --accept-drift is for a saved plan, not for a spec")
    if arguments.node is not None or arguments.meet is not None:
        raise Refused(2, "xtrain run: trials of a sweep run on one machine; --node and --meet are for one run")
    if arguments.ui == "tui":
        raise Refused(2, "xtrain run: a sweep is shown as lines; `xtrain watch` shows its trials")
    launcher = _local(plan)
    return _drive(plan, _trials(plan, arguments), launcher, arguments.ui or "plain")


def launch(arguments: argparse.Namespace, launcher_of: "Callable[[Plan, str | None], Launcher]") -> int | None:
    """Run the sweep with trials as jobs, or submit the job that drives it. Return None if the spec has no sweep.

    launcher_of: returns the launcher of a plan, or the named one. Raises Refused, EnvironmentFault.
    """
    from xtrain.planner.load import is_saved
    from xtrain.planner.review.proposal import policy_of

    plan = None if is_saved(arguments.spec) else _compiled(arguments)
    if plan is None:
        return None
    policy = policy_of(plan.base)
    if policy is not None and policy.approval == "required":
        hint = "approve and launch a trial's plan alone"
        raise Refused(2, f"xtrain launch: the policy demands approved plans, and trials of a sweep have none; {hint}")
    launcher = launcher_of(plan.base, arguments.on)
    if launcher.alone:
        raise Refused(2, "xtrain launch: `xtrain run` trains the trials of a sweep on this machine")
    trials, jobs = _trials(plan, arguments), _jobs(plan, launcher)
    if arguments.dry:
        files = jobs.files(_first(plan, trials))
        sys.stdout.write("\n".join(f"# {path}\n{text}" for path, text in files.items()))
        return 0
    return _drive(plan, trials, jobs, "plain", stops_with_terminal=False)


def _compiled(arguments: argparse.Namespace) -> "SweepPlan | None":
    """Compile the sweep; None if the spec has no sweep. Raises Refused."""
    from xtrain.planner.compile_sweep import compile_sweep

    demanded = getattr(arguments, "require_certificate", None) is not None
    compiled = compile_sweep(arguments.spec, arguments.sets, arguments.world, counted)
    if compiled is None:
        return None
    report(compiled.diagnostics)
    if compiled.plan is None:
        raise Refused(2, compiled.diagnostics.render(color=False), shown=True)
    if demanded or compiled.plan.base.launch.get("certificate") == "required":
        hint = "prove a trial's spec alone, and run the sweep without the demand"
        raise Refused(2, f"error: each trial of a sweep is a plan of its own, and has no certificate; {hint}")
    return compiled.plan


def _trials(plan: "SweepPlan", arguments: argparse.Namespace) -> "Trials":
    """Return the sweep's trials. Raises EnvironmentFault if a package is missing."""
    from xtrain.dsl.load import load_spec
    from xtrain.planner.compile_sweep import Trials
    from xtrain.runtime.jobs.sweep import check_method

    sweep = load_spec(arguments.spec, arguments.sets).require().sweep
    assert sweep is not None
    check_method(sweep)
    return Trials(sweep, plan.base, arguments.spec, tuple(arguments.sets), arguments.world, counted)


def _drive(
    plan: "SweepPlan", trials: "Trials", launcher: "TrialLauncher", ui: str, *, stops_with_terminal: bool = True
) -> int:
    """Drive the sweep's trials. stops_with_terminal: when the terminal closes, trials save and stop; otherwise they
    continue and only this process ends."""
    from xtrain.planner.review.sweep import render_sweep
    from xtrain.records.names import EndStatus
    from xtrain.runtime.base.errors import EXIT_CODES
    from xtrain.runtime.jobs.sweep import SweepDriver

    lines = SweepLines(plan, ui)
    driver = SweepDriver(plan, trials, launcher, lines.show)
    if lines.ui == "plain":
        print(render_sweep(plan), flush=True)
    for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if stops_with_terminal else [])):
        signal.signal(number, lambda *_: driver.stop())
    status = driver.run()
    if driver.fault:
        raise Refused(3, f"xtrain: the sweep was stopped: {driver.fault}")
    if status == EndStatus.DONE and driver.state.best() is None:
        raise Refused(1, f"xtrain: no trial has a final value of {plan.objective}; logs in {plan.folder}/logs")
    return EXIT_CODES[status]


def _jobs(plan: "SweepPlan", launcher: "Launcher") -> "JobTrials":
    from xtrain.runtime.jobs.trials import JobTrials

    return JobTrials(Path(plan.folder).absolute(), launcher, Path.cwd(), sys.executable)


def _first(plan: "SweepPlan", trials: "Trials") -> "list[TrialStart]":
    """Return the known trials that start first."""
    from xtrain.runtime.jobs.trials import TrialStart

    found = []
    for slot, trial in enumerate(plan.runs[: plan.parallel]):
        stop_at = plan.rungs[0] if plan.rungs else None
        compiled = trials.compiled(trial.number, trial.point, stop_at).plan
        assert compiled is not None
        folder = Path(plan.folder)
        file, log = folder / "plans" / f"{trial.name}.json", folder / "logs" / f"{trial.name}.log"
        found.append(TrialStart(compiled, file, log, slot))
    return found


def _local(plan: "SweepPlan") -> "LocalTrials":
    """Return a launcher of trials on this machine. Raises EnvironmentFault if it has too few devices for the parallel
    trials."""
    from xtrain.runtime.jobs.trials import LocalTrials
    from xtrain.runtime.loop.preflight import check_one_machine, find_devices

    plans = [plan.base, *(each.plan for each in plan.runs), *plan.tried]
    largest = max(plans, key=lambda each: each.mesh.world_size)
    check_one_machine(largest)
    ranks = largest.mesh.world_size
    devices = find_devices(largest, ranks * plan.parallel)
    return LocalTrials(plan.parallel, ranks, gpus=devices.kind == "cuda")
