"""A run whose folder another beginning takes: it is moved beside it, and whoever starts the new one is told."""

import json
from pathlib import Path
from shlex import join, quote

from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.records.paths import METRICS_FILE
from xtrain.records.start_events import SetAsideEvent
from xtrain.runtime.checkpoint.layout import CheckpointEntry, CheckpointFolder
from xtrain.runtime.checkpoint.sources import origin_of

# What says where a run is and begins: of the command that goes back, they say that of the run that was set aside.
_CHOSEN = ("workspace.run", "checkpoint.from", "checkpoint.resume")


@frozen(kw_only=True)
class SetAside:
    """directory: where it lies now. step: of its latest whole checkpoint, 0 for none. reason: why it made way.
    command: goes on with it; empty where there is nothing to go on from."""

    directory: Path
    step: int
    reason: str
    command: str

    def text(self) -> str:
        """For people, in lines."""
        where = f"at step {self.step:,}" if self.step else "without a complete checkpoint"
        lines = [f"the earlier run in this directory, {where}, was moved to {self.directory}: {self.reason}"]
        return "\n".join([*lines, *([f"  to resume that run: {self.command}"] if self.command else [])])

    def event(self, attempt: str) -> SetAsideEvent:
        """For the file of the start that has moved it."""
        directory = str(self.directory)
        return SetAsideEvent(
            step=self.step, attempt=attempt, directory=directory, reason=self.reason, command=self.command
        )


def set_aside(directory: Path, attempt: str, plan: Plan) -> SetAside | None:
    """Move what lies in the directory of a run that begins anew; None where there is nothing. Raises OSError.

    The directory is empty then.
    """
    latest = CheckpointFolder(directory / "checkpoints").latest()
    if latest is None and not (directory / METRICS_FILE).exists():
        return None
    beside = directory.with_name(f"{directory.name}~{attempt}")
    directory.rename(beside)
    directory.mkdir()
    entry = None if latest is None else CheckpointEntry(beside / latest.path.relative_to(directory), latest.step)
    return SetAside(
        directory=beside,
        step=entry.step if entry else 0,
        reason=_reason(plan, entry),
        command=_command(plan, beside, origin_of(entry)) if entry else "",
    )


def _reason(plan: Plan, latest: CheckpointEntry | None) -> str:
    args = plan.node("setup.resume").args
    if not args["resume"]:
        return "checkpoint.resume = false"
    began = origin_of(latest) if latest else None
    return f"it started {f'from {began}' if began else 'at step 0'}, and this run starts from {args['origin']}"


def _command(plan: Plan, beside: Path, origin: str | None) -> str:
    """What was started, but for where it is to begin."""
    sets, world = (plan.origin.sets, plan.origin.world) if plan.origin else ((), None)
    others = [text for text in sets if text.partition("=")[0].strip() not in _CHOSEN]
    named = "none" if origin is None else _text(origin)
    chosen = [f"workspace.run={_text(beside.name)}", f"checkpoint.from={named}"]
    words = ["xtrain", "run", plan.spec, *(["--world", str(world)] if world is not None else [])]
    given = " ".join(f"--set {quote(text)}" for text in [*others, *chosen, "checkpoint.resume=true"])
    return f"{join(words)} {given}"


def _text(value: str) -> str:
    """A text as a spec writes it."""
    return json.dumps(value, ensure_ascii=False)
