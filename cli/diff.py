"""`xtrain diff A [B]`: changes between two specs, plans or runs, their cost, and whether a run can resume."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import Refused, add_sets, colored, counted, ranks, report

if TYPE_CHECKING:
    from xtrain.planner.review.changes import Side

HELP = "compare two specs, plans or runs, and check whether a run can be resumed"
DESCRIPTION = (
    "Compare specs, saved plans and run directories: values, graph, memory, traffic, steps, and whether a "
    "checkpoint of A can be resumed under B. With two different arguments, --set and --world apply to "
    "every spec among them; with one, B is A with --set and --world."
)
EPILOG = """\
examples:
  xtrain diff old.xtrain new.xtrain
  xtrain diff specs/quickstart.xtrain --set optimizer.lr=1e-3     the spec against itself with this override
  xtrain diff runs/quickstart/1a2b3c4d-5e6f… new.xtrain           can this run go on under the new spec?
  xtrain diff runs/quickstart/1a2b3c4d-5e6f… --world 4            … or on four ranks?
  xtrain diff plan.json specs/quickstart.xtrain --exit-code       has the spec changed since it was planned?
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "a", metavar="A", help="a spec (*.xtrain), a saved plan (*.json) or a run as for `xtrain watch`"
    )
    parser.add_argument("b", metavar="B", nargs="?", help="the same; default: A with --set and --world")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as in the spec)")
    add_sets(parser)
    parser.add_argument("--json", action="store_true", help="print the difference as JSON")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if the plans differ")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain diff`. Exit status: 0 compared, 1 they differ and --exit-code was given, 2 an argument cannot be
    read."""
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics
    from xtrain.dsl.schema.model import executing_nothing
    from xtrain.planner.review.changes import going_on, open_sides, run_command
    from xtrain.planner.review.diff import compare_plans, render_diff, to_json

    paths = [_place(given) for given in (arguments.a, arguments.b) if given is not None]
    with executing_nothing():
        a, b, diagnostics = open_sides(paths, arguments.sets, arguments.world)
    if a is None or b is None:
        errors = Diagnostics()  # two similar specs would show the same warnings twice
        errors.extend(diagnostics.errors)
        report(errors)
        if arguments.json:
            print(json.dumps({"diagnostics": [error.to_json() for error in errors]}))
        return 2
    a, b = with_rows(_with_step(a)), with_rows(_with_step(b))
    found = compare_plans(a.plan, b.plan, a.step, a.past)
    lines = going_on(a, b, found.verdict)
    if arguments.json:
        sides = {letter: _side_json(side) for letter, side in (("a", a), ("b", b))}
        content = {**sides, **to_json(found), "go_on": {"text": "\n".join(lines), "run_b": " ".join(run_command(b))}}
        print(json.dumps(content, ensure_ascii=False, indent=1))
    else:
        names, steps = (a.name, b.name), (a.step, b.step)
        sys.stdout.write(render_diff(found, names, lines, steps=steps, color=colored()))
    return 1 if arguments.exit_code and found.differ else 0


def _place(given: str) -> str:
    """Return the run directory of a lineage, root of runs or run id; anything else unchanged."""
    from xtrain.dsl.diagnostics.diagnostic import printable
    from xtrain.tui.model.find import NoRun, run_at

    try:
        if given.endswith((".xtrain", ".json")) or Path(given).is_file():
            return given
        return str(run_at(given))
    except NoRun as error:
        if Path(given).exists():
            return given
        message = f"xtrain diff: {error}; a spec ends with .xtrain, a saved plan with .json"
        raise Refused(2, printable(message)) from None
    except OSError:  # a name that no file can have
        return given


def _with_step(side: "Side") -> "Side":
    """Return a run with the step of its latest checkpoint."""
    if side.kind != "run":
        return side
    from attrs import evolve

    from xtrain.plan.step_sizes import past_of
    from xtrain.runtime.store.checkpoints import CheckpointFolder

    latest = CheckpointFolder(Path(side.path) / "checkpoints").latest()
    return evolve(side, step=latest.step, past=past_of(latest.state())) if latest else side


def with_rows(side: "Side") -> "Side":
    """Return a side with its steps from the counted data, if the plan waits for it."""
    from attrs import evolve

    from xtrain.plan.timeline import waits

    if side.plan.counted is not None or not waits(side.plan):
        return side
    return evolve(side, plan=evolve(side.plan, counted=counted(side.plan)))


def _side_json(side: "Side") -> dict:
    plan = side.plan
    return {
        "path": side.path,
        "kind": side.kind,
        "sets": list(side.sets),
        "world": side.world,
        "plan_id": plan.id,
        "config_id": plan.config_id,
        "world_size": plan.mesh.world_size,
        "checkpoint_step": side.step,
    }
