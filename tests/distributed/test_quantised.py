"""Matrices that are not trained, stored in blocks of codes: training on layouts is that of one process, and what is
stored never changes."""

import json

import numpy as np
import pytest
import torch
from attrs import evolve
from projects import records
from safetensors.torch import load_file
from topologies import SCHEDULES, ZBV, Topology
from trials import TOLERANCE, Laboratory, Trial, gaps

from xtrain.cli.main import main
from xtrain.dsl.schema.precision import BASES
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.nn.number_formats import QuantisedMatrix

# What is trained lies below, between and above what is not.
PARTS = 'model.frozen=["layers.0-2.self_attn", "layers.*.mlp.down_proj", "layers.1.mlp"]'
DENSE = (PARTS, "model.ffn=64", "precision.base.kind=nf4", "precision.base.block=32")
PLAIN = (*DENSE, "precision.base.double=false")
EXPERTS = (
    'model.frozen=["layers.0-2.self_attn", "layers.*.mlp.experts", "layers.1.mlp"]',
    "model.expert_ffn=32",
    "precision.base.kind=nf4",
    "precision.base.block=32",
)
MOE = {"model": "moe"}
RECOMPUTED = ("activation.mode=selective",)


ADAPTED = ("model.ffn=64", "precision.base.kind=nf4", "precision.base.block=32")
ADAPTED_EXPERTS = (
    "model.expert_ffn=32", "precision.base.kind=nf4", "precision.base.block=32",
)  # fmt: skip
ODD = ("model.ffn=48", "precision.base.kind=nf4", "precision.base.block=32")  # blocks across rows of down_proj
ADAPTER = 'adapter lora { rank = 3, alpha = 12, train = ["norm"] }'
PISSA = 'adapter lora { rank = 3, alpha = 12, init = pissa, train = ["norm"] }'
DORA = 'adapter lora { rank = 3, alpha = 12, dora = true, train = ["norm"] }'
DORA_EXPERTS = 'adapter lora { rank = 3, alpha = 12, dora = true, targets = ["experts"], train = ["norm"] }'


def kind(name: str) -> tuple[str, ...]:
    return (PARTS, "model.ffn=64", f"precision.base.kind={name}", "precision.base.block=32")


ORDINARY = [
    Topology(fsdp=2, ep=2, shared=EXPERTS, note="nf4", **MOE),
]
MORE = [
    Topology(pp=2, shared=DENSE, note="nf4"),
    Topology(tp=2, shared=DENSE, note="nf4"),
    Topology(fsdp=2, tp=2, shared=DENSE, note="nf4"),
    Topology(fsdp=4, shared=DENSE, note="nf4"),
    Topology(fsdp=2, tp=2, shared=PLAIN, note="nf4 with fp32 scales"),
    Topology(fsdp=2, tp=2, shared=kind("int8"), note="int8"),
    Topology(fsdp=2, tp=2, shared=kind("fp8"), note="fp8"),
    Topology(tp=2, shared=DENSE, sets=("parallel.tp.sequence=false",), note="nf4, without sequence"),
    Topology(fsdp=2, shared=DENSE, sets=RECOMPUTED, note="nf4, selective recomputation"),
    Topology(fsdp=2, shared=DENSE, sets=("activation.mode=full",), note="nf4, full recomputation"),
    Topology(replicate=2, shared=DENSE, sets=("parallel.stack=ddp",), note="nf4, ddp"),
    Topology(ring=2, shared=DENSE, note="nf4"),
    Topology(pp=2, shared=DENSE, sets=ZBV, note="nf4, zbv"),
    Topology(pp=2, shared=DENSE, sets=SCHEDULES["zero_bubble"], note="nf4, zero_bubble"),
    Topology(pp=2, tp=2, fsdp=2, shared=DENSE, note="nf4"),
    Topology(fsdp=2, tp=2, ep=2, shared=EXPERTS, note="nf4", **MOE),
    Topology(fsdp=4, ep=2, shared=EXPERTS, note="nf4, experts sharded", **MOE),
    Topology(fsdp=2, ep=2, shared=EXPERTS, sets=RECOMPUTED, note="nf4, selective recomputation", **MOE),
]


@pytest.mark.parametrize(
    "topology",
    [*ORDINARY, *(pytest.param(each, marks=pytest.mark.matrix) for each in MORE)],
    ids=lambda topology: topology.name,
)
def test_a_layout_trains_what_one_process_trains(lab: Laboratory, topology: Topology):
    plan, outcome, alone = lab.same_as_one_process(evolve(topology.trial("fp64"), steps=2), topology.layout)
    stored = [name for name, value in outcome.tensors.items() if value.dtype == np.uint8]
    assert len(stored) == sum(each.quantised for each in plan.parameters.tensors) > 0
    assert not [name for name in stored if not np.array_equal(outcome.tensors[name], alone.tensors[name])]


@pytest.mark.matrix
@pytest.mark.parametrize(("topology", "adapter"), [
    pytest.param(Topology(fsdp=2, shared=ADAPTED), ADAPTER, id="fsdp 2"),
    pytest.param(Topology(fsdp=2, tp=2, shared=ADAPTED), ADAPTER, id="fsdp 2 · tp 2", marks=pytest.mark.matrix),
    pytest.param(Topology(fsdp=2, tp=2, shared=ADAPTED), DORA, id="fsdp 2 · tp 2, dora", marks=pytest.mark.matrix),
    pytest.param(Topology(fsdp=2, shared=ODD), DORA, id="fsdp 2, dora, odd", marks=pytest.mark.matrix),
    pytest.param(Topology(fsdp=4, ep=2, shared=ADAPTED_EXPERTS, **MOE), DORA_EXPERTS,
        id="fsdp 4 · ep 2, dora of experts", marks=pytest.mark.matrix),
    pytest.param(Topology(fsdp=2, tp=2, shared=ADAPTED), PISSA, id="fsdp 2 · tp 2, pissa", marks=pytest.mark.matrix),
    pytest.param(Topology(fsdp=2, shared=ODD), PISSA, id="fsdp 2, pissa, odd", marks=pytest.mark.matrix),
    pytest.param(Topology(fsdp=4, ep=2, shared=ADAPTED_EXPERTS, **MOE),
        PISSA.replace("train", 'targets = ["experts"], train'), id="fsdp 4 · ep 2, pissa of experts",
        marks=pytest.mark.matrix),
    pytest.param(Topology(pp=2, shared=ADAPTED), PISSA, id="pp 2, pissa", marks=pytest.mark.matrix),
    pytest.param(Topology(pp=2, tp=2, shared=ADAPTED), ADAPTER, id="pp 2 · tp 2", marks=pytest.mark.matrix),
])  # fmt: skip
def test_an_adapter_of_what_is_stored_trains_as_in_one_process(lab: Laboratory, topology: Topology, adapter: str):
    trial = evolve(topology.trial("fp64"), steps=2, more=f"{adapter}\nevery 1 step norms {{ of = [parameters] }}")
    alone = lab.alone(trial)
    outcome = lab.run(trial, topology.layout, saves=False)
    found = gaps(outcome, alone)
    ours, theirs = (
        [(key, value) for line in records(each.directory, "metrics") for key, value in line.items() if "param" in key]
        for each in (outcome, alone)
    )
    assert len(ours) == len(theirs) > 2 * 4
    assert all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-6 * b[1] for a, b in zip(ours, theirs, strict=True))
    assert found.loss < TOLERANCE["fp64"] and found.norm < TOLERANCE["fp64"]
    assert not {name: gap for name, gap in found.tensors.items() if not gap < TOLERANCE["fp64"]}
    plain = lab.alone(
        evolve(trial, settings=tuple(each for each in trial.settings if "precision" not in each))
    )  # the model as it was drawn: what codes cost
    assert 1e-6 < abs(plain.curve[0][1] - alone.curve[0][1]) < 0.3


@pytest.mark.parametrize(
    "first",
    [pytest.param(("parallel.tp=2",), id="tp 2"),
        pytest.param(("parallel.fsdp=2", "parallel.tp=2"), id="fsdp 2 · tp 2", marks=pytest.mark.matrix)],
)  # fmt: skip
def test_a_run_goes_on_from_what_it_has_stored_on_another_layout(lab: Laboratory, first: tuple[str, ...]):
    trial = Trial(steps=4, settings=(*DENSE, "model.layers=3"))

    def train(name: str, *sets: str) -> dict[str, np.ndarray]:
        return lab.ranks.run(lab.plan(trial, sets), lab.folder, name=name).tensors

    job = f"quantised-{len(first)}"
    whole = lab.resumed(trial, (), job)[0].tensors
    train(f"{job}-moved", "experiment.budget=2 steps", *first, "batch.micro=4")
    moved = train(f"{job}-moved", "parallel.pp=2", "batch.micro=2", "parallel.fsdp=1")
    assert moved.keys() == whole.keys()
    for name, value in whole.items():
        if value.dtype == np.uint8:
            assert np.array_equal(moved[name], value)
        else:
            assert np.allclose(moved[name], value, rtol=0, atol=TOLERANCE["fp64"]), name


FOLDER = """
experiment stored {{ seed = 3, budget = 1 steps }}
model {model}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl") }}
batch {{ sequence = 64, micro = 1, rows = 4 }}
optimizer sgd {{ lr = 1e-300, momentum = 0, clip = none }}
{more}
"""
DRAWN = """qwen3_moe {{ dim = 32, layers = 2, heads = 8, head_dim = 8, experts = 4, expert_ffn = 32, init_std = 0.2,
  router {{ aux_loss = 0 }}{more} }}"""
FROZEN = 'frozen = ["layers.*.self_attn", "layers.*.mlp.experts"]'
BASE = "precision { base nf4 { block = 32 } }"


@pytest.mark.matrix
def test_folders_and_checkpoints_are_stored_as_they_are_read_on_every_layout(lab: Laboratory, capsys):
    """A model of a folder, and the same model of a checkpoint; exported again with the values of its codes."""

    def train(name: str, model: str, more: str, *sets: str):
        spec = lab.folder / f"{name}.xtrain"
        spec.write_text(FOLDER.format(model=model, more=more))
        compiled = plan_from_spec(spec, ("workspace.root=runs", *sets))
        assert compiled.plan is not None, compiled.diagnostics.render()
        return lab.ranks.run(compiled.plan, lab.folder, name=name)

    whole = train("stored-whole", DRAWN.format(more=""), 'on finish export { to = "stored" } then checkpoint')
    folder = f'"{lab.folder / "stored"}" {{ router {{ aux_loss = 0 }}, {FROZEN} }}'
    values = f'{BASE}\non finish export {{ to = "%s", dequantise = true }} then checkpoint'
    read = train("stored-read", folder, values % "values")
    spread = train("stored-spread", folder, values % "spread", "parallel.fsdp=2", "parallel.ep=2", "parallel.tp=2")
    begun = f'{BASE}\ncheckpoint {{ pretrained = "{whole.directory}" }}'
    more = train("stored-begun", DRAWN.format(more=f", {FROZEN}"), begun, "parallel.fsdp=2", "parallel.ep=2")
    assert read.tensors.keys() == spread.tensors.keys() == more.tensors.keys()
    for name, value in read.tensors.items():
        assert np.array_equal(value, spread.tensors[name]) and np.array_equal(value, more.tensors[name]), name

    # What was stored is what the codes of each matrix of the file mean, an expert's as its stack has it.
    before, after = (load_file(lab.folder / each / "model.safetensors") for each in ("stored", "values"))
    base, count = BASES["nf4"](block=32), 0
    for name, weight in before.items():
        expected = weight
        if ("self_attn" in name and weight.ndim == 2) or ".experts." in name:
            matrix = weight.t() if ".experts." in name else weight
            shape = (matrix.shape[0], matrix.shape[1])
            stored = QuantisedMatrix(base, shape, shape, (0, 0), "")
            expected, count = stored.values(*stored.pack(matrix), torch.float32), count + 1
            expected = expected.t() if ".experts." in name else expected
        assert torch.equal(after[name], expected), name
    assert count == 2 * (4 + 3 * 4)
    assert (lab.folder / "values" / "model.safetensors").read_bytes() == (
        lab.folder / "spread" / "model.safetensors"
    ).read_bytes()

    (spread.directory / "metadata").mkdir(exist_ok=True)
    (spread.directory / "metadata" / "environment.json").write_text(json.dumps({"folder": str(lab.folder)}))
    command = ["export", str(spread.directory), "--to", str(lab.folder / "stored-again")]
    assert main(command) == 3
    assert "add --dequantise" in capsys.readouterr().err and not (lab.folder / "stored-again").exists()
    assert main([*command, "--dequantise"]) == 0
    assert (lab.folder / "stored-again" / "model.safetensors").read_bytes() == (
        lab.folder / "values" / "model.safetensors"
    ).read_bytes()
    # A model that is generated with reads the codes.
    assert main(["generate", str(spread.directory), "--prompt", "line", "--tokens", "3"]) == 0
