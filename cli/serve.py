"""`xtrain serve SPEC`: a training server on ranks of this machine."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import Refused, add_sets, ranks

if TYPE_CHECKING:
    from xtrain.plan.plan import Plan
    from xtrain.planner.load import Compiled
    from xtrain.server.access import Keys


HELP = "serve a model for training by clients"
DESCRIPTION = (
    "Compile a spec with a `serve` block (or take a plan.json unchanged), start its ranks on this machine, "
    "and listen. The same command resumes a stopped server."
)
EPILOG = "example: xtrain serve specs/serve_cpu.xtrain --set serve.port=8123"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="a .xtrain spec or a plan.json")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as the spec's axes need)")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="if the server's store is damaged, continue with the intact part, and set the rest aside",
    )
    add_sets(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain serve`. Exit status: 75 stopped by a signal, 1 failed, 2 invalid spec, 3 unsuitable machine."""
    from xtrain.dsl.load import load_spec
    from xtrain.planner.load import is_saved, plan_from_path

    # A serving spec does not need the settings of a training run.
    if not is_saved(arguments.spec) and (draft := load_spec(arguments.spec, arguments.sets).draft) is not None:
        _check_serves(draft.serve is not None)
    compiled = plan_from_path(arguments.spec, arguments.sets, arguments.world, lambda plan: None)
    if not compiled.report_to(sys.stderr) or compiled.plan is None:
        return 2
    return _serve(compiled, compiled.plan, repairs=arguments.repair)


def _serve(compiled: "Compiled", plan: "Plan", *, repairs: bool) -> int:
    """Serve the plan. Raises Refused."""
    from xtrain.plan.graph import SETUP
    from xtrain.runtime.base.packages import check_packages
    from xtrain.runtime.loop.preflight import check_devices, check_one_machine, find_devices
    from xtrain.server.access import ServerLimits
    from xtrain.server.engine.started import StartedEngine, StartedRanks
    from xtrain.server.serving import Address, CannotServe, check_serving, serve

    _check_serves(plan.serves)
    args = plan.node(SETUP).args
    files = {name: Path(args[name]) for name in ("certificate", "private_key") if args[name]}
    hosts, origins = (tuple(args.get(name, ())) for name in ("hosts", "origins"))
    address = Address(host=args["host"], port=args["port"], hosts=hosts, origins=origins, **files)
    keys = _keys(args["key"], needed=args["key_needed"])
    try:
        check_serving(address)
        check_one_machine(plan)
        check_packages(plan)
        for remark in check_devices(plan, find_devices(plan, plan.mesh.world_size)):
            print(f"warning[W707]: {remark}", file=sys.stderr)
        started = StartedRanks.open(plan, compiled.resolved_text)
        folder = started.directory / "server"
        keys = keys or _made_key(plan.name, args["key"], folder / "key")
        if repairs:
            _repair(plan.name, folder)
        print(f"{plan.name}: starting {plan.mesh.world_size} rank(s) in {started.directory}", flush=True)
        return serve(
            StartedEngine.over(started),
            folder,
            address,
            keys,
            ServerLimits(rows=args["texts"], queue=args["queue"], idle=float(args["idle_seconds"])),
            lambda url: print(f"{plan.name}: `{args['model_name']}` is served at {url}", flush=True),
        )
    except CannotServe as problem:
        raise Refused(3, f"xtrain serve: {problem}") from None


def _repair(server: str, folder: Path) -> None:
    """Repair the store. Raises CannotServe."""
    from xtrain.server.serving import CannotServe
    from xtrain.server.store import StoreInUse, repair

    try:
        damage = repair(folder)
    except (StoreInUse, OSError) as error:
        raise CannotServe(f"{folder} cannot be repaired: {error}") from error
    for place in damage:
        print(f"{server}: damaged: {place}", flush=True)
    found = f"was repaired: the original is in {folder / 'damaged'}" if damage else "is whole"
    print(f"{server}: {folder} {found}", flush=True)


def _check_serves(serves: bool) -> None:
    if not serves:
        hint = "add one, such as `serve { adapters = 8 }` next to an `adapter`; `xtrain run` trains with the spec"
        raise Refused(2, f"xtrain serve: the spec has no `serve` block; {hint}")


def _keys(name: str, *, needed: bool) -> "Keys | None":
    """Read the keys of all owners from the environment variable; None if it is unset and optional. Raises Refused."""
    from xtrain.server.access import Keys

    text = os.environ.get(name, "")
    if not (text or needed):
        return None
    try:
        return Keys.read(text)
    except ValueError as error:
        message = f"error[X709]: the environment variable {name} has no keys for the server: {error}"
        raise Refused(3, f"{message}; set it to a key, or to `NAME=KEY` for each of several owners") from None


def _made_key(server: str, variable: str, path: Path) -> "Keys":
    """Return the key that a server generates at its first start and prints at each start. Raises Refused."""
    from xtrain.server.access import OWNER, Keys

    try:
        keys = Keys.kept(path)
    except (OSError, ValueError) as error:
        message = f"xtrain serve: {path} has no valid key: {error}"
        raise Refused(3, f"{message}; remove the file to get a new key, or set {variable}") from None
    print(f"{server}: clients send the key {keys.of[OWNER]} ({path}); set {variable} to change it", flush=True)
    return keys
