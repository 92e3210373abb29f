"""What `diff` says of resuming is what the runtime does: pairs that are saved under the one plan and loaded under the
other, those among them that torch would take without a word."""

import shutil
from collections.abc import Callable

import pytest
from attrs import evolve, frozen
from forked_ranks import RanksFailed
from projects import events
from topologies import SHALLOW
from trials import TOLERANCE, Laboratory, Trial

from xtrain.plan.plan import Plan
from xtrain.planner.review.resumable import resumable
from xtrain.runtime.base.errors import ResumeRefused
from xtrain.runtime.store.beginning import check_model
from xtrain.runtime.store.checkpoints import CheckpointFolder
from xtrain.runtime.store.run_directory import open_workspace

pytestmark = pytest.mark.distributed


@frozen(kw_only=True)
class Move:
    """A trial of two steps under `before`, and its third under `after`. taken: whether the runtime goes on.

    asked: a refusal is only asked for, as the launcher does before it starts ranks; else it is run into. both: lines of
    both specs; more: further ones of the second. slow: another move shows by default what this one does.
    """

    name: str
    model: str = "dense"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    both: str = ""
    more: str = ""
    kind: str
    taken: bool
    asked: bool = False
    slow: bool = False


FSDP2 = ("parallel.fsdp.size=2",)
COPIES = ("parallel.stack=ddp", "parallel.fsdp.replicate=2")
BIASED = ("model.router.score=sigmoid", "model.router.bias_speed=1e-2")
MIXED = """
dataset talks { source = jsonl("talks.jsonl"), messages = "messages", template = "chatml" }
mixture { lines = 2, talks = 1 }
"""
LATE = "phase late { from = 2 steps, mix = { talks: 9 }, lr_scale = 0.5 }"
HEADS = ("model.heads=4", "model.kv_heads=2", "model.head_dim=16")

MOVES = (
    Move(name="longer", kind="safe", taken=True),
    Move(name="longer microbatches", after=("batch.micro=4",), kind="safe", taken=True, slow=True),
    Move(name="an evaluation more", more="every 1 step eval lines", kind="safe", taken=True, slow=True),
    Move(name="another rate", after=("optimizer.lr=5e-3",), kind="safe", taken=True, slow=True),
    Move(name="wider", before=("precision.params=fp32",), kind="safe", taken=True),
    Move(name="shards", after=FSDP2, kind="resharded", taken=True),
    Move(name="copies to shards", before=COPIES, after=FSDP2, kind="resharded", taken=True, slow=True),
    Move(name="a phase that comes now", both=MIXED, more=LATE, kind="safe", taken=True, slow=True),
    Move(name="another mixture", both=MIXED, after=("mixture.talks=3",), kind="safe", taken=True, slow=True),
    Move(name="a dataset more", more=MIXED, kind="safe", taken=True, slow=True),
    Move(name="a dataset less", both=MIXED, after=("mixture.talks=0",), kind="safe", taken=True, slow=True),
    Move(name="other masks", both=MIXED, after=("dataset.talks.train_on=all",), kind="incompatible", taken=False),
    # torch would round, or load other weights than were saved, or compute something else with them.
    Move(name="narrower", after=("precision.params=fp32",), kind="incompatible", taken=False),
    Move(name="heads of the same shapes", after=HEADS, kind="incompatible", taken=False),
    Move(name="positions", after=("model.rope_theta=500000.0",), kind="incompatible", taken=False, asked=True),
    Move(name="scores", model="moe", after=BIASED[:1], kind="incompatible", taken=False, asked=True),
    Move(name="biases gone", model="moe", before=BIASED, after=BIASED[:1], kind="incompatible", taken=False, slow=True),
    Move(name="biases new", model="moe", before=BIASED[:1], after=BIASED, kind="incompatible", taken=False, asked=True),
    Move(name="layers", after=("model.layers=5",), kind="incompatible", taken=False, asked=True),
    Move(name="rows", after=("batch.rows=16",), kind="safe", taken=True, slow=True),
    Move(name="seed", after=("experiment.seed=4",), kind="incompatible", taken=False, asked=True),
    Move(name="held out", after=("dataset.lines.holdout=30%",), kind="incompatible", taken=False),
    # Only the content of rows decides, and it is the same.
    Move(name="held out alike", after=("dataset.lines.holdout=10.001%",), kind="incompatible", taken=True, slow=True),
    Move(name="files alike", after=('dataset.lines.source=jsonl("da*.jsonl")',), kind="incompatible", taken=True,
        slow=True),
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(lab: Laboratory) -> Callable[[Plan, str], None]:
    """Makes the directory of a job that has a checkpoint of a plan; each plan is run once."""
    known: dict[str, str] = {}

    def make(plan: Plan, name: str) -> None:
        if plan.id not in known:
            known[plan.id] = f"saved {len(known)}"
            lab.ranks.run(plan, lab.folder, name=known[plan.id])
        folder = lab.folder / "jobs" / name
        shutil.copytree(lab.folder / "jobs" / known[plan.id], folder)
        (folder / "finished").unlink()

    return make


@pytest.fixture(scope="module")
def unbroken(lab: Laboratory) -> Callable[[Plan], tuple[int, float, float]]:
    """The last step of a plan that was run from its start."""
    known: dict[str, tuple[int, float, float]] = {}

    def last(plan: Plan) -> tuple[int, float, float]:
        if plan.id not in known:
            known[plan.id] = lab.ranks.run(plan, lab.folder, name=f"unbroken {len(known)}").curve[-1]
        return known[plan.id]

    return last


@pytest.mark.parametrize(
    "move", [pytest.param(move, id=move.name, marks=[pytest.mark.slow] if move.slow else []) for move in MOVES]
)
def test_the_runtime_does_what_diff_says(lab: Laboratory, saved, unbroken, move: Move):
    trial = Trial(model=move.model, steps=2, more=move.both, settings=SHALLOW)
    a = lab.plan(trial, move.before)
    b = lab.plan(evolve(trial, steps=3, more=move.both + move.more), move.after)
    verdict = resumable(a, b, 2)
    assert verdict.kind == move.kind
    assert (move.kind != "incompatible") == move.taken or not verdict.certain
    saved(a, move.name)
    if move.asked:
        entry = CheckpointFolder(lab.folder / "jobs" / move.name / "checkpoints").latest()
        assert entry is not None
        with pytest.raises(ResumeRefused, match="does not fit"):
            check_model(b, entry)
        return
    if not move.taken:
        with pytest.raises(RanksFailed) as refused:
            lab.ranks.run(b, lab.folder, name=move.name)
        reasons = [reason for reason in verdict.reasons if reason.kind == "incompatible"]
        assert "does not fit" in str(refused.value) or "the data differs from" in str(refused.value)
        assert not verdict.certain or reasons[0].text.partition(":")[0] in str(refused.value)
        return
    outcome = lab.ranks.run(b, lab.folder, name=move.name)
    assert events(outcome.directory, "resumed")[-1]["step"] == 2
    assert outcome.curve[-1][0] == 3
    if move.name == "wider" or verdict.effect == "learning":
        return
    expected = unbroken(b)
    if verdict.effect == "none":
        assert outcome.curve[-1] == expected
    else:
        assert outcome.curve[-1] == pytest.approx(expected, rel=TOLERANCE["fp64"])


def test_a_plan_that_is_refused_leaves_the_run_directory_as_it_was(lab: Laboratory, saved):
    trial = Trial(steps=2, settings=SHALLOW)
    saved(lab.plan(trial, ()), "left")
    folder = lab.folder / "jobs" / "left"
    place = (f"workspace.root={lab.folder}", "workspace.lineage=jobs", "workspace.run=left")
    before = (folder / "plan.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    for change in ("experiment.seed=4", "model.rope_theta=500000.0"):
        with pytest.raises(ResumeRefused, match=change.partition("=")[0]):
            open_workspace(lab.plan(trial, (change, *place)), "")
        assert before == ((folder / "plan.json").read_bytes(), (folder / "metrics.jsonl").read_bytes())
    open_workspace(lab.plan(trial, ("optimizer.lr=1e-3", *place)), "")
    assert before[0] != (folder / "plan.json").read_bytes()
