"""`xtrain push FOLDER REPO`: upload an exported model to the hub."""

import argparse
import hashlib
from pathlib import Path
from typing import Any, Final

from xtrain.cli.verb import Refused
from xtrain.plan.llama_cpp import SUFFIX
from xtrain.text.units import bytes_text, plural

HELP = "upload an exported model to the hub"
DESCRIPTION = (
    "Upload a folder or a .gguf file that `xtrain export` or `xtrain merge` has written to a repository of the Hugging "
    "Face hub in one commit, and compare the digests of the hub with the files. A repository that does not exist is "
    "created. Hidden files are left out; other files of the repository stay."
)
EPILOG = """\
examples:
  xtrain push models/tuned organisation/tuned
  xtrain push models/tuned.gguf organisation/tuned --public
"""
CONFIGS: Final = ("config.json", "adapter_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", metavar="FOLDER", type=Path, help="exported folder, or FILE.gguf")
    parser.add_argument("repo", metavar="REPO", help="organisation/name, or user/name")
    parser.add_argument("--public", action="store_true", help="a new repository can be seen by all (default: private)")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain push`. Exit status: 0 uploaded and compared, 2 invalid arguments, 3 not uploaded."""
    from xtrain.dsl.checking.config_json import names_repo

    path, repo = arguments.path, arguments.repo
    if "/" not in repo or not names_repo(repo):
        raise Refused(2, f"xtrain push: {repo!r} is not a repository: write organisation/name")
    files = _files(path)
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import LocalTokenNotFoundError
    except ImportError:
        raise Refused(3, "xtrain push needs huggingface_hub: pip install 'xtrain[hub]'") from None
    api, state = HfApi(), "was not uploaded"
    try:
        place = api.create_repo(repo, private=not arguments.public, exist_ok=True)
        adds = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()]
        commit = api.create_commit(repo, adds, commit_message="Upload a model that xtrain has exported").oid
        state = f"has the files in commit {commit[:12]}, and they were not compared"
        there = {each.path: each for each in api.get_paths_info(repo, list(files), revision=commit)}
        wrong = [name for name, file in files.items() if name not in there or not _is_same(file, there[name])]
        seen_by = "private" if api.model_info(repo).private else "public"
    except KeyboardInterrupt:
        raise Refused(130, f"\nxtrain push: {repo} {state}: interrupted; run the same command again") from None
    except Exception as error:  # also of the client of HTTP, which differs by version of huggingface_hub
        status = getattr(getattr(error, "response", None), "status_code", None)
        unknown = status in (401, 403) or isinstance(error, LocalTokenNotFoundError)
        login = "; log in with `hf auth login` and a token that may write" if unknown else ""
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Refused(3, f"xtrain push: {repo} {state}: {line}{login}") from None
    if wrong:
        raise Refused(3, f"xtrain push: {wrong[0]} of commit {commit[:12]} differs from the file; push it again")
    size = bytes_text(sum(file.stat().st_size for file in files.values()))
    print(f"uploaded {plural(len(files), 'file')}, {size}, to {place}, {seen_by}; digests compared")
    return 0


def _files(path: Path) -> dict[str, Path]:
    """Return the files to upload by their place in the repository. Raises Refused."""
    if path.suffix == SUFFIX and path.is_file():
        return {path.name: path}
    if not any((path / name).is_file() for name in CONFIGS):
        raise Refused(
            2, f"xtrain push: {path} is no exported model; `xtrain export RUN --to FOLDER` writes one from a run"
        )
    found = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {place: file for place, file in found.items() if not any(part[0] == "." for part in place.split("/"))}


def _is_same(file: Path, there: Any) -> bool:
    """Return True if a file has the digest that the hub gives: SHA-256 of a large file, else the name of a git blob."""
    stored = getattr(there, "lfs", None)
    begin = hashlib.sha1(b"blob %d\0" % file.stat().st_size) if stored is None else hashlib.sha256()
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, lambda: begin).hexdigest()
    return digest == (there.blob_id if stored is None else stored.sha256)
