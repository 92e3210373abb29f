"""`xtrain review BASE HEAD`: a comment on a changed spec for a pull request, and whether it keeps a policy."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import Refused, colored, end_by_exception, report

if TYPE_CHECKING:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics
    from xtrain.dsl.schema.run import Policy
    from xtrain.plan.plan import Plan
    from xtrain.planner.review.changes import Side

HELP = "review a changed spec: figures, resuming, and a policy of the team"
DESCRIPTION = (
    "Compare the plans of BASE and HEAD, check HEAD against the block `policy` of BASE, and print a comment for a pull "
    "request. Nothing is executed."
)
EPILOG = """\
BASE and HEAD are specs, saved plans, or files of a git revision, REVISION:PATH as `git show` takes them. The policy
comes from BASE, so that a change cannot weaken the policy that it is reviewed by.

examples:
  xtrain review main:specs/quickstart.xtrain specs/quickstart.xtrain
  xtrain review main:specs/quickstart.xtrain HEAD:specs/quickstart.xtrain --format github > comment.md
  xtrain review old.xtrain new.xtrain --policy main:policy.xtrain --law law.json

exit codes: 0 the policy is kept, or there is none, 1 it is broken, 2 a spec or the command line is wrong, 3 git fails
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    kinds = "a spec (*.xtrain), a saved plan (*.json), or REVISION:PATH of one"
    parser.add_argument("base", metavar="BASE", help=f"before the change: {kinds}")
    parser.add_argument("head", metavar="HEAD", help=f"with the change: {kinds}")
    parser.add_argument(
        "--format",
        choices=("text", "github", "gitlab"),
        default="text",
        help="text: the page of `xtrain diff`; github, gitlab: Markdown for a comment (default: text)",
    )
    parser.add_argument(
        "--policy",
        metavar="FILE",
        help="a spec or a file with a block `policy`, or REVISION:FILE (default: the policy of BASE)",
    )
    parser.add_argument("--law", type=Path, metavar="FILE", help="a law of `xtrain fit-law`, which predicts losses")
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="the certificate of HEAD (default: as `xtrain prove` writes it)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain review`. The help lists the exit statuses."""
    from xtrain.planner.review.diff import compare_plans, render_diff
    from xtrain.planner.review.proposal import Proposal, comment, policy_of

    end_by_exception()  # a terminated review removes its files
    law = arguments.law and arguments.law.absolute()
    base, head = _side(arguments.base), _side(arguments.head, as_comment=arguments.format != "text")
    policy = policy_of(base.plan) if arguments.policy is None else _policy(arguments.policy)
    found = compare_plans(base.plan, head.plan)
    proposal = Proposal(
        difference=found,
        losses=None if law is None else (_loss(base.plan, law), _loss(head.plan, law)),
        policy=policy,
        uncertified=_uncertified(head.plan, arguments.certificate),
    )
    if arguments.format == "text":
        sys.stdout.write(render_diff(found, (base.path, head.path), color=colored()))
        print("\nREVIEW", *proposal.policy_lines(), sep="\n  ")
    else:
        sys.stdout.write(comment(proposal, head.path.rpartition(":")[2]))
    return 0 if proposal.holds else 1


def _side(text: str, *, as_comment: bool = False) -> "Side":
    """Return a spec or plan, with its steps from the counted data where they are known. as_comment: print a comment on
    one that has no plan. Raises Refused."""
    from attrs import evolve

    from xtrain.cli.diff import with_rows
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics
    from xtrain.dsl.schema.model import executing_nothing
    from xtrain.planner.review.changes import open_side

    diagnostics = Diagnostics()
    with _at(text) as path, executing_nothing():
        side = open_side(path, (), None, diagnostics)
        if side is not None:
            return evolve(with_rows(side), path=text)
    if as_comment:
        from xtrain.planner.review.proposal import comment_on_errors

        sys.stdout.write(comment_on_errors(text.rpartition(":")[2], diagnostics))
    raise _refused(text, diagnostics)


def _policy(text: str) -> "Policy":
    """Return the policy of a file. Raises Refused."""
    from xtrain.planner.review.proposal import read_policy

    with _at(text) as path:
        policy, diagnostics = read_policy(path)
    if diagnostics.has_errors:
        raise _refused(text, diagnostics)
    if policy is None:
        raise Refused(2, f"xtrain review: {text} has no block `policy`")
    return policy


def _refused(text: str, diagnostics: "Diagnostics") -> Refused:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics

    errors = Diagnostics()
    errors.extend(diagnostics.errors)
    report(errors)
    return Refused(2, f"xtrain review: {text} cannot be planned")


def _loss(plan: "Plan", law: Path) -> float | None:
    from xtrain.cli.plan_views import prediction
    from xtrain.records.law import LawError, ScalingLaw

    try:
        found = prediction(plan, ScalingLaw.read(law))
    except LawError as problem:
        raise Refused(2, f"xtrain review: {problem}") from None
    return None if found is None else found["loss"]


def _uncertified(plan: "Plan", certificate: Path | None) -> str:
    """Return why a plan has no valid certificate; empty if it has one."""
    from xtrain.runtime.base.errors import EnvironmentFault
    from xtrain.runtime.store.certificates import check_certificate

    try:
        check_certificate(plan, certificate)
    except EnvironmentFault as fault:
        return str(fault)
    return ""


# Files of a git revision ----------------------------------------------------------------------------------------------


@contextmanager
def _at(text: str) -> Iterator[str]:
    """Yield the path of a file; for REVISION:PATH in the working folder of a copy of that revision. Raises Refused."""
    revision, colon, path = text.partition(":")
    if not colon or Path(text).exists():
        yield text
        return
    from xtrain.runtime.base.locks import scratch_folder

    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if not commit:
        raise Refused(3, f"xtrain review: {text}: this repository has no revision `{revision}`; fetch it first")
    top, here = Path(_git("rev-parse", "--show-toplevel") or "."), Path.cwd().resolve()
    named = path if path.startswith(("./", "../")) else os.path.relpath(top.resolve() / path, here)
    with scratch_folder("review") as folder:
        _extract(commit, top, folder)
        inside = folder / "files" / here.relative_to(top.resolve())
        inside.mkdir(parents=True, exist_ok=True)
        with chdir(inside):
            yield os.path.normpath(named)


def _extract(commit: str, top: Path, folder: Path) -> None:
    """Write the files of a commit into a folder, with links to what git does not track: data, models, runs."""
    files = folder / "files"
    index = {"GIT_INDEX_FILE": str(folder / "index")}
    # Not by `git archive`, which leaves out and rewrites files where `.gitattributes` says so.
    for command in (("read-tree", commit), ("checkout-index", "--all", f"--prefix={files}/")):
        done = _run_git("-C", str(top), *command, **index)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise Refused(3, f"xtrain review: the files of {commit[:12]} cannot be read: {said}")
    files.mkdir(exist_ok=True)  # a commit without files
    untracked = _git("-C", str(top), "ls-files", "--others", "--directory", "-z") or ""
    for name in filter(None, untracked.split("\0")):
        place = files / name.rstrip("/")
        with suppress(OSError):
            if place.parent.resolve().is_relative_to(files.resolve()) and not os.path.lexists(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(top / name.rstrip("/"))


def _git(*arguments: str) -> str | None:
    """Return the output of git; None if it fails. Raises Refused without git or a repository."""
    done = _run_git(*arguments)
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode and "not a git repository" in said:
        raise Refused(3, f"xtrain review: {Path.cwd()} is in no git repository; give the path of a spec or plan")
    return None if done.returncode else done.stdout.decode(errors="surrogateescape").removesuffix("\n")


def _run_git(*arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=False, env={**os.environ, **variables})
    except FileNotFoundError:
        raise Refused(3, "xtrain review: git is not installed, which reads REVISION:PATH") from None
