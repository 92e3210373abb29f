"""`tick.notify`: a command because of an event, or because a tick is due."""

from xtrain.runtime.monitoring.notify import Notifier
from xtrain.runtime.ops import op
from xtrain.runtime.state import Rank, Step, StepCall


@op("tick.notify")
def notify(notifier: Notifier, rank: Rank, node_id: str, command: str, limit_seconds: float) -> StepCall:
    """Run a command because of the event that the node is of, or of its tick."""
    kind = node_id.split(".")[1] if node_id.startswith("event.") else "tick"

    def run(step: Step) -> None:
        if rank.leads:
            notifier.trigger(kind, command, limit_seconds, step.loss)

    return run
