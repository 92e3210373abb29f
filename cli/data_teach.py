"""`xtrain data teach SPEC`: compute the teacher's token probabilities once and keep them in the cache."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.planner.plan import Plan

EPILOG = """\
The teacher runs over every token of the datasets, on the device of the spec, and on as many ranks as a machine of the
run has: tp cuts it as it does the model, and over all others it is sharded, each computing rows of its own. Nothing is
computed that is there already: an entry is named by the tokens, the teacher's weights, top, temperature and precision.

examples:
  xtrain data teach specs/distill_cpu.xtrain
  xtrain data teach specs/distill_cpu.xtrain --set parallel.fsdp=2
"""


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
    """Compute the teacher's outputs. Exit status: 0 complete, 2 the loss has no teacher, 130 interrupted. Raises
    DataError for unusable data or an unusable teacher."""
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
        print("xtrain data teach: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _teach(plan: "Plan", name: str, *, as_json: bool) -> None:
    from xtrain.cli.data_progress import shown
    from xtrain.planner.units import bytes_text, plural, seconds_text
    from xtrain.runtime.data.loading.prepared import prepared_from
    from xtrain.runtime.data.look import data_nodes, tokenizer_of
    from xtrain.runtime.generation.teaching_ranks import Lesson

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
