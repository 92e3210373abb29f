"""What a server trains is what plain torch trains, on every layout, however requests are cut and mixed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from plain_adapters import PlainLlama, PlainModel
from served import LLAMA, served, server_plan

from xtrain.components.adapters.lora_torch import first_values
from xtrain.plan.architecture import parameters
from xtrain.plan.plan import Plan
from xtrain.runtime.nn.weights import drawing
from xtrain.server.engine.keeping import read_kept
from xtrain.server.engine.started import RanksEngine
from xtrain.server.engine_interface import Adam, AdapterSettings, Datum, Pass

pytestmark = pytest.mark.distributed

BRIEF, STEPS = 2, 5  # of rows that run by default, so that the first step counts in the second; of the others


@frozen(kw_only=True)
class Client:
    """A model of a client: its adapter, its loss, and the numbers of its updates.

    wide: of its texts in turn, how many targets a token has, in a dim of their own; 0: one, without that dim.
    """

    rank: int
    seed: int
    loss: str
    settings: dict[str, float]
    adam: Adam
    attn: bool = True
    mlp: bool = True
    unembed: bool = True
    wide: tuple[int, ...] = (0,)

    @property
    def parts(self) -> dict[str, bool]:
        """Which matrices have an adapter."""
        return {"attn": self.attn, "mlp": self.mlp, "unembed": self.unembed}

    def data(self, step: int) -> list[Datum]:
        """Seven texts for a step."""
        rng = np.random.default_rng([self.seed, step])
        return [self._datum(rng, int(rng.integers(3, 40)), self.wide[text % len(self.wide)]) for text in range(7)]

    def _datum(self, rng: np.random.Generator, size: int, wide: int) -> Datum:
        shape = (size, wide) if wide else (size,)
        inputs = {"target_tokens": rng.integers(0, 258, shape)}
        if self.loss == "cross_entropy":
            inputs["weights"] = rng.normal(size=shape).astype(np.float32)  # negative ones and fractions
        else:
            inputs["advantages"] = rng.normal(size=shape).astype(np.float32)
            inputs["logprobs"] = (-5.6 + 0.5 * rng.normal(size=shape)).astype(np.float32)
        return Datum(tokens=rng.integers(0, 258, size).astype(np.int32), inputs=inputs)


def adam(**changed: float) -> Adam:
    usual = {"rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.0, "clip": 0.0}
    return Adam(**{**usual, **changed})


CLIENTS = {
    "plain": Client(rank=8, seed=1, loss="cross_entropy", settings={}, adam=adam()),
    "narrow": Client(rank=3, seed=2, loss="ppo", settings={}, adam=adam(weight_decay=0.1, clip=0.5), mlp=False),
    "wide": Client(rank=5, seed=5, loss="cross_entropy", settings={}, adam=adam(rate=3e-3, beta2=0.99),
        wide=(3, 0, 1, 2)),
    "weights": Client(rank=4, seed=4, loss="cispo", settings={"clip_high_threshold": 1.5}, adam=adam(clip=0.1),
        attn=False, unembed=False),
}  # fmt: skip


def train(engine: Any, folder: Path, calls: int, steps: int) -> dict[str, Any]:
    """Each client takes steps, each with so many calls of forward_backward, all of them in turn."""
    found: dict[str, Any] = {name: {"losses": [], "norms": [], "logprobs": []} for name in CLIENTS}
    for name, client in CLIENTS.items():
        engine.create_model(name, AdapterSettings(rank=client.rank, seed=client.seed, **client.parts))
    for step in range(steps):
        sums = dict.fromkeys(CLIENTS, 0.0)
        for call in range(calls):
            passes = []
            for name, client in CLIENTS.items():
                data = client.data(step)
                part = data[call * 7 // calls : (call + 1) * 7 // calls]
                passes.append(
                    Pass(model=name, data=part, loss=client.loss, settings=client.settings, forward_only=False)
                )
            for each, result in zip(passes, engine.forward_backward(passes), strict=True):
                sums[each.model] += result.metrics["loss:sum"]
                found[each.model]["logprobs"] += [output["logprobs"] for output in result.outputs]
        for name, client in CLIENTS.items():
            found[name]["losses"].append(sums[name])
            found[name]["norms"].append(engine.optim_step(name, client.adam)["grad_norm"])
    for name in CLIENTS:
        engine.save(name, folder / name)
    return found


def expected(plan: Plan, client: Client, steps: int) -> tuple[PlainModel, dict[str, Any]]:
    """The same in plain torch, without a server, from the same first values."""
    arch, cpu = plan.architecture, torch.device("cpu")
    draw = drawing(arch, plan.seed, arch.init_std, cpu)
    weights = {each.name: draw(each.name, each.shape).double() for each in parameters(arch.base)}
    base = PlainLlama(weights=weights, layers=arch.layers, heads=arch.heads, kv_heads=arch.kv_heads)
    ours = next(iter(arch.adapter.tasks.values())).of_rank(client.rank)
    first = {}
    from attrs import evolve

    for each in parameters(evolve(arch.base, adapter=ours)):
        part = "attn" if "self_attn" in each.name else "unembed" if "lm_head" in each.name else "mlp"
        if each.adapter and client.parts[part]:
            first[each.name] = first_values(each, "default", client.seed, cpu).double()
    model = PlainModel(base, first, 16 / client.rank)
    found: dict[str, Any] = {"losses": [], "norms": [], "logprobs": []}
    chosen = client.adam
    for step in range(steps):
        loss, logprobs = model.forward_backward(client.data(step), client.loss, client.settings)
        found["losses"].append(loss)
        found["logprobs"] += logprobs
        betas = (chosen.beta1, chosen.beta2)
        norm = model.optim_step(chosen.rate, betas, chosen.eps, chosen.weight_decay, chosen.clip)
        found["norms"].append(norm)
    return model, found


def gap(ours: Any, theirs: Any) -> float:
    """Of numbers relative to the largest."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


LAYOUTS = {
    "one": ((), 1),
    "fsdp": (("parallel.fsdp=2",), 3),
    "tp": (("parallel.tp=2",), 3),
    **{f"fsdp, tp, {calls} calls": (("parallel.fsdp=2", "parallel.tp=2"), calls) for calls in (1, 3, 7)},
    "pp": (("parallel.pp=2",), 3),
    "tied": (("model.tie_embeddings=true",), 3),
    "tied, tp": (("model.tie_embeddings=true", "parallel.tp=2"), 3),
    "tied, pp, fsdp": (("model.tie_embeddings=true", "parallel.pp=2", "parallel.fsdp=2"), 3),
    "ring": (("parallel.cp=2", "parallel.cp.ring=2"), 3),
    "ulysses": (("parallel.cp=2", "parallel.cp.ulysses=2"), 1),
    "pp, fsdp": (("parallel.pp=2", "parallel.fsdp=2"), 1),
    "pp, tp": (("parallel.pp=2", "parallel.tp=2"), 3),
    "ring, ulysses": (("parallel.cp=4", "parallel.cp.ring=2"), 7),
    "pp, ring": (("parallel.pp=2", "parallel.cp=2", "parallel.cp.ring=2"), 3),
    "ring, tp": (("parallel.cp=2", "parallel.cp.ring=2", "parallel.tp=2"), 1),
}


DEFAULT = ("one", "tp")


@pytest.mark.parametrize(
    "layout", [each if each in DEFAULT else pytest.param(each, marks=pytest.mark.matrix) for each in LAYOUTS]
)
def test_adapters_are_trained_as_plain_torch_trains_them(layout: str, tmp_path: Path):
    sets, calls = LAYOUTS[layout]
    steps = BRIEF if layout in DEFAULT else STEPS
    plan = server_plan(tmp_path, *sets)
    found = served(plan, train, tmp_path / "run", calls, steps)
    for name, client in CLIENTS.items():
        model, wanted = expected(plan, client, steps)
        ours = found[name]
        assert gap(ours["losses"], wanted["losses"]) < 1e-10, name
        assert gap(ours["norms"], wanted["norms"]) < 1e-10, name
        pairs = zip(ours["logprobs"], wanted["logprobs"], strict=True)
        assert max(gap(a, b) for a, b in pairs) < 1e-6  # they are sent as fp32
        kept = read_kept(tmp_path / "run" / name)
        assert kept.step == steps
        tensors = {**model.factors, **model.moments}
        assert kept.tensors.keys() == tensors.keys()
        worst = {key: gap(kept.tensors[key].numpy(), value.detach().numpy()) for key, value in tensors.items()}
        assert max(worst.values()) < 1e-10, max(worst, key=worst.__getitem__)


MIXTURE = """qwen3_moe {
  dim = 32, layers = 2, heads = 4, kv_heads = 2, head_dim = 8, experts = 4, experts_per_token = 2, expert_ffn = 24
  init_std = 0.2
  router { aux_loss = 0 }
}"""


@pytest.mark.parametrize(("sets", "model", "kinds"), [
    ((), LLAMA, {"attn", "mlp", "unembed"}),
    (('adapter.targets=["self_attn"]',), LLAMA, {"attn"}),
    (('adapter.targets=["mlp"]',), LLAMA, {"mlp"}),
    ((), MIXTURE, {"attn", "unembed"}),
    (('adapter.targets=["experts"]',), MIXTURE, {"mlp"}),
])  # fmt: skip
def test_clients_may_choose_among_matrices_that_have_an_adapter(
    sets: tuple[str, ...], model: str, kinds: set[str], tmp_path: Path
):
    engine = RanksEngine(server_plan(tmp_path, *sets, model=model), lambda message: message)
    assert engine.capabilities.matrices == kinds


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp 2, ep 2", "tp 2, ep 2"])
def test_a_mixture_of_experts_is_served_over_expert_ranks(layout: str, tmp_path: Path):
    """Adapters of spread experts are trained and kept as those of one rank."""
    targets = 'adapter.targets=["self_attn", "experts"]'
    sets = {"fsdp 2, ep 2": ("parallel.fsdp=2", "parallel.ep=2"), "tp 2, ep 2": ("parallel.tp=2", "parallel.ep=2")}
    alone = served(server_plan(tmp_path, targets, model=MIXTURE), train, tmp_path / "one", 2, STEPS)
    found = served(server_plan(tmp_path, targets, *sets[layout], model=MIXTURE), train, tmp_path / "spread", 2, STEPS)
    for name in CLIENTS:
        assert gap(found[name]["losses"], alone[name]["losses"]) < 1e-10, name
        assert gap(found[name]["norms"], alone[name]["norms"]) < 1e-10, name
        ours, wanted = (read_kept(tmp_path / folder / name).tensors for folder in ("spread", "one"))
        assert ours.keys() == wanted.keys() and any("experts" in key for key in ours) == CLIENTS[name].mlp
        worst = {key: gap(ours[key].numpy(), wanted[key].numpy()) for key in ours if wanted[key].any()}
        assert max(worst.values()) < 1e-10, max(worst, key=worst.__getitem__)
