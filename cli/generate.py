"""`xtrain generate RUN`: continue prompts with the model of one of a run's checkpoints."""

import argparse
import json
import sys
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="sample from a trained run",
        description="Load a checkpoint of a run, its latest unless told otherwise, into one process and continue "
        "prompts.",
        epilog="example: xtrain generate runs/quickstart/<run> --prompt 'def ' --tokens 200",
    )
    parser.add_argument("run_directory", metavar="RUN", help="a run directory")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be given again")
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="latest, best, model, a step, epoch-2, a name such as ckpt-s000000001000, or the path of any checkpoint "
        "of the same model (default: the weights of the finished run, else the latest state)",
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="share of probability to draw from (default 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    problem = _problem(arguments)
    if problem:
        print(f"xtrain generate: {problem}", file=sys.stderr)
        return 2
    from ..planner.serialise import PlanError
    from ..runtime.data.errors import DataError
    from ..runtime.errors import EnvironmentFault
    from ..runtime.generation.trained import TrainedRun

    try:
        trained = TrainedRun.load(Path(arguments.run_directory), arguments.device, arguments.checkpoint)
        for prompt in arguments.prompt:
            text = trained.continue_text(
                prompt, arguments.tokens, arguments.temperature, arguments.top_p, arguments.seed
            )
            print(json.dumps({"prompt": prompt, "text": text}) if arguments.json else prompt + text, flush=True)
    except (EnvironmentFault, DataError, PlanError) as fault:
        print(f"xtrain generate: {fault}", file=sys.stderr)
        return 3
    return 0


def _problem(arguments: argparse.Namespace) -> str | None:
    if arguments.tokens < 1:
        return "--tokens must be at least 1"
    if arguments.temperature < 0:
        return "--temperature must not be negative"
    if not 0 < arguments.top_p <= 1:
        return "--top-p must lie above 0 and at most at 1"
    if not (Path(arguments.run_directory) / "plan.json").is_file():
        return f"{arguments.run_directory} is not a run directory: it has no plan.json"
    return None
