"""`xtrain launch SPEC`: submit a run to a queue or a cluster, or start it in the background of this machine."""

import argparse
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from xtrain.cli.verb import Refused, add_certificate, add_sets, counted, demand_certificate, ranks, say_own_code

if TYPE_CHECKING:
    from xtrain.dsl.schema.cluster import Launcher
    from xtrain.plan.plan import Plan
    from xtrain.runtime.jobs.submitted import Job

HELP = "submit a run to Slurm or Kubernetes, or start it in the background"
DESCRIPTION = (
    "Compile SPEC and submit its plan to the launcher of the spec or of --on. The same command resumes a stopped run."
)
EPILOG = """\
examples:
  xtrain launch specs/two_ranks_cpu.xtrain --on local
  xtrain launch big.xtrain --on slurm --set launcher.partition='"gpu"' --dry
  xtrain launch big.xtrain                                 where the spec says `launcher slurm { … }`
  xtrain runs                                              what has become of it
  xtrain launch --cancel runs/big/<run>

exit codes: 0 submitted, printed or cancelled, 2 the spec is wrong, 3 the launcher refuses
"""


NEEDS_SAVED = (
    "which needs a saved plan, because a launched spec has another id; launch ROOT/approvals/PLAN_ID/"
    "approved-plan.json, which `xtrain approve` writes"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="a spec or a plan.json; with --cancel a run directory")
    parser.add_argument(
        "--on",
        metavar="NAME",
        help="slurm, kubernetes or local, and --set launcher.NAME=VALUE; default: `launcher` of the spec",
    )
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as the spec's axes need)")
    add_sets(parser)
    add_certificate(parser)
    parser.add_argument(
        "--approved",
        nargs="?",
        const="",
        metavar="SIGNERS",
        help="submit only what `xtrain approve` approved; with a file of allowed signers, only what one of them signed",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry", action="store_true", help="print what would be submitted, and submit nothing")
    what.add_argument("--cancel", action="store_true", help="cancel the job of a run")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain launch`. The help lists the exit statuses."""
    if arguments.cancel:
        return _cancel(Path(arguments.spec))
    from xtrain.cli.run_sweep import launch as launch_sweep
    from xtrain.plan.serialise import dumps
    from xtrain.planner.load import is_saved
    from xtrain.planner.review.proposal import policy_of
    from xtrain.runtime.jobs.approvals import check_approval
    from xtrain.runtime.jobs.submitted import job_launcher, submit_job

    arguments.sets = [*_chosen(arguments), *arguments.sets]
    if arguments.approved is not None and not is_saved(arguments.spec):
        raise Refused(2, f"xtrain launch: --approved demands an approval, {NEEDS_SAVED}")
    if (status := launch_sweep(arguments, _launcher)) is not None:
        return status
    job = _job(arguments)
    policy = policy_of(job.plan)
    if arguments.approved is not None or (policy is not None and policy.approval == "required"):
        if not is_saved(arguments.spec):
            raise Refused(2, f"xtrain launch: the policy demands an approval, {NEEDS_SAVED}")
        signers = arguments.approved or (policy and policy.signers)
        check_approval(job.plan, Path(signers) if signers else None)
    if arguments.dry:
        for number, (name, text) in enumerate(job_launcher(job.launcher.kind).files(job).items()):
            sys.stdout.write(f"{'' if number == 0 else chr(10)}# {job.files / name}\n{text}")
        return 0
    submitted = submit_job(job, dumps(job.plan))
    print(f"{submitted.kind} job {submitted.id}: plan {job.plan.id} in {job.directory}")
    root = "" if job.plan.workspace["root"] == "runs" else f" {quote(job.plan.workspace['root'])}"
    print(f"files and output: {job.files}; state: xtrain runs{root}; lines: xtrain watch {quote(str(job.directory))}")
    return 0


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """Return `--on` as a `--set` text if the spec has no launcher, so that launcher settings can be set too."""
    from xtrain.dsl.load import load_spec
    from xtrain.dsl.schema.cluster import LAUNCHERS
    from xtrain.planner.load import is_saved

    if arguments.on not in LAUNCHERS or is_saved(arguments.spec):
        return []
    draft = load_spec(arguments.spec).draft
    return [f"launcher={arguments.on}"] if draft is not None and draft.launcher is None else []


def _job(arguments: argparse.Namespace) -> "Job":
    """Return the job. Raises Refused."""
    from xtrain.runtime.jobs.submitted import Job
    from xtrain.runtime.observe.provenance import read_code
    from xtrain.runtime.store.run_directory import locate

    plan = _plan(arguments, arguments.sets)
    demand_certificate(plan, arguments.require_certificate)
    launcher = _launcher(plan, arguments.on)
    if launcher.alone and plan.launch["nodes"] > 1:
        raise Refused(2, f"xtrain launch: {launcher.kind} is one machine, but the plan is for {plan.launch['nodes']}")
    directory = locate(plan, read_code(Path(plan.spec).resolve().parent))
    if plan.workspace["run"] is None and not arguments.spec.endswith(".json"):
        # The code of the spec's folder may change before the job starts or resumes; the run directory must not.
        plan = _plan(arguments, [*arguments.sets, f'workspace.run="{directory.name}"'], quiet=True)
    return Job(plan=plan, launcher=launcher, directory=directory.absolute(), folder=Path.cwd(), python=sys.executable)


def _plan(arguments: argparse.Namespace, sets: list[str], *, quiet: bool = False) -> "Plan":
    """Compile the plan. Raises Refused. quiet: the spec's diagnostics were already shown."""
    from attrs import evolve

    from xtrain.plan.serialise import signed
    from xtrain.planner.load import is_saved, plan_from_path

    compiled = plan_from_path(arguments.spec, sets, arguments.world, counted)
    if not quiet and not compiled.report_to(sys.stderr):
        raise Refused(2, compiled.diagnostics.render(color=False), shown=True)
    assert compiled.plan is not None
    if compiled.plan.serves:
        raise Refused(2, "xtrain launch: this is a server spec; start it with `xtrain serve`")
    if is_saved(arguments.spec):
        if not quiet:
            say_own_code(compiled.plan, arguments.spec)
        return compiled.plan
    return evolve(signed(compiled.plan, sets, arguments.world), spec=str(Path(compiled.plan.spec).absolute()))


def _launcher(plan: "Plan", on: str | None) -> "Launcher":
    """Return the launcher of the spec, or the launcher named `on` with its defaults. Raises Refused."""
    from attrs import NOTHING

    from xtrain.dsl.schema.cluster import LAUNCHERS
    from xtrain.dsl.schema.setting import settings_of
    from xtrain.plan.graph import UnknownLauncher, launcher_of

    try:
        own = launcher_of(plan)
    except UnknownLauncher as unknown:
        if on is None:
            hint = f"use the xtrain and packages that made the plan, or --on {', '.join(LAUNCHERS)}"
            raise Refused(2, f"xtrain launch: the plan has {unknown}; {hint}") from unknown
        own = None
    if on is None and own is None:
        raise Refused(2, f"xtrain launch: the spec has no `launcher`; use --on {', '.join(LAUNCHERS)}")
    if own is not None and on in (None, own.kind):
        return own
    assert on is not None
    if on not in LAUNCHERS:
        raise Refused(2, f"xtrain launch: there is no launcher `{on}`; existing launchers: {', '.join(LAUNCHERS)}")
    settings = settings_of(LAUNCHERS[on]).items()
    needed = [f"{name} = {meta.example}" for name, (attribute, meta) in settings if attribute.default is NOTHING]
    if needed:
        raise Refused(2, f"xtrain launch: {on} needs settings; write `launcher {on} {{ {', '.join(needed)} }}`")
    return LAUNCHERS[on]()


def _cancel(directory: Path) -> int:
    """Cancel a run's job. Raises Refused, EnvironmentFault."""
    from xtrain.records.sweep import SWEEP_FILE
    from xtrain.runtime.jobs.submitted import cancel_job, job_state, read_job

    job = read_job(directory.absolute())
    if job is None:
        if (directory / SWEEP_FILE).is_file():
            hint = f"`xtrain sweep stop {quote(str(directory))}` makes its trials save and stop"
            raise Refused(3, f"xtrain launch: {directory} is a sweep; {hint}")
        if directory.is_file():
            raise Refused(3, f"xtrain launch: {directory} is a file, but --cancel takes the directory of a run")
        raise Refused(3, f"xtrain launch: run {directory} was not submitted; `xtrain runs` lists submitted runs")
    state = job_state(job)
    if state.over:
        print(f"{job.kind} job {job.id} is over: {state}")
        return 0
    cancel_job(job)
    print(f"{job.kind} job {job.id} was {state}, and is cancelled")
    return 0
