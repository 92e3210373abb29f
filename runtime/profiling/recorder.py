"""`ProfileRecorder`: torch's profiler on this rank, with the steps and nodes of the plan marked in its trace."""

from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch.profiler import ProfilerActivity, record_function
from torch.profiler.profiler import _KinetoProfile

from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter

STEP = "ProfilerStep#"
"""How a step is named in a trace, in front of its number: the name that tools which read traces look for."""


@define(kw_only=True, eq=False)
class ProfileRecorder:
    """One trace: `prepare` some steps before it if they are to warm up, `start`, `begin_step`s, `stop`, `write`.

    All of it may raise whatever torch and the disk raise.
    """

    beat: HeartbeatWriter | None
    profiler: Any
    _step: Any = field(default=None, init=False)
    _node: Any = field(default=None, init=False)
    _state: str = field(default="", init=False)  # prepared, started; empty before and behind

    @classmethod
    def of(
        cls, device: torch.device, *, shapes: bool, stacks: bool, memory: bool, beat: HeartbeatWriter | None = None
    ) -> "ProfileRecorder":
        """A recorder of what the CPU does on this rank, and its GPU if it has one."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        profiler = _KinetoProfile(activities=activities, record_shapes=shapes, with_stack=stacks, profile_memory=memory)
        return cls(profiler=profiler, beat=beat)

    def prepare(self) -> None:
        """From now on operations are seen, and forgotten."""
        self.profiler.prepare_trace()
        self._state = "prepared"

    def start(self) -> None:
        """From now on they are kept."""
        if not self._state:
            self.prepare()
        self.profiler.start_trace()
        self._state = "started"
        if self.beat is not None:
            self.beat.on_node = self._at

    def begin_step(self, number: int) -> None:
        """What follows belongs to another step, and that before it is over."""
        self._leave()
        self._step = record_function(f"{STEP}{number}")
        self._step.__enter__()

    def stop(self) -> None:
        """Keep no more; what was only prepared is let go of."""
        state, self._state = self._state, ""
        if self.beat is not None:
            self.beat.on_node = None
        if state == "prepared":
            self.profiler.start_trace()  # as torch ends what it has only prepared
        self._leave()
        if state:
            self.profiler.stop_trace()

    def write(self, path: Path) -> None:
        """The trace as Chrome reads it."""
        self.profiler.export_chrome_trace(str(path))

    def _at(self, node: str) -> None:
        """A node of the plan begins."""
        if self._node is not None:
            self._node.__exit__(None, None, None)
        self._node = record_function(node)
        self._node.__enter__()

    def _leave(self) -> None:
        node, step, self._node, self._step = self._node, self._step, None, None
        for each in (node, step):
            if each is not None:
                each.__exit__(None, None, None)
