"""`xtrain generate RUN`: continue prompts with the model of a run's checkpoint."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from xtrain.cli.verb import RUN_HELP, Refused, run_named, say_own_code

if TYPE_CHECKING:
    from xtrain.runtime.nn.texts import Continuation


HELP = "sample from a trained run"
DESCRIPTION = "Load a checkpoint of a run, by default its latest, into one process and continue prompts."
EPILOG = "example: xtrain generate runs/quickstart/<run> --prompt 'def ' --tokens 200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="latest, best, model, a step, epoch-2, a name such as ckpt-s000000001000, or the path of any checkpoint "
        "of the same model (default: the weights of the finished run, else the latest state)",
    )
    parser.add_argument("--task", metavar="NAME", help="task whose adapter is used, for a run with tasks")
    parser.add_argument("--tokens", type=int, default=200, help="maximum tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    parser.add_argument(
        "--top-k", type=int, metavar="K", help=("sample from the K most likely tokens (default: from all)")
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="share of probability to sample from (default 0.95)")
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="sample from tokens with at least this share of the most likely one's probability (default 0: from all)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends the continuation; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of each prompt's samples (default 0)")
    parser.add_argument(
        "--chat",
        nargs="?",
        const="auto",
        metavar="TEMPLATE",
        help=(
            "prompts are user messages: print the assistant's answers. TEMPLATE is chatml, llama3, plain, or the "
            "path of a Jinja template (default: that of the run's conversations, else its tokenizer's)"
        ),
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="with --chat, the system message")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per prompt")


def run(arguments: argparse.Namespace) -> int:
    problem = _problem(arguments)
    if problem:
        raise Refused(2, f"xtrain generate: {problem}")
    directory = run_named(arguments.run_directory)
    from xtrain.plan.serialise import PlanError, load_plan
    from xtrain.runtime.base.errors import DataError, EnvironmentFault
    from xtrain.runtime.nn.texts import Sampling
    from xtrain.runtime.sampling.text_generator import LogitsNotFinite
    from xtrain.runtime.sampling.trained_run import TrainedRun

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )
    try:
        with suppress(PlanError):  # the checkpoint's own error is reported first
            plan = load_plan(directory / "plan.json")
            if plan.architecture.own:
                say_own_code(plan, str(directory))
        trained = TrainedRun.load(directory, arguments.device, arguments.checkpoint, arguments.task)
        chat = None if arguments.chat is None else trained.chat(arguments.chat, arguments.system)
        show = as_json(arguments.prompt) if arguments.json else as_text(arguments.prompt, whole=chat is None)
        trained.continue_texts(arguments.prompt, arguments.tokens, sampling, arguments.stop, chat, show)
    except (EnvironmentFault, DataError, PlanError, LogitsNotFinite) as fault:
        raise Refused(3, f"xtrain generate: {fault}") from None
    return 0


def as_text(prompts: Sequence[str], *, whole: bool) -> "Callable[[list[Continuation]], None]":
    """Return a callback that prints texts in order while they grow; later texts wait for earlier ones. whole: include
    prompts."""
    begun = done = 0

    def show(texts: "list[Continuation]") -> None:
        nonlocal begun, done
        while done < len(texts):
            if begun == done:
                print(prompts[done] if whole else "", end="")
                begun += 1
            print(texts[done].news(), end="", flush=True)
            if not texts[done].done:
                return
            print()
            done += 1

    return show


def as_json(prompts: Sequence[str]) -> "Callable[[list[Continuation]], None]":
    """Return a callback that prints each text once it and all earlier ones are complete."""
    done = 0

    def show(texts: "list[Continuation]") -> None:
        nonlocal done
        while done < len(texts) and texts[done].done:
            print(json.dumps({"prompt": prompts[done], "text": texts[done].text}), flush=True)
            done += 1

    return show


def _problem(arguments: argparse.Namespace) -> str | None:
    if arguments.tokens < 1:
        return "--tokens must be at least 1"
    if not 0 <= arguments.temperature < math.inf:
        return "--temperature must be a finite number of at least 0"
    if arguments.top_k is not None and arguments.top_k < 1:
        return "--top-k must be at least 1"
    if not 0 <= arguments.min_p <= 1:
        return "--min-p must be between 0 and 1"
    if "" in arguments.stop:
        return "--stop must not be empty"
    if arguments.system and arguments.chat is None:
        return "--system needs --chat"
    if not 0 < arguments.top_p <= 1:
        return "--top-p must be above 0 and at most 1"
    return None
