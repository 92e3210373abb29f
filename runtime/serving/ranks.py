"""All ranks of a server: the first one gives out requests, and each carries them out, in one order."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import define

from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.serving.keeping import RequestRefused
from xtrain.runtime.serving.messages import RankMessage
from xtrain.runtime.serving.passes import Handle
from xtrain.runtime.serving.slots import Slots
from xtrain.runtime.state import Rank

STOP: Final = "stop"
WAIT: Final = "wait"
REFUSED: Final = "refused"
SAMPLES: Final = ("sample", "forget")


@define(eq=False)
class ServingRanks:
    """handles: what carries out each kind of request. slots: as they are trained, for all but those that sample."""

    rank: Rank
    handles: Mapping[str, Handle]
    slots: Slots
    beat: HeartbeatWriter

    def lead(self, message: RankMessage) -> RankMessage:
        """Carry out a request on all ranks, as the first of them; its answer, or `refused` with a reason."""
        self._share(message.pack())
        return self._do(message)

    def stop(self) -> None:
        """Let the other ranks leave `follow`."""
        self._share(RankMessage(name=STOP).pack())

    def wait(self) -> None:
        """Let the other ranks know that the first one is there, and waits for requests."""
        self._share(RankMessage(name=WAIT).pack())
        self.beat.mark()

    def follow(self) -> None:
        """Carry out what the first rank gives out, until it stops."""
        while True:
            message = RankMessage.unpack(self._share(None))
            if message.name == STOP:
                return
            self.beat.mark()
            if message.name != WAIT:
                self._do(message)

    def _do(self, message: RankMessage) -> RankMessage:
        self.beat.at(f"request.{message.name}", lasting=True)
        if message.name not in SAMPLES:
            self.slots.restore()
        try:
            return self.handles[message.name](message)
        except RequestRefused as refused:
            return RankMessage(name=REFUSED, values={"reason": str(refused)})

    def _share(self, content: bytes | None) -> bytes:
        """Bytes of the first rank, on all of them. Collective."""
        if self.rank.world_size == 1:
            assert content is not None
            return content
        size = torch.tensor(0 if content is None else len(content))
        dist.broadcast(size, src=0)
        data = torch.empty(int(size), dtype=torch.uint8)
        if content is not None:
            data.copy_(torch.from_numpy(np.frombuffer(content, np.uint8).copy()))
        dist.broadcast(data, src=0)
        return data.numpy().tobytes()
