"""`xtrain fetch REPO`: download a repository of the hub into its cache."""

import argparse
import shlex

from xtrain.cli.verb import Refused

HELP = "download a model, tokenizer or dataset of the hub"
DESCRIPTION = (
    "Download a repository of the Hugging Face hub into the cache of huggingface_hub, where `hub(…)` in a spec finds "
    "models and tokenizers: no other command downloads these. A dataset of the source `huggingface` is also downloaded "
    "when its data is first read."
)
EPILOG = """\
examples:
  xtrain fetch Qwen/Qwen3-0.6B
  xtrain fetch Qwen/Qwen3-0.6B --revision v1.0
  xtrain fetch Qwen/Qwen3-0.6B --tokenizer        without the weights
  xtrain fetch HuggingFaceH4/no_robots --dataset
"""
# Weights in other formats, which xtrain does not read.
OTHER_FORMATS = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "*.onnx_data", "*.mlmodel",
    "original/*", "metal/*", "coreml/*", "onnx/*", "openvino/*",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("repo", metavar="REPO", help='organisation/name, or hub("organisation/name", revision = "…")')
    parser.add_argument("--revision", metavar="R", help="a branch, tag or commit (default: main)")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--dataset", action="store_true", help="REPO is a dataset")
    part.add_argument("--tokenizer", action="store_true", help="leave out the weights")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain fetch`. Exit status: 0 downloaded, 2 invalid name, 3 not downloaded."""
    from xtrain.dsl.checking.config_json import names_repo

    repo, revision = _named(arguments.repo, arguments.revision)
    if not names_repo(repo if "/" in repo else f"models/{repo}"):
        raise Refused(2, f"xtrain fetch: {repo!r} is not a repository: write organisation/name")
    ignored = (*OTHER_FORMATS, "*.safetensors*") if arguments.tokenizer else OTHER_FORMATS
    kind = "dataset" if arguments.dataset else "model"
    folder = _download(repo, revision, kind, () if arguments.dataset else ignored)
    print(f"Downloaded {repo} into {folder}")
    if kind == "dataset":
        print(f"\nIts files are the data of a spec:\n\n  xtrain init lora --model … --data {shlex.quote(folder)}")
    else:
        from xtrain.dsl.schema.model import snapshot_text

        what = "tokenizer" if arguments.tokenizer else "model"
        end = "" if arguments.tokenizer else " {}"
        print(f"\nIn a spec:\n\n  {what} {snapshot_text(repo, folder.rpartition('/')[2])}{end}")
    return 0


def _named(text: str, revision: str | None) -> tuple[str, str]:
    """Return (repository, revision) of the arguments."""
    parts = text.split('"')
    if text.startswith("hub(") and text.endswith(")") and len(parts) in (3, 5):
        text, *own = parts[1::2]
        if own and revision not in (None, own[0]):
            raise Refused(2, f"xtrain fetch: the revision is both {own[0]} and {revision}")
        revision = own[0] if own else revision
    return text, "main" if revision is None else revision


def _download(repo: str, revision: str, kind: str, ignored: tuple[str, ...]) -> str:
    """Download a repository; return the folder of its snapshot. Raises Refused."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError
    except ImportError:
        raise Refused(3, "xtrain fetch needs huggingface_hub: pip install 'xtrain[hub]'") from None
    try:
        return snapshot_download(repo, revision=revision, repo_type=kind, ignore_patterns=list(ignored))
    except KeyboardInterrupt:
        raise Refused(130, f"\nxtrain fetch: {repo} was interrupted; the same command continues") from None
    except GatedRepoError:
        return _refuse(repo, "its authors grant access by request: ask on its page, then log in with `hf auth login`")
    except (HfHubHTTPError, OSError, ValueError) as error:
        return _refuse(repo, str(error).strip().partition("\n")[0] or type(error).__name__)


def _refuse(repo: str, why: str) -> str:
    raise Refused(3, f"xtrain fetch: {repo} was not downloaded: {why}")
