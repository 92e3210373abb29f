"""`shutdown.*`: what always runs, however the run ended, and what has to be told before.

All of it shares what is left until the deadline of a stop: who is told of the end must not cost the run its end.
"""

from typing import Final

import torch.distributed as dist

from xtrain.runtime.checkpoint.saver import Saver
from xtrain.runtime.control.signals import StopRequests
from xtrain.runtime.input.feed import Feed
from xtrain.runtime.monitoring.notify import Notifier
from xtrain.runtime.ops import op
from xtrain.runtime.reporting.records import CLOSE_SECONDS, Records

# The share of the deadline reserved for what comes behind: for leaving, and before that for the files of records.
RESERVED: Final = 0.2
LEAVING: Final = 0.1
# Seconds that writers get at the end of a run that has failed: it is to be started again.
AFTER_FAILURE: Final = 10.0


def report_end(
    records: Records, requests: StopRequests, notifier: Notifier, saver: Saver | None, *, exit_code: int, failed: bool
) -> None:
    """A save that is being written has its name, commands and writers have been told all, as far as there is time."""
    if saver is not None:
        saver.drain(requests.left())
    notifier.close(requests.left(RESERVED) / 2)  # before the writers, which are told what became of commands
    left = requests.left(RESERVED)
    records.end_sinks(exit_code, min(AFTER_FAILURE, left) if failed else left)


@op("shutdown.drain")
def drain(records: Records, requests: StopRequests, saver: Saver | None = None, feed: Feed | None = None) -> None:
    """A save that is still being written has its name, nothing is read any more, and all that was reported is in its
    file."""
    if saver is not None:
        saver.drain(requests.left())
    if feed is not None:
        feed.close()
    records.close(min(CLOSE_SECONDS, requests.left(LEAVING)))


@op("shutdown.leave")
def leave_group() -> None:
    """Wait for the others, then leave the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
