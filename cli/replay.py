"""`xtrain replay RUN --from STEP`: run a window of a recorded run again, and show what differs."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.cli.run_data import DOCUMENT_HELP, RunData, enter
from xtrain.cli.verb import RUN_HELP, Refused, add_sets, colored, number_of, ranks, run_named
from xtrain.text.page import Page
from xtrain.text.units import plural

if TYPE_CHECKING:
    import numpy as np

    from xtrain.planner.load import Compiled
    from xtrain.runtime.jobs.replay import Logged, ReplayWindow, StepDifference
    from xtrain.runtime.store.history import TrainedSteps

HELP = "run steps of a recorded run again, unchanged, with other settings, or without documents"
DESCRIPTION = (
    "Run a window of a recorded run again from the last checkpoint before it, into a run of its own, and compare the "
    "recorded steps of both. Without changes, on the same number of ranks, all of them are equal bit for bit."
)
EPILOG = """\
--without removes the tokens of documents from the packed rows; all other documents keep their step and row. From the
window on this is exactly the run that never had these documents: it equals a run with `dataset { without = [..] }` that
resumes from the same checkpoint. Documents that were trained on before the checkpoint are reported.

The same command resumes a replay that was interrupted; a finished one is only compared.

examples:
  xtrain replay RUN --from 900                          from the last checkpoint before step 900 to the end of the run
  xtrain replay RUN --from 900 --steps 20 --world 2     20 steps, on two ranks
  xtrain replay RUN --from 900 --steps 20 --set optimizer.lr=1e-4
  xtrain replay RUN --from 900 --steps 20 --without data/web.jsonl:1204 --without 'web#77'

exit codes: 0 the recorded steps are equal, 1 some differ, 2 the command line or a setting is wrong, 3 no checkpoint, no
records, or changed data; else the exit code of the run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_directory", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--from", dest="first", type=number_of("steps"), required=True, metavar="STEP", help="first step, as in logs"
    )
    parser.add_argument(
        "--steps", type=number_of("steps"), metavar="N", help="number of steps (default: to the last recorded one)"
    )
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as the run)")
    add_sets(parser)
    parser.add_argument("--without", action="append", default=[], metavar="DOCUMENT", help=f"leave out {DOCUMENT_HELP}")
    parser.add_argument("--json", action="store_true", help="print only the comparison, as JSON, a step a line")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain replay`. The help lists the exit statuses."""
    directory = enter(run_named(arguments.run_directory, 3))
    window = window_of(directory, arguments.first, arguments.steps)
    sets = [*arguments.sets]
    if arguments.without:
        data = RunData(directory, window.begin or None)
        removed = RunData(directory).named(arguments.without)
        sets += without_sets(directory, removed)
        for text in _seen_before(data.runs if window.begin else [], removed, window):
            print(f"warning: {text}", file=sys.stderr)
    if not window.unchanged():
        message = "this xtrain makes another plan of the recorded spec than the run had; differences may come from that"
        print(f"warning[W706]: {message}", file=sys.stderr)
    replay, code = replayed(window, sets, arguments.world, "none" if arguments.json else None)
    if replay is None:
        return code
    return _show(window, replay, sets, as_json=arguments.json)


def window_of(directory: Path, first: int, steps: int | None, last: int | None = None) -> "ReplayWindow":
    """Return the window of a run: `steps` steps, or up to `last`, or to the end. Raises Refused (2) for steps that the
    run does not have, (3) without records."""
    from xtrain.runtime.jobs.replay import ReplayWindow
    from xtrain.runtime.store.history import changed_within, last_step
    from xtrain.tui.model.find import runs_below

    end = last_step(directory)
    if any(run.state == "running" for run in runs_below(directory)):
        print(f"note: the run is still running; its steps up to {end:,} are known", file=sys.stderr)
    if end == 0:
        raise Refused(3, f"xtrain: {directory} has no recorded step and no checkpoint: there is nothing to run again")
    if (asked := max(first, last or 0)) > end:
        raise Refused(2, f"xtrain: step {asked:,} is after the last one of {directory}, which is {end:,}")
    last = end if last is None else last
    window = ReplayWindow.of(directory, first, last if steps is None else first + steps - 1)
    for step in changed_within(directory, window.begin, window.last):
        message = (
            f"the run was resumed with another plan, or rolled back, at step {step:,}; the replay has the last plan"
        )
        print(f"warning[W706]: {message} in all steps", file=sys.stderr)
    return window


def without_sets(directory: Path, removed: "dict[str, np.ndarray]") -> list[str]:
    """Return `--set` texts that leave out documents in addition to those that a run leaves out. Raises Refused (2)."""
    from xtrain.runtime.observe.provenance import plan_in

    plan, sets = plan_in(directory), []
    for name, documents in removed.items():
        if name not in plan.node("setup.loader").args["datasets"]:
            raise Refused(2, f"xtrain: dataset {name} is not trained on by the last start of {directory}")
        before = plan.node(f"setup.data.{name}").args.get("without", [])
        sets.append(f"dataset.{name}.without={json.dumps(sorted({*before, *documents.tolist()}))}")
    return sets


def _seen_before(runs: "list[TrainedSteps]", removed: "dict[str, np.ndarray]", window: "ReplayWindow") -> list[str]:
    """Return a text for each dataset with removed documents that the state before the window was trained on."""
    import numpy as np

    texts = []
    for name, documents in removed.items():
        parts = [
            part
            for each in runs
            for stretch in each.stretches
            if name in stretch.prepared
            for part in stretch.sightings(name, documents)
        ]
        known = np.unique(np.concatenate([part.documents for part in parts])) if parts else documents[:0]
        if len(known):
            shown = ", ".join(f"{name}:{document}" for document in known[:5].tolist())
            more = f" and {len(known) - 5:,} more" if len(known) > 5 else ""
            texts.append(
                f"{shown}{more}: trained on before the checkpoint of step {window.begin:,}, which the replay begins "
                "with; `xtrain seen` shows the steps"
            )
    return texts


def replayed(
    window: "ReplayWindow", sets: list[str], world: int | None, ui: str | None, logs: "Logged" = ""
) -> tuple[Path | None, int]:
    """Run a replay, unless it is done; return its directory, or None if it did not get to its end, and the exit code of
    the run. Raises Refused (2) for invalid settings. logs: see `ReplayWindow.compiled`."""
    from xtrain.cli.run import start
    from xtrain.runtime.observe.provenance import read_code
    from xtrain.runtime.store.run_directory import locate

    compiled = window.compiled(sets, world, logs)
    if compiled.plan is None or compiled.diagnostics.has_errors:
        raise Refused(2, compiled.diagnostics.render(color=False).rstrip())
    plan = compiled.plan
    directory = locate(plan, read_code(Path(plan.spec).resolve().parent))
    if window.is_done(directory):
        if ui is None:
            print(f"note: {directory} is there already", file=sys.stderr)
        return directory, 0

    def ready() -> "Compiled":
        return compiled

    code = start(ready, ui)
    return (directory if window.is_done(directory) else None), code


def _show(window: "ReplayWindow", replay: Path, sets: list[str], *, as_json: bool) -> int:
    from xtrain.runtime.jobs.replay import compared

    found = compared(window.directory, replay, window.first, window.last)
    if as_json:
        for each in found:
            print(json.dumps(_as_json(each)))
        return int(any(each.differs for each in found))
    began = f"the checkpoint of step {window.begin:,}" if window.entry is not None else "the beginning"
    page = Page(color=colored())
    page.heading(replay.name, f"steps {window.first:,} to {window.last:,}, from {began}: {replay}")
    if not found:
        page.line("  no step of the window is recorded in both runs")
    different = [each for each in found if each.differs]
    if different:
        rows = [("step", "loss", "replayed", "difference", "gradient norm", "replayed")]
        page.table([*rows, *map(_row, found)], styles=("dim",))
        page.line(
            f"  {len(different):,} of {plural(len(found), 'recorded step')} differ, first step {different[0].step:,}"
        )
    elif found:
        page.line(f"  {plural(len(found), 'recorded step')}: equal bit for bit (loss, gradient norm, learning rate)")
    sys.stdout.write(str(page).lstrip("\n"))
    return int(bool(different))


def _row(each: "StepDifference") -> tuple[str, ...]:
    one, other = each.before, each.after
    gap = "" if one.loss is None or other.loss is None else f"{other.loss - one.loss:+.3g}" if each.differs else "equal"
    return (
        f"{each.step:,}", _number(one.loss), _number(other.loss), gap, _number(one.grad_norm), _number(other.grad_norm)
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _as_json(each: "StepDifference") -> dict[str, Any]:
    from xtrain.runtime.jobs.replay import COMPARED

    values = {name: [getattr(each.before, name), getattr(each.after, name)] for name in COMPARED}
    return {"step": each.step, **values, "differs": list(each.differs)}
