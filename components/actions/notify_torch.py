"""`tick.notify`: run a command on an event or a tick."""

from xtrain.runtime.monitoring.notify import Notifier
from xtrain.runtime.ops import op
from xtrain.runtime.state import Rank
from xtrain.runtime.step_state import Step, StepCall


@op("tick.notify")
def notify(notifier: Notifier, rank: Rank, node_id: str, command: str, limit_seconds: float) -> StepCall:
    """Run a command for the node's event or tick."""
    kind = node_id.split(".")[1] if node_id.startswith("event.") else "tick"

    def run(step: Step) -> None:
        if rank.leads:
            notifier.trigger(kind, command, limit_seconds, step.loss)

    return run
