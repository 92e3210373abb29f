"""`event.rollback`: restore the last good checkpoint and continue with the data after the failure.

The run continues like a resumed run, in the same processes: weights, moments, averages, counters, random state and the
step number come from the checkpoint. The rows of all steps between the checkpoint and the failure are skipped: the step
after the checkpoint takes the first rows that no step has seen.
"""

import time

from xtrain.plan.plan import Plan
from xtrain.records.training_events import RollbackEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import BadSteps, Progress
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.commands import UnderWay
from xtrain.runtime.loop.metrics import Window
from xtrain.runtime.loop.step import bad_steps_text
from xtrain.runtime.nn.batch import NonFinite, Step, StepCall
from xtrain.runtime.nn.router import LayerLosses
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.records import Records
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder
from xtrain.runtime.store.full_state import flaw_of
from xtrain.runtime.store.rollback import RollbackState, seal_of
from xtrain.runtime.store.saver import Saver


@op("event.rollback")
def roll_back(
    plan: Plan,
    model: ModelParts,
    feed: Feed,
    progress: Progress,
    records: Records,
    window: Window,
    saver: Saver,
    under_way: UnderWay,
    times: int,
) -> StepCall:
    """Roll back, at most `times` times in a run. Raises NonFinite, with a report, if the limit is reached or there is
    no intact checkpoint."""
    collective = saver.transaction.collective
    content = plan.node("setup.resume").args["verify"] == "content"

    def run(step: Step) -> None:
        bad = progress.bad
        if len(bad.went_back) >= times:
            raise _failure(step, bad, f"at most {times} rollbacks are allowed, and all are used up: {_history(bad)}")
        saver.settle(raises=False)
        entry, passed = _target(saver, progress, content=content)
        for flaw in passed:
            records.warn(f"no rollback to {flaw}", step=progress.step)
        if entry is None:
            raise _failure(step, bad, _nothing_left(passed, bad))
        under_way.cut_short("the run goes back")
        begin, steps = time.perf_counter(), feed.steps
        number = len(bad.went_back) + 1
        loader = {**feed.loader.state(step.index + 1), "step": entry.step}
        left_out = feed.loader.curriculum.rows_per_step.between(entry.step, step.index + 1)
        counts = BadSteps(total=bad.total, last_good=min(bad.last_good, entry.step), went_back=[*bad.went_back])
        counts.went_back.append((step.index + 1, entry.step))
        collective.first(lambda: _write(saver.folder, entry, step, loader, counts))
        feed.close()  # the prefetched rows belong to steps that are undone
        saver.state.restore(entry, collective)
        saver.saved_step, saver.put_off = entry.step, ""
        for module in model.modules():
            if isinstance(module, LayerLosses):
                module.reset_counts()
        window.clear()
        records.pending = None
        collective.first(lambda: records.undo_after(entry.step))
        records.event(
            RollbackEvent(
                step=entry.step,
                from_step=step.index + 1,
                checkpoint=entry.name,
                number=number,
                of=times,
                rows_left_out=left_out,
                seconds=time.perf_counter() - begin,
            )
        )
        if steps != feed.steps:
            message = f"the budget now gives {feed.steps:,} steps, not {steps:,}: the rollback skipped rows"
            records.warn(message, step=entry.step)

    return run


def _target(saver: Saver, progress: Progress, *, content: bool) -> tuple[CheckpointEntry | None, list[str]]:
    """Return the newest intact checkpoint not saved after a bad step, and why newer ones were skipped. Collective."""
    bad, folder, collective = progress.bad, saver.folder, saver.transaction.collective
    # The last rollback led here without a single good step: the fault lies in its checkpoint or before it.
    until = progress.step
    if bad.went_back and bad.last_good <= bad.went_back[-1][1]:
        until = bad.went_back[-1][1] - 1
    passed: list[str] = []
    for entry, amid in collective.first(lambda: _candidates(folder, until)):
        flaw = "it was saved after a bad step" if amid else flaw_of(entry, collective, content=content)
        if not flaw:
            return entry, passed
        passed.append(f"{entry.name}: {flaw}")
    return None, passed


def _candidates(folder: CheckpointFolder, until: int) -> list[tuple[CheckpointEntry, bool]]:
    """Return checkpoints of at most `until` steps, newest first, with whether the step before each was bad."""
    found = []
    for entry in reversed(folder.published()):
        if entry.step <= until:
            try:
                amid = bool(entry.state().get("nonfinite", {}).get("in_a_row"))
            except (OSError, ValueError):
                amid = False  # a full verification reports the damage
            found.append((entry, amid))
    return found


def _write(folder: CheckpointFolder, entry: CheckpointEntry, step: Step, loader: dict, counts: BadSteps) -> None:
    """Write the rollback's state. After this returns, a killed run resumes with the same rollback."""
    newer = {other.name: seal for other in folder.published() if other.step > entry.step and (seal := seal_of(other))}
    rollback = RollbackState(
        checkpoint=entry.name,
        seal=seal_of(entry),
        from_step=step.index + 1,
        loader=loader,
        nonfinite=counts.counters(),
        newer=newer,
    )
    rollback.write(folder.root.parent)
    rollback.finish(folder.root.parent)


def _failure(step: Step, bad: BadSteps, why: str) -> NonFinite:
    return NonFinite(step.index + 1, step.loss, step.grad_norm, f"{bad_steps_text(bad)}; {why}")


def _nothing_left(passed: list[str], bad: BadSteps) -> str:
    if bad.went_back:
        found = f"there is no older checkpoint to go back to ({_history(bad)})"
    elif passed:
        found = "there is no intact checkpoint to go back to"
    else:
        found = "there is no checkpoint to go back to yet"
    return f"{found}: {'; '.join(passed)}" if passed else found


def _history(bad: BadSteps) -> str:
    return ", ".join(f"from step {before:,} to {after:,}" for before, after in bad.went_back)
