"""`event.pause`: what a command does that nothing else in a plan does: wait."""

import time

from xtrain.records.control_words import ControlState
from xtrain.records.run_events import PausedEvent
from xtrain.runtime.control.agreement import Agreement
from xtrain.runtime.control.commands import Control
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.profiling.under_way import UnderWay
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress
from xtrain.runtime.step_state import Step, StepCall

# Between two looks of ranks that wait: nobody notices a fifth of a second, and nothing is busy meanwhile.
WAIT_SECONDS = 0.2


@op("event.pause")
def pause(
    control: Control,
    agreement: Agreement,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Wait until the run is to go on. Commands are carried out meanwhile; raises Halt if it is to stop."""

    def run(step: Step) -> None:
        assert control.order is not None
        under_way.cut_short("the run is paused")
        records.flush(progress.step)  # who looks at a run that waits is to see its last step
        control.paused, began = True, time.monotonic()
        control.report(control.order, ControlState.DONE, f"the run is paused after step {progress.step:,}")
        while control.paused and not control.stopping:
            time.sleep(WAIT_SECONDS)
            if beat is not None:
                beat.mark()
            agreement.meet_waiting()
            control.carry_out(step)
        records.event(PausedEvent(step=progress.step, seconds=time.monotonic() - began))

    return run
