"""`tick.notify`: run a command on an event or a tick."""

from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.loop.alerts import Notifier
from xtrain.runtime.nn.batch import Step, StepCall


@op("tick.notify")
def notify(notifier: Notifier, rank: Rank, node_id: str, command: str, limit_seconds: float) -> StepCall:
    """Run a command for the node's event or tick."""
    kind = node_id.split(".")[1] if node_id.startswith("event.") else "tick"

    def run(step: Step) -> None:
        if rank.leads:
            notifier.trigger(kind, command, limit_seconds, step.loss)

    return run
