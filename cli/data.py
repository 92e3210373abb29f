"""`xtrain data build|show|stats|teach SPEC`: build and inspect the data of a run before or after training."""

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

from xtrain.cli.data_show import add_show, show, shown, stats
from xtrain.cli.verb import Refused, add_sets, colored, number_of, say_own_code
from xtrain.text.page import Page
from xtrain.text.units import bytes_text, plural, seconds_text

if TYPE_CHECKING:
    from xtrain.plan.plan import Node, Plan
    from xtrain.runtime.feed.prepared import StoreIdentity
    from xtrain.runtime.feed.sources.source import DataSource
    from xtrain.runtime.feed.tokenizers import TextTokenizer


BUILD_EPILOG = (
    "Existing stores are not rebuilt: the name of a store covers everything it depends on. An interrupted build "
    "resumes\nwhen the same command is given again.\n\nexamples:\n  xtrain data build specs/quickstart.xtrain\n  "
    "xtrain data build specs/quickstart.xtrain --jobs 8 --dataset code\n  xtrain data build "
    "specs/quickstart.xtrain --verify --json | jq .key\n"
)
RESUMABLE = "the finished part is kept; the same command resumes it"


class _Stopped(BaseException):
    """A request to stop this process."""


def add_build(views: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the view to `xtrain data`."""
    build = views.add_parser(
        "build",
        help="tokenize and pack, as a run would",
        description="Tokenize the datasets of SPEC and pack their rows into the cache, so that a run starts at once.",
        epilog=BUILD_EPILOG,
    )
    build.add_argument(
        "--jobs",
        type=number_of("processes"),
        metavar="N",
        help="processes that tokenize (default: one per core, or none if there is little to do)",
    )
    build.add_argument("--verify", action="store_true", help="verify existing stores, and rebuild damaged ones")
    return build


def build(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Build the data. Exit status: 0 complete, 130 interrupted, 75 stopped. Raises DataError for unusable data."""
    from xtrain.runtime.feed.dataset_view import data_nodes, tokenizer_of

    try:
        with _stoppable():
            tokenizer = tokenizer_of(plan)
            for name, node in data_nodes(plan).items():
                if arguments.dataset in (None, name):
                    _build(plan, name, node, tokenizer, arguments)
    except KeyboardInterrupt:
        raise Refused(130, f"xtrain data: interrupted; {RESUMABLE}") from None
    except _Stopped:
        raise Refused(75, f"xtrain data: stopped; {RESUMABLE}") from None
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
    from xtrain.runtime.base.files import move_aside
    from xtrain.runtime.feed.documents import DocumentEncoder
    from xtrain.runtime.feed.prepared import build_store, cache_of, identify, packed_from, source_of
    from xtrain.runtime.feed.token_store import DataProgress, damage, open_named

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
        what = f"{folder}: {', '.join(damaged)}: damaged; it is rebuilt"
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
        **({"left_out": data.left_out.text(store.num_documents)} if data.left_out is not None else {}),
        "rows": {part: reader.rows.num_rows for part, reader in data.parts.items()},
        "seconds": round(time.monotonic() - begun, 3),
    }
    if arguments.json:
        print(json.dumps(found), flush=True)
    else:
        _print_result(found)


def _print_identity(name: str, source: "DataSource", identity: "StoreIdentity") -> None:
    title, size = source.kind, source.num_bytes()
    title += f", {plural(source.num_files, 'file')}" if source.num_files else ""
    title += f", {bytes_text(size)}" if size else ""
    page = Page(color=colored())
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
    state = {"there": "was there already", "built": "built", "resumed": "resumed and completed"}[found["state"]]
    rows = " · ".join(f"{part} {count:,}" for part, count in found["rows"].items())
    files = f", from {plural(found['files'], 'file')}" if found["files"] else ""
    table = [("documents", f"{found['documents']:,} of {found['tokens']:,} tokens{files}"), ("rows", rows)]
    if "left_out" in found:
        table.append(("left out", found["left_out"]))
    if found["bad_records"]:
        table.append(("left out", f"{plural(found['bad_records'], 'bad record')}, listed in bad_records.jsonl there"))
        table += [("", line) for line in found["first_bad_records"]]
    lost = [f"{kind} in {plural(count, 'record')}" for kind, count in found["lost"].items()]
    table += [("" if number else "not written by the template", line) for number, line in enumerate(lost)]
    page = Page(color=colored())
    page.line(f"  {state}, {seconds_text(found['seconds'])}: {found['folder']}")
    page.described(table)
    print(str(page).strip("\n"), flush=True)


TEACH_EPILOG = """\
The teacher runs over every token of the datasets, on the device of the spec, and on as many ranks as a machine of the
run has: tp cuts it as it does the model, and over all others it is sharded, each computing rows of its own. Nothing is
computed that is there already: an entry is named by the tokens, the teacher's weights, top, temperature and precision.

examples:
  xtrain data teach specs/distill_cpu.xtrain
  xtrain data teach specs/distill_cpu.xtrain --set parallel.fsdp=2
"""


def teach(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Compute the teacher's outputs. Exit status: 0 complete, 2 the loss has no teacher, 130 interrupted. Raises
    DataError for unusable data or an unusable teacher."""
    nodes = {node.args["dataset"]: node for node in plan.nodes if node.op == "setup.teacher"}
    if not nodes:
        raise Refused(2, "xtrain data teach: the loss of this spec has no teacher; use `loss distill`")
    if arguments.dataset is not None and arguments.dataset not in nodes:
        raise Refused(2, f"xtrain data teach: the loss reads no teacher beside dataset {arguments.dataset}")
    try:
        for name in nodes if arguments.dataset is None else (arguments.dataset,):
            _teach(plan, name, as_json=arguments.json)
    except KeyboardInterrupt:
        raise Refused(130, "xtrain data teach: interrupted; the same command resumes it") from None
    return 0


def _teach(plan: "Plan", name: str, *, as_json: bool) -> None:
    from xtrain.runtime.feed.dataset_view import data_nodes, tokenizer_of
    from xtrain.runtime.feed.prepared import prepared_from
    from xtrain.runtime.sampling.teaching import Lesson

    with shown(name) as report:
        store = prepared_from(plan, data_nodes(plan)[name], tokenizer_of(plan), progress=report).store
    begun, ranks = time.monotonic(), plan.launch["ranks_per_node"]
    lesson = Lesson.of(plan, name, store)
    there = lesson.is_there
    if not there:
        lesson.give(ranks)
    size = store.num_tokens * 4 * (2 * lesson.key.top + 1)
    found = {
        "dataset": name,
        "key": lesson.key.name,
        "folder": str(lesson.cache / lesson.key.name),
        "state": "there" if there else "computed",
        "tokens": store.num_tokens,
        "bytes": size,
        "seconds": round(time.monotonic() - begun, 3),
    }
    if as_json:
        print(json.dumps(found), flush=True)
        return
    together = f" by {plural(ranks, 'rank')}" if ranks > 1 else ""
    done = "was there already" if there else f"computed in {seconds_text(found['seconds'])}{together}"
    print(f"{name}: {store.num_tokens:,} tokens, {bytes_text(size)}, {done}: {found['folder']}", flush=True)


HELP = "build the data of a spec, and show it: counts, lengths, packed rows"
DESCRIPTION = "Tokenize and pack the data of SPEC as a run would (once, then cached), and show it."
EPILOG = """\
examples:
  xtrain data build specs/quickstart.xtrain
  xtrain data stats specs/quickstart.xtrain
  xtrain data show specs/quickstart.xtrain -n 2
  xtrain data show specs/quickstart.xtrain --step 100 --full | less -R
  xtrain data show specs/chat.xtrain -n 1 --tokens
  xtrain data stats specs/quickstart.xtrain --json | jq .parts.training.fill
"""
VIEWS = {"build": build, "show": show, "stats": stats, "teach": teach}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    views = parser.add_subparsers(title="views", metavar="VIEW", dest="view", required=True)
    build_parser = add_build(views)
    stats_parser = views.add_parser(
        "stats", help="counts and lengths", description="Print counts, lengths and fill of rows."
    )
    teach_parser = views.add_parser(
        "teach",
        help="store the most probable tokens of the teacher of `loss distill`",
        description="Run the teacher of SPEC over its datasets, and store its most probable tokens in the cache.",
        epilog=TEACH_EPILOG,
    )
    default = dict.fromkeys((build_parser, stats_parser, teach_parser), "all")
    default[add_show(views)] = "the training datasets"
    for view, datasets in default.items():
        view.add_argument("spec", metavar="SPEC", help="a spec (*.xtrain), or a saved plan (*.json)")
        view.add_argument("--dataset", metavar="NAME", help=f"which dataset (default: {datasets})")
        view.add_argument("--json", action="store_true", help="print JSON, one object per line")
        add_sets(view)


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain data`. Exit status: 0 done, 2 invalid spec or command line, 3 unusable data. `build` exits with 130
    if interrupted and 75 if stopped."""
    from xtrain.planner.load import is_saved, plan_from_path

    compiled = plan_from_path(arguments.spec, arguments.sets)
    compiled.report_to(sys.stderr)
    plan = compiled.plan
    if plan is None:
        return 2
    from xtrain.runtime.feed.dataset_view import data_nodes

    if is_saved(arguments.spec):
        say_own_code(plan, arguments.spec)
    known = data_nodes(plan)
    if arguments.dataset is not None and arguments.dataset not in known:
        raise Refused(2, f"xtrain data: no dataset `{arguments.dataset}`; this plan reads {', '.join(known)}")
    return VIEWS[arguments.view](plan, arguments)
