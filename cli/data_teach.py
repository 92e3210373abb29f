"""`xtrain data teach SPEC`: what the teacher of a loss holds probable, computed once and kept in the cache."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..planner.plan import Plan

EPILOG = """\
One process runs the teacher over every token of the datasets, on the device of the spec. Nothing is computed that is
there already: an entry is named by the tokens, the teacher's weights, top, temperature and precision.

examples:
  xtrain data teach specs/distill_cpu.xtrain
"""
LINE_SECONDS = 10.0


def add_teach(views: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the view to `xtrain data`."""
    return views.add_parser(
        "teach",
        help="store what the teacher of `loss distill` holds probable",
        description="Run the teacher of SPEC over its datasets, and store its most probable tokens in the cache.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def teach(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Exit status: 0 all is there, 2 the loss has no teacher, 130 interrupted. Raises DataError for data or a teacher
    that cannot be used."""
    nodes = {node.args["dataset"]: node for node in plan.nodes if node.op == "setup.teacher"}
    if not nodes:
        print("xtrain data teach: the loss of this spec learns from no teacher; choose `loss distill`", file=sys.stderr)
        return 2
    if arguments.dataset is not None and arguments.dataset not in nodes:
        print(f"xtrain data teach: the loss reads no teacher beside dataset {arguments.dataset}", file=sys.stderr)
        return 2
    try:
        for name in nodes if arguments.dataset is None else (arguments.dataset,):
            _teach(plan, name, as_json=arguments.json)
    except KeyboardInterrupt:
        print("xtrain data teach: interrupted; the same command begins this dataset anew", file=sys.stderr)
        return 130
    return 0


def _teach(plan: "Plan", name: str, *, as_json: bool) -> None:
    from ..planner.units import bytes_text, seconds_text
    from ..runtime.data.loading.prepared import cache_of, prepared_from
    from ..runtime.data.look import data_nodes, tokenizer_of
    from ..runtime.data.stores.taught import TaughtKey, open_taught, store_taught
    from ..runtime.input.teacher import TEACHERS
    from .data_progress import shown

    with shown(name) as report:
        store = prepared_from(plan, data_nodes(plan)[name], tokenizer_of(plan), progress=report).store
    node, cache, begun = plan.node(f"setup.teacher.{name}"), cache_of(plan) / TEACHERS, time.monotonic()
    given = {each: node.args[each] for each in ("top", "temperature", "precision", "sequence")}
    key = TaughtKey.of(store, Path(node.args["folder"]), cache, **given)
    there = open_taught(cache, key, store.num_tokens) is not None
    if not there:
        from ..runtime.generation.teaching import TeacherModel

        teacher = TeacherModel.load(plan, node)
        progress = _progress(name, store.num_tokens)
        store_taught(
            cache,
            key,
            store.num_tokens,
            lambda columns: teacher.fill(columns, store, key.top, key.temperature, progress),
        )
    size = store.num_tokens * 4 * (2 * key.top + 1)
    found = {
        "dataset": name,
        "key": key.name,
        "folder": str(cache / key.name),
        "state": "there" if there else "computed",
        "tokens": store.num_tokens,
        "bytes": size,
        "seconds": round(time.monotonic() - begun, 3),
    }
    if as_json:
        print(json.dumps(found), flush=True)
        return
    done = "was there already" if there else f"computed in {seconds_text(found['seconds'])}"
    print(f"{name}: {store.num_tokens:,} tokens, {bytes_text(size)}, {done}: {found['folder']}", flush=True)


def _progress(name: str, tokens: int) -> Callable[[int], None]:
    """Writes a line now and then."""
    begun = said = time.monotonic()

    def report(done: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= LINE_SECONDS:
            said = now
            pace = done / (now - begun)
            print(f"{name}: {done / tokens:.0%}, {pace:,.0f} tokens/s", file=sys.stderr, flush=True)

    return report
