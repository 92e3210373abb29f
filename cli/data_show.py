"""`xtrain data show` and `stats`: rows in the order of training with their loss masks, counts and lengths."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from xtrain.cli.verb import colored, number_of
from xtrain.text.flow import TextPart, flow, plain, width
from xtrain.text.page import Page
from xtrain.text.printing import drawn_on
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.plan import Plan
    from xtrain.plan.step_sizes import StepSizes
    from xtrain.runtime.feed.curriculum import Curriculum
    from xtrain.runtime.feed.dataset_view import DocumentSpan, Segment, SegmentInRow, ShownRow
    from xtrain.runtime.feed.packing.stored_rows import RowReader
    from xtrain.runtime.feed.prepared import PreparedDataset
    from xtrain.runtime.feed.token_store import DataProgress, Report

    Chosen = tuple[str, RowReader, int, int | None]
    "Dataset, reader, number and place of a row to show."


LINE_SECONDS = 10.0


@contextmanager
def shown(name: str) -> "Iterator[Report]":
    """Yield a callback for `build_store` that shows its progress on stderr until the block ends."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(name) as report:
            yield report
        return
    from xtrain.runtime.feed.token_store import every

    yield every(LINE_SECONDS, lambda line, _: print(f"{name}: {line}", file=sys.stderr, flush=True))


@contextmanager
def _bar(name: str) -> "Iterator[Report]":
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    from xtrain.runtime.feed.token_store import ReadingPace, in_words

    pace = ReadingPace()
    # Remove the bar at the end; other lines report the result.
    bars = Bars(
        TextColumn("{task.fields[dataset]}", table_column=Column(no_wrap=True, min_width=len(name))),
        BarColumn(16, table_column=Column(min_width=16)),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=Console(file=drawn_on(sys.stderr)),
        transient=True,
        # Output for stdout must not be redirected to the bar's stream.
        redirect_stdout=False,
        redirect_stderr=False,
        refresh_per_second=4,
    )
    with bars:
        task = bars.add_task("", dataset=name, total=None, start=False)

        def report(now: "DataProgress") -> None:
            pace.look(now)
            bars.start_task(task)
            bars.update(task, description=in_words(now, pace), total=now.total, completed=now.done)

        yield report


def stats(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Print the statistics. Raises DataError for unusable data."""
    from xtrain.runtime.feed.dataset_view import data_nodes, epoch, sampling, statistics, tokenizer_of
    from xtrain.runtime.feed.prepared import prepared_from

    tokenizer = tokenizer_of(plan)
    page = Page(color=colored())
    trained, rows = plan.node("setup.loader").args["datasets"], {}
    for name, node in data_nodes(plan).items():
        if arguments.dataset not in (None, name):
            continue
        with shown(name) as report:
            data = prepared_from(plan, node, tokenizer, progress=report)
        found = statistics(plan, data)
        if name in trained:
            rows[name] = data.train_rows.num_rows
        if arguments.json:
            print(json.dumps(found))
            continue
        files = f"{plural(found['files'], 'file')}, " if found["files"] else ""
        page.heading(name, f"{files}{plural(found['bad_records'], 'bad record')}, store {found['store']}")
        if data.left_out is not None:
            page.line(f"  {data.left_out.text(data.store.num_documents)}")
        for part, own in found["parts"].items():
            if own["documents"]:
                page.table(_table(part, own, found["oversized"]), styles=("bold", "dim"))
        if beside := _beside(found):
            page.table(beside, styles=("bold", "dim"))
    # The sampling of one dataset depends on the number of rows of all datasets.
    if len(trained) > 1 and len(rows) == len(trained):
        taken, whole = sampling(plan, rows), epoch(plan, rows)
        if arguments.json:
            print(json.dumps({"mixture": taken, "epoch": whole}))
        else:
            page.heading("mixture", "shares of rows in each phase, and totals of the run")
            epoch_row = ("an epoch", "rows", f"{whole['rows']:,g}, {whole['steps']:,} steps")
            page.table([*_mixture(taken), epoch_row], styles=("bold", "dim"))
    if not arguments.json:
        sys.stdout.write(str(page).lstrip("\n"))
    return 0


def _beside(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows for numeric fields, content that the template leaves out, and reasons for bad records."""
    numbers = [
        ("", name, f"min {own['least']:.4g} · mean {own['mean']:.4g} · max {own['most']:.4g}")
        for name, own in found.get("numbers", {}).items()
    ]
    reasons = [("", f"{count:,}", reason) for reason, count in found.get("bad_reasons", {}).items()]
    lost = [("", f"{count:,}", kind) for kind, count in found.get("lost", {}).items()]
    return [
        *_titled("numbers", numbers), *_titled("not written by the template", lost), *_titled("bad records", reasons)
    ]  # fmt: skip


def _titled(title: str, rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the rows with the title in the first one."""
    return [(title, *row[1:]) for row in rows[:1]] + rows[1:]


def _table(part: str, own: dict[str, Any], oversized: str) -> list[tuple[str, str, str]]:
    lengths = " · ".join(f"{name} {value:,}" for name, value in own["lengths"].items())
    table = [
        ("", "documents", f"{own['documents']:,} of {own['tokens']:,} tokens"),
        ("", "lengths", f"{lengths} tokens"),
        ("", "rows", f"{own['rows']:,} of {own['capacity']:,} positions, {own['fill']:.3%} filled"),
    ]
    if own.get("trained_tokens", own["tokens"]) != own["tokens"]:
        table.insert(
            1, ("", "predicted", f"{own['trained_tokens']:,} tokens, {own['trained_tokens'] / own['tokens']:.1%}")
        )
    if "questions" in own:
        table.insert(0, ("", "questions", f"{own['questions']:,}, one document per choice"))
    if "pairs" in own:
        table[0] = ("", "pairs", f"{own['pairs']:,} of {own['tokens']:,} tokens")
    what = "pairs" if "pairs" in own else "documents"
    if own["documents_split"]:
        table.append(("", "too long", f"{own['documents_split']:,} {what} split over rows (oversized = split)"))
    if own["tokens_lost"]:
        lost = f"{own['documents_cut']:,} {what} cut, {own['documents_left_out']:,} left out"
        why = "at the front" if oversized == "truncate_front" else f"as oversized = {oversized} says"
        table.append(("", "too long", f"{lost}, {why}: {own['tokens_lost']:,} tokens lost"))
    if own.get("documents_unanswered"):
        table.append(("", "", f"{own['documents_unanswered']:,} of the cut ones have nothing left to predict"))
    if "steps_an_epoch" in own:
        table.append(("", "an epoch", f"{own['steps_an_epoch']:,} steps"))
    return _titled(part, table)


def _mixture(taken: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    table = []
    for name, own in taken.items():
        shares = " · ".join(f"{phase} {share:.1%}" for phase, share in own["shares"].items())
        epochs = "" if own["epochs"] is None else f", {own['epochs']:,} epochs"
        table.append((name, "shares", shares))
        table.append(("", "rows", f"{own['rows']:,}{epochs}"))
    return table


SHOWN = 240  # characters of a document, unless all are requested
SHORTEST = 40  # characters of a stretch of it
TOKENS = 48  # the same for tokens
BAR = 30  # columns
STYLES = ("cyan", "green", "yellow")
READ = ("⟦", "⟧")  # encloses tokens outside the loss mask when colors are off


def add_show(views: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the view to `xtrain data`."""
    show = views.add_parser("show", help="packed rows, as text", description="Print rows in the order of training.")
    show.add_argument("-n", type=number_of("rows"), default=5, metavar="ROWS", help="how many rows (default 5)")
    show.add_argument("--step", type=int, help="from this optimizer step on, counted from 1 as in logs (default 1)")
    show.add_argument("--heldout", action="store_true", help="held-out rows, the first ones of each dataset")
    show.add_argument("--tokens", action="store_true", help="print every token separately, with its number")
    show.add_argument(
        "--full", action="store_true", help=(f"print each document in full, not only its first {SHOWN} characters")
    )
    return show


def show(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Print the requested rows. Return exit status 0, or 2 if the step does not exist.

    Raises DataError for unusable data.
    """
    from xtrain.plan.arithmetic import arithmetic_of
    from xtrain.plan.data import changes_documents
    from xtrain.runtime.feed.curriculum import curriculum_of
    from xtrain.runtime.feed.dataset_view import data_nodes, laid_out, tokenizer_of, written_out
    from xtrain.runtime.feed.prepared import prepared_from

    nodes, loader, tokenizer = data_nodes(plan), plan.node("setup.loader").args, tokenizer_of(plan)
    wanted = [arguments.dataset] if arguments.dataset else loader["datasets"]
    # A dataset that is only evaluated has no training rows.
    held_out = arguments.heldout or wanted[0] not in loader["datasets"]
    if held_out and arguments.step is not None:
        print("xtrain data: held-out rows belong to no step; leave out --step", file=sys.stderr)
        return 2
    # An epoch has rows of all datasets.
    counted = loader["datasets"] if loader["steps"] is None and not held_out else []
    prepared: dict[str, PreparedDataset] = {}
    for name in dict.fromkeys((*wanted, *counted)):
        with shown(name) as report:
            prepared[name] = prepared_from(plan, nodes[name], tokenizer, progress=report)
    found = {name: prepared[name] for name in wanted}
    if held_out:
        chosen, sizes = _held_out(found, arguments.n), arithmetic_of(plan).row_sizes
    else:
        curriculum = curriculum_of(plan, {name: data.train_rows.num_rows for name, data in prepared.items()})
        step = 1 if arguments.step is None else arguments.step
        if not 1 <= step <= curriculum.steps:
            message = f"the run has {plural(curriculum.steps, 'step')}, --step 1 to {curriculum.steps:,}"
            print(f"xtrain data: {message}", file=sys.stderr)
            return 2
        chosen, sizes = _trained(curriculum, found, step - 1, arguments.n), curriculum.rows_per_step
    color = colored()
    page = Page(color=color)
    view = _View(page, color=color, tokens=arguments.tokens, full=arguments.full)
    own = [
        node.args.get("function") or node.op.partition(".")[2]
        for node in plan.of_kind("collate")
        if changes_documents(node)
    ]
    behind = _behind(plan) if own else None
    any_row = False
    for name, reader, index, place in chosen:
        any_row = True
        row = written_out(reader, index, tokenizer, dataset=name, place=place, each=arguments.tokens)
        if behind is not None:
            row = laid_out(row, behind(name, reader, index, place), tokenizer, each=arguments.tokens)
        if arguments.json:
            print(json.dumps(_as_json(row, tokens=arguments.tokens)))
        else:
            view.add(row, sizes)
    if not any_row:
        which = "is held out" if held_out else f"is trained on from step {arguments.step or 1:,} on"
        print(f"xtrain data: no row of {', '.join(wanted)} {which}", file=sys.stderr)
    elif not arguments.json:
        view.add_legend(own)
        sys.stdout.write(str(page).lstrip("\n"))
    return 0


def _held_out(found: "dict[str, PreparedDataset]", most: int) -> "Iterator[Chosen]":
    for name, data in found.items():
        reader = data.parts["hold-out"]
        for index in range(min(most, reader.rows.num_rows)):
            yield name, reader, index, None


def _trained(curriculum: "Curriculum", found: "dict[str, PreparedDataset]", step: int, most: int) -> "Iterator[Chosen]":
    """Yield training rows from a step on, counted from 0 here."""
    from xtrain.runtime.feed.dataset_view import rows_from

    rows = {name: data.train_rows.num_rows for name, data in found.items()}
    readers = {name: data.parts["training"] for name, data in found.items()}
    # With a single training dataset, an epoch covers all rows.
    most = most if len(curriculum.datasets) > 1 else min(most, sum(rows.values()))
    for name, index, place in islice(rows_from(curriculum, rows, step), most):
        yield name, readers[name], index, place


def _behind(plan: "Plan") -> "Callable[[str, RowReader, int, int | None], list[SegmentInRow]]":
    """Return a function that applies the user's collators to a row, as in a training step. Needs torch."""
    from xtrain.runtime.feed.collated_view import collated
    from xtrain.runtime.feed.packing.stored_rows import UNKNOWN

    run, trained = collated(plan), plan.node("setup.loader").args["datasets"]

    def of(name: str, reader: "RowReader", index: int, place: int | None) -> "list[SegmentInRow]":
        known = place is not None and len(trained) > 1
        dataset = trained.index(name) if known else UNKNOWN
        return run(reader.row(index, dataset=dataset, position=UNKNOWN if place is None else place))

    return of


def _as_json(row: "ShownRow", *, tokens: bool) -> dict[str, Any]:
    def stretch(one: "DocumentSpan") -> dict[str, Any]:
        content = {"trained": one.trained, "tokens": len(one.ids), "text": one.text}
        return content | ({"ids": one.ids, "pieces": one.pieces} if tokens else {})

    def segment(one: "Segment") -> dict[str, Any]:
        names = ("document", "start", "tokens", "trained", "other", "before", "text", "ends")
        names += (("side",) if one.side else ()) + (("values",) if one.values else ())
        return {name: getattr(one, name) for name in names} | {"stretches": list(map(stretch, one.stretches))}

    content = {name: getattr(row, name) for name in ("dataset", "index", "place", "capacity", "filled", "trained")}
    return content | {"segments": list(map(segment, row.segments))}


class _View:
    """Rows on a page, as wide as the terminal."""

    def __init__(self, page: "Page", *, color: bool, tokens: bool, full: bool) -> None:
        self._page, self._color, self._tokens, self._full = page, color, tokens, full
        self._width = width()
        self._marked = self._escaped = False

    def add(self, row: "ShownRow", sizes: "StepSizes") -> None:
        """Add the header, the fill and every segment. sizes: rows of every step."""
        self._page.line()
        where = f"  row {row.index:,}"
        if row.place is not None:
            step = sizes.steps_of(row.place + 1)
            within = row.place - sizes.before(step - 1)
            where += f" · step {step:,}, row {within + 1:,} of {sizes.at(step - 1):,}"
        flow(self._page, [TextPart(row.dataset, "bold"), TextPart(where, "dim")], self._width, rest="  ")
        padding = row.capacity - row.filled
        usage = f" {row.filled / row.capacity:.1%} of {row.capacity:,} positions filled"
        usage += f", {row.trained / row.filled:.1%} of them trained" if row.filled else ""
        usage += f", {padding:,} of padding" if padding else ""
        flow(self._page, [*self._bar(row), TextPart(usage, "dim")], self._width, first="  ", rest="  ")
        for number, segment in enumerate(row.segments):
            self._add_segment(segment, STYLES[number % len(STYLES)])

    def add_legend(self, own: list[str]) -> None:
        """Add the legend of colors and marks. own: the user's collators applied to the rows."""
        self._page.line()
        marked = f" {READ[0]}…{READ[1]}: only read." if self._marked else ""
        meaning = " Colored, one color per document: trained. Dim: only read." if self._color else marked
        first = " The first token of a document is never predicted."
        first += " \\ before the name of a special token: its characters, not the token." if self._escaped else ""
        behind = f" Rows are shown behind {', '.join(own)}." if own else ""
        flow(self._page, [TextPart(f"█ trained, ▒ only read, ░ padding.{meaning}{first}{behind}", "dim")], self._width)

    def _bar(self, row: "ShownRow") -> list[TextPart]:
        columns = max(8, min(BAR, self._width // 3))
        trained = round(row.trained / row.capacity * columns)
        filled = max(trained, round(row.filled / row.capacity * columns))
        return [
            TextPart("█" * trained, "green"),
            TextPart("▒" * (filled - trained)),
            TextPart("░" * (columns - filled), "dim"),
        ]

    def _add_segment(self, segment: "Segment", style: str) -> None:
        trained = f", {segment.trained:,} trained" if segment.trained < segment.tokens else ""
        whose = "" if segment.document is None else f"document {segment.document:,} from {segment.start:,}, "
        whose = f"pair {segment.document:,}, {segment.side}, " if segment.side else whose
        other = f", {segment.other:,} labels are not the next token" if segment.other else ""
        values = "".join(f", {name} {value:g}" for name, value in segment.values.items())
        said = f"{whose}{plural(segment.tokens, 'token')}{trained}{other}{values}"
        flow(self._page, [TextPart(said, "dim")], self._width, first="  ", rest="    ")
        parts = self._single(segment, style) if self._tokens else self._text(segment, style)
        flow(self._page, parts, self._width, first="    ", rest="    ")

    def _text(self, segment: "Segment", style: str) -> Iterator[TextPart]:
        stretches = segment.stretches
        whole = self._full or sum(len(one.text) for one in stretches) <= SHOWN
        long = sum(len(one.text) > SHORTEST for one in stretches)
        each = None if whole else max(SHORTEST, SHOWN // max(1, long))
        shown = 0
        for number, stretch in enumerate(stretches):
            if not whole and shown > 2 * SHOWN:
                yield TextPart(f" … {plural(len(stretches) - number, 'more stretch')}", "dim")
                return
            text = stretch.text if each is None else _shortened(stretch.text, each)
            shown += len(text)
            self._escaped = self._escaped or "\\" in text
            # The bos at a document's start is never predicted: do not mark it.
            bare = number == 0 and len(stretch.ids) == 1 and segment.start == 0
            text = plain(text.replace("\n", "⏎ "))
            yield TextPart(*self._marks(text, stretch.trained or bare, "dim" if not stretch.trained else style))

    def _marks(self, text: str, bare: bool, style: str) -> tuple[str, str]:
        if self._color or bare:
            return text, style
        self._marked = True
        return f"{READ[0]}{text}{READ[1]}", style

    def _single(self, segment: "Segment", style: str) -> Iterator[TextPart]:
        total = sum(len(stretch.ids) for stretch in segment.stretches)
        left = total if self._full else TOKENS
        for stretch in segment.stretches:
            some = list(zip(stretch.pieces, stretch.ids, strict=True))[:left]
            if not some:
                break
            left -= len(some)
            total -= len(some)
            opening, closing = ("", "") if self._color or stretch.trained else READ
            self._marked = self._marked or bool(opening)
            yield TextPart(opening)
            for number, (piece, token) in enumerate(some):
                yield TextPart(plain(piece).replace(" ", "␣"), style if stretch.trained else "dim")
                yield TextPart(f" {token}", "dim", whole=True)
                yield TextPart(closing if number == len(some) - 1 else "")
                yield TextPart(" │", "dim", whole=True)
                yield TextPart(" ")
        if total:
            yield TextPart(f"… {plural(total, 'more token')}", "dim")


def _shortened(text: str, most: int) -> str:
    """Return `text` without its middle, in about `most` characters."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} … {text[head - most :]}"
