"""`xtrain doctor [SPEC|PLAN|RUN]`: problems of this machine, or of all machines of a job, for a plan."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import above_zero, add_node, add_sets, counted, ranks, spec_or_run
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.plan import Plan
    from xtrain.runtime.inspect.machine import Unfit

HELP = "check a machine against a plan, and suggest fixes"
DESCRIPTION = (
    "Check this machine, or all machines of a job, against a plan: devices, memory, disks, locks, "
    "versions, data, and whether the machines reach each other. Takes seconds, and trains nothing. Without "
    "an argument, check what any run in this folder needs."
)
EPILOG = (
    "examples:\n  xtrain doctor specs/two_ranks_cpu.xtrain\n  xtrain doctor runs/quickstart/<run> --json\n  srun "
    "--ntasks-per-node 1 xtrain doctor plan.json     once on each machine of a job\n  xtrain doctor plan.json "
    "--node 1 --meet n01:29500    the same without Slurm, on the second machine\n\nexit codes: 0 the run can work "
    "here, perhaps with warnings; 2 the spec is invalid; 3 it cannot\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("spec", metavar="SPEC", nargs="?", help="a spec, a saved plan (*.json) or a run")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as in the spec)")
    add_sets(parser)
    add_node(parser)
    parser.add_argument(
        "--wait",
        type=above_zero("a number of seconds"),
        default=60.0,
        metavar="SECONDS",
        help="for other machines (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain doctor`. The help lists the exit statuses."""
    from xtrain.planner.load import plan_from_path

    began = time.perf_counter()
    if arguments.spec is None:
        from xtrain.runtime.inspect.doctor import examine_without_plan

        return _report(examine_without_plan(), arguments, None, began)
    path = spec_or_run(arguments.spec)
    compiled = plan_from_path(path / "plan.json" if path.is_dir() else path, arguments.sets, arguments.world, counted)
    if compiled.plan is None:
        compiled.report_to(sys.stderr)
        if arguments.json:
            print(json.dumps({"diagnostics": [each.to_json() for each in compiled.diagnostics]}))
        return 2
    return _report(_with_plan(compiled.plan, arguments), arguments, compiled.plan, began)


def _with_plan(plan: "Plan", arguments: argparse.Namespace) -> "list[Unfit]":
    from xtrain.runtime.base.errors import EnvironmentFault
    from xtrain.runtime.base.hosts import node_place
    from xtrain.runtime.inspect.doctor import examine, of_fault

    # torch prints its own traces when a store does not answer.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        place = node_place(plan, arguments.node, arguments.meet)
    except EnvironmentFault as fault:
        return [of_fault(fault), *examine(plan, None, arguments.wait)]
    return examine(plan, place, arguments.wait)


def _report(found: "list[Unfit]", arguments: argparse.Namespace, plan: "Plan | None", began: float) -> int:
    from xtrain.runtime.base.hosts import in_slurm_step

    seconds = time.perf_counter() - began
    code = 3 if any(each.stops for each in found) else 0
    # With several machines, the first machine prints the findings of all. A machine that did not reach it prints its
    # own.
    codes = {each.code for each in found}
    apart = "X716" in codes or ("X703" in codes and arguments.node is not None)
    later_task = in_slurm_step() and os.environ.get("SLURM_PROCID", "0") != "0"
    prints = apart or not (arguments.node or later_task)
    if arguments.json:
        if prints:
            content = {"plan": plan.id if plan else None, "seconds": round(seconds, 3), "exit_code": code}
            print(json.dumps({**content, "findings": [each.to_json() for each in found]}, ensure_ascii=False, indent=1))
        return code
    if prints:
        for each in found:
            print(each)
        print(f"{_looked_at(plan, arguments)}: {_counts(found)}, {seconds:.1f} s")
    return code


def _looked_at(plan: "Plan | None", arguments: argparse.Namespace) -> str:
    if plan is None:
        return f"this machine in {Path.cwd()}, without a plan"
    from xtrain.runtime.base.hosts import in_slurm_step

    nodes, alone = plan.launch["nodes"], arguments.node is None and not in_slurm_step()
    of = f"plan {plan.id}, {plural(plan.mesh.world_size, 'rank')} on {plural(nodes, 'machine')}"
    return f"{of}, of which this is one" if nodes > 1 and alone else of


def _counts(found: "list[Unfit]") -> str:
    errors = sum(each.stops for each in found)
    if not found:
        return "nothing found"
    return f"{plural(errors, 'error')}, {plural(len(found) - errors, 'warning')}"
