"""`xtrain data build|show|stats|teach SPEC`: build and inspect training data before or after training."""

import argparse
import sys

from xtrain.cli.arguments import add_sets
from xtrain.cli.data_build import add_build, build
from xtrain.cli.data_show import add_show, show
from xtrain.cli.data_stats import add_stats, stats
from xtrain.cli.data_teach import add_teach, teach
from xtrain.cli.own_code import say_own_code

EPILOG = """\
examples:
  xtrain data build specs/quickstart.xtrain
  xtrain data stats specs/quickstart.xtrain
  xtrain data show specs/quickstart.xtrain -n 2
  xtrain data show specs/quickstart.xtrain --step 100 --full | less -R
  xtrain data show specs/chat.xtrain -n 1 --tokens
  xtrain data stats specs/quickstart.xtrain --json | jq .parts.training.fill
"""
VIEWS = {"build": build, "show": show, "stats": stats, "teach": teach}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "data",
        help="build the data of a spec, and look at it: counts, lengths, packed rows",
        description="Tokenise and pack the data of SPEC as a run would (once, then cached), and look at it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    views = parser.add_subparsers(title="views", metavar="VIEW", dest="view", required=True)
    default = dict.fromkeys((add_build(views), add_stats(views), add_teach(views)), "all")
    default[add_show(views)] = "those that are trained on"
    for view, datasets in default.items():
        view.add_argument("spec", metavar="SPEC", help="a spec (*.xtrain), or a saved plan (*.json)")
        view.add_argument("--dataset", metavar="NAME", help=f"which dataset (default: {datasets})")
        view.add_argument("--json", action="store_true", help="one JSON object a line")
        add_sets(view)
        view.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain data`. Exit status: 0 done, 2 invalid spec or command line, 3 unusable data. `build` exits with 130
    if interrupted and 75 if stopped."""
    from xtrain.planner.load import is_saved, plan_from_path

    compiled = plan_from_path(arguments.spec, arguments.sets)
    compiled.report_to(sys.stderr)
    plan = compiled.plan
    if plan is None:
        return 2
    from xtrain.runtime.data.errors import DataError
    from xtrain.runtime.data.look import data_nodes
    from xtrain.runtime.errors import EnvironmentFault

    if is_saved(arguments.spec):
        say_own_code(plan, arguments.spec)
    known = data_nodes(plan)
    if arguments.dataset is not None and arguments.dataset not in known:
        print(f"xtrain data: no dataset `{arguments.dataset}`; this plan reads {', '.join(known)}", file=sys.stderr)
        return 2
    try:
        return VIEWS[arguments.view](plan, arguments)
    except (DataError, EnvironmentFault) as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
        return 3
