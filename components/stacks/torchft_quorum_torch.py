"""A rank's view of the replica group quorum: members of a step, sums over them, and state transfer from one.

After any failure between two quorums, ranks close the connections to all other groups, so that none waits for them, and
repeat the step. A group that missed the end of a step is one step behind in the next quorum, and takes the state of a
group that is ahead.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from xtrain.components.stacks.torchft import BUCKET
from xtrain.dsl.schema.actions import SIGNALS
from xtrain.records.events import ReplicasEvent
from xtrain.records.names import heartbeat_path
from xtrain.records.status import read_heartbeat
from xtrain.runtime.base.process import FEWER, JOINED, OPEN, OVER, READY, ReplicaGroup, gone
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.batch import Halt, RunIsOver, Step, StepAgain
from xtrain.runtime.observe.heartbeat import HeartbeatWriter, is_same_process, own_host
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stopping import StopRequests
from xtrain.runtime.store.full_state import FullState, give, take

MANAGER: Final = "manager"
# Time that ranks of a group wait for a quorum before they agree whether to stop; and time to connect to others or to
# receive the next piece of their state.
ASK: Final = timedelta(seconds=10)
CONNECT: Final = timedelta(seconds=60)
# Wait for slow groups: a dead group has closed its connections.
SUM: Final = timedelta(hours=2)
BEAT: Final = timedelta(milliseconds=100)
PAUSE: Final = 0.2
BEATS: Final = 3.0  # seconds within which a running rank writes another heartbeat
PIECE: Final = 2**26  # bytes of state sent at a time
QUORUM: Final = "step.torchft.quorum"


@define(eq=False, kw_only=True)
class Quorum:
    """This group's place among all replica groups. others: process group of the ranks at the same place in every group.

    formed_for: the step whose quorum exists already, because its state was transferred first. failures: consecutive
    failed steps or connections; the next quorum then has another number, so that all groups reconnect. number: number
    and members of the connected quorum.
    """

    rank: Rank
    replica: ReplicaGroup
    records: Records
    requests: StopRequests
    beat: HeartbeatWriter
    progress: Progress
    store: TCPStore
    client: Any
    server: Any
    others: Any
    formed_for: int | None = None
    failures: int = 0
    number: tuple[int, tuple[str, ...]] | None = None
    told: tuple[int, ...] = ()
    _began: bool = False
    _joined: bool = False

    def form(self, step: int, state: FullState, feed: Feed) -> bool:
        """Wait for the quorum of a step; return True if this group took another one's state. Collective in the group.

        Raises Halt if ranks were asked to stop while there is no quorum.
        """
        if not self._began:
            self._wait_until_open()
        self.beat.at(QUORUM, lasting=True)
        while True:
            found = self._ask(step)
            if not self._agreed(found is not None and self._may_begin(found)) or found is None:
                self._leave_if_over()
                self._halt_if_asked()
                continue
            if not self._agreed(self._connect(found)):
                self.drop()
                continue
            self._take_part(found)
            if self._agreed(self._exchange(found, state, feed)):
                break
            self.drop()
        self._began = True
        if found.heal:
            self.replica.comes_back = False
        return bool(found.heal)

    def add_up(self, values: list[float]) -> list[float]:
        """Sum numbers, already summed over the ranks of a group, over groups. Raises StepAgain."""
        self.beat.at("step.agree", lasting=True)
        shared = torch.tensor([1.0, *values], dtype=torch.float64)
        if self.rank.rank == 0 and not self._sum(shared):
            shared.zero_()
        if self.rank.world_size > 1:
            shared = shared.to(self.rank.device)
            dist.broadcast(shared, src=0)
        groups, *sums = shared.tolist()
        if groups != len(self.replica.taking_part):
            self.drop()
            raise StepAgain("another group was lost while ranks agreed")
        return sums

    def sum_step(self, step: Step, tensors: list[Tensor]) -> None:
        """Sum tensors over groups in place. Raises StepAgain on all ranks of the group if one of them failed."""
        self.beat.at("step.torchft.sum", lasting=True)
        if not self._agreed(self._sum(tensors[0]) and self._sum_gradients(tensors[1:])):
            self.drop()
            raise StepAgain("another group was lost while gradients were added up", agreed=True)
        self.failures = 0
        if self.rank.rank == 0 and not self._joined:
            with suppress(RuntimeError):
                self.store.set(JOINED, "1")
            self._joined = True
        taking_part = self.replica.taking_part
        if taking_part != self.told:
            event = ReplicasEvent(
                step=step.index,
                taking_part=[*taking_part],
                joined=[each for each in taking_part if each not in self.told],
                left=[each for each in self.told if each not in taking_part],
                of=self.replica.count,
                rows=step.rows,
            )
            self.told = taking_part
            self.records.event(event)

    def drop(self) -> None:
        """Close the connections to all other groups, so that ranks that wait for this one fail."""
        self.failures += 1
        self.number = None
        with suppress(RuntimeError):
            self.others.abort()

    # a quorum -------------------------------------------------------------------------------------------------------

    def _wait_until_open(self) -> None:
        """Wait until all groups are there, because all take part in the first step of a run."""
        self.store.set(READY, "1")
        while not self._is_told(OPEN) and not self.requests.received:
            self.beat.at(QUORUM, lasting=True)
            time.sleep(PAUSE / 4)

    def _ask(self, step: int) -> Any:
        """Return the lighthouse's quorum; None if there is no quorum yet, or no lighthouse."""
        began = time.monotonic()
        try:
            return self.client._quorum(
                group_rank=self.rank.rank,
                step=0
                if self.replica.comes_back
                else step + 1,  # a returning group is behind even groups at the first step
                checkpoint_metadata="",
                shrink_only=False,
                timeout=ASK,
                commit_failures=self.failures,
                init_sync=False,
            )
        except (RuntimeError, TimeoutError):
            if time.monotonic() - began < PAUSE:
                time.sleep(PAUSE)
            return None

    def _is_told(self, key: str) -> bool:
        """Return True if the launcher set the key; False if the launcher is gone (its ranks are then asked to stop)."""
        with suppress(RuntimeError):
            return self.store.check([key])
        return False

    def _may_begin(self, found: Any) -> bool:
        """Return True if the run can continue with this quorum. The first step needs all groups, except those that
        ended. A group without state needs a quorum that gives it one."""
        if self.replica.comes_back:
            fine = bool(found.heal)
        else:
            fine = self._began or len(found.replica_ids) == self.replica.count or self._is_told(FEWER)
        if not fine:
            time.sleep(PAUSE)
        return fine and not self._is_told(OVER)

    def _leave_if_over(self) -> None:
        """Raise RunIsOver if other groups have finished the run: alone, this group would train differently."""
        if not self._agreed(not self._is_told(OVER)):
            self.replica.leads = False
            raise RunIsOver

    def _agreed(self, fine: bool) -> bool:
        """Return True if `fine` is true on all ranks of the group."""
        if self.rank.world_size == 1:
            return fine
        faults = torch.tensor([float(not fine)], device=self.rank.device)
        dist.all_reduce(faults)
        return faults.item() == 0

    def _halt_if_asked(self) -> None:
        """Halt if a stop was requested. Without a quorum, the ranks of this group agree among themselves."""
        asked = torch.tensor([float(event in self.requests.received) for event in SIGNALS], device=self.rank.device)
        if self.rank.world_size > 1:
            dist.all_reduce(asked)
        for event, ranks in zip(SIGNALS, asked.tolist(), strict=True):
            if ranks:
                self.replica.leads = self.replica.index == next(filter(self._is_alive, self.replica.taking_part), None)
                self.requests.hurry(event)
                raise Halt(event, f"{int(ranks)} of {self.rank.world_size} ranks received the signal, without a quorum")

    def _is_alive(self, group: int) -> bool:
        """Return True if the first rank of a group runs. On this machine its process is checked; elsewhere the
        launcher's report, or, if the launcher is gone, the heartbeat."""
        path = heartbeat_path(self.records.directory, group * self.replica.size)
        reading = read_heartbeat(path)
        if reading is None or reading.host == own_host():
            return reading is not None and is_same_process(reading)
        try:
            return not self.store.check([gone(group)])
        except RuntimeError:
            time.sleep(BEATS)
            now = read_heartbeat(path)
            return now is not None and now.alive != reading.alive

    def _connect(self, found: Any) -> bool:
        number = found.quorum_id, tuple(found.replica_ids)
        if number == self.number:
            return True
        # A restarted lighthouse counts from the start again.
        name = f"torchft/{found.quorum_id}/{found.max_step}/{self.rank.rank}"
        try:
            self.others.configure(
                f"{found.store_address}/{name}",
                str(self.replica.index),
                found.replica_rank,
                found.replica_world_size,
                found.quorum_id,
            )
        except (RuntimeError, TimeoutError):
            return False
        self.number = number
        return True

    def _take_part(self, found: Any) -> None:
        """Update the groups that take part; the first one leads. A group that no longer leads first flushes its
        records."""
        taking_part = tuple(sorted(int(name.partition(":")[0]) for name in found.replica_ids))
        leads = taking_part[0] == self.replica.index
        if self.records.speaks and not leads:
            self.records.settle(self.progress.step)
        self.replica.taking_part, self.replica.leads = taking_part, leads

    # sums -----------------------------------------------------------------------------------------------------------

    def _sum(self, tensor: Tensor) -> bool:
        """Sum a tensor over groups, in place."""
        options = AllreduceOptions()
        options.reduceOp, options.timeout = cast(ReduceOp, ReduceOp.SUM), SUM
        try:
            self.others.allreduce([tensor], options).wait()
        except RuntimeError:
            return False
        return True

    def _sum_gradients(self, gradients: list[Tensor]) -> bool:
        return all(self._sum_bucket(bucket) for bucket in buckets_of(gradients))

    def _sum_bucket(self, bucket: list[Tensor]) -> bool:
        if len(bucket) == 1 and bucket[0].is_contiguous():
            return self._sum(bucket[0])
        flat = torch.cat([each.reshape(-1) for each in bucket])
        if not self._sum(flat):
            return False
        pieces = flat.split([each.numel() for each in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view(gradient.shape))
        return True

    # states ---------------------------------------------------------------------------------------------------------

    def _exchange(self, found: Any, state: FullState, feed: Feed) -> bool:
        """Send the own state to groups without one, or receive one."""
        try:
            for each in found.recover_dst_replica_ranks:
                give(state, {"replicas": [*self.told]}, partial(self._send, to=each))
            if found.heal:
                feed.close()
                receive = partial(self._receive, source=found.recover_src_replica_rank)
                self.told = tuple(take(state, receive, self.records.directory)["replicas"])
        except RuntimeError:
            return False
        return True

    def _send(self, content: Tensor, to: int) -> None:
        for piece in content.split(PIECE) if len(content) else ():
            self.others.send([piece], to, 0).wait()

    def _receive(self, size: int, source: int) -> Tensor:
        content = torch.empty(size, dtype=torch.uint8)
        for piece in content.split(PIECE) if size else ():
            self.others.recv([piece], source, 0).wait()
        return content


def buckets_of(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of gradients in order, each of one format."""
    bucket: list[Tensor] = []
    for each in gradients:
        full = bucket and sum(tensor.numel() for tensor in bucket) + each.numel() > BUCKET
        if bucket and (full or bucket[0].dtype != each.dtype):
            yield bucket
            bucket = []
        bucket = [*bucket, each]
    if bucket:
        yield bucket
