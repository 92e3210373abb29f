"""`xtrain checkpoint ls|show|verify|prune|convert PATH`: inspect, delete and convert checkpoints.

`convert` reads the checkpoints of DeepSpeed's engine.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.cli.export import file_size
from xtrain.cli.verb import RUN_HELP, Refused, colored, found_at, number_of
from xtrain.text.page import Page
from xtrain.text.units import bytes_text, plural, seconds_text

if TYPE_CHECKING:
    from xtrain.runtime.jobs.runs import SeenCheckpoint


CONVERT_EPILOG = """\
FOLDER is what `engine.save_checkpoint` was given, or one checkpoint in it: ZeRO of any stage and number of ranks. The
pieces are put together, in fp32, one tensor at a time, and written as safetensors under the names of the module; `model
"folder"` and transformers read them. Moments are not taken along: training begins anew with these weights.

Files are read without executing what is in them. DeepSpeed need not be installed.

examples:
  xtrain checkpoint convert output --like models/llama --to models/mine
  xtrain checkpoint convert output/global_step100 --like models/llama --to models/mine --dtype bf16

For the way back, `xtrain export RUN --to FOLDER` writes what programs with DeepSpeed load by `from_pretrained`.

exit codes: 0 converted, 2 the command line is wrong, 3 no such checkpoint, a damaged one, no room, or --to is there
already
"""


def add_convert(views: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the action to `xtrain checkpoint`."""
    parser = views.add_parser(
        "convert",
        help="convert a DeepSpeed checkpoint to safetensors",
        description="Convert a checkpoint of DeepSpeed's engine to a folder of safetensors.",
        epilog=CONVERT_EPILOG,
    )
    parser.add_argument("path", metavar="FOLDER", type=Path, help="checkpoint of DeepSpeed's engine")
    parser.add_argument("--to", metavar="FOLDER", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--like", metavar="FOLDER", type=Path, help="folder of the trained model: config.json and tokenizer are copied"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="number format (default: that of the checkpoint, fp32)"
    )
    parser.add_argument("--shard-size", metavar="SIZE", type=file_size, default=file_size("5GB"), help="default 5GB")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read files that contain more than tensors and DeepSpeed's own classes; this executes code in them",
    )
    parser.set_defaults(run=run_convert)


def run_convert(arguments: argparse.Namespace) -> int:
    """Run the conversion. The help lists the exit statuses."""
    from xtrain.cli.export import print_result, progress
    from xtrain.runtime.store.deepspeed_import import ZeroFiles, convert
    from xtrain.runtime.store.export_folder import check_free

    begin = time.monotonic()
    if (arguments.path / "plan.json").is_file():
        raise Refused(2, f"xtrain checkpoint convert: {arguments.path} is a run; use `xtrain export`")
    if arguments.like is not None and not (arguments.like / "config.json").is_file():
        raise Refused(2, f"xtrain checkpoint convert: {arguments.like} has no config.json")
    check_free(arguments.to)
    if arguments.trust_pickle:
        print("warning: files are read as pickles, which can execute any code", file=sys.stderr)
    files = ZeroFiles.open(arguments.path, trust=arguments.trust_pickle)
    pieces = f"ZeRO stage {files.stage}, {files.ranks} ranks" if files.stage else "not in pieces"
    print(f"{files.folder}: {pieces}, {len(files.shapes):,} weights", file=sys.stderr, flush=True)
    converted = convert(files, arguments.like, arguments.to, arguments.dtype, arguments.shard_size, progress())
    print_result(converted, time.monotonic() - begin)
    return 0


HELP = "list, show, verify and prune checkpoints"
DESCRIPTION = "Inspect the checkpoints below PATH, without loading them."
EPILOG = """\
PATH is a run, a lineage or root of runs, a folder of checkpoints, or one checkpoint.

examples:
  xtrain checkpoint ls runs/quickstart
  xtrain checkpoint show runs/quickstart/<run>/checkpoints/ckpt-s000000001000
  xtrain checkpoint verify runs/quickstart/<run>
  xtrain checkpoint prune runs/quickstart --keep 1          # says what would go
  xtrain checkpoint prune runs/quickstart --keep 1 --yes
  xtrain checkpoint convert output/global_step100 --like models/llama --to models/mine

exit codes: 0 fine, 1 something is damaged, 2 the command line is wrong, 3 no checkpoint, or it cannot be removed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    views = parser.add_subparsers(title="what to do", metavar="ACTION", dest="action", required=True)
    about = {
        "ls": "list checkpoints, with pointers and sizes",
        "show": "show their metadata",
        "verify": "read them completely and compare checksums",
        "prune": "remove old, damaged and leftover checkpoints",
    }
    parsers = {
        name: views.add_parser(name, help=text, description=f"{text.capitalize()}.") for name, text in about.items()
    }
    where = f"{RUN_HELP}; or a folder with runs, a folder of checkpoints, or a checkpoint"
    for view in parsers.values():
        view.add_argument(
            "path",
            metavar="PATH",
            type=Path,
            help=where,
        )
        view.add_argument("--json", action="store_true", help="print JSON, one object per line")
    parsers["verify"].add_argument("--sizes", action="store_true", help="compare only sizes, which is instant")
    prune = parsers["prune"]
    prune.add_argument(
        "--keep", type=number_of("checkpoints"), metavar="N", help="all except the newest N of each run (pointers stay)"
    )
    prune.add_argument("--damaged", action="store_true", help="those with missing or short files")
    prune.add_argument("--yes", action="store_true", help="remove them; without --yes, only list them")
    add_convert(views)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain checkpoint`. The help lists the exit statuses."""
    from xtrain.runtime.jobs.runs import below, folders

    path = arguments.path = found_at(arguments.path, 3)
    if not folders(path) and not below(path):
        raise Refused(3, f"xtrain checkpoint: there is no checkpoint below {path}")
    if arguments.action == "prune":
        return _prune(arguments)
    seen = below(path, content=arguments.action == "verify" and not arguments.sizes)
    if arguments.json:
        for each in seen:
            print(json.dumps(each.json()))
    elif arguments.action == "show":
        _show(seen)
    else:
        _list(seen, verified=arguments.action == "verify")
    return 1 if arguments.action == "verify" and any(each.flaws for each in seen) else 0


def _list(seen: "list[SeenCheckpoint]", *, verified: bool) -> None:
    page = Page(color=colored())
    for folder in dict.fromkeys(each.run for each in seen):
        page.heading(folder)
        rows = []
        for each in (each for each in seen if each.run == folder):
            verdict = "; ".join(each.flaws) or ("intact" if verified else "")
            remark = " · ".join(filter(None, (", ".join(each.pointers), _epoch(each), _measured(each), verdict)))
            rows.append((each.entry.name, bytes_text(each.bytes), _age(each), remark))
        page.table(rows, align="<>><")
    sys.stdout.write(str(page).lstrip("\n"))


def _epoch(each: "SeenCheckpoint") -> str:
    """Return `epoch-2` for a checkpoint at the end of an epoch, which can be named so; otherwise the progress in
    epochs."""
    if each.state.get("epoch_ended") is not None:
        return f"epoch-{each.state['epoch_ended']}"
    epoch = each.state.get("epoch")
    return "" if epoch is None else f"{epoch:.3g} epochs"


def _measured(each: "SeenCheckpoint") -> str:
    metrics = each.state.get("metrics") or {}
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _age(each: "SeenCheckpoint") -> str:
    saved = each.state.get("time")
    return "" if saved is None else f"{seconds_text(max(time.time() - saved, 1))} ago"


def _contents(each: "SeenCheckpoint") -> str:
    """Return a description of the checkpoint's contents, including averaged weights."""
    average = each.state.get("ema")
    if not average:
        return "the full state" if each.entry.is_full else "weights alone"
    decay = average.get("decay")
    of = f"{average['updates']:,} updates" + ("" if decay is None else f" of decay {decay:g}")
    return f"the full state, with an average of {of}" if each.entry.is_full else f"averaged weights only: {of}"


def _show(seen: "list[SeenCheckpoint]") -> None:
    page = Page(color=colored())
    for each in seen:
        state: dict[str, Any] = each.state
        page.heading(each.entry.name, str(each.entry.path.parent))
        model, begun = state.get("model") or {}, state.get("begun_from")
        ranks = plural(state.get("world_size", 0), "rank")
        written = f"{bytes_text(each.bytes)} in {plural(len(state.get('files', ())), 'file')}, by {ranks}"
        rows = [
            ("holds", _contents(each)),
            ("state", _behind(each)),
            ("written", f"{written}, {_age(each) or 'unknown age'}"),
            ("model", ", ".join(f"{name} {value}" for name, value in model.items() if value not in (0, None))),
            ("tensors", f"{len(state.get('tensors', ())):,} parameters in {state.get('params')}"),
            ("plan", f"{state.get('plan_id')}, experiment {state.get('config_id')}"),
            ("made by", _versions_text(state.get("made_by") or {})),
            ("named by", ", ".join(each.pointers) or "no pointer"),
        ]
        rows += [("measured", measured)] if (measured := _measured(each)) else []
        rows += [("begun from", f"{begun['path']}, step {begun['step']:,}")] if begun else []
        rows += [("damaged", "; ".join(each.flaws))] if each.flaws else []
        page.described(rows)
    sys.stdout.write(str(page).lstrip("\n"))


def _behind(each: "SeenCheckpoint") -> str:
    """Return the progress at the checkpoint: steps, tokens, epochs."""
    text = f"after {each.entry.step:,} steps, {each.state.get('tokens', 0):,} tokens"
    epoch, ended = each.state.get("epoch"), each.state.get("epoch_ended")
    text += f", {epoch:.4g} epochs" if epoch is not None else ""
    return text + (f"; epoch {ended} ends with it" if ended else "")


def _versions_text(versions: "dict[str, str]") -> str:
    """Return `code 1a2b3c4d, xtrain 0.1.0, torch 2.13.0, python 3.11.9`, or the known part of it."""
    words = {"code_id": "code", "xtrain": "xtrain", "torch": "torch", "python": "python"}
    return ", ".join(f"{word} {versions[name]}" for name, word in words.items() if name in versions) or "not known"


def _prune(arguments: argparse.Namespace) -> int:
    from xtrain.runtime.base.errors import EnvironmentFault
    from xtrain.runtime.base.files import forget
    from xtrain.runtime.base.locks import LAUNCHER_LOCK, WORKER_LOCK, hold
    from xtrain.runtime.jobs.runs import folders, removable
    from xtrain.runtime.store.checkpoints import Publisher, size_bytes

    known = folders(arguments.path)
    if not known:
        raise Refused(2, "xtrain checkpoint: prune takes a run or a folder of checkpoints, not a single one")
    for folder in known:
        try:
            # A running run may be writing a checkpoint at this moment.
            names = (LAUNCHER_LOCK, WORKER_LOCK) if arguments.yes and folder.root.name == "checkpoints" else ()
            locks = [hold(folder.root.parent, name) for name in names]
            found = removable(folder, keep=arguments.keep, damaged=arguments.damaged)
            for path, why in found:
                size = size_bytes(path) if path.is_dir() else path.stat().st_size
                _report(arguments, path, why, size)
                if arguments.yes:
                    Publisher(folder).remove(path) if path.is_dir() else forget(path)
            for lock in locks:
                lock.close()
        except EnvironmentFault as fault:
            raise Refused(3, f"xtrain checkpoint: {fault}") from None
        except OSError as error:
            raise Refused(3, f"xtrain checkpoint: {error.filename}: {error.strerror}") from None
    if not arguments.yes and not arguments.json:
        print("nothing was removed; add --yes to remove the listed checkpoints", file=sys.stderr)
    return 0


def _report(arguments: argparse.Namespace, path: Path, why: str, size: int) -> None:
    if arguments.json:
        print(json.dumps({"path": str(path), "why": why, "bytes": size, "removed": arguments.yes}))
    else:
        print(f"{'removed' if arguments.yes else 'would remove'}  {path}  {bytes_text(size)}  {why}")
