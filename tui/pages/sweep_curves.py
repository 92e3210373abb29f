"""Which curves of a sweep are drawn: the best trial first, then those that can still become better; the others behind
them."""

from collections.abc import Mapping

from xtrain.records.sweep_state import SweepState, TrialState
from xtrain.tui.curves.canvas import MOST_LINES
from xtrain.tui.curves.curve import Line
from xtrain.tui.model.series import Series
from xtrain.tui.pages.sweep_page import ranked


def trial_lines(state: SweepState, series: Mapping[str, Series], key: str) -> list[Line]:
    """Return a line over tokens for each trial with values of a key. Finished trials that are not among the best are in
    the background."""
    best = state.best()
    measured = [each for each in ranked(state) if each.same_as is None and each.name in series]

    def order(trial: TrialState) -> int:
        if trial is best:
            return 0
        return 3 if trial.stopped_early or trial.failed else 1 if not trial.ended else 2

    found: list[Line] = []
    for trial in sorted(measured, key=order):
        x, y = series[trial.name].xy(key, "tokens")
        if not len(x):
            continue
        steps = series[trial.name].xy(key)[0]
        behind = order(trial) == 3 or len(found) >= MOST_LINES
        name = f"{trial.number:03d}" + (" best" if trial is best else "")
        # While a long file is being read the two may be of different moments.
        found.append(Line(name, x, y, dim=behind, steps=steps if len(steps) == len(x) else None))
    return found
