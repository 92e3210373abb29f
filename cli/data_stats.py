"""`xtrain data stats SPEC`: counts and lengths of documents, and how full rows are."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtrain.planner.plan import Plan


def add_stats(views: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the view to `xtrain data`."""
    return views.add_parser("stats", help="counts and lengths", description="Print counts, lengths and fill of rows.")


def stats(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Print the statistics. Raises DataError for unusable data."""
    from xtrain.cli.data_progress import shown
    from xtrain.dsl.diagnostics.diagnostic import shows_color
    from xtrain.planner.report.text import Page
    from xtrain.planner.units import plural
    from xtrain.runtime.data.loading.prepared import prepared_from
    from xtrain.runtime.data.look import data_nodes, epoch, sampling, statistics, tokenizer_of

    tokenizer = tokenizer_of(plan)
    page = Page(color=shows_color(sys.stdout))
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
            page.heading("mixture", "shares of rows in each phase, and what the whole run takes")
            epoch_row = ("an epoch", "rows", f"{whole['rows']:,g}, {whole['steps']:,} steps")
            page.table([*_mixture(taken), epoch_row], styles=("bold", "dim"))
    if not arguments.json:
        sys.stdout.write(str(page).lstrip("\n"))
    return 0


def _beside(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows for numeric fields, content that the template leaves out, and reasons for bad records."""
    numbers = [
        ("", name, f"least {own['least']:.4g} · mean {own['mean']:.4g} · most {own['most']:.4g}")
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
        table.insert(0, ("", "questions", f"{own['questions']:,}, a document for each of their choices"))
    if "pairs" in own:
        table[0] = ("", "pairs", f"{own['pairs']:,} of {own['tokens']:,} tokens")
    what = "pairs" if "pairs" in own else "documents"
    if own["documents_split"]:
        table.append(("", "too long", f"{own['documents_split']:,} {what} split over rows, as oversized = split says"))
    if own["tokens_lost"]:
        lost = f"{own['documents_cut']:,} {what} cut, {own['documents_left_out']:,} left out"
        why = "at the front" if oversized == "truncate_front" else f"as oversized = {oversized} says"
        table.append(("", "too long", f"{lost}, {why}: {own['tokens_lost']:,} tokens lost"))
    if own.get("documents_unanswered"):
        table.append(("", "", f"{own['documents_unanswered']:,} of those that are cut have nothing left to predict"))
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
