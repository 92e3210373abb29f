"""An adapter trains on layouts as in one process, and the model under it stays as it was."""

import json
import shutil

import numpy as np
import pytest
from attrs import evolve
from forked_ranks import Mutation
from safetensors.numpy import load_file
from topologies import SCHEDULES, SHALLOW, TIED, ZBV, Topology
from trials import FEWER, TOLERANCE, Laboratory, Trial, gaps

ALL = "adapter lora { rank = 3, alpha = 12 }"
SOME = 'adapter lora { rank = 4, scaling = rslora, targets = ["v_proj", "layers.1-2.mlp", "o_proj"], init = gaussian }'
RANKS = "adapter lora { rank = 4, alpha = 8, ranks = { down_proj: 2, self_attn: 5 }, alphas = { mlp: 3 } }"
BESIDE = 'adapter lora { rank = 3, alpha = 6, targets = ["layers.2.mlp"], train = ["norm", "layers.3.mlp"] }'
EXPERTS = 'adapter lora { rank = 3, alpha = 6, targets = ["q_proj", "experts"] }'
DOWN = 'adapter lora { rank = 4, init = orthogonal, targets = ["2-3.*.experts.down_proj"], train = ["*.*.*.gate"] }'
HEAD = 'adapter lora { rank = 4, alpha = 12, targets = ["v_proj", "lm_head"], init = orthogonal }'
DORA = "adapter lora { rank = 4, alpha = 12, dora = true, init = orthogonal }"
DORA_EXPERTS = 'adapter lora { rank = 4, alpha = 6, dora = true, init = orthogonal, targets = ["q_proj", "experts"] }'
DORA_DROPOUT = DORA.replace("dora", "dropout = 0.3, dora")
DORA_DROPOUT_EXPERTS = DORA_EXPERTS.replace("dora", "dropout = 0.3, dora")
DROPOUT = "adapter lora { rank = 4, alpha = 12, dropout = 0.3, init = orthogonal }"
DROPOUT_EXPERTS = DROPOUT.replace(" }", ', targets = ["q_proj", "experts"] }')
PISSA = 'adapter lora { rank = 3, alpha = 12, init = pissa, targets = ["self_attn", "layers.1-2.mlp"] }'
PISSA_EXPERTS = 'adapter lora { rank = 3, alpha = 2, init = pissa, targets = ["q_proj", "experts"] }'
PISSA_DORA = "adapter lora { rank = 4, scaling = rslora, init = pissa, dora = true }"
MERGE, KEEP = "\nevery 1 step merge", "\nevery 1 step merge { state = keep }"
MOE = {"model": "moe"}

ORDINARY = [
    (Topology(tp=2, shared=SHALLOW, note="merge"), SOME + MERGE),
    (Topology(fsdp=2, shared=SHALLOW, note="all"), ALL),
    (Topology(pp=2, note="some"), SOME),
    (Topology(tp=2, ep=2, shared=SHALLOW, note="dora, experts", **MOE), DORA_EXPERTS),
]
MORE = [
    (Topology(fsdp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(fsdp=2, note="merge"), ALL + KEEP),
    (Topology(tp=2, fsdp=2, note="merge, head"), HEAD + MERGE),
    (Topology(pp=2, note="merge, dropout"), DROPOUT + MERGE),
    (Topology(pp=2, sets=ZBV, note="merge"), ALL + KEEP),
    (Topology(ring=2, note="merge"), BESIDE + MERGE),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="merge, ddp"), RANKS + MERGE),
    (Topology(fsdp=2, ep=2, note="merge, experts", **MOE), EXPERTS + MERGE),
    (Topology(tp=2, ep=2, note="merge, experts", **MOE), EXPERTS + KEEP),
    (Topology(pp=2, tp=2, ep=2, note="merge, experts", **MOE), DOWN + MERGE),
    (Topology(tp=2, note="dora"), DORA),
    (Topology(tp=2, note="dropout"), DROPOUT),
    (Topology(tp=2, note="all"), ALL),
    (Topology(tp=2, fsdp=2, note="head"), HEAD),
    (Topology(tp=2, sets=("parallel.tp.loss=false",), note="head, whole vocabulary"), HEAD),
    (Topology(pp=2, tp=2, shared=TIED, note="head, tied"), HEAD),
    (Topology(pp=2, sets=ZBV, note="head, zbv"), HEAD),
    (Topology(ring=2, note="head"), HEAD),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="head, ddp"), HEAD),
    (Topology(fsdp=2, note="pissa"), PISSA),
    (Topology(pp=2, tp=2, note="dropout"), DROPOUT),
    (Topology(fsdp=2, tp=2, note="pissa"), PISSA),
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
    (Topology(fsdp=2, note="dora"), DORA),
    (Topology(fsdp=4, note="dora"), DORA),
    (Topology(tp=2, sets=("parallel.tp.sequence=false",), note="dora, without sequence"), DORA),
    (Topology(pp=2, sets=ZBV, note="dora, zbv"), DORA),
    (Topology(pp=2, tp=2, fsdp=2, note="dora"), DORA),
    (Topology(tp=2, sets=("activation.mode=full",), note="dora, full recomputation"), DORA),
    (Topology(tp=2, sets=("activation.mode=selective",), note="dora, selective recomputation"), DORA),
    (Topology(tp=2, ep=2, note="dora", **MOE), DORA),
    (Topology(fsdp=4, ep=2, note="dora, experts", **MOE), DORA_EXPERTS),
    (Topology(pp=2, tp=2, ep=2, note="dora, experts", **MOE), DORA_EXPERTS),
    (Topology(fsdp=2, ep=2, sets=("activation.mode=selective",), note="dora, experts, selective", **MOE), DORA_EXPERTS),
    (Topology(fsdp=2, note="dora, dropout"), DORA_DROPOUT),
    (Topology(pp=2, tp=2, note="dora, dropout"), DORA_DROPOUT),
    (Topology(tp=2, sets=("activation.mode=selective",), note="dora, dropout, selective"), DORA_DROPOUT),
    (Topology(fsdp=2, ep=2, note="dora, dropout, experts", **MOE), DORA_DROPOUT_EXPERTS),
    (Topology(tp=2, ep=2, note="dora, dropout, experts", **MOE), DORA_DROPOUT_EXPERTS),
    (Topology(fsdp=2, note="dropout"), DROPOUT),
    (Topology(fsdp=4, note="dropout"), DROPOUT),
    (Topology(tp=2, sets=("parallel.tp.sequence=false",), note="dropout, without sequence"), DROPOUT),
    (Topology(pp=2, note="dropout"), DROPOUT),
    (Topology(pp=2, sets=ZBV, note="dropout, zbv"), DROPOUT),
    (Topology(pp=2, tp=2, fsdp=2, note="dropout"), DROPOUT),
    (Topology(ring=2, note="dropout"), DROPOUT),
    (Topology(pp=2, ulysses=2, note="dropout"), DROPOUT),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="dropout, full recomputation"), DROPOUT),
    (Topology(tp=2, sets=("activation.mode=selective",), note="dropout, selective recomputation"), DROPOUT),
    (Topology(tp=2, ep=2, note="dropout", **MOE), DROPOUT),
    (Topology(fsdp=2, ep=2, note="dropout, experts", **MOE), DROPOUT_EXPERTS),
    (Topology(fsdp=4, ep=2, note="dropout, experts", **MOE), DROPOUT_EXPERTS),
    (Topology(tp=2, ep=2, note="dropout, experts", **MOE), DROPOUT_EXPERTS),
    (Topology(tp=2, sets=("parallel.tp.sequence=false",), note="dropout, experts, without sequence", **MOE),
        DROPOUT_EXPERTS),
    (Topology(pp=2, tp=2, ep=2, note="dropout, experts", **MOE), DROPOUT_EXPERTS),
    (Topology(fsdp=2, ep=2, sets=("activation.mode=selective",), note="dropout, experts, selective", **MOE),
        DROPOUT_EXPERTS),
    (Topology(fsdp=4, note="pissa"), PISSA),
    (Topology(pp=2, note="pissa"), PISSA),
    (Topology(pp=2, sets=ZBV, note="pissa, zbv"), PISSA),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="pissa, ddp"), PISSA),
    (Topology(ring=2, note="pissa"), PISSA),
    (Topology(fsdp=2, sets=("activation.mode=full",), note="pissa, full recomputation"), PISSA),
    (Topology(tp=2, note="pissa, dora"), PISSA_DORA),
    (Topology(pp=2, tp=2, fsdp=2, note="pissa, dora"), PISSA_DORA),
    (Topology(fsdp=4, ep=2, note="pissa, experts", **MOE), PISSA_EXPERTS),
    (Topology(tp=2, ep=2, note="pissa, experts", **MOE), PISSA_EXPERTS),
    (Topology(fsdp=2, ep=2, note="all", **MOE), ALL),
    (Topology(tp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(fsdp=4, ep=2, note="down", **MOE), DOWN),
    (Topology(fsdp=4, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(pp=2, tp=2, ep=2, note="experts", **MOE), EXPERTS),
    (Topology(fsdp=2, ep=2, sets=("activation.mode=full",), note="down, full recomputation", **MOE), DOWN),
]  # fmt: skip


def cases(rows):
    return [pytest.param(*each, id=each[0].name) for each in rows]


def trial_of(topology: Topology, adapter: str) -> Trial:
    return evolve(topology.trial("fp64"), steps=2, more=adapter)


@pytest.mark.parametrize(
    ("topology", "adapter"),
    [*cases(ORDINARY), *(pytest.param(*each, id=each[0].name, marks=pytest.mark.matrix) for each in MORE)],
)  # fmt: skip
def test_a_layout_trains_what_one_process_trains(lab: Laboratory, topology: Topology, adapter: str):
    lab.same_as_one_process(trial_of(topology, adapter), topology.layout)


def test_a_run_begins_with_the_model_under_the_adapter(lab: Laboratory):
    """Magnitudes are norms at first, and the rest of a matrix is what A and B do not have of it."""
    adapters = (ALL, DORA, PISSA.replace("1-2", "1"))
    first = [lab.alone(trial_of(Topology(shared=SHALLOW), adapter)).curve for adapter in adapters]
    assert all(each[0][1] == pytest.approx(first[0][0][1], rel=1e-6) for each in first)
    assert len({each[-1][1] for each in first}) == 3


def test_merging_changes_no_loss_and_every_later_step(lab: Laboratory):
    """Step 2 has the loss of the model after step 1, merged or not; a new adapter learns otherwise."""
    plain, keep, reset = (
        [loss for _, loss, *_ in lab.alone(evolve(trial_of(Topology(shared=SHALLOW), ALL + more), steps=3)).curve]
        for more in ("", KEEP, MERGE)
    )
    assert plain[:2] == pytest.approx(keep[:2], rel=1e-13) and keep[:2] == reset[:2]
    assert len({plain[2], keep[2], reset[2]}) == 3


FAULTS = [
    (Topology(tp=2, shared=SHALLOW, note="summands"), ALL, Mutation("own_summands")),
    (Topology(fsdp=2, note="averaged"), ALL, Mutation("average")),
    (Topology(fsdp=2, ep=2, note="experts divided", **MOE), EXPERTS, Mutation("divide_experts", by=2)),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("topology", "adapter", "fault"), [pytest.param(*each, id=each[0].name) for each in FAULTS])
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


BESIDES = """
group "**.*lora_B" { lr_scale = 4, optimizer lion { lr = 1e-3 } }
group norm { weight_decay = 0.1 }
ema { decay = 0.9 }
"""
NF4 = ("model.layers=2", "model.ffn=64", "precision.base.kind=nf4", "precision.base.block=32")
SHORT = {"settings": ("model.layers=2",)}
EIGHT_BITS = {"optimizer": "adamw8bit { lr = 1e-2, eps = 1e-3, block = 16"}
# What is trained, settings of the trial, and the layouts before and behind the checkpoint.
RESUMED = {
    "pissa, groups and averages": (
        PISSA.replace("1-2", "1").replace(" }", ', train = ["norm"] }') + BESIDES, SHORT, "fsdp", "tp"
    ),
    "groups and averages": (ALL.replace(" }", ', train = ["norm"] }') + BESIDES, SHORT, "fsdp", "tp"),
    "pissa": (f"{PISSA.replace('1-2', '1')}\nema {{ decay = 0.9 }}", SHORT, "fsdp", "tp"),
    "pissa, nf4": (PISSA.replace("1-2", "1"), {"settings": NF4}, "tp", "fsdp"),
    "dora, nf4": (DORA, {"settings": NF4}, "tp", "pp"),
    "dropout": (DROPOUT, SHORT, "fsdp", "pp"),
    "8 bits": (ALL, {**SHORT, **EIGHT_BITS}, "fsdp", "tp"),
    "experts": (PISSA_EXPERTS, {**SHORT, **MOE}, "ep", "fsdp"),
    "merge": (ALL + MERGE, SHORT, "fsdp", "tp"),
    "merge, 8 bits": (ALL + KEEP, {**SHORT, **EIGHT_BITS}, "tp", "fsdp"),
    "merge, experts": (EXPERTS + MERGE, {**SHORT, **MOE}, "ep", "fsdp"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.matrix if place else ()) for place, each in enumerate(RESUMED)]
)
def test_a_run_goes_on_with_its_adapter(lab: Laboratory, name: str):
    """Bit for bit; and on another layout the same."""
    more, settings, *axes = RESUMED[name]
    trial = Trial(steps=4, more=more, **settings)
    first, second = ((f"parallel.{axis}=2", *(("parallel.fsdp=2",) if axis == "ep" else ())) for axis in axes)

    whole, ended = lab.resumed(trial, first, f"adapter-{name}")
    assert ("ema" in more) == any(name.startswith("ema.") and "lora_B" in name for name in whole.tensors)
    lab.take_checkpoint(whole, 2, f"adapter-moved-{name}")
    moved = lab.ranks.run(lab.plan(trial, (*FEWER, *second)), lab.folder, name=f"adapter-moved-{name}")
    ended, moved = (evolve(each, evals=each.evals[-1:]) for each in (ended, moved))
    assert gaps(moved, ended).worst < TOLERANCE["fp64"]


@pytest.mark.parametrize(
    "again",
    [pytest.param(Topology(tp=2, ep=2, **MOE), id="two ranks", marks=pytest.mark.matrix),
        pytest.param(Topology(fsdp=2, tp=2, ep=2, **MOE), id="four ranks", marks=pytest.mark.matrix)],
)  # fmt: skip
def test_an_adapter_of_a_folder_is_read_and_written_by_ranks_as_it_was(lab: Laboratory, monkeypatch, again: Topology):
    """Experts on two ranks for PEFT, and read by others: steps that change nothing, and the same bytes."""
    monkeypatch.chdir(lab.folder)
    settings = ("model.layers=2", "model.router.aux_loss=0", "model.router.z_loss=0")
    written = "on finish export {{ to = {}, adapter = true }} then checkpoint"

    def train(adapter: str, to: str, topology: Topology, optimizer: str) -> None:
        more = f"{adapter}\n{written.format(json.dumps(to))}"
        trial = Trial(
            model="moe", params="fp32", steps=1, optimizer=optimizer, clip="none", settings=settings, more=more
        )
        lab.run(trial, topology.layout)

    for name in ("written", "again"):
        shutil.rmtree(lab.folder / name, ignore_errors=True)
    first = Topology(fsdp=2, ep=2, **MOE)
    train(EXPERTS.replace(" }", ", init = gaussian }"), "written", first, "sgd { lr = 0.1, momentum = 0")
    train('adapter lora { from = "written" }', "again", again, "sgd { lr = 1e-300, momentum = 0")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (lab.folder / "again" / name).read_bytes() == (lab.folder / "written" / name).read_bytes()
    b = load_file(lab.folder / "written" / "adapter_model.safetensors")
    assert len(b) == 2 * 2 * (1 + 8 * 3) and any(value.any() for name, value in b.items() if "experts.7" in name)
