"""Display of a run from its files while this process runs it."""

import sys
import threading
from typing import TYPE_CHECKING

from xtrain.cli.safe_output import drawn_on

if TYPE_CHECKING:
    from xtrain.runtime.run_directory.workspace import RunDirectory


class Following:
    """Shows the run in a thread until the block ends."""

    def __init__(self, workspace: "RunDirectory", ui: str) -> None:
        from xtrain.records.paths import EVENTS_FILE, METRICS_FILE
        from xtrain.runtime.files.lines import size_of
        from xtrain.tui.lines.view import follow

        directory = workspace.directory
        self._finished = threading.Event()
        offsets = {name: size_of(directory / name) for name in (METRICS_FILE, EVENTS_FILE)}
        out = drawn_on(sys.stdout, ui)
        options = {"ui": ui, "out": out, "offsets": offsets, "finished": self._finished}
        self._thread = threading.Thread(target=follow, args=(directory,), kwargs=options, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Show everything up to now and stop; from any thread."""
        self._finished.set()
        self._thread.join(timeout=10)
