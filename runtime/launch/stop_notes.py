"""Stop requests to a launcher while it has no ranks: noted, and asked for before ranks are started."""

import signal
import threading
from types import FrameType

from attrs import define, field

from xtrain.runtime.control.signals import stop_signals


@define
class StopNotes:
    """`signal` is the first stop request that came, None for none."""

    signal: int | None = None
    _came: threading.Event = field(factory=threading.Event)

    def listen(self) -> None:
        """Take over the signals; the elastic agent has its own handlers while it runs. Main thread only."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal if self.signal is not None else number
        self._came.set()

    def wait(self, seconds: float) -> bool:
        """Whether a stop was asked for within so many seconds."""
        return self._came.wait(seconds)
