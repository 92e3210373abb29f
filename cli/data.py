"""`xtrain data show SPEC` and `xtrain data stats SPEC`: look at what a model sees, before or after it is trained."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from .arguments import add_sets

if TYPE_CHECKING:
    from ..planner.plan import Plan
    from ..planner.text import Page
    from ..runtime.data.look import Row

EPILOG = """\
examples:
  xtrain data stats specs/quickstart.xtrain
  xtrain data show specs/quickstart.xtrain -n 2
  xtrain data show specs/quickstart.xtrain --step 100 --full | less -R
  xtrain data stats specs/quickstart.xtrain --json | jq .parts.training.fill
"""
SHOWN = 240  # characters of a document, unless all are asked for
BAR = 30  # columns
STYLES = ("cyan", "green", "yellow")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the `xtrain` command."""
    parser = subparsers.add_parser(
        "data",
        help="look at the data of a spec: counts, lengths, packed rows",
        description="Tokenize and pack the data of SPEC as a run would (once, then cached), and look at it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    views = parser.add_subparsers(title="views", metavar="VIEW", dest="view", required=True)
    show = views.add_parser("show", help="packed rows, as text", description="Print rows in the order of training.")
    show.add_argument("-n", type=_count, default=5, metavar="ROWS", help="how many rows (default 5)")
    show.add_argument("--step", type=int, default=0, help="from this optimizer step on, the first is 0 (default 0)")
    show.add_argument("--heldout", action="store_true", help="rows that are kept for evaluation, from the first on")
    show.add_argument("--full", action="store_true", help=f"all of each document, not its first {SHOWN} characters")
    stats = views.add_parser("stats", help="counts and lengths", description="Print counts, lengths and fill of rows.")
    for view, what in ((show, "the one that is trained on"), (stats, "all")):
        view.add_argument("spec", metavar="SPEC", help="a spec (*.xtrain), or a saved plan (*.json)")
        view.add_argument("--dataset", metavar="NAME", help=f"which dataset (default: {what})")
        view.add_argument("--json", action="store_true", help="one JSON object a line")
        add_sets(view)
        view.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of rows; use 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 it was shown, 2 the spec or the command line is wrong, 3 the data cannot be used."""
    from ..planner.load import plan_from_path

    compiled = plan_from_path(arguments.spec, arguments.sets)
    compiled.report_to(sys.stderr)
    plan = compiled.plan
    if plan is None:
        return 2
    from ..runtime.data.errors import DataError
    from ..runtime.data.look import data_nodes

    known = data_nodes(plan)
    if arguments.dataset is not None and arguments.dataset not in known:
        print(f"xtrain data: no dataset `{arguments.dataset}`; this plan reads {', '.join(known)}", file=sys.stderr)
        return 2
    if arguments.view == "show" and arguments.step < 0:
        print("xtrain data: --step must not be negative", file=sys.stderr)
        return 2
    try:
        return _stats(plan, arguments) if arguments.view == "stats" else _show(plan, arguments)
    except DataError as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
        return 3


def _stats(plan: "Plan", arguments: argparse.Namespace) -> int:
    from ..planner.text import Page, shows_color
    from ..runtime.data.look import data_nodes, prepared, statistics, tokenizer_of

    tokenizer = tokenizer_of(plan)
    page = Page(color=shows_color(sys.stdout))
    for name, node in data_nodes(plan).items():
        if arguments.dataset not in (None, name):
            continue
        found = statistics(plan, prepared(plan, node, tokenizer))
        if arguments.json:
            print(json.dumps(found))
            continue
        page.heading(name, f"{found['files']:,} files, {found['bad_records']:,} bad records, store {found['store']}")
        for part, own in found["parts"].items():
            if own["documents"]:
                page.table(_table(part, own), styles=("bold", "dim"))
    if not arguments.json:
        sys.stdout.write(str(page).lstrip("\n"))
    return 0


def _table(part: str, own: dict) -> list[tuple[str, str, str]]:
    lengths = " · ".join(f"{name} {value:,}" for name, value in own["lengths"].items())
    table = [
        (part, "documents", f"{own['documents']:,} of {own['tokens']:,} tokens"),
        ("", "lengths", f"{lengths} tokens"),
        ("", "rows", f"{own['rows']:,} of {own['capacity']:,} positions, {own['fill']:.3%} filled"),
    ]
    if own["tokens_lost"]:
        lost = f"{own['documents_cut']:,} documents cut, {own['documents_left_out']:,} left out"
        table.append(("", "lost", f"{lost}, {own['tokens_lost']:,} tokens in all"))
    if "steps_an_epoch" in own:
        table.append(("", "an epoch", f"{own['steps_an_epoch']:,} steps"))
    return table


def _show(plan: "Plan", arguments: argparse.Namespace) -> int:
    from ..planner.text import Page, shows_color
    from ..runtime.data.look import data_nodes, prepared, rows_of_step, tokenizer_of, written_out

    nodes = data_nodes(plan)
    name = arguments.dataset or plan.node("setup.loader").args["dataset"]
    tokenizer = tokenizer_of(plan)
    data = prepared(plan, nodes[name], tokenizer)
    # What is only evaluated has no training rows.
    part = "hold-out" if arguments.heldout or not data.train_rows.num_rows else "training"
    reader = data.parts[part]
    count = min(arguments.n, reader.rows.num_rows)
    rows = list(range(count)) if part == "hold-out" else rows_of_step(plan, reader, arguments.step, count)
    page = Page(color=shows_color(sys.stdout))
    for index in rows:
        row = written_out(reader, index, tokenizer)
        if arguments.json:
            print(json.dumps(_as_json(row)))
        else:
            _add_row(page, row, None if arguments.full else SHOWN)
    if not arguments.json:
        page.line()
        page.line("Coloured, a document each: trained. Dim: not trained, as the first token of a segment.", "dim")
        sys.stdout.write(str(page).lstrip("\n"))
    return 0


def _as_json(row: "Row") -> dict:
    import attrs

    return {**attrs.asdict(row), "filled": row.filled}


def _add_row(page: "Page", row: "Row", shown: int | None) -> None:
    share = row.filled / row.capacity
    bar = "█" * round(share * BAR)
    padding = f", {row.capacity - row.filled:,} of padding" if row.filled < row.capacity else ""
    page.heading(f"row {row.index:,}", f"{bar:░<{BAR}} {share:.1%} of {row.capacity:,} positions trained{padding}")
    for number, segment in enumerate(row.segments):
        page.line(f"  document {segment.document:,} from {segment.start:,}, {segment.tokens:,} tokens", "dim")
        text = segment.text if shown is None or len(segment.text) <= shown else segment.text[:shown] + "…"
        whole = text.replace("\n", "⏎ ") + ("⟨eos⟩" if segment.ends else "")
        opening = page.paint(segment.before.replace("\n", "⏎") if segment.start else "⟨bos⟩", "dim")
        page.wrapped(whole, first=f"    {opening}", rest="    ", style=STYLES[number % len(STYLES)])
