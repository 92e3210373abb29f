"""A thread of the first rank that looks at files once a second, so that no step waits for a file system."""

import threading
from collections.abc import Callable

from attrs import define, field

SECONDS = 1.0


@define(eq=False)
class Poller:
    """Calls each of `looks`, by what it looks for, once a second until it is closed. `report` is told, once, why one
    has failed."""

    report: Callable[[str], None]
    looks: dict[str, Callable[[], None]] = field(factory=dict)
    _closed: threading.Event = field(factory=threading.Event)
    _thread: threading.Thread | None = None
    _reported: set[str] = field(factory=set)

    def begin(self) -> None:
        if self.looks:
            self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Return when no look is under way, and none follows."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5 * SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(SECONDS):
            for what, look in self.looks.items():
                try:
                    look()
                except Exception as error:  # a file system may fail in any way, and training must not
                    message = f"{what} could not be checked: {type(error).__name__}: {error}"
                    if message not in self._reported:
                        self._reported.add(message)
                        self.report(message)
