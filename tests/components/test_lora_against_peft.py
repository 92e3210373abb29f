"""`adapter lora { … }` against PEFT: the same model, the same factors and the same tokens, for three steps of AdamW."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapted_models import adapted, its_factors, loss_of, model_of, with_single_experts
from reference_models import make
from torch import Tensor, nn

from xtrain.components.adapters.lora_torch import LoraLinear
from xtrain.components.optimizers.adamw_torch import LocalAdamW
from xtrain.runtime.nn.layers import Dropout, token_keys

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
EXPERTS = r".*\.experts\.\d+\.(gate|up|down)_proj"
EACH = EXPERTS + r"|.*\.q_proj"
# Family, its model in `reference_models`, settings of the adapter, and PEFT's.
# A dense model and one of experts, with and without magnitudes.
ORDINARY = ("llama", "qwen3_moe")
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama", "odd heads, tied", "rank = 3, alpha = 12", {"r": 3, "lora_alpha": 12, "target_modules": LINEAR}),
    ("llama", "biased, scaled by yarn",
        'rank = 4, alpha = 4, scaling = rslora, targets = ["q_proj", "layers.1.mlp.down_proj"]',
        {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": r".*\.(q_proj|layers\.1\.mlp\.down_proj)"}),
    (
        "qwen3",
        "plain",
        'rank = 2, alpha = 5, layers = ["1"], targets = ["q_proj", "v_proj", "mlp"], '
        'ranks = { v_proj: 3, "up_proj": 4 }, alphas = { v_proj: 9, gate_proj: 1 }',
        {
            "r": 2,
            "lora_alpha": 5,
            "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"v_proj": 3, "up_proj": 4},
            "alpha_pattern": {"v_proj": 9, "gate_proj": 1},
        },
    ),
    ("llama", "biased, scaled by yarn", 'rank = 3, alpha = 12, dora = true, targets = ["all_linear"]',
        {"r": 3, "lora_alpha": 12, "use_dora": True, "target_modules": LINEAR}),
    ("llama", "odd heads, tied", 'rank = 3, alpha = 12, targets = ["v_proj", "lm_head"]',
        {"r": 3, "lora_alpha": 12, "target_modules": ["v_proj", "lm_head"]}),
    ("qwen3", "plain", 'rank = 3, alpha = 12, scaling = rslora, targets = ["lm_head"], ranks = { lm_head: 5 }',
        {"r": 5, "lora_alpha": 12, "use_rslora": True, "target_modules": ["lm_head"]}),
    ("gemma3", "plain", 'rank = 2, alpha = 3, targets = ["all_linear", "lm_head"]',
        {"r": 2, "lora_alpha": 3, "target_modules": [*LINEAR, "lm_head"]}),
    ("gemma3", "plain", "rank = 2, alpha = 3", {"r": 2, "lora_alpha": 3, "target_modules": LINEAR}),
    ("gemma4", "plain", "rank = 2, alpha = 3", {"r": 2, "lora_alpha": 3, "target_modules": LINEAR}),
    ("deepseek_v3", "plain", 'rank = 2, alpha = 8, targets = ["self_attn"]',
        {"r": 2, "lora_alpha": 8, "target_modules": LATENT}),
    ("qwen2_moe", "plain", 'rank = 2, alpha = 8, targets = ["self_attn", "shared_expert"]',
        {"r": 2, "lora_alpha": 8, "target_modules": r".*\.(self_attn|shared_expert)\.[a-z]+_proj"}),
    ("qwen3_moe", "plain", 'rank = 3, alpha = 6, targets = ["experts", "q_proj"]',
        {"r": 3, "lora_alpha": 6, "target_modules": EACH}),
    ("qwen3_moe", "plain", 'rank = 3, alpha = 6, dora = true, targets = ["experts", "q_proj"]',
        {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": EACH}),
    (
        "mixtral",
        "plain",
        'rank = 4, alpha = 4, scaling = rslora, targets = ["experts"], ranks = { "experts.down_proj": 2 }, '
        'alphas = { "experts.up_proj": 9 }',
        {
            "r": 4,
            "lora_alpha": 4,
            "use_rslora": True,
            "target_modules": EXPERTS,
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"up_proj": 9},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "settings", "theirs"), [pytest.param(
    *case,
    id=f"{case[0]}, {case[1]}{', dora' * ('dora' in case[2])}{', head' * ('lm_head' in case[2])}",
    marks=() if case[0] in ORDINARY else pytest.mark.matrix,
) for case in CASES])  # fmt: skip
def test_losses_gradients_and_steps_are_those_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, name: str, settings: str, theirs: dict[str, Any]
):
    from peft import LoraConfig, get_peft_model

    reference = make(family, name, tmp_path / "base").double()
    reference.set_experts_implementation("eager")
    with all_in_fp64(monkeypatch):  # the frequencies of positions too
        reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    if "experts" in settings:
        reference = with_single_experts(reference)
    plan, tensors = adapted(tmp_path / "base", settings)
    peft: Any = get_peft_model(reference, LoraConfig(**theirs))
    its: dict[str, Any] = {each: parameter for each, parameter in peft.named_parameters() if parameter.requires_grad}
    factors = {each.name for each in plan.parameters.tensors if each.adapter}
    first = {other: value for each in factors for other, value in its_factors(each, tensors[each])}
    assert first.keys() == its.keys()
    with torch.no_grad():
        for each, value in first.items():
            its[each].copy_(value)
    ids_BS = torch.randint(plan.architecture.vocab, (2, 48), generator=torch.Generator().manual_seed(0))
    model = model_of(plan, tensors)
    own = {each: parameter for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert own.keys() == factors
    peft.eval()
    for _ in same_steps(model, peft, own, its, ids_BS, monkeypatch):
        moved = {each: p.detach() - tensors[each] for each, p in own.items()}
        assert gap(moved, {each: p.detach() - first[each] for each, p in its.items()}) < 1e-9


class Forced(nn.Module):
    """Drops what we drop, in the place of PEFT's dropout."""

    def __init__(self, how: Dropout, keys_BS: Tensor) -> None:
        super().__init__()
        self.how, self.keys_BS = how, keys_BS

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.how(x_BSD, self.keys_BS, 0)


@pytest.mark.parametrize("dora", [False, True])
def test_what_dropout_leaves_is_computed_with_as_in_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dora: bool):
    """The same numbers are dropped in both: losses, gradients and three steps of matrices with biases."""
    from peft import LoraConfig, get_peft_model

    reference = make("llama", "biased, scaled by yarn", tmp_path / "base").double()
    with all_in_fp64(monkeypatch):
        reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    more = ", dora = true" if dora else ""
    plan, tensors = adapted(tmp_path / "base", f"rank = 3, alpha = 12, dropout = 0.3{more}")
    config = LoraConfig(r=3, lora_alpha=12, lora_dropout=0.3, use_dora=dora, target_modules=LINEAR)
    peft: Any = get_peft_model(reference, config)
    its: dict[str, Any] = {each: parameter for each, parameter in peft.named_parameters() if parameter.requires_grad}
    model = model_of(plan, tensors)
    own = {each: parameter for each, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for each in own:
            for other, value in its_factors(each, tensors[each]):
                its[other].copy_(value)
    ids_BS = torch.randint(plan.architecture.vocab, (2, 24), generator=torch.Generator().manual_seed(0))
    keys_BS = token_keys(torch.tensor([3, 4]), torch.arange(23))
    names = {module: name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    for module, name in names.items():
        module.dropout = Dropout.of(name, 0.3, seed=1)
        peft.get_submodule(f"base_model.model.model.{name}").lora_dropout["default"] = Forced(module.dropout, keys_BS)
    monkeypatch.setattr(LoraLinear, "keys_BS", keys_BS)
    peft.train()
    assert len([*same_steps(model, peft, own, its, ids_BS, monkeypatch)]) == 3


def same_steps(
    model: Any, peft: Any, own: dict[str, Any], its: dict[str, Any], ids_BS: Tensor, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Three updates of adapters, with the same losses and gradients; each is yielded after it. own, its: parameters."""
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    ours = LocalAdamW([{"params": list(own.values()), "weight_decay": 0.1}], **options)
    other = torch.optim.AdamW(its.values(), weight_decay=0.1, **options)
    for _ in range(3):
        loss = loss_of(model, ids_BS)
        with all_in_fp64(monkeypatch):
            logits_TV = peft(input_ids=ids_BS[:, :-1]).logits.flatten(0, 1)
        expected = F.cross_entropy(logits_TV, ids_BS[:, 1:].flatten())
        loss.backward()
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert gap({each: p.grad for each, p in own.items()}, {each: p.grad for each, p in its.items()}) < 1e-12
        for optimizer in (ours, other):
            optimizer.step()
            optimizer.zero_grad()
        yield


@contextmanager
def all_in_fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile transformers computes in fp64 where it would round to fp32."""
    with monkeypatch.context() as patch:
        for narrow in ("float32", "float"):
            patch.setattr(torch, narrow, torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def gap(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The norm of the difference of all tensors, as a share of theirs."""
    pairs = {other: value for each, whole in ours.items() for other, value in its_factors(each, whole)}
    found = torch.cat([pairs[each].flatten() for each in theirs])
    wanted = torch.cat([each.flatten() for each in theirs.values()])
    return float((found - wanted).norm() / wanted.norm())
