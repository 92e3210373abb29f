"""The Datasets screen as rows of text: a table of them, and what stands out in words."""

from collections.abc import Callable

from attrs import frozen

from xtrain.tui.pages.list_page import ListPage, ListView
from xtrain.tui.pages.mixture import DatasetFacts, MixtureTable
from xtrain.tui.pages.sheet import bar, block, fit, joined, left, restyled, right, row, rule, wrapped
from xtrain.tui.words import brief, count, decimal, plural

# Deviation of a phase's rows from its shares that is reported; rows are dealt in turns, not drawn at random.
_NEAR = 0.02
_BAR_TITLES = ("share of rows in this phase", "share")
# Share of a step from which on waiting for rows is a warning.
_LONG_WAIT = 0.1


@frozen(kw_only=True)
class _Column:
    title: str
    width: int
    value: Callable[[DatasetFacts], str]


_COLUMNS = (
    _Column(title="loss", width=8, value=lambda one: decimal(one.loss, 4)),
    _Column(title="held out", width=8, value=lambda one: decimal(one.evaluation.loss if one.evaluation else None, 4)),
    _Column(title="share", width=6, value=lambda one: _percent(one.share)),
    _Column(title="plan", width=6, value=lambda one: _percent(one.target)),
    _Column(title="epochs", width=7, value=lambda one: _times(one.epochs)),
    _Column(title="rows", width=11, value=lambda one: "–" if one.rows is None else f"{one.rows:,.0f}"),
    _Column(title="tokens", width=7, value=lambda one: count(one.tokens)),
    _Column(title="in all", width=6, value=lambda one: _percent(one.run_share)),
)  # fmt: skip


def page(mixture: MixtureTable, view: ListView, width: int, most_rows: int, *, step: int = 0) -> ListPage:
    """Return at most `most_rows` rows of `width` cells; sentences are dropped before table rows."""
    facts = joined(
        [
            plural(len(mixture.datasets), "dataset"),
            f"phase {mixture.phase.name}" if mixture.phase and mixture.num_phases > 1 else "",
            f"step {step:,}",
        ],
    )
    title = rule("Datasets", width, facts)
    words = [row((line, style)) for text, style in in_words(mixture) for line in wrapped(text, width, "  ")]
    room = len(mixture.datasets)
    if least_rows(mixture) > most_rows:  # one row says how many more there are
        room = max(1, most_rows - 3 - min(len(words), most_rows // 4))
    view = view.within(len(mixture.datasets), room)
    names, columns, broad = _layout(mixture, width)
    head = [left("", names), *(right(column.title, column.width) for column in columns)]
    if broad:
        head.append(next((words for words in _BAR_TITLES if len(words) <= broad), ""))
    rows = [title, fit(row((" ".join(head), "dim")), width)]
    for number, one in enumerate(mixture.datasets[view.top : view.top + room], start=view.top):
        line = [left(one.name, names), *(right(column.value(one), column.width) for column in columns)]
        share = (" " + bar(one.share, broad), "bar") if broad else ""
        drawn = fit(row(" ".join(line), share), width)
        rows.append(restyled(drawn, "cursor") if number == view.place and len(mixture.datasets) > room else drawn)
    if hidden := len(mixture.datasets) - room:
        words = [row((f"{hidden} more: up and down", "dim")), *words]
    rows += words[: max(0, most_rows - len(rows))]
    return ListPage(
        rows=tuple(block(rows, width, len(rows))),
        view=view,
        count=len(mixture.datasets),
        height=room,
    )


def least_rows(mixture: MixtureTable) -> int:
    """Return the number of rows of the whole table without sentences."""
    return 2 + len(mixture.datasets)


def _layout(mixture: MixtureTable, width: int) -> tuple[int, list[_Column], int]:
    """Return the width of the names, the columns that fit, and the width left for a bar."""
    names = min(max([8, *(len(one.name) for one in mixture.datasets)]), max(8, width // 5))
    columns: list[_Column] = []
    used = names
    for column in _COLUMNS:
        if used + 1 + column.width > width:
            break
        columns.append(column)
        used += 1 + column.width
    broad = min(40, width - used - 1)
    return names, columns, broad if broad >= 10 else 0


def in_words(mixture: MixtureTable) -> list[tuple[str, str]]:
    """Return sentences with style names: the phase, deviations from planned shares, repeats, and the wait for rows."""
    found: list[tuple[str, str]] = []
    phase = mixture.phase
    if phase is not None and mixture.num_phases > 1:
        since = "from the beginning" if not phase.first else f"since step {phase.first:,}"
        until = f", until step {mixture.until:,}" if mixture.until is not None else ""
        rate = f", learning rate × {phase.lr_scale:g}" if phase.lr_scale != 1 else ""
        then = f"; then {mixture.following.name}" if mixture.following is not None else ""
        found.append((f"Phase {phase.name} {since}{until}{rate}{then}.", ""))
    strays = [
        (one.share - one.target, one.name)
        for one in mixture.datasets
        if one.share is not None and one.target is not None
    ]
    if strays:
        stray, name = max(strays, key=lambda pair: abs(pair[0]))
        if abs(stray) <= _NEAR:
            found.append((f"Rows come as planned, within {100 * abs(stray):.1f} points.", "good"))
        else:
            one = next(one for one in mixture.datasets if one.name == name)
            said = f"{name} has {one.share:.1%} of the rows of this phase; {one.target:.1%} are planned."
            found.append((said, "warn"))
    often = [one for one in mixture.datasets if (one.epochs or 0) > 1]
    if often:
        seen = ", ".join(f"{one.name} {one.epochs:.1f} times" for one in often[:6])
        found.append((f"Seen more than once: {seen}.", ""))
    if mixture.wait_seconds is not None:
        share = f", {mixture.wait_share:.1%} of it" if mixture.wait_share is not None else ""
        style = "warn" if (mixture.wait_share or 0) >= _LONG_WAIT else ""
        found.append((f"A step waits {brief(mixture.wait_seconds)} for its rows{share}.", style))
    return found


def _times(epochs: float | None) -> str:
    return "n/a" if epochs is None else f"{epochs:.2f}" if epochs >= 0.1 or epochs == 0 else f"{epochs:.4f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
