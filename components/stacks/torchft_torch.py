"""`setup.parallel.torchft` and its step: a quorum of replica groups, and sums over its members.

torchft provides the quorum, with a lighthouse and a manager per group, and process groups that are rebuilt with it: one
for each place in a group. State is transferred through these too, as tensor bytes and a JSON text: nothing is
unpickled, and no server listens for it.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from xtrain.components.stacks.torchft_quorum_torch import BEAT, CONNECT, MANAGER, QUORUM, Quorum
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.hosts import in_url, own_address
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.process import LIGHTHOUSE, ReplicaGroup
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.agreement import Agreement
from xtrain.runtime.loop.checkpointing import Beginning
from xtrain.runtime.loop.metrics import Window
from xtrain.runtime.nn.batch import RowLosses, Step, StepAgain, StepCall
from xtrain.runtime.nn.gradients import local_gradient
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stopping import StopRequests

# Word of a spec → class of torchft.
PROCESS_GROUPS: Final = {"gloo": "ProcessGroupGloo", "baby_gloo": "ProcessGroupBabyGloo"}


@op("setup.parallel.torchft", gives="quorum")
def open_quorum(
    rank: Rank,
    agreement: Agreement,
    requests: StopRequests,
    beat: HeartbeatWriter,
    progress: Progress,
    records: Records,
    replica: ReplicaGroup,
    replicas: int,
    min: int,
    heartbeat_seconds: float,
    process_group: str = "gloo",
    timeout_seconds: float = CONNECT.total_seconds(),
) -> Quorum:
    """Register this group with the lighthouse. timeout_seconds: of the process group between replica groups. Raises
    EnvironmentFault if the package is missing."""
    assert replicas == replica.count and 1 <= min <= replicas and heartbeat_seconds > 0
    # Its servers would log every operation.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        coordination: Any = import_module("torchft.coordination")
        groups: Any = import_module("torchft.process_group")
    except Exception as error:
        message = f"stack torchft needs the package torchft ({type(error).__name__}: {error}); install it with "
        raise EnvironmentFault("X715", message + "`pip install 'xtrain[torchft]'`, or use stack parallel") from error
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=CONNECT)
    server = None
    if rank.rank == 0:
        host = own_address(*place)
        server = coordination.ManagerServer(
            replica_id=f"{replica.index}:{os.getpid()}",
            lighthouse_addr=os.environ[LIGHTHOUSE],
            hostname=in_url(host),
            bind=f"{in_url(host)}:0",
            store_addr=f"{place[0]}:{place[1]}",
            world_size=rank.world_size,
            heartbeat_interval=BEAT,
            connect_timeout=CONNECT,
            quorum_retries=0,
        )
        store.set(MANAGER, server.address())
    client = coordination.ManagerClient(store.get(MANAGER).decode(), connect_timeout=CONNECT)
    found = Quorum(
        rank=rank,
        replica=replica,
        records=records,
        requests=requests,
        beat=beat,
        progress=progress,
        store=store,
        client=client,
        server=server,
        others=getattr(groups, PROCESS_GROUPS[process_group])(timeout=timedelta(seconds=timeout_seconds)),
    )
    agreement.beyond = found.add_up
    return found


@op(QUORUM)
def meet(quorum: Quorum, begun: Beginning, feed: Feed, window: Window, at_end: list[Callable[[], None]]) -> StepCall:
    """Wait for the groups of this step, and for the state of one of them if this group is behind. Meets once more after
    the last step, so that the remaining groups end the run together with the same state."""

    def meet_at_end() -> None:
        if quorum.formed_for != quorum.progress.step:
            quorum.form(quorum.progress.step, begun.state, feed)

    at_end.append(meet_at_end)

    def run(step: Step) -> None:
        if quorum.formed_for == step.index:  # the step was restarted after a state transfer
            quorum.formed_for = None
        elif quorum.form(step.index, begun.state, feed):
            window.clear()
            quorum.formed_for = quorum.progress.step
            raise StepAgain("the state of another group was taken", moved=True)
        step.rows = step.rows * len(quorum.replica.taking_part) // quorum.replica.count

    return run


@op("step.torchft.sum")
def sum_over_groups(plan: Plan, model: ModelParts, quorum: Quorum) -> StepCall:
    """Sum gradients and loss sums over the groups that take part."""
    datasets = len(plan.node("setup.loader").args["datasets"])
    parameters = [parameter for _, parameter in model.trained()]

    def run(step: Step) -> None:
        assert step.loss_sums is not None
        losses = [step.loss_sums.double()]
        if datasets > 1:
            losses.append(_of_datasets(step.row_losses, datasets, losses[0].device).flatten())
        vector = torch.cat(losses)
        quorum.sum_step(step, [vector, *(local_gradient(each.grad) for each in parameters)])
        count = len(losses[0])
        step.loss_sums = vector[:count]
        if datasets > 1:
            sums_D, valid_D = vector[count:].view(2, datasets)
            numbers_D = torch.arange(datasets, device=vector.device)
            step.row_losses = [RowLosses(dataset_B=numbers_D, cross_entropy_B=sums_D, valid_B=valid_D)]

    return run


def _of_datasets(batches: Sequence[RowLosses], datasets: int, device: torch.device) -> Tensor:
    """Return the cross-entropies and valid tokens of each of D datasets, [2, D] fp64."""
    sums_2D = torch.zeros(2, datasets, dtype=torch.float64, device=device)
    for batch in batches:
        sums_2D[0].index_add_(0, batch.dataset_B, batch.cross_entropy_B)
        sums_2D[1].index_add_(0, batch.dataset_B, batch.valid_B)
    return sums_2D
