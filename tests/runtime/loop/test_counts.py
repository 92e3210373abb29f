"""How often a plan says that its ticks do something, and how often they do in a run."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from examples import drawn
from hypothesis import assume, given
from hypothesis import strategies as st

from xtrain.components.actions import checkpoint_torch
from xtrain.components.actions import profile_torch as profiling_ops
from xtrain.components.actions.profile_torch import Profile
from xtrain.dsl.load import load_spec
from xtrain.plan.arithmetic import arithmetic_of
from xtrain.plan.plan import Counted, Plan, PlanTick
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import MOST_LOOKED_AT, as_known, count_node, count_saves, known_arithmetic, steps_due
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.page import render
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.loop.node_calls import NodeCalls
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.store.checkpoints import CheckpointFolder
from xtrain.runtime.store.saver import Saver

SPEC = """
experiment counted {{ budget = {steps} steps }}
model llama {{ dim = 16, layers = 1, heads = 2 }}
tokenizer bytes
dataset code {{ source = synthetic(documents = 30, length = 40), holdout = 10% }}
batch {{ sequence = 20 }}
optimizer adamw {{ lr = 1e-3 }}
launch {{ device = cpu{launch} }}
{ticks}
"""


def spec_text(steps: int, ticks: list[str], launch: str = "") -> str:
    return SPEC.format(steps=steps, launch=launch, ticks="\n".join(ticks))


def plan_of(folder: Path, text: str) -> Plan | None:
    path = folder / "counted.xtrain"
    path.write_text(text)
    loaded = load_spec(path)
    assert loaded.spec is not None, loaded.diagnostics.render()
    plan = compile_plan(loaded.spec, world=1, count=lambda plan: Counted(rows={"code": ROWS}, stores={})).plan
    return None if plan is None else as_known(plan)


class Recorded(Profile):
    """A profile that goes with the steps and records nothing."""

    happened: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def begun_by(cls, subject, *, rank, records, progress, beat=None, report=None) -> "Recorded":
        common = {"rank": rank, "records": records, "progress": progress, "beat": beat, "report": report}
        return cls(subject=subject, begun=progress.step, number=0, **common)

    def _prepare_step(self) -> None:
        pass

    def _end(self, note: str) -> None:
        self.happened.append((self.subject.node, self.begun))

    def drop(self) -> None:
        pass


class Saved(Saver):
    """A saver with no state and no disk."""

    steps: ClassVar[list[int]] = []

    def _described(self) -> dict[str, Any]:
        return {}

    def _write(self, job: Any, tensors: dict[str, Any]) -> None:
        self.steps.append(job.step)

    @property
    def folder(self) -> Any:
        return CheckpointFolder(Path("nowhere"))


class Untrained(Executor):
    """The loop of a run in which no step computes anything. happened: (node, step) of what ticks and events did."""

    def prepare(self, happened: list[tuple[str, int]], saved: int | None) -> None:
        self.happened = happened
        batch = known_arithmetic(self.plan)
        taken = {"tokens_taken": lambda step: batch.rows_before(step) * batch.sequence, "batch": batch}
        feed = SimpleNamespace(steps=self.plan.timeline.steps, phase=None, timeline=self.plan.timeline, **taken)
        begun = SimpleNamespace(start=SimpleNamespace(entry=None))
        self.resources["rank"] = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.resources |= {"feed": feed, "window": SimpleNamespace(), "begun": begun}
        state = SimpleNamespace(progress=self.progress, tensors=dict, described=dict, files=dict)
        self.saver = Saved(
            state=state, records=self.records, transaction=None, overlap="wait", best=None, failures=None,
            saved_step=saved, begun_from=None, written_by={},
        )  # fmt: skip

        self.loop.nodes = Calls(self.plan, self.resources, self.progress, self.beat, self.clocks)
        self.loop.nodes.run = self


class Calls(NodeCalls):
    """What the nodes of a run do in which no step computes anything."""

    run: Untrained

    def call(self, node_id: str) -> Any:
        run, node = self.run, self.plan.node(node_id)
        if node.op == "tick.checkpoint":
            return checkpoint_torch.checkpoint(run.saver, node_id, **node.args)
        if node.op == "tick.profile":
            given = {"rank": None, "records": run.records, "progress": self.progress, "under_way": run.under_way}
            return profiling_ops.profile(node_id, feed=self.resources["feed"], **given, **node.args)
        if node.kind == "step":
            return self._learn
        return lambda step: run.happened.append((node_id, self.progress.step))

    def _learn(self, step: Step) -> None:
        self.progress.bad.last_good = step.index + 1


def run_untrained(plan: Plan, folder: Path) -> tuple[Counter[str], list[int]]:
    """What happens in all starts of a run, by node, and the steps that were saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling_ops.Profile, "begin", Recorded.begun_by)
        return _run_untrained(plan, folder)


def _run_untrained(plan: Plan, folder: Path) -> tuple[Counter[str], list[int]]:
    happened: list[tuple[str, int]] = []
    Recorded.happened, Saved.steps = happened, []
    step = 0
    for number in range(100):
        executor = Untrained(plan, folder / f"start-{number}", rank=0)
        executor.progress.step, executor.progress.tokens = step, arithmetic_of(plan).sizes.before(step)
        executor.prepare(happened, saved=step or None)
        status = executor.loop.run()
        executor.under_way.cut_short("the run ends")
        executor.requests.rest()
        executor.records.close()
        if status == "done" or executor.progress.step == step:
            return Counter(node for node, _ in happened), Saved.steps
        step = executor.progress.step
    raise AssertionError("the run does not end")


ROWS = 7  # of the data, in an epoch
PERIODS = st.one_of(
    st.integers(1, 12).map(lambda n: f"{n} steps"),
    st.integers(5, 200).map(lambda n: f"{n} tokens"),
    st.sampled_from(("10%", "25%", "33%", "50%", "1 epoch", "0.5 epochs", "0.07 epochs", "1.3 epochs")),
)
ACTIONS = st.sampled_from(
    ("log", "eval code { batches = 1 }", "eval code { batches = 2 }", "checkpoint", "memory_snapshot", "health",
     "profile { wait = 0, warmup = 0, active = 1 }", "profile { wait = 1, warmup = 0, active = 2 }", "profile",
     'generate { prompts = ["a"] }')
)  # fmt: skip
TICKS = st.builds(
    lambda period, actions: f"every {period} {' then '.join(actions)}",
    PERIODS,
    st.lists(ACTIONS, min_size=1, max_size=3),
)
STOPPING = PERIODS.map(lambda period: f"every {period} checkpoint then stop")
LAUNCHES = st.one_of(
    st.just(""),
    st.integers(1, 30).map(lambda n: f", stop_at = {n} steps"),
    st.integers(1, 30).map(lambda n: f", stop_after = {n} steps"),
    st.builds(", stop_at = {} steps, stop_after = {} steps".format, st.integers(1, 30), st.integers(1, 30)),
)


def hold_against(plan: Plan, happened: Counter[str], saves: list[int]) -> None:
    """The counts of a plan are those of the run."""
    ticks = plan.timeline.ticks
    for tick in ticks:
        counts = [happened[node] for node in tick.nodes if plan.node(node).op != "tick.checkpoint"]
        alone = all(set(tick.nodes).isdisjoint(other.nodes) for other in ticks if other is not tick)
        if alone and counts and len(counts) == len(tick.nodes):
            assert tick.count == max(counts)
    for node in {node for tick in ticks for node in tick.nodes if plan.node(node).op != "tick.checkpoint"}:
        assert count_node(plan, node) == happened[node], node
    assert count_saves(plan) == len(saves) == len(set(saves))


@drawn(12, 250)
@given(st.integers(1, 30), st.lists(TICKS, max_size=5), st.lists(STOPPING, max_size=1), LAUNCHES)
def test_the_plan_counts_what_the_run_does(tmp_path_factory, steps, ticks, stopping, launch):
    folder = tmp_path_factory.mktemp("counted")
    plan = plan_of(folder, spec_text(steps, [*ticks, *stopping], launch))
    assume(plan is not None)
    assert plan is not None
    hold_against(plan, *run_untrained(plan, folder))


def test_what_is_due_twice_in_a_step_happens_once(tmp_path):
    """Two ticks of each kind in 12 steps: in steps 6 and 12 both are due; a profile has no step left behind step 12."""
    ticks = [f"every {period} steps {action}" for action in ("checkpoint", "eval code", "log") for period in (2, 3)]
    plan = plan_of(tmp_path, spec_text(12, [*ticks, "every 4 steps profile { wait = 0, warmup = 0, active = 2 }"]))
    assert plan is not None
    happened, saves = run_untrained(plan, tmp_path)
    assert sorted(saves) == [2, 3, 4, 6, 8, 9, 10, 12] and count_saves(plan) == 8
    assert happened["tick.eval.code"] == happened["tick.log"] == 8 and happened["tick.profile"] == 2
    page = render(plan)
    assert " 8 written, " in page and page.count("in all checkpoint 8") == 2 and page.count("in all eval code 8") == 2
    assert next(line for line in page.splitlines() if line.split()[3:4] == ["profile"]).split()[4:] == ["2", "times"]


def test_profiles_of_ticks_that_never_meet_are_added(tmp_path):
    """Behind steps 7 and 14 the one, behind step 11 the other; both are one node."""
    profile = "profile { wait = 0, warmup = 0, active = 1 }"
    plan = plan_of(tmp_path, spec_text(20, [f"every {period} steps {profile}" for period in (7, 11)]))
    assert plan is not None
    happened, _ = run_untrained(plan, tmp_path)
    assert happened["tick.profile"] == count_node(plan, "tick.profile") == 3
    assert [tick.count for tick in plan.timeline.ticks if "tick.profile" in tick.nodes] == [2, 1]
    assert plan_of(tmp_path, spec_text(77, [f"every {period} steps {profile}" for period in (7, 11)])) is None


def test_a_run_that_stops_early_counts_what_comes_before(tmp_path):
    ticks = ["every 4 steps checkpoint", "every 3 steps log then profile { wait = 0, warmup = 1, active = 1 }"]
    plan = plan_of(tmp_path, spec_text(20, ticks, ", stop_at = 10 steps"))
    assert plan is not None
    happened, saves = run_untrained(plan, tmp_path)
    assert saves == [4, 8, 10] and count_saves(plan) == 3  # that of `on stop_at` comes on top
    assert happened["tick.log"] == 3 and happened["tick.profile"] == 2
    line = next(line for line in render(plan).splitlines() if "log then profile" in line)
    assert line.split()[-6:] == ["3", "times", "in", "all", "profile", "2"]


def test_a_profile_that_could_record_nothing_is_warned_of(tmp_path):
    ticks = ["every 10 steps profile", "every 9 steps log then profile"]
    (tmp_path / "counted.xtrain").write_text(spec_text(12, ticks))
    loaded = load_spec(tmp_path / "counted.xtrain").require()
    (warning,) = (each for each in compile_plan(loaded, world=1).diagnostics if each.code == "W601")
    assert warning.message == (
        "every 10 steps profile records nothing: the run has 12 steps, and the first one that could be recorded is "
        "step 13"
    )


def test_long_runs_are_counted_by_what_recurs():
    ticks = [PlanTick(nodes=("a",), steps=2), PlanTick(nodes=("a",), steps=3), PlanTick(nodes=("a",), tokens=50)]
    assert steps_due(ticks[:2], 6 * 10**17 + 3, StepSizes(8)) == 4 * 10**17 + 2
    assert steps_due(ticks, 300_000, StepSizes(8)) == sum(
        step % 2 == 0 or step % 3 == 0 or step * 8 // 50 > (step - 1) * 8 // 50 for step in range(1, 300_001)
    )
    odd = [PlanTick(nodes=("a",), tokens=10**9 + 7), PlanTick(nodes=("a",), steps=MOST_LOOKED_AT + 3)]
    assert steps_due(odd, 10**17, StepSizes(8)) is None  # too long to be looked at


def test_a_real_run_keeps_to_the_counts_of_its_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    actions = ("checkpoint", "eval code { batches = 1 }")
    ticks = [f"every {period} steps {action}" for action in actions for period in (2, 3)]
    ticks.append("every 3 steps log then profile { wait = 0, warmup = 0, active = 1 }")
    plan = plan_of(tmp_path, spec_text(6, ticks))
    assert plan is not None
    assert Executor(plan, tmp_path / "run", rank=0).run() == "done"
    events = Counter(json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert events["checkpoint"] == count_saves(plan) == 4
    assert events["eval"] == count_node(plan, "tick.eval.code") == 4
    assert events["profile"] == count_node(plan, "tick.profile") == 1
