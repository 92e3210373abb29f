"""Families of the user's own compute on layouts what they compute in one process, and go on as if never stopped."""

import shutil
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve
from projects import events
from trials import gaps

from xtrain.planner.load import plan_from_path

OWN = Path(__file__).parents[1] / "support" / "own_families" / "parts.py"
SPEC = """
use "parts.py"
experiment own { seed = 3, budget = 4 steps }
model gated { dim = 32, layers = 2, heads = 4, kv_heads = 4, ffn = 48, init_std = 0.2 }
tokenizer bytes
dataset made { source = synthetic(documents = 100), holdout = 10% }
batch { sequence = 64, micro = 1, rows = 4 }
collate = to_tensor -> flatten -> shift_tokens -> pack(sequential, align = 4)
optimizer adamw { lr = 1e-2, eps = 1e-3, clip = 0.5 }
precision { params = fp64 }
every 1 step log
every 1000 steps checkpoint
on finish eval made
"""
ROUTED = SPEC.replace("model gated {", "model routed { experts = 4, expert_ffn = 24,")
LAYOUTS = {
    "tp 2, beside": ("parallel.tp=2", "model.beside=true"),
    "tp 2, whole sequences": ("parallel.tp=2", "parallel.tp.sequence=false"),
    "fsdp 2, full": ("parallel.fsdp=2", "activation=full"),
    "pp 2": ("parallel.pp=2",),
    "ulysses 2": ("parallel.cp=2", "parallel.cp.ulysses=2"),
    "ring 2, tp 2": ("parallel.cp=2", "parallel.cp.ring=2", "parallel.tp=2"),
    "fsdp 2, tp 2": ("parallel.fsdp=2", "parallel.tp=2"),
    "ddp": ("parallel.stack=ddp", "parallel.fsdp=1", "parallel.fsdp.replicate=2"),
}
# The ring is that of families with windows and sinks, below.
BY_DEFAULT = ("tp 2, whole sequences",)


pytestmark = pytest.mark.usefixtures("inspected_here")


@pytest.fixture(scope="module")
def train(lab, tmp_path_factory):
    """Train a spec under `--set` texts as the job `name`: its plan, and what came of it."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(OWN, folder)
    (folder / "mixers.py").write_text(MIXERS)

    def run(name, *sets, spec=SPEC):
        (folder / "own.xtrain").write_text(spec)
        compiled = plan_from_path(folder / "own.xtrain", sets)
        assert compiled.plan is not None, compiled.diagnostics.render()
        return compiled.plan, lab.ranks.run(compiled.plan, folder, name=name)

    return run


@pytest.fixture(scope="module")
def alone(train):
    """What one process computes of a spec under `--set` texts."""

    @cache
    def run(*sets, spec=SPEC):
        return train(f"alone {hash((sets, spec))}", *sets, spec=spec)

    return run


def test_llama_out_of_pieces_is_llama(train):
    """The same parameters, costs, losses and weights bit for bit."""
    plan, found = train("plain", spec=SPEC.replace("gated", "plain"))
    llama, expected = train("llama", spec=SPEC.replace("gated", "llama"))
    assert plan.parameters == llama.parameters and plan.estimates == llama.estimates
    assert evolve(plan.architecture, family="llama", own={}) == llama.architecture
    assert found.curve == expected.curve and len(found.curve) == 4
    assert gaps(found, expected).worst == 0.0


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.matrix) for name in LAYOUTS]
)
def test_a_layout_learns_the_same(train, alone, layout):
    sets = LAYOUTS[layout]
    _, expected = alone(*(each for each in sets if each.startswith("model")))
    _, found = train(layout, *sets)
    assert gaps(found, expected).worst < 1e-10


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ep 2", "ep 2, tp 2, full"])
def test_with_experts_too(train, alone, layout):
    _, expected = alone(spec=ROUTED)
    more = ("parallel.tp=2", "activation=full") if "tp" in layout else ()
    _, found = train(f"routed {layout}", "parallel.fsdp=2", "parallel.ep=2", *more, spec=ROUTED)
    assert gaps(found, expected).worst < 1e-10


SUNK = SPEC.replace("gated", "sunk")
SINKS = {
    "ring 2": ("parallel.cp=2", "parallel.cp.ring=2"),
    "ring 2, tp 2": ("parallel.cp=2", "parallel.cp.ring=2", "parallel.tp=2"),
    "ulysses 2, fsdp 2": ("parallel.cp=2", "parallel.cp.ulysses=2", "parallel.fsdp=2"),
    "pp 2, full": ("parallel.pp=2", "activation=full"),
    "pp 2, zero bubble": ("parallel.pp=2", "parallel.pp.schedule=zero_bubble"),
    "ring 2, ulysses 2, selective": (
        "parallel.cp=4", "parallel.cp.ring=2", "parallel.cp.ulysses=2", "activation=selective"
    ),
    "tp 2, written out": ("parallel.tp=2", "model.attention=mask"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "ring 2" else pytest.mark.matrix) for name in SINKS]
)
def test_with_windows_and_sinks_too(train, alone, layout):
    """Each rank has the sinks of its own heads, and their gradients from its own positions."""
    _, expected = alone(spec=SUNK)
    _, found = train(f"sunk {layout}", *SINKS[layout], spec=SUNK)
    assert gaps(found, expected).worst < 1e-10


def test_it_goes_on_exactly(train, alone):
    _, whole = alone()
    train("parts", "experiment.budget=2 steps")
    _, found = train("parts")
    assert found.curve == whole.curve and len(found.curve) == 4
    assert found.evals[-1]["loss"] == whole.evals[-1]["loss"]
    assert all((found.tensors[name] == value).all() for name, value in whole.tensors.items())


MIXERS = '''
import torch
from xtrain import AttentionLayer, Chain, NormLayer, Residual, SwiGLULayer, family, layer, state, weight


@layer(mixes="causal")
def decayed(x, memory=state("dim"), count=state(1, initial="ones"), rate=weight("dim", initial="normal"),
            out=weight("dim", "dim", initial="residual"), *, power: int = 1):
    """Decaying sums, divided by the number of positions."""
    keep, found = torch.sigmoid(rate), []
    for position in x.unbind(1):
        memory, count = keep * memory + position, count + 1
        found.append(memory / count ** power)
    return torch.stack(found, 1) @ out.T, memory, count


@family
def recurrent(arch, attends: bool = False):
    """Decaying sums, with or without attention."""
    mixer = decayed("mixer")
    if attends:
        attention = AttentionLayer("self_attn")
        return Chain.of(Residual.of(NormLayer("norm"), attention), Residual.of(NormLayer("mixed"), mixer))
    return Chain.of(Residual.of(NormLayer("norm"), mixer), Residual.of(NormLayer("fed"), SwiGLULayer("mlp")))
'''
# A loop over positions is slow.
SHORTER = SPEC.replace("budget = 4", "budget = 2").replace("= 64", "= 24")
MIXED = SHORTER.replace("model gated", "model recurrent").replace("parts.py", "mixers.py")
TEXTS = 'on finish generate { prompts = ["a", "line 12 and more", "abc"], tokens = 5, temperature = 0 }\n'
MIXER_LAYOUTS = {
    "tp 2": ("parallel.tp=2",),
    "tp 2, whole sequences": ("parallel.tp=2", "parallel.tp.sequence=false"),
    "fsdp 2, full": ("parallel.fsdp=2", "activation=full"),
    "pp 2": ("parallel.pp=2", "model.attends=true"),
    "fsdp 2, tp 2": ("parallel.fsdp=2", "parallel.tp=2", "model.attends=true"),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "tp 2" else pytest.mark.matrix) for name in MIXER_LAYOUTS]
)
def test_layers_that_mix_positions_too(train, alone, layout):
    """And the same texts: documents begin with new states, and texts are continued by the states after them."""
    spec, sets = MIXED + TEXTS, MIXER_LAYOUTS[layout]
    _, expected = alone(*(each for each in sets if each.startswith("model")), spec=spec)
    _, found = train(f"mixed {layout}", *sets, spec=spec)
    assert gaps(found, expected).worst < 1e-10
    texts = [events(outcome.directory, "generate")[0]["samples"] for outcome in (found, expected)]
    assert texts[0] == texts[1] and len({each["text"] for each in texts[0]}) > 1
