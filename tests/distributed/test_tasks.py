"""Several adapters in one run: each trains as in a run of its own, on every layout."""

import shutil

import numpy as np
import pytest
from attrs import evolve, frozen
from forked_ranks import Mutation, Outcome
from projects import records
from topologies import SCHEDULES, Topology
from trials import TOLERANCE, Laboratory, Trial

from xtrain.cli.main import main
from xtrain.plan.plan import Plan

TALKS = 'dataset talks { source = jsonl("talks.jsonl"), messages = "messages", template = "plain", train_on = all }'
ROUTER = ("model.router.aux_loss=0", "model.router.z_loss=0")


@frozen
class Tasks:
    """Two tasks: the first on `lines` with the optimizer of the spec, the second on `talks`. shares: of the 8 rows of a
    step, in quarters."""

    lines: str
    talks: str
    optimizer: str = ""
    shares: tuple[int, int] = (1, 1)

    @property
    def more(self) -> str:
        own = f", optimizer {self.optimizer}, clip = 0.05 }}" if self.optimizer else ""
        mixture = f"mixture {{ lines = {self.shares[0]}, talks = {self.shares[1]}, exact = true }}"
        return f"{TALKS}\n{mixture}\ntask lines {{ adapter {self.lines} }}\ntask talks {{ adapter {self.talks}{own} }}"

    def alone(self, trial: Trial) -> dict[str, Trial]:
        """Of each task the trial that it is alone in."""
        rows = [share * trial.rows // sum(self.shares) for share in self.shares]
        lines = evolve(trial, rows=rows[0], more=f"adapter {self.lines}")
        talks = evolve(trial, rows=rows[1], more=f"{TALKS}\nmixture {{ talks = 1 }}\nadapter {self.talks}")
        if self.optimizer:
            talks = evolve(talks, optimizer=self.optimizer, clip="0.05")
        return {"lines": lines, "talks": talks}


ALL = Tasks("lora { rank = 3, alpha = 12 }", "lora { rank = 4, alpha = 8 }")
SOME = Tasks(
    'lora { rank = 4, scaling = rslora, targets = ["v_proj", "layers.1-2.mlp", "o_proj"], init = gaussian }',
    'lora { rank = 2, targets = ["v_proj", "layers.0.mlp"] }',
    "sgd { lr = 0.3",
    (3, 1),
)
EXPERTS = Tasks(
    'lora { rank = 3, alpha = 6, targets = ["q_proj", "experts"] }',
    'lora { rank = 4, targets = ["1-2.*.experts.down_proj", "o_proj"] }',
    "lion { lr = 1e-2",
)
DORA = Tasks("lora { rank = 4, alpha = 12, dora = true, init = orthogonal }", "lora { rank = 4, alpha = 8 }")
DORA_EXPERTS = Tasks(
    'lora { rank = 3, alpha = 6, targets = ["q_proj", "experts"] }',
    'lora { rank = 4, dora = true, init = orthogonal, targets = ["1-2.*.experts.down_proj", "o_proj"] }',
)
MOE = {"model": "moe", "shared": ROUTER}

ORDINARY = [
    (Topology(tp=2, note="some"), SOME),
]
MORE = [
    (Topology(fsdp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(fsdp=2, note="some"), SOME),
    (Topology(note="all"), ALL),
    (Topology(tp=2, note="all"), ALL),
    (Topology(accumulate=1, note="some, one microbatch"), SOME),
    (Topology(accumulate=8, note="some, a row a microbatch"), SOME),
    (Topology(note="experts", **MOE), EXPERTS),
    (Topology(fsdp=4, note="all"), ALL),
    (Topology(pp=2, note="some"), SOME),
    (Topology(pp=4, note="all"), ALL),
    (Topology(pp=2, sets=SCHEDULES["zero_bubble"], note="some, zero_bubble"), SOME),
    (Topology(tp=2, sets=("parallel.tp.sequence=false",), note="some, without sequence"), SOME),
    (Topology(ring=2, note="some"), SOME),
    (Topology(ulysses=2, note="all"), ALL),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="some, ddp"), SOME),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="all, full recomputation"), ALL),
    (Topology(pp=2, sets=("activation.mode=full",), note="some, full recomputation"), SOME),
    (Topology(pp=2, tp=2, fsdp=2, note="some"), SOME),
    (Topology(tp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(pp=2, tp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(fsdp=2, note="dora"), DORA),
    (Topology(tp=2, note="dora"), DORA),
    (Topology(pp=2, tp=2, fsdp=2, note="dora"), DORA),
    (Topology(fsdp=2, ep=2, note="dora, experts", **MOE), DORA_EXPERTS),
    (Topology(fsdp=2, ep=2, sets=("activation.mode=full",), note="experts, full recomputation", **MOE), EXPERTS),
]


def numbers_of(outcome: Outcome, suffix: str = "") -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, those of one task where it is named."""
    names = [f"{name}{suffix}" for name in ("loss", "grad_norm")]
    return [tuple(record[name] for name in names) for record in records(outcome.directory, "metrics")]  # type: ignore


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


def worst(outcome: Outcome, plan: Plan, alone: dict[str, Outcome]) -> float:
    """The largest difference of a task from its own run, of losses, norms, evaluations, parameters and moments, on any
    rank."""
    found = []
    for task, own in alone.items():
        pairs = zip(numbers_of(outcome, f"/{task}"), numbers_of(own), strict=True)
        found += [abs(a - b) / abs(b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
        names = {each.name for each in plan.parameters.tensors if each.task == task}
        assert names
        compared = set()
        for state in outcome.whole:
            for name, value in state.items():
                before, _, inside = name.partition(f".tasks.{task}.")
                if inside:
                    compared.add(f"{before}.{inside}")
                    found.append(distance(value, own.tensors[f"{before}.{inside}"]))
        if task == "lines":  # its evaluation goes through its adapter
            (ours,), (theirs,) = outcome.evals, own.evals
            found.append(abs(ours["loss"] - theirs["loss"]) / theirs["loss"])
        assert compared == {name for name in own.tensors if "lora_" in name}
    return max(found)


def gap(lab: Laboratory, topology: Topology, tasks: Tasks, *, shallow: bool, fault: Mutation | None = None) -> float:
    """How far the tasks are from their own runs, each in one process."""
    base = topology.trial("fp64", shallow=shallow)
    alone = {task: lab.alone(trial) for task, trial in tasks.alone(base).items()}
    trial = evolve(base, more=tasks.more)
    outcome = lab.run(trial, topology.layout, mutation=fault, saves=False)
    return worst(outcome, lab.plan(trial, topology.layout), alone)


@pytest.mark.parametrize(
    ("topology", "tasks", "shallow"),
    [*(pytest.param(*each, True, id=each[0].name) for each in ORDINARY),
        *(pytest.param(*each, False, id=each[0].name, marks=pytest.mark.matrix) for each in MORE)],
)  # fmt: skip
def test_each_task_trains_as_in_a_run_of_its_own(lab: Laboratory, topology: Topology, tasks: Tasks, shallow: bool):
    assert gap(lab, topology, tasks, shallow=shallow) < TOLERANCE["fp64"]


@pytest.mark.matrix
@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2, tp=2, fsdp=2)], ids=str)
def test_tasks_begin_with_adapters_of_folders_and_are_written_as_they_were(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch, topology: Topology
):
    """Each as in a run that reads it alone; and with steps that change nothing what is exported has the same bytes."""
    monkeypatch.chdir(lab.folder)
    base = topology.trial("fp64", shallow=True)
    for name, settings in (("first", "rank = 3, alpha = 12, dora = true"), ("second", 'targets = ["v_proj"]')):
        shutil.rmtree(lab.folder / name, ignore_errors=True)
        adapter = f"adapter lora {{ {settings} }}\n"
        export = f'on finish export {{ to = "{name}", adapter = true }} then checkpoint'
        lab.run(evolve(base, steps=1, more=adapter + export), ())
    tasks = Tasks('lora { from = "first" }', 'lora { from = "second" }', "sgd { lr = 0.3")
    assert gap(lab, topology, tasks, shallow=True) < TOLERANCE["fp64"]
    still = evolve(base, steps=1, optimizer="sgd { lr = 1e-300, momentum = 0", clip="none")
    still = evolve(still, more=evolve(tasks, optimizer="").more + "\non finish checkpoint")
    directory = lab.run(still, topology.layout).directory
    for task, name in (("lines", "first"), ("talks", "second")):
        to = lab.folder / f"again-{task}"
        shutil.rmtree(to, ignore_errors=True)
        assert main(["export", str(directory), "--adapter", "--task", task, "--to", str(to)]) == 0
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            assert (to / file).read_bytes() == (lab.folder / name / file).read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["next_task", "shared_divisor"])
def test_faults_between_tasks_are_seen(lab: Laboratory, fault: str):
    assert gap(lab, Topology(), SOME, shallow=True, fault=Mutation(fault)) > 1e-4


def test_a_run_goes_on_with_all_of_its_tasks(lab: Laboratory):
    trial = Trial(steps=4, more=SOME.more, settings=("model.layers=2",))

    def train(name: str, *sets: str) -> Outcome:
        return lab.ranks.run(lab.plan(trial, sets), lab.folder, name=name)

    whole = train("tasks-whole")
    train("tasks-parts", "experiment.budget=2 steps")
    ended = train("tasks-parts")
    assert ended.curve == whole.curve and len(whole.curve) == 4
    assert not [name for name in whole.tensors if not np.array_equal(ended.tensors[name], whole.tensors[name])]


@pytest.mark.matrix  # by default they go on where they were, and an adapter by itself moves
@pytest.mark.parametrize("axes", [("fsdp", "tp", "fsdp"), ("tp", "pp", "fsdp")], ids=" to ".join)
def test_tasks_move_to_another_layout(lab: Laboratory, axes: tuple[str, ...]):
    """A step or two on each layout are as many in one process: weights, moments and losses of each task."""
    trial = Trial(steps=4, more=SOME.more, settings=("model.layers=2",))
    alone, name = lab.alone(trial), f"tasks-by-{'-'.join(axes)}"
    for end, axis in zip((1, 2, 4), axes, strict=True):
        plan = lab.plan(trial, (f"parallel.{axis}=2", f"experiment.budget={end} steps"))
        moved = lab.ranks.run(plan, lab.folder, name=name)
    assert len(moved.curve) == 4
    for task in ("lines", "talks"):
        pairs = list(zip(numbers_of(moved, f"/{task}"), numbers_of(alone, f"/{task}"), strict=True))
        assert len(pairs) == trial.steps
        assert all(
            abs(a - b) < TOLERANCE["fp64"] * abs(b) for mine, its in pairs for a, b in zip(mine, its, strict=True)
        )
        own = {each for each in alone.tensors if f".tasks.{task}." in each}
        assert any(each.startswith("optimizer.") for each in own) and own <= moved.tensors.keys()
        assert all(distance(moved.tensors[each], alone.tensors[each]) < TOLERANCE["fp64"] for each in own)
