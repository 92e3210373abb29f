"""Groups of parameters against optimizers of torch that are given the same parameters by hand."""

from pathlib import Path

import pytest
import torch
from attrs import frozen
from one_rank import one_rank
from torch import Tensor, nn

from xtrain.components.optimizers.lion_torch import LionOptimizer
from xtrain.dsl.load import load_spec
from xtrain.plan.plan import Plan
from xtrain.planner.compile import compile_plan
from xtrain.runtime.base.ops import PlanMismatch, load_ops, op_of
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.nn.optimizer import set_group
from xtrain.runtime.nn.weights import optimizer_tensors

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
        if node.op in ("setup.optimizer", "setup.group"):
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
