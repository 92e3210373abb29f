"""What is not as it was when a run was last started, and whether it can go on all the same."""

from pathlib import Path
from typing import Any, Final

from attrs import frozen

from xtrain.planner.compare.diff_values import changed_values
from xtrain.planner.compare.resumable import Verdict, resumable
from xtrain.planner.compare.resumable_curve import BUDGET
from xtrain.planner.data.chain import own_modules
from xtrain.planner.plan import Plan
from xtrain.planner.schedule.step_sizes import StepSizes
from xtrain.runtime.errors import ResumeRefused
from xtrain.runtime.provenance.code import CodeUnread, CodeVersion
from xtrain.runtime.provenance.metadata import Before, versions

MOST: Final = 8
MOST_REASONS: Final = 3


@frozen(kw_only=True)
class ChangedSinceStart:
    """texts: a short list for people. found: what a checkpoint can be under this plan; None where the plan before
    cannot be read."""

    texts: tuple[str, ...]
    found: Verdict | None

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def verdict(self) -> str:
        """same, safe, resharded or incompatible; empty where it is not known."""
        return self.found.kind if self.found is not None else ""

    def refuse_if_unfit(self, directory: Path) -> None:
        """Raise ResumeRefused if it is certain that no checkpoint of the plan before can be gone on with."""
        if self.found is None or self.found.kind != "incompatible" or not self.found.certain:
            return
        reasons = [reason for reason in self.found.refusals if reason.certain]
        more = f"; and {len(reasons) - MOST_REASONS} more differences" if len(reasons) > MOST_REASONS else ""
        said = "; ".join(f"{reason.path} {reason.text}" for reason in reasons[:MOST_REASONS])
        raise ResumeRefused(f"the run in {directory} cannot be resumed with this plan: {said}{more}")


def find_changes(
    before: Before, plan: Plan, code: CodeVersion | CodeUnread | None, step: int | None, past: StepSizes | None = None
) -> ChangedSinceStart:
    """Against the start before. step: that of the checkpoint that the run goes on from, None if it does not; past: the
    rows of the steps before it."""
    texts = [*_of_code(before, code)]
    if before.plan is None:
        return ChangedSinceStart(texts=tuple(texts), found=None)
    found = resumable(before.plan, plan, step, past)
    if before.plan.id != plan.id:
        texts += _of_plan(before.plan, plan, found)
    return ChangedSinceStart(texts=_short(texts), found=found)


def _of_code(before: Before, code: CodeVersion | CodeUnread | None) -> list[str]:
    known = isinstance(code, CodeVersion)
    now: dict[str, Any] = {"code_id": code.code_id if known else None, **versions()}
    names = {"code_id": "code", "xtrain": "xtrain", "torch": "torch", "python": "python"}
    then = before.environment
    unread = "could not be read" if isinstance(code, CodeUnread) else "no checkout"
    then_unread = "could not be read" if then.get("code_unread") else "no checkout"
    texts = [
        f"{words} {then[name] or then_unread} → {now[name] or unread}"
        for name, words in names.items()
        if name in then and then[name] != now[name]
    ]
    if then.get("xtrain") == now["xtrain"] and then.get("source", now["source"]) != now["source"]:
        texts.append(f"xtrain {now['xtrain']} has other source files")
    return texts


def _of_plan(before: Plan, plan: Plan, found: Verdict) -> list[str]:
    # What is left of the budget, counted from the checkpoint, says more than the steps of a run from its start.
    left = next((f"steps {reason.text}" for reason in found.reasons if reason.path == BUDGET), None)
    texts = [
        left
        if change.path == "steps" and left
        else f"{change.path} {change.before.value if change.before else 'not there'} → "
        f"{change.after.value if change.after else 'not there'}"
        for change in changed_values(before, plan)
    ]
    then, now = own_modules(before), own_modules(plan)
    return texts + [f"{name} has changed" for name, digest in now.items() if then.get(name, digest) != digest]


def _short(texts: list[str]) -> tuple[str, ...]:
    return tuple(texts) if len(texts) <= MOST else (*texts[:MOST], f"and {len(texts) - MOST} more")
