"""Sources, an encoder and a builder for tests of tokenising: also run as a program, so that it can be killed.

    python tokenising.py build FOLDER CACHE [--jobs N] [--seconds S] [--beat S] [--silent S]
    python tokenising.py crash FOLDER CACHE [--stride N] [--random SEED --trials N]

`crash` builds again and again, each time in a process that is killed at another call of the operating system, and each
time goes on with what is left: the store must be the one of an undisturbed build, every time.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xtrain.runtime.feed import digests
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.prepared import build_store
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord, Unusable
from xtrain.runtime.feed.sources.fields import taker
from xtrain.runtime.feed.sources.source import DataSource, open_source
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.feed.tokenizing import tokenize as tokenise
from xtrain.runtime.feed.tokenizing import tokenize as tokenise_claims

# Small files that a killed process leaves, which are swept when they are old.
LITTER = (".partial-", ".claim-", "files.json")
CALLS = ("write", "fsync", "ftruncate", "rename", "replace", "unlink", "mkdir", "rmdir")


def made(fields: dict[str, Any], reads: dict[str, Any], tokenizer: TextTokenizer) -> TokenDocument | str:
    """Return the document of a record, or why there is none."""
    content = taker(Reads.of(reads))(fields)
    if isinstance(content, Unusable):
        return content.reason
    (found,) = DocumentEncoder(tokenizer, reads).encode([SourceRecord(content, "here")])
    assert not isinstance(found, tuple)
    return found.reason if isinstance(found, BadRecord) else found


class BytesEncoder:
    """Bytes between 256 and 257. Texts that begin with `?` are masked; those with `!` do what they say."""

    vocab_size = 258

    def __init__(self, log: Path | None = None, seconds: float = 0.0) -> None:
        self.log = log
        self.seconds = seconds

    @property
    def covers(self) -> dict[str, str]:
        return {"tokenizer": "bytes of tests"}

    def encode(self, records: Sequence) -> list[TokenDocument | BadRecord]:
        return [self._encode(record) for record in records]

    def _encode(self, record) -> TokenDocument | BadRecord:
        text, _, argument = record.content.partition(" ")
        time.sleep(self.seconds)
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"{record.origin}\n")
        match text:
            case "!die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "!die_once" if not Path(argument).exists():
                Path(argument).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "!raise":
                raise ZeroDivisionError(argument)
            case "!memory":
                raise MemoryError
            case "!bad":
                return BadRecord(origin=record.origin, reason="as the text says")
            case "!alien":
                return TokenDocument(ids=np.array([300], np.uint16))
        ids = np.array([256, *record.content.encode(), 257], np.uint16)
        trained = np.arange(len(ids)) % 3 == 0 if text.startswith("?") else None
        return TokenDocument(ids=ids, trained=trained)


def write_lines(folder: Path, files: Sequence[Sequence[str]]) -> Path:
    """A folder of .jsonl files of texts; each file is a unit of its own. A text `#` is a line that is no JSON."""
    folder.mkdir(exist_ok=True)
    for number, texts in enumerate(files):
        lines = ["{" if text == "#" else json.dumps({"text": text}) for text in texts]
        (folder / f"{number:03d}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def lines_of(folder: Path, limit: int = 1000) -> DataSource:
    return open_source("jsonl", patterns=("*.jsonl",), base=folder, reads={"form": "text"}, bad_record_limit=limit)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _crash(arguments: argparse.Namespace) -> dict:
    """Every call in turn, or many at random; how often, and what came out wrong."""
    source, cache = lines_of(arguments.folder), arguments.cache
    alone = build_store(source, BytesEncoder(), cache / "alone", jobs=1)
    expected = contents(cache / "alone" / alone.key)
    # Not the disk is tried here, but what a killed process leaves: that is in the memory of the operating system.
    fsync, os.fsync = os.fsync, lambda fd: None
    tokenise.COMMIT_SECONDS = 0.0
    chance = random.Random(arguments.random)
    trials, crashes, number, wrong = 0, 0, 1 - arguments.stride, []
    while True:
        trials += 1
        number += arguments.stride
        shutil.rmtree(cache / "tried", ignore_errors=True)
        first = chance.randrange(1, 80) if arguments.random is not None else number
        died = _forked(source, cache / "tried", first, chance.random())
        if not died and arguments.random is None:
            break
        crashes += died
        # A crash may be followed by another while its leftovers are gone on with.
        while died and arguments.random is not None:
            died = _forked(source, cache / "tried", chance.randrange(1, 200), chance.random())
            crashes += died
        if _forked(source, cache / "tried", None, 1.0):
            wrong.append(f"{first}: ended badly")
        left = {path.name for path in (cache / "tried").iterdir() if not path.name.startswith(LITTER)}
        if left != {alone.key} or contents(cache / "tried" / alone.key) != expected:
            wrong.append(f"{first}: {sorted(left)}")
        if arguments.random is not None and trials == arguments.trials:
            break
    os.fsync = fsync
    return {"trials": trials, "crashes": crashes, "wrong": wrong}


def _forked(source: DataSource, cache: Path, call: int | None, share: float) -> bool:
    """Build in a process that dies at its `call`-th call, of a write having done a share; whether it died."""
    child = os.fork()
    if not child:
        try:
            if call is not None:
                _die_at(call, share)
            build_store(source, BytesEncoder(), cache, jobs=1)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a build failed that should not have")
    return os.WIFSIGNALED(status)


def _die_at(call: int, share: float) -> None:
    left = call

    def deadly(name: str):
        real = getattr(os, name)

        def wrapper(*args, **kwargs):
            nonlocal left
            left -= 1
            if not left:
                if name == "write":
                    real(args[0], args[1][: int(len(args[1]) * share)])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapper

    for name in CALLS:
        setattr(os, name, deadly(name))


def _build(arguments: argparse.Namespace) -> dict:
    tokenise_claims.BEAT_SECONDS, tokenise_claims.SILENT_SECONDS = arguments.beat, arguments.silent
    tokenise.COMMIT_SECONDS = 0.0
    tokenise.POLL_SECONDS = 0.02
    digests.TICK_NS = 0
    waited = False

    def report(now) -> None:
        nonlocal waited
        if now.stage == "waiting" and not waited:
            waited = True
            print("waiting", flush=True)

    encoder = BytesEncoder(arguments.cache.parent / "log", arguments.seconds)
    store = build_store(lines_of(arguments.folder), encoder, arguments.cache, jobs=arguments.jobs, progress=report)
    return {"key": store.key, "tokens": store.num_tokens, "waited": waited}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("build", "crash"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--beat", type=float, default=5.0)
    parser.add_argument("--silent", type=float, default=60.0)
    parser.add_argument("--random", type=int)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--stride", type=int, default=1)
    arguments = parser.parse_args()
    print(json.dumps(_crash(arguments) if arguments.what == "crash" else _build(arguments)))


if __name__ == "__main__":
    # What travels to another process must be found there under the name of this module.
    import tokenising

    tokenising.main()
