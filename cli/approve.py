"""`xtrain approve PLAN`: the approval of a plan by a person, for `xtrain mcp` and `xtrain launch --approved`."""

import argparse
import getpass
import sys
from pathlib import Path

from xtrain.cli.verb import Refused, add_sets, counted, ranks, report, say_own_code

HELP = "approve a plan, for programs that start only approved plans"
DESCRIPTION = (
    "Show a plan and ask whether it may run. The answer is kept below the root of the workspace, in "
    "approvals/PLAN_ID, with the plan itself. With --key nothing is asked: the signature counts."
)
EPILOG = """\
examples:
  xtrain approve specs/quickstart.xtrain
  xtrain approve plan.json --by ann@example.com --key ~/.ssh/id_ed25519
  xtrain launch runs/approvals/76ae824ce72f23a5/approved-plan.json --on local --approved
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("plan", metavar="PLAN", help="a spec (*.xtrain), or a saved plan (*.json)")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as in the spec)")
    add_sets(parser)
    parser.add_argument("--by", metavar="NAME", help="the person, as in a file of allowed signers (default: the user)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="an SSH key that signs the approval")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain approve`. Exit status: 0 approved, 1 the person said no, 2 there is no plan or nobody to ask, 3 the
    approval cannot be signed or written."""
    from xtrain.plan.serialise import signed
    from xtrain.planner.load import is_saved, plan_from_path
    from xtrain.planner.review.page import render
    from xtrain.runtime.jobs.approvals import approve

    if arguments.key is None and not sys.stdin.isatty():
        raise Refused(2, "xtrain approve: a person must answer; run it in a terminal, or sign with --key FILE")
    by = arguments.by or _user()
    compiled = plan_from_path(arguments.plan, arguments.sets, arguments.world, counted)
    report(compiled.diagnostics)
    if compiled.plan is None:
        return 2
    plan = compiled.plan if is_saved(arguments.plan) else signed(compiled.plan, arguments.sets, arguments.world)
    say_own_code(plan, arguments.plan)
    if arguments.key is None:
        sys.stdout.write(render(plan))
        try:
            answer = input(f"\nMay plan {plan.id} run? yes or no: ")
        except EOFError:  # Ctrl-D
            answer = "no"
        if answer.strip().lower() not in ("y", "yes"):
            print("not approved")
            return 1
    folder = approve(plan, by, arguments.key)
    print(f"Approved plan {plan.id}: {folder}")
    return 0


def _user() -> str:
    """Return the name of the user. Raises Refused."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user of a container
        raise Refused(2, "xtrain approve: this user has no name on this machine; give --by NAME") from None
