"""`tick.checkpoint`: the full state, saved."""

from xtrain.runtime.checkpoint.saver import Saver
from xtrain.runtime.ops import op
from xtrain.runtime.state import Step, StepCall


@op("tick.checkpoint")
def checkpoint(saver: Saver, node_id: str, must: bool) -> StepCall:
    """Save, unless this very step is saved already. must: the run may end with it, so that it has to succeed.

    Before the first step there is nothing that another start would not make as well.
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
