"""How many threads work on data at once, and work dealt to them."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def default_threads() -> int:
    """Threads that this process may keep busy.

    In a run, as many as its matrix products take: `launch.threads`, OMP_NUM_THREADS, or the rank's share of the
    machine, so that ranks of one machine do not crowd each other out. Elsewhere OMP_NUM_THREADS, or the cores.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested teams
    if setting.isdecimal() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0))


def in_threads(work: Callable[..., _T], calls: Sequence[tuple]) -> list[_T]:
    """`work` called with each of some arguments, all at once, this thread doing the first; the answers in their order.

    It pays if the work lets go of the interpreter.
    """
    if len(calls) <= 1:
        return [work(*arguments) for arguments in calls]
    with ThreadPoolExecutor(len(calls) - 1) as pool:
        others = [pool.submit(work, *arguments) for arguments in calls[1:]]
        return [work(*calls[0]), *(other.result() for other in others)]
