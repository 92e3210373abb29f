"""`xtrain data build SPEC`: tokenize and pack before a run, resume interrupted work, verify existing data."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import FrameType
from typing import TYPE_CHECKING, Any

from xtrain.cli.arguments import number_of

if TYPE_CHECKING:
    from xtrain.planner.plan import Node, Plan
    from xtrain.runtime.data.documents.tokenizers import TextTokenizer
    from xtrain.runtime.data.sources.source import DataSource
    from xtrain.runtime.data.tokenising.build import StoreIdentity

EPILOG = """\
Nothing is built that is there already: a store is named by everything it depends on. A build that was interrupted, in
whatever way, goes on where it was when the same command is given again.

examples:
  xtrain data build specs/quickstart.xtrain
  xtrain data build specs/quickstart.xtrain --jobs 8 --dataset code
  xtrain data build specs/quickstart.xtrain --verify --json | jq .key
"""
RESUMABLE = "the finished part is kept; the same command continues from there"


class _Stopped(BaseException):
    """A request to stop this process."""


def add_build(views: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the view to `xtrain data`."""
    build = views.add_parser(
        "build",
        help="tokenise and pack, as a run would",
        description="Tokenise the datasets of SPEC and pack their rows into the cache, so that a run starts at once.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument(
        "--jobs",
        type=number_of("processes"),
        metavar="N",
        help="processes that tokenise (default: one a core, or none if there is little to do)",
    )
    build.add_argument(
        "--verify", action="store_true", help="read what is there already, and build it anew if it is damaged"
    )
    return build


def build(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Build the data. Exit status: 0 complete, 130 interrupted, 75 stopped. Raises DataError for unusable data."""
    from xtrain.runtime.data.look import data_nodes, tokenizer_of

    try:
        with _stoppable():
            tokenizer = tokenizer_of(plan)
            for name, node in data_nodes(plan).items():
                if arguments.dataset in (None, name):
                    _build(plan, name, node, tokenizer, arguments)
    except KeyboardInterrupt:
        print(f"xtrain data: interrupted; {RESUMABLE}", file=sys.stderr)
        return 130
    except _Stopped:
        print(f"xtrain data: stopped; {RESUMABLE}", file=sys.stderr)
        return 75
    return 0


@contextmanager
def _stoppable() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _build(plan: "Plan", name: str, node: "Node", tokenizer: "TextTokenizer", arguments: argparse.Namespace) -> None:
    from xtrain.cli.data_progress import shown
    from xtrain.runtime.data.documents.encoder import DocumentEncoder
    from xtrain.runtime.data.loading.prepared import cache_of, packed_from, source_of
    from xtrain.runtime.data.stores.cache_folder import move_aside
    from xtrain.runtime.data.stores.progress import DataProgress
    from xtrain.runtime.data.stores.store import damage, open_named
    from xtrain.runtime.data.tokenising.build import build_store, identify

    begun, resumed = time.monotonic(), 0
    source, encoder = source_of(plan, node, tokenizer), DocumentEncoder(tokenizer, node.args["reads"])
    cache = cache_of(plan) / "tokens"
    with shown(name) as show:
        identity = identify(source, encoder, cache, show)
    if not arguments.json:
        _print_identity(name, source, identity)
    while (there := open_named(cache, identity.names)) is not None and arguments.verify:
        folder = cache / there.folder
        with shown(name) as show:
            damaged = damage(folder, show)
        if not damaged:
            break
        what = f"{folder}: {', '.join(damaged)}: not what was written; it is built anew"
        print(f"warning: {what}", file=sys.stderr)
        move_aside(folder)
    with shown(name) as show:

        def report(now: DataProgress) -> None:
            nonlocal resumed
            resumed = max(resumed, now.resumed)
            show(now)

        store = build_store(source, encoder, cache, jobs=arguments.jobs, progress=report, identity=identity)
    data, folder = packed_from(plan, node, store), cache / store.folder
    found = {
        "dataset": name,
        "key": identity.key,
        "covers": identity.covers,
        "folder": str(folder),
        "state": "there" if there else "resumed" if resumed else "built",
        "files": store.num_files,
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "lost": dict(store.lost),
        "bad_records": store.bad_records.count,
        "first_bad_records": [f"{record.origin}: {record.reason}" for record in store.bad_records.first],
        "bad_records_file": str(folder / "bad_records.jsonl") if store.bad_records.count else None,
        "rows": {part: reader.rows.num_rows for part, reader in data.parts.items()},
        "seconds": round(time.monotonic() - begun, 3),
    }
    if arguments.json:
        print(json.dumps(found), flush=True)
    else:
        _print_result(found)


def _print_identity(name: str, source: "DataSource", identity: "StoreIdentity") -> None:
    from xtrain.dsl.diagnostics.diagnostic import shows_color
    from xtrain.planner.report.text import Page
    from xtrain.planner.units import bytes_text, plural

    title, size = source.kind, source.num_bytes()
    title += f", {plural(len(source.files), 'file')}" if source.files else ""
    title += f", {bytes_text(size)}" if size else ""
    page = Page(color=shows_color(sys.stdout))
    page.heading(name, title)
    page.line(f"  store {identity.key}, named by")
    page.described([(part, _shown(value)) for part, value in identity.covers.items()])
    # Report at once: the next part may take hours.
    print(str(page).strip("\n"), flush=True)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    return f"{len(text):,} characters, {blake2b(text.encode(), digest_size=16).hexdigest()}"


def _print_result(found: dict[str, Any]) -> None:
    from xtrain.dsl.diagnostics.diagnostic import shows_color
    from xtrain.planner.report.text import Page
    from xtrain.planner.units import plural, seconds_text

    state = {"there": "was there already", "built": "built", "resumed": "gone on with and completed"}[found["state"]]
    rows = " · ".join(f"{part} {count:,}" for part, count in found["rows"].items())
    files = f", from {plural(found['files'], 'file')}" if found["files"] else ""
    table = [("documents", f"{found['documents']:,} of {found['tokens']:,} tokens{files}"), ("rows", rows)]
    if found["bad_records"]:
        table.append(("left out", f"{plural(found['bad_records'], 'bad record')}, listed in bad_records.jsonl there"))
        table += [("", line) for line in found["first_bad_records"]]
    lost = [f"{kind} in {plural(count, 'record')}" for kind, count in found["lost"].items()]
    table += [("" if number else "not written by the template", line) for number, line in enumerate(lost)]
    page = Page(color=shows_color(sys.stdout))
    page.line(f"  {state}, {seconds_text(found['seconds'])}: {found['folder']}")
    page.described(table)
    print(str(page).strip("\n"), flush=True)
