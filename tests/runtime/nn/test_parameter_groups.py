"""Groups of parameters against optimizers of torch that are given the same parameters by hand, and `parametrization`
against the published form, in which logits and branches have factors: CompleteP (arXiv 2505.01618), table 1."""

import math
from pathlib import Path

import pytest
import torch
from attrs import frozen
from one_rank import one_rank
from torch import Tensor, nn

from xtrain.components.optimizers.lion_torch import LionOptimizer
from xtrain.dsl.load import load_spec
from xtrain.plan.parametrization import roles_of, scales_of
from xtrain.plan.plan import Plan
from xtrain.planner.compile import compile_plan
from xtrain.runtime.base.ops import PlanMismatch, load_ops, op_of
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.nn.optimizer import set_group, set_rates
from xtrain.runtime.nn.weights import drawing, optimizer_tensors

SPEC = """
experiment groups { budget = 10 steps }
model llama { dim = 8, layers = 2, heads = 2, ffn = 12 }
tokenizer bytes
dataset code { source = python_stdlib() }
batch { sequence = 64 }
optimizer adamw { lr = 1e-2, weight_decay = 0.1 }
group embed_tokens { lr_scale = 0.5, weight_decay = 0.3 }
group "layers.*.mlp" { lr_scale = 2, optimizer sgd { lr = 0.1, momentum = 0.9 } }
group "layers.0.self_attn" { weight_decay = 0.2, optimizer lion { lr = 1e-3, betas = [0.8, 0.9] } }
"""


PARAMETRIZED = """
experiment parametrized {{ budget = 10 steps }}
model {family} {{ dim = 16, layers = 6, heads = 4, head_dim = 4, {sizes} tie_embeddings = false }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64 }}
optimizer {optimizer}
group "layers.0" {{ lr_scale = 0.5 }}
parametrization {{ {kind}, base_width = 4 }}
"""
WIDER, DEEPER = 4, 3
COMPLETE = "kind = complete_p, base_depth = 2"
ADAMW = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.3}


@frozen
class FewParameters:
    """What optimizers ask of a model."""

    parameters: dict[str, nn.Parameter]
    group: str = ""

    def trained(self):
        return iter(self.parameters.items())


def parameters_of(plan: Plan) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {
        each.name: nn.Parameter(torch.randn(*each.shape, generator=generator, dtype=torch.float64))
        for each in plan.parameters.tensors
    }


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "spec.xtrain"
    path.write_text(SPEC)
    plan = compile_plan(load_spec(path).require()).plan
    assert plan is not None
    return plan


def built(plan: Plan, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    load_ops()
    resources = {"plan": plan, "model": FewParameters(parameters), "rank": one_rank(), "progress": Progress()}
    resources["resources"] = resources
    for node in plan.nodes:
        if node.op in ("setup.optimizer", "setup.group", "setup.parametrization"):
            resources["optimizer"] = op_of(node).bind(node, resources)()
    return resources["optimizer"]  # type: ignore[return-value]


def by_hand(parameters: dict[str, nn.Parameter]) -> list[tuple[torch.optim.Optimizer, float]]:
    """Optimizers, each with its share of the rate."""

    def those(test) -> list[Tensor]:
        return [parameter for name, parameter in parameters.items() if test(name)]

    def rest(name: str) -> bool:
        return not (name.startswith(("embed_tokens", "layers.0.self_attn")) or ".mlp." in name)

    matrices = those(lambda name: rest(name) and parameters[name].dim() > 1)
    vectors = those(lambda name: rest(name) and parameters[name].dim() == 1)
    table = those(lambda name: name.startswith("embed_tokens"))
    attention = those(lambda name: name.startswith("layers.0.self_attn"))
    adamw = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    return [
        (torch.optim.AdamW(matrices, weight_decay=0.1, **adamw), 1e-2),
        (torch.optim.AdamW(vectors, weight_decay=0.0, **adamw), 1e-2),
        (torch.optim.AdamW(table, weight_decay=0.3, **adamw), 0.5e-2),
        (torch.optim.SGD(those(lambda name: ".mlp." in name), momentum=0.9), 0.2),
        (LionOptimizer([{"params": attention, "weight_decay": 0.2}], lr=1.0, betas=(0.8, 0.9)), 1e-3),
    ]


def test_every_group_is_updated_as_if_it_were_alone(plan):
    """The rate falls, as a schedule makes it, for all alike."""
    ours, theirs = parameters_of(plan), parameters_of(plan)
    optimizer, others = built(plan, ours), by_hand(theirs)
    generator = torch.Generator().manual_seed(6)
    for step in range(5):
        share = 1 / (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * share * group.get("lr_scale", 1.0)
        for other, lr in others:
            for group in other.param_groups:
                group["lr"] = lr * share
        for name, parameter in ours.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            theirs[name].grad = parameter.grad.clone()
        optimizer.step()
        for other, _ in others:
            other.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-12, atol=1e-14)
    saved = optimizer_tensors(FewParameters(ours), optimizer, plan)  # type: ignore[arg-type]
    kept = {name.rpartition(".")[2] for name in saved if ".layers.1.mlp." in name}
    assert kept == {"momentum_buffer"} and saved["optimizer.norm.weight.step"] == 5
    assert saved["optimizer.layers.0.self_attn.q_proj.weight.exp_avg"].abs().sum() > 0


def test_weight_decay_follows_the_schedule_in_every_group(tmp_path):
    path = tmp_path / "spec.xtrain"
    path.write_text(
        SPEC.replace("weight_decay = 0.1 }", "weight_decay = 0.1, scheduled_decay = true }\nscheduler cosine { }")
    )
    plan = compile_plan(load_spec(path).require()).plan
    assert plan is not None and plan.node("step.schedule").args == {"decay": "lr"}
    optimizer, rates = built(plan, parameters_of(plan)), [1e-2, 4e-3, 0.0, 1e-2]
    before = [(group.get("lr_scale", 1.0), group["weight_decay"]) for group in optimizer.param_groups]
    assert {decay for _, decay in before} == {0.1, 0.0, 0.3, 0.2}
    node, resources = plan.node("step.schedule"), {"plan": plan, "optimizer": optimizer, "schedule": rates.__getitem__}
    run = op_of(node).bind(node, resources)()
    for index, rate in enumerate(rates):
        run(Step(index=index))
        now = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        for (lr, decay), (scale, whole) in zip(now, before, strict=True):
            assert (lr, decay) == (rate * scale, whole * (rate / 1e-2))


def test_an_optimizer_that_joins_groups_is_refused(plan):
    parameters = parameters_of(plan)
    joined = torch.optim.SGD(list(parameters.values()), lr=0.1)
    with pytest.raises(PlanMismatch, match="`group norm` with others"):
        set_group(plan, FewParameters(parameters), {}, joined, "norm", lr_scale=2.0)  # type: ignore[arg-type]


def planned(folder: Path, kind: str = COMPLETE, family: str = "qwen2", optimizer: str = "", sizes: str = "") -> Plan:
    path = folder / "spec.xtrain"
    text = ", ".join(f"{name} = {value}" for name, value in ADAMW.items())
    sizes = sizes or "ffn = 24,"
    path.write_text(
        PARAMETRIZED.format(kind=kind, family=family, optimizer=optimizer or f"adamw {{ {text} }}", sizes=sizes)
    )
    plan = compile_plan(load_spec(path).require()).plan
    assert plan is not None
    return plan


def published(name: str) -> tuple[float, float, float, float]:
    """Return a parameter's factor in the forward, then learning rate, weight decay and eps, as in table 1 for α = 1."""
    n, m = WIDER, DEEPER
    if name in ("embed_tokens.weight", "norm.weight"):
        return 1.0, 1.0, 1.0, 1 / n
    if name == "lm_head.weight":
        return 1 / n, 1.0, 1.0, 1 / n
    adds = "o_proj" in name or "down_proj" in name
    if name.endswith("proj.weight"):
        return (1 / m if adds else 1.0), 1 / n, n, 1 / (n * m)
    return (1 / m if adds else 1.0), 1.0, 1.0, 1 / (n * m)


def loss_of(parameters: dict[str, Tensor]) -> Tensor:
    """A function of the weights whose gradients are of very different sizes."""
    return sum(
        ((1 + place) * 0.01 * parameter.sin() * parameter.cos().roll(1, 0)).sum() / (1 + place % 5)
        for place, parameter in enumerate(parameters.values())
    )  # type: ignore[return-value]


def test_updates_are_those_of_the_published_form(tmp_path):
    plan = planned(tmp_path)
    generator = torch.Generator().manual_seed(1)
    whole = {
        each.name: torch.randn(*each.shape, generator=generator, dtype=torch.float64)
        for each in plan.parameters.tensors
    }
    parameters = {name: nn.Parameter(published(name)[0] * value) for name, value in whole.items()}
    reference = {name: nn.Parameter(value.clone()) for name, value in whole.items()}
    decays = {each.name: each.decays for each in plan.parameters.tensors}
    groups = []
    for name, parameter in reference.items():
        _, lr, decay, eps = published(name)
        lr *= 0.5 if name.startswith("layers.0.") else 1.0
        rates = {"lr": ADAMW["lr"] * lr, "eps": ADAMW["eps"] * eps}
        groups.append({"params": [parameter], "weight_decay": ADAMW["weight_decay"] * decay * decays[name], **rates})
    by_hand, ours = torch.optim.AdamW(groups, betas=(0.9, 0.95)), built(plan, parameters)
    for _ in range(5):
        for group in ours.param_groups:
            group["lr"] = ADAMW["lr"] * group.get("lr_scale", 1.0)
        loss_of(parameters).backward()
        loss_of({name: published(name)[0] * parameter for name, parameter in reference.items()}).backward()
        for each in (ours, by_hand):
            each.step()
            each.zero_grad()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, published(name)[0] * reference[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [COMPLETE, "kind = mup"])
def test_initial_values_have_the_published_deviations(tmp_path, kind):
    plan = planned(tmp_path, kind)
    args, deeper = plan.node("setup.weights").args, DEEPER if kind == COMPLETE else 1
    scaled, plain = (
        drawing(plan.architecture, 1, 0.02, torch.device("cpu"), scales) for scales in (args["scales"], {})
    )
    for name, shape, expected in (
        ("embed_tokens.weight", (258, 16), 0.02),
        ("lm_head.weight", (258, 16), 0.02 / WIDER),
        ("layers.3.mlp.up_proj.weight", (24, 16), 0.02 / math.sqrt(WIDER)),
        # The base of two layers has 0.02 / √(2 · 2), and one of six layers without rules for depth 0.02 / √(2 · 6).
        ("layers.3.mlp.down_proj.weight", (16, 24), 0.02 / math.sqrt(12 / deeper * WIDER) / deeper),
    ):
        usual = 0.02 / math.sqrt(12) if "down_proj" in name else 0.02
        torch.testing.assert_close(scaled(name, shape), plain(name, shape) * (expected / usual))


def test_the_base_itself_is_the_standard_model(tmp_path):
    text = "kind = complete_p, base_depth = 6"
    plan = planned(tmp_path, text)
    same = compile_plan(load_spec(_edited(tmp_path, "base_width = 4", "base_width = 16")).require()).plan
    assert same is not None and same.node("setup.weights").args["scales"] == {}
    assert same.node("setup.parametrization").args["roles"] == {}
    assert same.node("setup.parametrization").does.endswith(": all factors are 1")
    assert plan.node("setup.parametrization").args["roles"]["hidden"] == {"lr": 0.25, "weight_decay": 4.0, "eps": 0.25}


def _edited(folder: Path, old: str, new: str) -> Path:
    path = folder / "spec.xtrain"
    path.write_text(path.read_text().replace(old, new))
    return path


def test_routers_choose_as_heads_do(tmp_path):
    sizes = "experts = 4, experts_per_token = 2, expert_ffn = 8, shared_experts = 1,"
    plan = planned(tmp_path, "kind = mup", "glm4_moe", "lion { lr = 1e-3 }", sizes)
    roles = roles_of(plan.architecture)
    chosen = {name for name, role in roles.items() if role == "choice"}
    assert chosen and chosen == {name for name in roles if name.endswith("mlp.gate.weight")}
    assert {roles[each.name] for each in plan.parameters.tensors if each.expert} == {"hidden", "residual"}
    rates = plan.node("setup.parametrization").args["roles"]
    assert rates["choice"]["lr"] == rates["head"]["lr"] == 0.25


def test_joined_roles_are_refused(tmp_path):
    plan = planned(tmp_path)
    parameters = {each.name: nn.Parameter(torch.zeros(each.shape)) for each in plan.parameters.tensors}
    joined = torch.optim.AdamW(parameters.values())
    with pytest.raises(PlanMismatch, match="several roles: embedding, head, hidden"):
        set_rates(plan, FewParameters(parameters), joined, {})  # type: ignore[arg-type]


def test_every_role_has_factors(tmp_path):
    plan = planned(tmp_path)
    spec = load_spec(tmp_path / "spec.xtrain").require()
    assert spec.parametrization is not None
    assert set(scales_of(spec.parametrization, plan.architecture)) == set(roles_of(plan.architecture).values())
