"""`xtrain checkpoint convert FOLDER --to FOLDER`: convert the weights of a checkpoint of DeepSpeed's engine."""

import argparse
import sys
import time
from pathlib import Path

from xtrain.cli.export import file_size

EPILOG = """\
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
        help="write the weights of a checkpoint of DeepSpeed as safetensors",
        description="Write the weights of a checkpoint that DeepSpeed's engine has saved as a folder of safetensors.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="FOLDER", type=Path, help="a checkpoint of DeepSpeed's engine")
    parser.add_argument("--to", metavar="FOLDER", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--like", metavar="FOLDER", type=Path, help="the model that was trained: config.json and tokenizer are copied"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="number format (default: that of the checkpoint, fp32)"
    )
    parser.add_argument("--shard-size", metavar="SIZE", type=file_size, default=file_size("5GB"), help="default 5GB")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read files that hold more than tensors and DeepSpeed's own marks; this executes whatever they say",
    )
    parser.set_defaults(run=run, action="convert")


def run(arguments: argparse.Namespace) -> int:
    """Run the conversion. The help lists the exit statuses."""
    from xtrain.cli.export import print_result, progress
    from xtrain.runtime.errors import EnvironmentFault
    from xtrain.runtime.export.from_zero import convert
    from xtrain.runtime.export.new_folder import check_free
    from xtrain.runtime.export.zero_files import ZeroFiles

    begin = time.monotonic()
    if (arguments.path / "plan.json").is_file():
        print(f"xtrain checkpoint convert: {arguments.path} is a run; use `xtrain export`", file=sys.stderr)
        return 2
    if arguments.like is not None and not (arguments.like / "config.json").is_file():
        print(f"xtrain checkpoint convert: {arguments.like} has no config.json", file=sys.stderr)
        return 2
    try:
        check_free(arguments.to)
        if arguments.trust_pickle:
            print("warning: files are read as pickles, which can execute any code", file=sys.stderr)
        files = ZeroFiles.open(arguments.path, trust=arguments.trust_pickle)
        pieces = f"ZeRO stage {files.stage}, {files.ranks} ranks" if files.stage else "not in pieces"
        print(f"{files.folder}: {pieces}, {len(files.shapes):,} weights", file=sys.stderr, flush=True)
        converted = convert(files, arguments.like, arguments.to, arguments.dtype, arguments.shard_size, progress())
    except EnvironmentFault as fault:
        print(f"error[{fault.code}]: {fault}", file=sys.stderr)
        return 3
    print_result(converted, time.monotonic() - begin)
    return 0
