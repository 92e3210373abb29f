"""`xtrain init`: a spec to start from, annotated, or for a job with a model and data of one's own."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import Refused

if TYPE_CHECKING:
    from xtrain.dsl.starter import JobTemplate

HELP = "write a spec to start from"
DESCRIPTION = (
    "Write a spec: with a job, JOB.xtrain for your model and data; with another NAME, NAME.xtrain, an example with "
    "comments on each choice. NAME is the experiment's name."
)
EPILOG = """\
examples:
  xtrain init lora --model models/Qwen3-0.6B --data talks.jsonl
  xtrain init dpo --model Qwen/Qwen3-0.6B --data pairs/ --to first.xtrain
  xtrain init tryout                        tryout.xtrain, for one process on a laptop
  xtrain init specs/big --template cluster
  xtrain init --list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "name", nargs="?", metavar="JOB|NAME", help="a job (see --list), or a name, optionally with a folder"
    )
    parser.add_argument("--model", metavar="M", help="of a job: a folder, or organisation/name in the hub's cache")
    parser.add_argument(
        "--data", action="append", default=[], metavar="D", help="of a job: a file, folder or pattern; may be repeated"
    )
    parser.add_argument("--teacher", metavar="M", help="of `distill`: the folder of the teacher")
    parser.add_argument("--to", metavar="FILE", help="of a job: the spec to write (default: JOB.xtrain)")
    parser.add_argument("--template", metavar="T", help="the template of NAME (default: quickstart)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--list", action="store_true", help="list the jobs and the templates")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain init`. Exit status: 0 written, 2 invalid name, template or data, an existing file, or a spec of a
    job with errors, 3 it cannot be written."""
    from xtrain.dsl.starter import jobs, near_starter, starters

    known, known_jobs = starters(), jobs()
    if arguments.list:
        wide = max(map(len, (*known, *known_jobs)))
        for title, about in (("jobs", known_jobs), ("templates", known)):
            print("\n".join([f"{title}:", *(f"  {name.ljust(wide)}  {each.about}" for name, each in about.items())]))
        return 0
    if arguments.name is None:
        raise Refused(2, "xtrain init: NAME is missing: write `xtrain init NAME`, or `xtrain init --list`")
    of_job = [f"--{word}" for word in ("model", "data", "teacher", "to") if getattr(arguments, word)]
    if (job := known_jobs.get(arguments.name)) is not None:
        if arguments.model is None:
            raise Refused(2, f"xtrain init: `{arguments.name}` needs --model: a folder, or organisation/name")
        if arguments.template is not None:
            raise Refused(2, f"xtrain init: `{arguments.name}` is a job, which takes no --template")
        return _write_job(job, arguments)
    if of_job:
        words = ", ".join(known_jobs)
        raise Refused(2, f"xtrain init: {of_job[0]} goes with a job, and `{arguments.name}` is none of {words}")
    template = arguments.template or "quickstart"
    starter = known.get(template)
    if starter is None:
        meant = near_starter(template)
        hint = f"did you mean `{meant}`?" if meant else f"existing templates: {', '.join(known)}"
        raise Refused(2, f"xtrain init: there is no template `{template}`; {hint}")
    path, name = _path(arguments.name)
    return _write(path, starter.named(name, shlex.quote(str(path))), force=arguments.force)


def _path(text: str) -> tuple[Path, str]:
    """Return the file of a spec and the name of its experiment. Raises Refused."""
    from xtrain.dsl.starter import name_problem

    path = Path(text)
    name = path.name.removesuffix(".xtrain")
    problem = name_problem(name)
    if problem is not None:
        raise Refused(2, f"xtrain init: an experiment cannot be called `{name}`: {problem}")
    path = path.with_name(f"{name}.xtrain")
    if not str(path).isprintable():
        raise Refused(2, f"xtrain init: {str(path)!r} is not a path for a spec")
    return path, name


def _write_job(job: "JobTemplate", arguments: argparse.Namespace) -> int:
    """Write the spec of a job, and report what its plan says about it."""
    from xtrain.cli.init_job import job_spec
    from xtrain.planner.load import plan_from_text

    path, name = _path(arguments.to or arguments.name)
    shown = shlex.quote(str(path))
    text = job_spec(arguments.name, job, name, shown, arguments.model, arguments.data, arguments.teacher)
    found = plan_from_text(text, str(path))
    status = _write(path, text, "serve" if job.records == "none" else "run", force=arguments.force)
    if found.diagnostics:
        from xtrain.cli.verb import report

        print("\nIts plan says:", file=sys.stderr)
        report(found.diagnostics)
    return 2 if found.diagnostics.has_errors else status


def _write(path: Path, text: str, verb: str = "run", *, force: bool) -> int:
    from xtrain.cli.rewrite import write_new

    write_new(path, text, "init", force=force)
    shown = shlex.quote(str(path))
    print(f"Wrote {path}. Next:\n\n  xtrain plan {shown}    show the plan\n  xtrain {verb} {shown}     run it")
    return 0
