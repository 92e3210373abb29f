"""The verdict on ranks that get on no more, in words."""

from collections.abc import Mapping

from ...records.heartbeat import Heartbeat
from ...records.run_events import StuckEvent


def explained(event: StuckEvent) -> str:
    """The verdict as a sentence; the first rank is named by the event, others of them here."""
    where = _where(event.step, event.node)
    waited = f"no progress for {event.seconds or 0:g} s"
    if not event.ranks:
        return f"{waited} in {where}, and the heartbeats of the ranks cannot be read: is the disk full?"
    how = {
        "stopped": "stopped, as by SIGSTOP",
        "ended": "gone",
        "frozen": "executes no Python any more",
        "stuck": "stuck",
    }[event.state]
    others = ", ".join(map(str, event.ranks[1:]))
    also = f" (and so are ranks {others})" if others else ""
    inside = f" at {event.place}" if event.place else ""
    if event.frozen:
        last = _where(event.last_step, event.last_node)
        inside = "; no heartbeat yet" if event.pid is None else "" if last == where else f"; last seen in {last}"
        where = f"the others wait in {where}"
    process = f"; process {event.pid} on {event.host}" if event.pid else ""
    return f"{how}{also}: {waited}, {where}{inside}{process}; stacks and collectives of all ranks: {event.folder}"


def _where(step: int | None, node: str | None) -> str:
    return f"step {step}, {node}" if step else str(node)


def whereabouts_of(lines: Mapping[int, Heartbeat | None]) -> str:
    """A line for every rank: what it was in, as far as it has told."""
    return "".join(
        f"rank {rank}: {f'{_where(line.step, line.node)} {line.place}'.rstrip() if line else 'no heartbeat'}\n"
        for rank, line in lines.items()
    )
