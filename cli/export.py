"""`xtrain export RUN --to FOLDER`: export a checkpoint as a transformers folder."""

import argparse
import re
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import RUN_HELP, Refused, run_named
from xtrain.plan.llama_cpp import SUFFIX
from xtrain.text.units import bytes_text, plural, rate_text, seconds_text

if TYPE_CHECKING:
    from xtrain.runtime.store.export import Exported
    from xtrain.runtime.store.export_weights import Report

HELP = "export a trained model for transformers"
DESCRIPTION = "Write a checkpoint of a run as a folder that transformers reads, or as a file for llama.cpp."
EPILOG = """\
FOLDER gets config.json, generation_config.json, weights as safetensors, the tokenizer with its chat template, and a
model card, README.md. It is written beside its place, read back, and then gets its name; what is there is never
overwritten. One tensor at a time is in memory, whatever the layout of the run; no ranks are started.

examples:
  xtrain export runs/quickstart/<run> --to models/quickstart
  xtrain export runs/quickstart/<run> --to models/best --checkpoint best --dtype bf16
  xtrain export runs/quickstart/<run> --to models/averaged --ema --shard-size 5GB
  xtrain export runs/quickstart/<run> --to models/quickstart.gguf

exit codes: 0 exported, 2 the command line is wrong, 3 no checkpoint, a damaged one, no room, or FOLDER is there already
"""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LINE_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_export(parser)
    parser.add_argument(
        "--adapter",
        action="store_true",
        help=(
            "for a run with an `adapter`: export the adapter alone, as PEFT reads it; `xtrain merge` writes the "
            "whole model"
        ),
    )
    parser.add_argument(
        "--quantise",
        action="store_true",
        help="write the matrices that `precision { qat }` of the run rounds as integers, as compressed-tensors does",
    )
    add_task(parser)


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add `--task`, which selects one of several adapters."""
    parser.add_argument("--task", metavar="NAME", help="task whose adapter is exported, for a run with tasks")


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the checkpoint, the target folder and the format."""
    parser.add_argument("run_directory", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--to", metavar="FOLDER", type=Path, required=True, help="output folder, or FILE.gguf for llama.cpp and Ollama"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help=(
            "latest, best, model, a step, epoch-2, a name such as ckpt-s000000001000, or the path of any "
            "checkpoint of the same model (default: the weights of the finished run, else the latest state)"
        ),
    )
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="averaged or trained weights (default: as set by `ema { publish }` of the run)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32", "fp64", "fp8"),
        help=(
            "number format (default: for a model from a folder that of each tensor there, else that of the run's "
            "parameters); fp8: matrices of blocks in fp8 with scales, as DeepSeek publishes them, all else in bf16"
        ),
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=file_size,
        default=file_size("5GB"),
        help="maximum bytes of weights per file, such as 500MB or 2GiB; several files get an index (default 5GB)",
    )
    parser.add_argument(
        "--dequantise",
        action="store_true",
        help="dequantize matrices stored by `precision { base }` of the run, and write them",
    )


def file_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or Fraction(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a size; write 5GB or 500MB")
    return int(Fraction(match[1]) * unit)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain export`. The help lists the exit statuses."""
    if arguments.adapter and arguments.quantise:
        raise Refused(2, "xtrain export: --quantise is for a whole model, and --adapter exports none")
    if arguments.adapter and arguments.dtype == "fp8":
        raise Refused(2, "xtrain export: --dtype fp8 is for a whole model, and --adapter exports none")
    return write("export", arguments, adapter=arguments.adapter)


def write(verb: str, arguments: argparse.Namespace, *, adapter: bool = False, merges: bool = False) -> int:
    """Write the requested folder; return the exit status. adapter: export only the adapter. merges: merge the adapter
    into the model."""
    gguf, quantise = arguments.to.suffix == SUFFIX, not merges and arguments.quantise
    if gguf and (adapter or quantise or arguments.dtype in ("fp8", "fp64")):
        raise Refused(2, f"xtrain {verb}: a .gguf file is written of a whole model in fp32, fp16 or bf16")
    directory = run_named(arguments.run_directory)
    from xtrain.plan.serialise import load_plan
    from xtrain.runtime.store.adapter_export import adapter_export_of, check_sound, export_of
    from xtrain.runtime.store.export_folder import check_free

    begin = time.monotonic()
    check_free(arguments.to)
    plan = load_plan(directory / "plan.json")
    which = {"checkpoint": arguments.checkpoint, "averaged": arguments.ema, "dtype": arguments.dtype}
    how = {"most": arguments.shard_size, "dequantise": arguments.dequantise, "merges": merges}
    how |= {"quantise": quantise, "gguf": gguf}
    which["task"] = arguments.task
    export = adapter_export_of(plan, directory, **which) if adapter else export_of(plan, directory, **which, **how)
    step = f"step {export.state['step']:,}"
    print(f"{export.tensors}: {step}, {export.weights} weights; comparing checksums", file=sys.stderr, flush=True)
    check_sound(export.tensors)
    exported = export.write(arguments.to, progress())
    print_result(exported, time.monotonic() - begin)
    return 0


def progress() -> "Report":
    """Return a callback that prints progress lines on stderr, some seconds apart."""

    begun: dict[str, float] = {}
    due = time.monotonic() + LINE_SECONDS

    def report(what: str, done: int, total: int, file: int, files: int) -> None:
        nonlocal due
        now = time.monotonic()
        begin = begun.setdefault(what, now)
        if now < due:
            return
        due = now + LINE_SECONDS
        rate = f", {rate_text(done / (now - begin), 'B/s')}" if now > begin else ""
        share = f"{done / total:.0%} of {bytes_text(total)}"
        print(f"{what} file {file} of {files}: {share}{rate}", file=sys.stderr, flush=True)

    return report


def print_result(exported: "Exported", seconds: float) -> None:
    for remark in exported.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    formats = " and ".join(f"{bytes_text(size)} of {name}" for name, size in exported.formats.items())
    what = f"{plural(exported.tensors, 'tensor')}, {formats} in {plural(exported.files, 'file')}"
    if exported.merged:
        worst = max(exported.merged, key=lambda each: each.error)
        print(
            f"{plural(len(exported.merged), 'matrix')} with an adapter; rounding to the format affects "
            f"{worst.name} most:"
        )
        lost = f"of a change of rms {worst.rms:.2g}, {worst.error:.2g} is lost to rounding"
        where = "" if exported.folder.suffix == SUFFIX else "; merge.json has all"
        print(f"  {lost}, and {worst.unchanged:.1%} of its elements are unchanged{where}")
    print(f"exported to {exported.folder}: {what}, read back and compared, {seconds_text(seconds)}")
