"""Experts of transformers' layers that xtrain computes: their routers' losses, and choices that are made again."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from code_models import ROLLOUT, built, content_of, make, rows
from small_runs import SPEC, plan_of
from torch import Tensor

from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.inspect.code_experts import experts_of, measured_experts, take_all
from xtrain.runtime.inspect.small_model import small
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.code_experts import CodeExperts, repeating
from xtrain.runtime.nn.model_code import CodeModel, build, config_of
from xtrain.runtime.nn.recompute import runs_of

QWEN3_MOE = "transformers.models.qwen3_moe.modeling_qwen3_moe"

pytestmark = pytest.mark.usefixtures("inspected_here")


def tiny(kind: str, **values: Any) -> CodeModel:
    content = content_of(kind) | values
    with torch.device("meta"):
        model = build(config_of(content))
    found = small(content, model)
    assert found is not None
    return found


def measured(kind: str) -> dict[str, Any] | None:
    code = tiny(kind)
    experts = experts_of(code)
    assert experts is not None
    return measured_experts(code, experts)


@pytest.fixture
def experts(tmp_path: Path) -> tuple[Any, CodeExperts]:
    """A model with routers' losses, and the experts of its first layer."""
    make("qwen3_moe", tmp_path)
    model = built(plan_of(f'"{tmp_path}" {{ code = transformers }}')).whole
    model.train()
    return model, next(module for module in model.modules() if isinstance(module, CodeExperts))


@pytest.mark.parametrize("grad", [True, False])
def test_logits_of_routers_are_not_kept(experts: tuple[Any, CodeExperts], grad: bool):
    model, module = experts
    with torch.set_grad_enabled(grad):
        model(None, rows(250, (64,)))
    assert module.has_loss and module.logits is None


@pytest.mark.parametrize(("count", "logits"), [(60, 64), (64, 60), (64, None)])
def test_a_router_loss_that_would_not_be_of_all_tokens(
    experts: tuple[Any, CodeExperts], count: int, logits: int | None
):
    _, module = experts
    module.real_BS = torch.ones(2, 32, dtype=torch.bool)
    module.logits = None if logits is None else torch.randn(logits, module.experts)
    chosen = torch.zeros(count, module.per_token, dtype=torch.int64)
    with pytest.raises(PlanMismatch, match=f"experts got {count} of 64 tokens, and their router {logits or 0}"):
        module._loss(chosen)


def _halves(self: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    _, weights, chosen = self.gate(flat)
    parts = zip(flat.chunk(2), chosen.chunk(2), weights.chunk(2), strict=True)
    return torch.cat([self.experts(*each) for each in parts]).reshape(x.shape)


def _wider(right: Callable[..., Any], self: Any, x: Tensor) -> Any:
    logits, *others = right(self, x)
    return torch.cat((logits, logits[:, :1]), 1), *others


def test_experts_that_get_some_tokens_at_a_time_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch):
    assert measured("qwen3_moe") is not None
    monkeypatch.setattr(f"{QWEN3_MOE}.Qwen3MoeSparseMoeBlock.forward", _halves)
    assert measured("qwen3_moe") is None


def test_a_router_with_logits_of_more_than_the_experts_has_no_loss(monkeypatch: pytest.MonkeyPatch):
    right = import_module(QWEN3_MOE).Qwen3MoeTopKRouter.forward
    monkeypatch.setattr(f"{QWEN3_MOE}.Qwen3MoeTopKRouter.forward", lambda *given: _wider(right, *given))
    found = measured("qwen3_moe")
    assert found == {"router": None, "repeats": True}


@pytest.mark.parametrize(("kind", "scores"), [
    ("qwen3_moe", lambda logits: logits.softmax(-1)),
    ("deepseek_v3", Tensor.sigmoid),
])  # fmt: skip
def test_weights_follow_choices_that_are_made_again(kind: str, scores: Callable[[Tensor], Tensor]):
    """In the second run of a checkpoint, where the router itself would choose other experts."""
    code = tiny(kind)
    experts = experts_of(code)
    assert experts is not None
    (module, *_), router = take_all(code, experts, Axes()), code.layers[-1].get_submodule(experts["router"]["module"])
    module.per_token = experts["chosen"]
    first, second = torch.randn(2, 1, 30, code.head.in_features)
    run, again = runs_of([])
    with run, repeating([module]):
        _, _, chosen = router(first)
    own = router(second)[2]
    with again, repeating([module]):
        logits, weights, same = router(second)
    assert torch.equal(same, chosen) and not torch.equal(own.sort(-1).values, chosen.sort(-1).values)
    wanted = scores(logits).gather(-1, chosen)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), wanted / wanted.sum(-1, keepdim=True))


def test_scores_of_the_only_group_of_experts_are_no_choice():
    code = tiny("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=2)
    experts = experts_of(code)
    assert experts is not None and experts["chosen"] == 2
    (module, *_), router = take_all(code, experts, Axes()), code.layers[-1].get_submodule(experts["router"]["module"])
    module.per_token, choices = experts["chosen"], list[Tensor]()
    run, _ = runs_of(choices)
    with run, repeating([module]):
        chosen = router(torch.randn(1, 30, code.head.in_features))[2]
    assert len(choices) == 1 and torch.equal(choices[0], chosen)


def faults(kind: str, folder: Path, more: str) -> list[str]:
    make(kind, folder)
    text = SPEC.format(model=f'"{folder}" {{ code = transformers }}', tokenizer="bytes", params="fp32", more=more)
    found = plan_from_text(text, "small.xtrain", world=2).diagnostics.errors
    return [f"{each.code} {each.message}" for each in found]


@pytest.mark.parametrize(("kind", "mode", "reason"), [
    pytest.param("phimoe", "full", "cannot choose the experts of the forward again", marks=pytest.mark.slow),
    pytest.param("phimoe", "none", "", marks=pytest.mark.slow),
    ("qwen3_moe", "full", ""),
])  # fmt: skip
def test_experts_over_ranks_need_choices_that_are_made_again(kind: str, mode: str, reason: str, tmp_path: Path):
    found = faults(kind, tmp_path, f"parallel {{\n  fsdp 2 {{ }}\n  ep 2 {{ }}\n}}\nactivation {mode} {{ }}")
    assert len(found) == bool(reason) and all(reason in each for each in found), found


@pytest.mark.parametrize(("replayed", "codes"), [("true", ["X530"]), ("false", [])])
def test_replayed_routing_is_refused(replayed: str, codes: list[str], tmp_path: Path):
    make("qwen3_moe", tmp_path)
    text = ROLLOUT.format(tmp_path, f", replay_routing = {replayed}")
    found = plan_from_text(text, "small.xtrain").diagnostics.errors
    assert [each.code for each in found] == codes
