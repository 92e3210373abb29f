"""Ranks as a table that is sorted by any of its columns."""

from collections.abc import Sequence

from attrs import evolve, frozen

from xtrain.tui.model.ranks import OneRank
from xtrain.tui.pages.rank_facts import RankFacts
from xtrain.tui.pages.rank_figures import COMMUNICATION, DATA, MEMORY, PROGRESS, STEP, WORK, Figure, expected
from xtrain.tui.pages.rank_map import sign
from xtrain.tui.pages.rank_states import FINE, WORDS, current_step
from xtrain.tui.pages.sheet import CURSOR, DOWN, UP, Row, fit, left, restyled, right, row
from xtrain.tui.words import size


@frozen(kw_only=True)
class TableColumn:
    """Column of the table. key: sort key; wide: width in cells; early: columns with a lower value get room first."""

    key: str
    title: str
    wide: int
    early: int
    figure: Figure | None = None


COLUMNS = (
    TableColumn(key="rank", title="rank", wide=6, early=0),
    TableColumn(key="state", title="state", wide=9, early=1),
    TableColumn(key="place", title="place", wide=36, early=9),
    TableColumn(key="step", title="step", wide=8, early=2, figure=STEP),
    TableColumn(key="work", title="own work", wide=8, early=7, figure=WORK),
    TableColumn(key="data", title="data", wide=8, early=6, figure=DATA),
    TableColumn(key="communication", title="comm", wide=8, early=5, figure=COMMUNICATION),
    TableColumn(key="memory", title="memory", wide=9, early=3, figure=MEMORY),
    TableColumn(key="planned", title="planned", wide=9, early=8),
    TableColumn(key="progress", title="idle", wide=6, early=4, figure=PROGRESS),
    TableColumn(key="node", title="current node", wide=28, early=10),
    TableColumn(key="host", title="host", wide=18, early=11),
)


def columns(facts: RankFacts, width: int) -> tuple[TableColumn, ...]:
    """Return the columns that fit in `width` cells, in order; text columns are as wide as their texts."""
    texts = {
        "place": len(" ".join(f"{axis.name} {axis.size - 1}" for axis in facts.axes if axis.size > 1)),
        "host": max((len(rank.beat.host) for rank in facts.ranks if rank.beat), default=0),
    }
    if not facts.memory:
        texts["planned"] = 0
    for column in COLUMNS:
        # Where waiting between ranks is not measured, an empty column would waste room.
        if column.figure in (WORK, COMMUNICATION) and facts.figure(column.figure).median is None:
            texts[column.key] = 0
    found = [_as_wide_as(column, texts.get(column.key)) for column in COLUMNS]
    room, shown = width - 1, set()
    for column in sorted(found, key=lambda each: each.early):
        if column.wide and column.wide + 1 <= room:
            shown.add(column.key)
            room -= column.wide + 1
    return tuple(column for column in found if column.key in shown)


def _as_wide_as(column: TableColumn, text: int | None) -> TableColumn:
    """Return the column limited to that text width; 0 is an empty column."""
    if text is None or not text:
        return column if text is None else evolve(column, wide=0)
    return evolve(column, wide=min(column.wide, max(len(column.title), text)))


def ordered(facts: RankFacts, ranks: Sequence[int], key: str, *, most_first: bool) -> list[int]:
    """Return the ranks in table order; ranks without a value come last."""
    figure = next((column.figure for column in COLUMNS if column.key == key), None)
    if figure is not None:
        sign_of = -1 if most_first else 1
        # Memory is compared in bytes, as it is shown, and not as a share of the plan.
        values = {rank: figure.of(facts.ranks[rank]) for rank in ranks}
        return sorted(ranks, key=lambda rank: (values[rank] is None, sign_of * (values[rank] or 0.0), rank))
    if key == "state":
        return sorted(
            ranks, key=lambda rank: (-int(facts.states.of[rank]) if most_first else int(facts.states.of[rank]), rank)
        )
    return sorted(ranks, reverse=most_first)


def table_head(shown: Sequence[TableColumn], key: str, width: int, *, most_first: bool) -> Row:
    """Return the titles, with a sign at the sort column."""
    spans: list[tuple[str, str] | str] = [" "]
    for column in shown:
        arrow = (DOWN if most_first else UP) if column.key == key else ""
        title = column.title if len(column.title) + len(arrow) <= column.wide else column.title[: column.wide - 1]
        put = right if column.figure or column.key in ("rank", "planned") else left
        spans.append((put(f"{title}{arrow}", column.wide) + " ", "title" if arrow else "dim"))
    return fit(row(*spans), width)


def table_row(rank: OneRank, facts: RankFacts, shown: Sequence[TableColumn], width: int, *, chosen: bool) -> Row:
    """Return the table row of one rank."""
    state = int(facts.states.of[rank.rank])
    mark, style = sign(state, 0)
    spans: list[tuple[str, str] | str] = [(CURSOR if chosen else " ", "mark")]
    for column in shown:
        if column.figure is not None:
            value = None if facts.over and column.figure is PROGRESS else column.figure.of(rank)
            text = right("–" if value is None else column.figure.words(value), column.wide)
            slow = column.figure is WORK and rank.rank in facts.states.slow
            plan = expected(rank, facts.memory) if column.figure is MEMORY else None
            over = plan is not None and value is not None and value > plan
            spans.append((f"{text} ", "bad" if over else "warn" if slow else ""))
        elif column.key == "state":
            words = WORDS[state] or ("ended" if facts.over else "ok" if rank.beat else "–")
            text = f"{mark} {words}" if state > FINE and style in ("bad", "warn") else words
            spans.append((f"{left(text, column.wide)} ", style if style in ("bad", "warn") else ""))
        else:
            spans.append(f"{_cell(rank, facts, column)} ")
    whole = fit(row(*spans), width)
    return restyled(whole, "cursor") if chosen else whole


def _cell(rank: OneRank, facts: RankFacts, column: TableColumn) -> str:
    if column.key == "rank":
        return right(f"{rank.rank:,}", column.wide)
    if column.key == "planned":
        plan = expected(rank, facts.memory)
        return right("–" if plan is None else size(plan), column.wide)
    if column.key == "place":
        text = " ".join(f"{name} {rank.coordinates.get(name, '–')}" for name in facts.real)
    elif column.key == "node":
        text = rank.beat.node if rank.beat else ""
    else:
        text = rank.beat.host if rank.beat else ""
    step = current_step(rank)
    if column.key == "node" and text and step is not None:
        text = f"{step:,} {text.removeprefix('step.')}" if step else text
    return left(text, column.wide)
