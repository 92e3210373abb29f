"""What a checkpoint says of the rows that were taken, held against the data that a run goes on with."""

from typing import Any, Final

from attrs import frozen

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loading.curriculum import Passes, Position

FORMAT: Final = 2
# What may not change between the run that wrote a state and the one that resumes it, in words.
SAME: Final = {
    "seed": "seed of the row order",
    "capacity": "positions in a row",
    "align": "multiple of positions that documents are padded to",
}
OF_A_DATASET: Final = {
    "rows": "number of packed rows",
    "content": "content of the rows (data, tokenizer, hold-out or packing)",
}


@frozen(kw_only=True)
class Remarks:
    """How the datasets of a run differ from those that its checkpoint speaks of.

    new: begin with their first row. renamed: old name → new one, with the same rows. left: states of those that are not
    read any more; should they come back, they go on where they stopped.
    """

    new: tuple[str, ...]
    renamed: dict[str, str]
    left: dict[str, dict[str, Any]]

    def in_words(self) -> list[str]:
        """A line for each."""
        lines = [f"dataset {name} is new to this run: it begins with its first row" for name in self.new]
        for old, new in self.renamed.items():
            lines.append(f"dataset {new} is what was called {old}, and goes on where that was")
        for name, its in self.left.items():
            stopped = f"after {its['cursor']:,} rows, from where it goes on should it come back"
            lines.append(f"dataset {name} is not trained on any more, {stopped}")
        return lines


def position_of(state: dict[str, Any], now: dict[str, Any]) -> tuple[Position, Remarks]:
    """Where a run goes on whose checkpoint says `state` of its data, and which would say `now` of what it has.

    Raises DataError with all differences if the rows that were taken are not those of this data.
    """
    _check(state, now)
    saved, own = dict(state["datasets"]), now["datasets"]
    # A dataset may be called otherwise: what is in it counts.
    renamed = {}
    for name in (name for name in own if name not in saved):
        same_content = (old for old, its in saved.items() if old not in own and _content(its) == _content(own[name]))
        if (old := next(same_content, None)) is not None:
            renamed[old], saved[name] = name, saved.pop(old)
    new = tuple(name for name in own if name not in saved)
    left = {name: its for name, its in saved.items() if name not in own}
    position = Position(
        step=state["step"],
        rows=state["rows"],
        cursors={name: saved[name]["cursor"] for name in own if name in saved},
        phase=state["phase"],
        sampled=state["rows_in_phase"],
        passes=_passes(state.get("passes"), renamed),
    )
    return position, Remarks(new=new, renamed=renamed, left=left)


def _passes(found: list[tuple[str, float]] | None, renamed: dict[str, str]) -> Passes:
    return None if found is None else tuple((renamed.get(name, name), epochs) for name, epochs in found)


def _content(state: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(state[key] for key in OF_A_DATASET)


def _check(state: dict[str, Any], now: dict[str, Any]) -> None:
    if state.get("format") != FORMAT:
        raise DataError(
            f"the data position of the checkpoint has format {state.get('format', 1)}, and this version of xtrain "
            f"reads format {FORMAT}: the data cannot be resumed",
            remedy="Resume with the version that wrote it, or start a new run from the weights alone.",
        )
    differences = [
        f"{words}: {state.get(key, 'missing')} in the checkpoint, {now[key]} now"
        for key, words in SAME.items()
        if state.get(key) != now[key]
    ]
    for name, own in now["datasets"].items():
        saved = state["datasets"].get(name, own)
        differences += [
            f"dataset {name}, {words}: {saved.get(key, 'missing')} in the checkpoint, {own[key]} now"
            for key, words in OF_A_DATASET.items()
            if saved.get(key) != own[key]
        ]
    if differences:
        listed = "".join(f"\n    {difference}" for difference in differences)
        raise DataError(
            f"the data differs from that of the checkpoint:{listed}",
            remedy="Restore these settings, give a dataset that has changed another name so that it starts from the "
            "beginning, or start a new run from the checkpoint's weights alone.",
        )
