"""The verdict on ranks that get on no more, in words."""

from collections.abc import Mapping

from ...records.heartbeat import Heartbeat
from ...records.run_events import StuckEvent


def explained(told: StuckEvent) -> str:
    """The verdict as a sentence; the first rank is named by the event, others of them here."""
    where = _where(told.step, told.node)
    waited = f"no progress for {told.seconds or 0:g} s"
    if not told.ranks:
        return f"{waited} in {where}, and the heartbeats of the ranks cannot be read: is the disk full?"
    how = {
        "stopped": "stopped, as by SIGSTOP",
        "ended": "gone",
        "frozen": "executes no Python any more",
        "stuck": "stuck",
    }[told.state]
    others = ", ".join(map(str, told.ranks[1:]))
    also = f" (and so are ranks {others})" if others else ""
    inside = f" at {told.place}" if told.place else ""
    if told.frozen:
        last = _where(told.last_step, told.last_node)
        inside = "; no heartbeat yet" if told.pid is None else "" if last == where else f"; last seen in {last}"
        where = f"the others wait in {where}"
    process = f"; process {told.pid} on {told.host}" if told.pid else ""
    return f"{how}{also}: {waited}, {where}{inside}{process}; stacks and collectives of all ranks: {told.folder}"


def _where(step: int | None, node: str | None) -> str:
    return f"step {step}, {node}" if step else str(node)


def whereabouts_of(lines: Mapping[int, Heartbeat | None]) -> str:
    """A line for every rank: what it was in, as far as it has told."""
    return "".join(
        f"rank {rank}: {f'{_where(line.step, line.node)} {line.place}'.rstrip() if line else 'no heartbeat'}\n"
        for rank, line in lines.items()
    )
