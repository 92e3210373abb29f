"""An adapter trains on layouts as in one process, and the model under it stays as it was."""

import numpy as np
import pytest
from attrs import evolve
from forked_ranks import Mutation, Outcome
from topologies import SCHEDULES, TIED, ZBV, Topology
from trials import TOLERANCE, Laboratory, Trial, gaps, stray_shapes

pytestmark = pytest.mark.distributed

ALL = "adapter lora { rank = 3, alpha = 12 }"
SOME = 'adapter lora { rank = 4, scaling = rslora, targets = ["v_proj", "layers.1-2.mlp", "o_proj"], init = gaussian }'
RANKS = "adapter lora { rank = 4, alpha = 8, ranks = { down_proj: 2, self_attn: 5 }, alphas = { mlp: 3 } }"
BESIDE = 'adapter lora { rank = 3, alpha = 6, targets = ["layers.2.mlp"], train = ["norm", "layers.3.mlp"] }'
EXPERTS = 'adapter lora { rank = 3, alpha = 6, targets = ["q_proj", "experts"] }'
DOWN = 'adapter lora { rank = 4, init = orthogonal, targets = ["2-3.*.experts.down_proj"], train = ["*.*.*.gate"] }'
MOE = {"model": "moe"}

ORDINARY = [
    (Topology(fsdp=2, note="all"), ALL),
    (Topology(tp=2, note="all"), ALL),
    (Topology(pp=2, note="some"), SOME),
    (Topology(fsdp=2, ep=2, note="experts", **MOE), EXPERTS),
]
MORE = [
    (Topology(fsdp=4, note="some"), SOME),
    (Topology(tp=2, sets=("parallel.tp.sequence=false",), note="all, without sequence"), ALL),
    (Topology(tp=2, fsdp=2, note="some"), SOME),
    (Topology(tp=2, fsdp=2, note="ranks"), RANKS),
    (Topology(tp=2, note="beside norms"), BESIDE),
    (Topology(pp=2, shared=TIED, note="beside norms, tied"), BESIDE),
    (Topology(pp=2, sets=ZBV, note="all, zbv"), ALL),
    (Topology(pp=2, sets=SCHEDULES["zero_bubble"], note="some, zero_bubble"), SOME),
    (Topology(pp=2, tp=2, fsdp=2, note="some"), SOME),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="some, ddp"), SOME),
    (Topology(replicate=2, fsdp=2, note="all"), ALL),
    (Topology(ring=2, note="all"), ALL),
    (Topology(ulysses=2, note="some"), SOME),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="all, full recomputation"), ALL),
    (Topology(fsdp=2, sets=("activation.mode=selective",), note="some, selective recomputation"), SOME),
    (Topology(fsdp=2, ep=2, note="all", **MOE), ALL),
    (Topology(tp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(fsdp=4, ep=2, note="down", **MOE), DOWN),
    (Topology(fsdp=4, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(pp=2, tp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(fsdp=2, ep=2, sets=("activation.mode=full",), note="down, full recomputation", **MOE), DOWN),
]


def cases(rows):
    return [pytest.param(*each, id=each[0].name) for each in rows]


def trial_of(topology: Topology, adapter: str) -> Trial:
    trial = topology.trial("fp64")
    return evolve(trial, more=f"{adapter}\n{trial.more}")


@pytest.mark.parametrize(
    ("topology", "adapter"),
    [
        *cases(ORDINARY),
        *(pytest.param(*each, id=each[0].name, marks=pytest.mark.matrix) for each in MORE),
    ],
)
def test_a_layout_trains_what_one_process_trains(lab: Laboratory, topology: Topology, adapter: str):
    trial = trial_of(topology, adapter)
    alone = lab.alone(trial)
    outcome = lab.run(trial, topology.layout, saves=False)
    found, limit = gaps(outcome, alone), TOLERANCE["fp64"]
    assert found.loss < limit and found.norm < limit and found.eval < limit and found.routing < limit
    assert not {name: gap for name, gap in found.tensors.items() if not gap < limit}
    assert not stray_shapes(lab.plan(trial, topology.layout), outcome)


FAULTS = [
    (Topology(tp=2, note="summands"), ALL, Mutation("own_summands")),
    (Topology(fsdp=2, note="averaged"), ALL, Mutation("average")),
    (Topology(fsdp=2, ep=2, note="experts divided", **MOE), EXPERTS, Mutation("divide_experts", by=2)),
]


@pytest.mark.parametrize(
    ("topology", "adapter", "fault"),
    [
        pytest.param(*each, id=each[0].name, marks=pytest.mark.matrix if place else ())
        for place, each in enumerate(FAULTS)
    ],
)
def test_faults_of_layouts_are_seen(lab: Laboratory, topology: Topology, adapter: str, fault: Mutation):
    trial = trial_of(topology, adapter)
    found = gaps(lab.run(trial, topology.layout, mutation=fault, saves=False), lab.alone(trial))
    wrong = {name for name, gap in found.tensors.items() if not gap < TOLERANCE["fp64"]}
    assert any("lora_" in name for name in wrong)


def test_the_model_under_an_adapter_stays_as_it_was(lab: Laboratory):
    trial = Trial(steps=2, more=SOME)
    after, before = (lab.alone(each).tensors for each in (trial, evolve(trial, optimizer="adamw { lr = 1e-30")))
    weights = {name for name in after if not name.startswith("optimizer.")}
    moved = {name for name in weights if not np.array_equal(after[name], before[name])}
    factors = {name for name in weights if ".lora_" in name}
    assert moved == factors and len(factors) == 2 * (4 + 4 + 6)
    assert {name.removeprefix("optimizer.") for name in after if name.startswith("optimizer.")} >= {
        f"{name}.exp_avg" for name in factors
    }


def test_a_run_goes_on_with_its_adapter(lab: Laboratory):
    trial = Trial(steps=4, more=ALL, settings=("model.layers=2",))

    def train(name: str, *sets: str) -> Outcome:
        return lab.ranks.run(lab.plan(trial, sets), lab.folder, name=name)

    whole = train("adapter-whole")
    train("adapter-parts", "experiment.budget=2 steps")
    ended = train("adapter-parts")
    assert ended.curve == whole.curve and len(whole.curve) == 4
    assert not [name for name in whole.tensors if not np.array_equal(ended.tensors[name], whole.tensors[name])]
