"""`xtrain find-lr SPEC|RUN`: train with a growing learning rate and suggest a rate."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.cli.verb import Refused, above_zero, add_sets, colored, ranks, spec_or_run
from xtrain.records.names import LR_SWEEP_FILE
from xtrain.regular_files import read_json

if TYPE_CHECKING:
    from xtrain.planner.load import Compiled


HELP = "suggest a learning rate"
DESCRIPTION = (
    "Train a spec for a few steps with an exponentially growing learning rate until the loss diverges, and "
    "suggest a rate. The sweep is a run with its own plan; its result is in lr_sweep.json of its "
    "directory. Given that directory, show the result again."
)
EPILOG = "example: xtrain find-lr specs/quickstart.xtrain --to 10"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC|RUN", help="a .xtrain spec, or a run of find-lr")
    parser.add_argument(
        "--from",
        dest="low",
        type=above_zero("a learning rate"),
        default=1e-7,
        metavar="RATE",
        help="first (default 1e-7)",
    )
    parser.add_argument(
        "--to", dest="high", type=above_zero("a learning rate"), default=1.0, metavar="RATE", help="last (default 1)"
    )
    parser.add_argument("--steps", type=_steps, default=100, metavar="N", help="steps of the sweep (default 100)")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as the spec's axes need)")
    add_sets(parser)
    parser.add_argument("--plan", action="store_true", help="print the plan of the sweep, and train nothing")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 10:
        raise argparse.ArgumentTypeError(f"`{text}` steps are too few for a sweep; use 10 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain find-lr`. Exit status: 0 for a result, 2 for an invalid spec or command line, else the run's own
    status."""
    if (path := spec_or_run(arguments.spec)).is_dir():
        return _show(path, as_json=arguments.json)
    if arguments.low >= arguments.high:
        raise Refused(2, f"xtrain find-lr: --from {arguments.low:g} is not below --to {arguments.high:g}")
    if arguments.plan:
        return _print_plan(arguments)
    from xtrain.cli.run import start

    directories: list[Path] = []
    code = start(
        lambda: _compiled(arguments), "none" if arguments.json else None, lambda opened: directories.append(opened)
    )
    if not directories or not (directories[0] / LR_SWEEP_FILE).is_file():
        return code
    return _show(directories[0], as_json=arguments.json)


def _compiled(arguments: argparse.Namespace) -> "Compiled":
    """Return the plan of the sweep. Raises Refused."""
    from attrs import evolve

    from xtrain.components.actions.lr_sweep import swept
    from xtrain.dsl.load import load_spec
    from xtrain.dsl.spec_text import resolved_text
    from xtrain.plan.serialise import signed
    from xtrain.planner.compile import compile_plan

    loaded = load_spec(arguments.spec, arguments.sets)
    if loaded.spec is None:
        raise Refused(2, loaded.diagnostics.render(color=False).rstrip())
    if loaded.spec.serve is not None:
        raise Refused(2, "xtrain find-lr: this is a server spec, whose clients choose learning rates")
    spec = swept(loaded.spec, low=arguments.low, high=arguments.high, steps=arguments.steps)
    compiled = compile_plan(spec, world=arguments.world, spec_text=resolved_text(spec))
    if compiled.plan is None:
        raise Refused(2, compiled.diagnostics.render(color=False).rstrip())
    return evolve(compiled, plan=signed(compiled.plan, arguments.sets, arguments.world))


def _print_plan(arguments: argparse.Namespace) -> int:
    from xtrain.plan.serialise import dumps
    from xtrain.planner.review.page import render

    plan = _compiled(arguments).plan
    assert plan is not None
    sys.stdout.write(dumps(plan) if arguments.json else render(plan, color=colored()))
    return 0


def _show(directory: Path, *, as_json: bool) -> int:
    from shutil import get_terminal_size

    from xtrain.tui.board.plot import terminal_glyphs
    from xtrain.tui.pages.sweeps import lr_sweep_page

    try:
        found: dict[str, Any] = read_json(directory / LR_SWEEP_FILE)
    except (OSError, ValueError):
        message = f"{directory} is not a finished run of find-lr: it has no {LR_SWEEP_FILE}"
        raise Refused(2, f"xtrain find-lr: {message}") from None
    if as_json:
        print(json.dumps({"directory": str(directory), **found}))
    else:
        print("\n".join(lr_sweep_page(found, min(100, get_terminal_size().columns), terminal_glyphs())))
    return 0
