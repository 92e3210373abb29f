"""`adapter lora { … }` by its formulas: experts, what is dropped, and first values."""

from pathlib import Path

import pytest
import torch
from adapted_models import adapted, loss_of, model_of
from reference_models import make
from small_runs import plan_of
from torch import Tensor

from xtrain.components.adapters.lora_torch import LoraLinear, first_values
from xtrain.plan.architecture import ParameterSpec
from xtrain.runtime.nn.layers import Dropout, splitmix64, token_keys
from xtrain.runtime.nn.moe import MoE


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_a_change_of_their_matrices(tmp_path: Path, family: str):
    """Loss and gradients are those of W + scale · A · B, dA = scale · dW · Bᵀ and dB = scale · Aᵀ · dW."""
    make(family, "plain", tmp_path / "base")
    plan, tensors = adapted(tmp_path / "base", 'rank = 3, alpha = 6, targets = ["experts"]')
    model = model_of(plan, tensors)
    ids_BS = torch.randint(plan.architecture.vocab, (2, 24), generator=torch.Generator().manual_seed(0))
    loss = loss_of(model, ids_BS)
    loss.backward()
    factors = {each.name: each.adapter for each in plan.parameters.tensors if each.adapter}
    stacks = dict.fromkeys(factors.values())
    bare = plan_of(f'"{tmp_path / "base"}"', params="fp64")
    merged = {name: each for name, each in tensors.items() if name not in factors}
    for stack in stacks:
        merged[stack] = tensors[stack] + 2 * tensors[f"{stack}_lora_A"] @ tensors[f"{stack}_lora_B"]
    whole = model_of(bare, merged)
    other = loss_of(whole, ids_BS)
    other.backward()
    assert loss.item() == pytest.approx(other.item(), rel=1e-12) and len(stacks) == 3 * plan.architecture.layers
    gradients, its = dict(model.named_parameters()), dict(whole.named_parameters())
    for stack in stacks:
        a, b, change = gradients[f"{stack}_lora_A"], gradients[f"{stack}_lora_B"], its[stack].grad
        assert a.grad is not None and b.grad is not None and change is not None and change.abs().max() > 0
        torch.testing.assert_close(a.grad, 2 * change @ b.mT, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(b.grad, 2 * a.mT @ change, rtol=1e-9, atol=1e-12)


def test_dropout_is_of_what_goes_into_a(tmp_path: Path):
    """The loss is that of x · Wᵀ + scale · drop(x) · Aᵀ · Bᵀ, its gradients those of autograd; in evaluation nothing is
    dropped."""
    make("llama", "odd heads, tied", tmp_path / "base")
    plan, tensors = adapted(tmp_path / "base", "rank = 3, alpha = 12, dropout = 0.4")
    model = model_of(plan, tensors)
    linear = model.get_submodule("layers.0.mlp.down_proj")
    assert isinstance(linear, LoraLinear)
    share = plan.node("setup.dropout").args["share"]
    linear.dropout = how = Dropout.of("layers.0.mlp.down_proj.weight", share, seed=1)
    x_BSD = torch.randn(2, 5, linear.in_features, dtype=torch.float64, requires_grad=True)
    weight, a, b = linear.weight, linear.lora_A.weight, linear.lora_B.weight
    assert torch.equal(linear(x_BSD), x_BSD @ weight.T + (x_BSD @ a.T) * 4 @ b.T)
    linear.keys_BS = token_keys(torch.tensor([7, 2**40]), torch.arange(5))
    mask_BSD = how.dropped(torch.ones_like(x_BSD), linear.keys_BS, 0)
    assert set(mask_BSD.unique().tolist()) == {0.0, 1 / 0.6}
    out = linear(x_BSD)
    expected = x_BSD @ weight.T + ((x_BSD * mask_BSD) @ a.T) * 4 @ b.T
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(each.square().sum(), (x_BSD, a, b), retain_graph=True) for each in (out, expected)]
    for own, its in zip(*grads, strict=True):
        torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dora", [False, True])
def test_each_expert_drops_inputs_of_its_own(tmp_path: Path, dora: bool):
    """What an expert adds is scale · drop(x) · A · B, by the keys of its rows; of other experts other numbers of a
    token are dropped. With dora x · W is added to, and scaled, where nothing of x is dropped."""
    make("qwen3_moe", "plain", tmp_path / "base")
    more = ", dora = true" if dora else ""
    plan, tensors = adapted(tmp_path / "base", f'rank = 3, alpha = 12, dropout = 0.4, targets = ["experts"]{more}')
    moe = model_of(plan, tensors).get_submodule("layers.0.mlp")
    assert isinstance(moe, MoE)
    share, experts = plan.node("setup.dropout").args["share"], moe.experts
    experts.dropout = {name: Dropout.of(name, share, 1) for name in ("gate_proj", "up_proj", "down_proj")}
    x_BSD = torch.randn(2, 5, plan.architecture.dim, dtype=torch.float64)
    real_BS = torch.ones(2, 5, dtype=torch.bool)
    whole_BSD = moe(x_BSD, real_BS)
    moe.keys_BS = token_keys(torch.tensor([7, 2**40]), torch.arange(5))
    chosen_TK, weights_TK = (getattr(moe.gate(x_BSD, real_BS), name) for name in ("chosen_TK", "weights_TK"))

    def product(name: str, expert: int, x_D: Tensor, key: Tensor) -> Tensor:
        w, a, b = (getattr(experts, f"{name}{each}")[expert] for each in ("", "_lora_A", "_lora_B"))
        dropped = experts.dropout[name].dropped(x_D[None], key[None], 0)
        masks[name, expert] = dropped[0] == 0
        change_F = 4 * (dropped @ a @ b)[0]
        if not dora:
            return x_D @ w + change_F
        magnitude_F = getattr(experts, f"{name}_lora_magnitude_vector")[expert]
        share_F = magnitude_F / (w + 4 * a @ b).norm(dim=0)
        return x_D @ w + (share_F - 1) * (dropped[0] @ w) + share_F * change_F

    masks: dict[tuple[str, int], Tensor] = {}
    expected_TD = torch.zeros(10, x_BSD.shape[2], dtype=torch.float64)
    for token, (x_D, key) in enumerate(zip(x_BSD.flatten(0, 1), moe.keys_BS.flatten(), strict=True)):
        for expert, weight in zip(chosen_TK[token].tolist(), weights_TK[token], strict=True):
            own = splitmix64(torch.tensor(expert), key)
            gate, up = (product(name, expert, x_D, own) for name in ("gate_proj", "up_proj"))
            expected_TD[token] += weight * product("down_proj", expert, torch.nn.functional.silu(gate) * up, own)
        one, other = (masks["gate_proj", expert] for expert in chosen_TK[token, :2].tolist())
        assert not torch.equal(one, other) and not torch.equal(one, masks["up_proj", int(chosen_TK[token, 0])])
    torch.testing.assert_close(moe(x_BSD, real_BS), expected_TD.view_as(x_BSD), rtol=1e-10, atol=1e-12)
    moe.keys_BS = None
    assert torch.equal(moe(x_BSD, real_BS), whole_BSD) and not torch.allclose(whole_BSD, expected_TD.view_as(x_BSD))


def test_what_is_dropped_is_independent_of_all_that_it_depends_on():
    """Shares of rows, positions, features, matrices and seeds, and of what two of them drop both, are as for
    independent draws: within five deviations."""
    share, size = 0.3, (64, 128, 96)
    keys_BS = token_keys(torch.arange(size[0]), torch.arange(size[1]))
    ones = torch.ones(size)
    masks = [
        Dropout.of(name, share, seed).dropped(ones, keys_BS, 0) == 0 for name, seed in (("a", 1), ("b", 1), ("a", 2))
    ]
    later = Dropout.of("a", share, 1).dropped(ones[..., :10], keys_BS, 86) == 0
    assert torch.equal(later, masks[0][..., 86:])  # features of a rank that has the last ones
    first = masks[0].double()
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1), 2, 0):
        count = ones.numel() / (first.mean(dims).numel() or 1)
        assert (first.mean(dims) - share).abs().max() < 5 * (share * (1 - share) / count) ** 0.5
    pairs = [
        (masks[0], masks[1]), (masks[0], masks[2]), (masks[0][1:], masks[0][:-1]),
        (masks[0][:, 1:], masks[0][:, :-1]), (masks[0][..., 1:], masks[0][..., :-1]),
    ]  # fmt: skip
    for one, other in pairs:
        both = (one & other).double()
        assert abs(both.mean() - share**2) < 5 * (share**2 * (1 - share**2) / both.numel()) ** 0.5


@pytest.mark.parametrize("shapes", [((6, 10), (8, 6)), ((3, 10, 6), (3, 6, 8))], ids=["dense", "experts"])
def test_first_values(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    """Their product is zero; A and B of orthogonal ones are as large as PEFT's, normal numbers through half a basis."""
    expert = len(shapes[0]) == 3
    names = ("layers.0.x_lora_A", "layers.0.x_lora_B")
    a, b = (
        ParameterSpec(name=name, shape=shape, decays=True, expert=expert, adapter="layers.0.x")
        for name, shape in zip(names, shapes, strict=True)
    )
    for init, bound in (("default", 1 / 10**0.5), ("gaussian", 1.0)):
        first = first_values(a, init, 3, torch.device("cpu"))
        assert first.shape == a.shape and 0 < first.abs().max() <= bound
        assert not first_values(b, init, 3, torch.device("cpu")).any()
    whole, other = (first_values(each, "orthogonal", 3, torch.device("cpu")) for each in (a, b))
    assert whole.shape == a.shape and other.shape == b.shape
    product = whole @ other if expert else other @ whole
    assert product.abs().max() < 1e-7
    for each in (whole, other):
        assert 0.03 < each.std() < 0.12
        assert int(torch.linalg.matrix_rank(each).max()) == 3
