"""Questions about a finished run that other commands answer: which documents caused a spike, what was forgotten."""

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any, Final

from xtrain.records.events import ALERTS_OF_DATA, AlertEvent
from xtrain.regular_files import read_json
from xtrain.tui.lines.plain import short_path
from xtrain.tui.model.board import Board

_MOST: Final = 3
_MOST_BYTES: Final = 1 << 20


def inquiries(board: Board) -> Iterator[str]:
    """Yield what `xtrain blame` found about the last alerts, or its command, and what `xtrain forget` retrained."""
    run = board.directory
    lineage = run.absolute().parent  # a run may be given by its name alone
    replays = lineage.parent / f"{lineage.name}-replays"
    alerts = [entry.event for entry in board.events.entries if isinstance(entry.event, AlertEvent)]
    steps = {alert.step: alert.kind for alert in alerts if alert.state == "raised" and alert.kind in ALERTS_OF_DATA}
    for step, kind in [*steps.items()][-_MOST:]:
        if step is None:
            continue
        found = _read(replays / f"blame-{run.name}-{step}.json")
        answer = f"which documents: xtrain blame {quote(short_path(run))} --step {step}"
        yield f"{kind} at step {step:,}: {answer if found is None else _blamed(found)}"
    for file in sorted(replays.glob(f"{run.name}-*/forgotten.json"))[-_MOST:]:
        found = _read(file)
        if found is not None and isinstance(found.get("documents"), dict):
            counts = [f"{len(each)} of {name}" for name, each in found["documents"].items() if isinstance(each, dict)]
            yield f"forgotten documents: {', '.join(counts)}; retrained in {short_path(file.parent)}"


def _blamed(found: dict[str, Any]) -> str:
    documents = found.get("documents")
    if not isinstance(documents, list) or not documents:
        return f"no document is to blame: {found.get('note')}"
    names = [f"{each.get('dataset')}:{each.get('document')}" for each in documents if isinstance(each, dict)]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    without = found.get("without")
    value = f"{without:.5g}" if isinstance(without, float) else without
    return f"caused by {', '.join(names[:_MOST])}{more}; {found.get('metric')} without: {value}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path, _MOST_BYTES)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
