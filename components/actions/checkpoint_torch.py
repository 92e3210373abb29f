"""`tick.checkpoint`: save the full state."""

from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.store.saver import Saver


@op("tick.checkpoint")
def checkpoint(saver: Saver, node_id: str, must: bool) -> StepCall:
    """Save unless this step is saved already. must: the run may end after it, so the save has to succeed.

    Nothing is saved before the first step, because another start would produce the same state.
    """

    def run(step: Step) -> None:
        if saver.progress.step == 0:
            return
        # After a bad step the weights may be corrupt: wait for a good step before saving.
        in_order = not saver.progress.bad.in_a_row and (saver.overlap == "wait" or saver.may_begin())
        if must or in_order:
            saver.save(node_id, must=must)
        else:
            saver.put_off = node_id

    return run
