"""`xtrain run` of a spec with `sweep`: this process drives its trials, each an `xtrain run` of its own."""

import argparse
import signal
import sys
from typing import TYPE_CHECKING

from .counting import counted
from .refused import Refused, refusals

if TYPE_CHECKING:
    from ..planner.sweep.sweep_plan import SweepPlan
    from ..runtime.sweep.trial_launcher import LocalTrials


def drive(arguments: argparse.Namespace) -> int | None:
    """The exit status: 0 every trial has ended, 75 the sweep was stopped, 2 the spec is wrong, 3 so is the machine.
    None where the spec has no sweep."""
    from ..planner.load import is_saved
    from ..runtime.provenance.start import is_worker

    if is_saved(arguments.spec) or is_worker():
        return None
    from ..planner.sweep.compile_sweep import compile_sweep

    compiled = compile_sweep(arguments.spec, arguments.sets, arguments.world, counted)
    if compiled is None:
        return None
    from ..dsl.diagnostics.diagnostic import shows_color

    sys.stderr.write(compiled.diagnostics.render(color=shows_color(sys.stderr)))
    if compiled.plan is None:
        return 2
    try:
        if arguments.accept_drift:
            raise Refused(2, "xtrain run: --accept-drift is for a saved plan, and this is a spec")
        if arguments.node is not None or arguments.meet is not None:
            raise Refused(2, "xtrain run: trials of a sweep run on one machine; --node and --meet are for one run")
        if arguments.ui == "tui":
            raise Refused(2, "xtrain run: a sweep is shown in lines; `xtrain watch` shows its trials")
        with refusals():
            return _drive(compiled.plan, arguments)
    except Refused as refused:
        return refused.show()


def _drive(plan: "SweepPlan", arguments: argparse.Namespace) -> int:
    from ..dsl.load import load_spec
    from ..planner.report.render_sweep import render_sweep
    from ..planner.sweep.compile_sweep import Trials
    from ..runtime.outcome import EXIT_CODES
    from ..runtime.sweep.driver import SweepDriver
    from ..runtime.sweep.suggesting import check_method
    from .sweep_lines import SweepLines

    sweep = load_spec(arguments.spec, arguments.sets).require().sweep
    assert sweep is not None
    check_method(sweep)
    launcher = _launcher(plan)
    trials = Trials(sweep, plan.base, arguments.spec, tuple(arguments.sets), arguments.world, counted)
    lines = SweepLines(plan, arguments.ui or "plain")
    driver = SweepDriver(plan, trials, launcher, lines.show)
    if lines.ui == "plain":
        print(render_sweep(plan), flush=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: driver.stop())
    status = driver.run()
    if driver.fault:
        raise Refused(3, f"xtrain run: the sweep was stopped: {driver.fault}")
    return EXIT_CODES[status]


def _launcher(plan: "SweepPlan") -> "LocalTrials":
    """Trials on this machine. Raises EnvironmentFault where it has too few devices for so many at once."""
    from ..runtime.launch.preflight import check_one_machine, find_devices
    from ..runtime.sweep.trial_launcher import LocalTrials

    plans = [plan.base, *(each.plan for each in plan.runs), *plan.tried]
    largest = max(plans, key=lambda each: each.mesh.world_size)
    check_one_machine(largest)
    ranks = largest.mesh.world_size
    devices = find_devices(largest, ranks * plan.parallel)
    return LocalTrials(plan.parallel, ranks, gpus=devices.kind == "cuda")
