"""Connection to a server's first rank, nodes of its plan on all ranks, and requests that all ranks execute in order."""

import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, frozen

from xtrain.plan.plan import Node, Plan
from xtrain.runtime.base.ops import load_ops, op_of
from xtrain.runtime.base.state import Rank, Resources
from xtrain.runtime.loop.node_calls import topological
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.server.engine.keeping import RequestRefused
from xtrain.server.engine.messages import RankMessage
from xtrain.server.engine.passes import Handle
from xtrain.server.engine.slots import Slots

HEAD: Final = 8  # bytes of a length


class Closed(Exception):
    """End of a connection: the other end is gone."""


@frozen(eq=False)
class Connection:
    socket: socket.socket

    def send(self, message: RankMessage) -> None:
        """Send a message. Raises Closed."""
        content = message.pack()
        try:
            self.socket.sendall(len(content).to_bytes(HEAD, "little") + content)
        except OSError as error:
            raise Closed from error

    def receive(self, seconds: float) -> RankMessage | None:
        """Return the next whole message; None if none begins within `seconds`. Raises Closed."""
        self.socket.settimeout(seconds)
        try:
            first = self.socket.recv(1)
        except TimeoutError:
            return None
        except OSError as error:
            raise Closed from error
        if not first:
            raise Closed
        self.socket.settimeout(None)
        head = first + self._exactly(HEAD - 1)
        return RankMessage.unpack(self._exactly(int.from_bytes(head, "little")))

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        view, at = memoryview(content), 0
        while at < count:
            try:
                got = self.socket.recv_into(view[at:])
            except OSError as error:
                raise Closed from error
            if not got:
                raise Closed
            at += got
        return bytes(content)

    def close(self) -> None:
        self.socket.close()


STOP: Final = "stop"
WAIT: Final = "wait"
REFUSED: Final = "refused"
SAMPLES: Final = ("sample", "forget")


@define(eq=False)
class ServingRanks:
    """Execution of requests on all ranks. handles: kind of request → its function. slots: restored to their trained
    adapters before all requests except sampling."""

    rank: Rank
    handles: Mapping[str, Handle]
    slots: Slots
    beat: HeartbeatWriter

    def lead(self, message: RankMessage) -> RankMessage:
        """Execute a request on all ranks, as the first rank; return its answer, or `refused` with a reason."""
        self._share(message.pack())
        return self._do(message)

    def stop(self) -> None:
        """Let the other ranks leave `follow`."""
        self._share(RankMessage(name=STOP).pack())

    def wait(self) -> None:
        """Tell the other ranks that the first one is alive and waits for requests."""
        self._share(RankMessage(name=WAIT).pack())
        self.beat.mark()

    def follow(self) -> None:
        """Execute the first rank's requests until it stops."""
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
        """Return the first rank's bytes on all ranks. Collective."""
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


def set_up(
    plan: Plan,
    resources: Resources,
    done: Callable[[Node, float], None] = lambda node, seconds: None,
    without: Collection[str] = (),
) -> ServingRanks:
    """Run the set-up in plan order; afterwards `resources` has everything that requests need.

    done: called after each node with its seconds. without: nodes whose results exist already.
    """
    load_ops()
    for node in topological(plan):
        if node.kind == "setup" and node.id not in without:
            began = time.perf_counter()
            operation = op_of(node)
            result = operation.bind(node, {**resources, "node_id": node.id})()
            if operation.gives:
                resources[operation.gives] = result
            done(node, time.perf_counter() - began)
    handles = {
        node.op.removeprefix("request."): op_of(node).bind(node, {**resources, "node_id": node.id})()
        for node in plan.of_kind("request")
    }
    return ServingRanks(rank=resources["rank"], handles=handles, slots=resources["slots"], beat=resources["beat"])


def shut_down(plan: Plan, resources: Resources) -> None:
    """Run the shutdown nodes, in order."""
    for node in topological(plan):
        if node.kind == "shutdown":
            op_of(node).bind(node, {**resources, "node_id": node.id})()
    watch = resources.get("watch")
    if watch is not None:
        watch.close()
