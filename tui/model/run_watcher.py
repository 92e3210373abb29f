"""For who follows a run in lines, with a reducer of his own: whether there is still somebody who writes them."""

import time
from pathlib import Path

from xtrain.tui.model.life import LifeReader
from xtrain.tui.model.rank_reader import RankReader
from xtrain.tui.state import RunState

LOOK_SECONDS = 0.25


class RunWatcher:
    """Watcher of the run in a directory, which looks at most four times a second."""

    def __init__(self, directory: Path) -> None:
        self._ranks = RankReader(directory)
        self._life = LifeReader(directory)
        self._looked = float("-inf")
        self._why = ""

    def why_over(self, state: RunState, newest: float | None) -> str:
        """Return why nothing more will come although the run has not recorded its end; empty while it is running.

        state: after all existing records; newest: time of the newest of them.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            start = state.start
            size = (start.world_size or 0) if start else 0
            self._ranks.poll(size, None, state.attempt, now + LOOK_SECONDS)
            life = self._life.look(state, self._ranks.ranks(), newest)
            self._why = life.why if life.over else ""
        return self._why
