"""Optimizers by their formulas, over the groups that a plan makes."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xtrain.components.optimizers.adamw_torch import LocalAdamW
from xtrain.components.optimizers.lion_torch import LionOptimizer
from xtrain.components.optimizers.muon_torch import MuonOptimizer, newton_schulz


def test_lion_is_the_update_of_its_paper():
    """Chen et al. 2023, algorithm 2, in numpy; the rate changes on the way, and one weight has no gradient at first."""
    generator = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.float64)) for _ in range(2)]
    ours = LionOptimizer(
        [{"params": weights[:1], "weight_decay": 0.3}, {"params": weights[1:]}], lr=0.1, betas=(0.9, 0.99)
    )
    w = [weight.detach().numpy().copy() for weight in weights]
    m = [np.zeros_like(each) for each in w]
    for step in range(5):
        lr = 0.1 / (step + 1)
        for group in ours.param_groups:
            group["lr"] = lr
        for i, weight in enumerate(weights):
            g = torch.randn(4, 3, generator=generator, dtype=torch.float64)
            if step == 0 and i == 1:
                weight.grad = None
                continue
            weight.grad = g.clone()
            update = np.sign(0.9 * m[i] + 0.1 * g.numpy())
            w[i] = w[i] * (1 - lr * (0.3 if i == 0 else 0.0)) - lr * update
            m[i] = 0.99 * m[i] + 0.01 * g.numpy()
        ours.step()
        for i, weight in enumerate(weights):
            np.testing.assert_allclose(weight.detach().numpy(), w[i], rtol=1e-13)
    assert np.abs(w[0]).max() > 0.1


COEFFICIENTS = (3.4445, -4.775, 2.0315)


def muon(matrices: dict[str, Tensor], rest: list[dict], number_format: torch.dtype, **options) -> MuonOptimizer:
    return MuonOptimizer(
        matrices,
        [{"params": list(matrices.values()), "weight_decay": 0.1}],
        rest,
        lr=0.02,
        momentum=0.95,
        orthogonal=partial(newton_schulz, steps=5, coefficients=COEFFICIENTS),
        number_format=number_format,
        device=torch.device("cpu"),
        betas=(0.9, 0.95),
        eps=1e-8,
        **options,
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_is_that_of_torch_and_the_rest_its_adamw(scale: str, nesterov: bool):
    """To the last bit: torch's computes in bf16, whatever the format of the parameters. Wide, tall and square."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((6, 4), (3, 8), (5, 5))
    ours = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    norm, expected = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    optimizer = muon(
        {str(n): each for n, each in enumerate(ours)},
        [{"params": [norm], "weight_decay": 0.0}],
        torch.bfloat16,
        scale=scale,
        nesterov=nesterov,
    )
    matrices = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn=scale)
    vectors = torch.optim.AdamW([expected], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(10):
        for own, other in zip([*ours, norm], [*theirs, expected], strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        for each in (optimizer, matrices, vectors):
            each.step()
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def test_muon_is_its_formula():
    """Of stacks of matrices [count, inputs, outputs], each by itself, in fp64 and by singular values."""
    generator = torch.Generator().manual_seed(3)
    stack = nn.Parameter(torch.randn(3, 4, 6, generator=generator, dtype=torch.float64))
    optimizer = muon({"experts": stack}, [{"params": []}], torch.float64, scale="original", nesterov=True)
    w, m = stack.detach().numpy().copy(), np.zeros((3, 4, 6))
    for step in range(10):
        optimizer.param_groups[0]["lr"] = lr = 0.02 / (step + 1)
        stack.grad = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
        m = 0.95 * m + 0.05 * stack.grad.numpy()
        left, values, right = np.linalg.svd(0.05 * stack.grad.numpy() + 0.95 * m, full_matrices=False)
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        for _ in range(5):
            values = COEFFICIENTS[0] * values + COEFFICIENTS[1] * values**3 + COEFFICIENTS[2] * values**5
        w = w * (1 - lr * 0.1) - lr * (6 / 4) ** 0.5 * (left * values[:, None]) @ right
        optimizer.step()
        np.testing.assert_allclose(stack.detach().numpy(), w, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("name", "shape", "dim"), [("q_proj", (6, 5), 0), ("o_proj", (5, 6), 1)])
def test_heads_are_matrices_of_their_own_where_asked(name: str, shape: tuple[int, int], dim: int, scale: str):
    generator = torch.Generator().manual_seed(5)
    whole = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
    each = {f"head.{n}": nn.Parameter(part.clone()) for n, part in enumerate(whole.detach().chunk(3, dim))}
    heads = {f"layers.*.self_attn.{name}.weight": [3, dim]}
    named, rest, options = f"layers.4.self_attn.{name}.weight", [{"params": []}], {"scale": scale, "nesterov": True}
    ours = muon({named: whole}, rest, torch.float64, heads=heads, **options)
    theirs = muon(each, rest, torch.float64, **options)
    for _ in range(3):
        whole.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        for part, gradient in zip(each.values(), whole.grad.chunk(3, dim), strict=True):
            part.grad = gradient.clone()
        ours.step()
        theirs.step()
    expected = torch.cat([part.detach() for part in each.values()], dim)
    torch.testing.assert_close(whole.detach(), expected, rtol=1e-12, atol=1e-14)


def test_muon_without_matrices_is_adamw():
    """Of a stage whose matrices are all frozen."""
    generator = torch.Generator().manual_seed(4)
    norm, expected = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(7))
    ours = muon({}, [{"params": [norm], "weight_decay": 0.0}], torch.float32, scale="original", nesterov=True)
    theirs = torch.optim.AdamW([expected], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(3):
        norm.grad = torch.randn(7, generator=generator)
        expected.grad = norm.grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(norm, expected) and norm[0] != 1


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon"])
def test_cautious_decay_is_its_formula(kind: str):
    """w ← w − lr · (u + decay · w where u · w ≥ 0), u being what the optimizer without decay subtracts (Chen et al.
    2025)."""
    generator = torch.Generator().manual_seed(8)
    start = torch.randn(6, 5, generator=generator, dtype=torch.float64)

    def optimizer(weight: Tensor, decay: float, cautious: bool) -> torch.optim.Optimizer:
        groups = [{"params": [weight], "weight_decay": decay}]
        if kind == "adamw":
            return LocalAdamW(groups, 0.1, (0.9, 0.95), 1e-8, cautious_decay=cautious)
        if kind == "lion":
            return LionOptimizer(groups, 0.1, (0.9, 0.99), cautious_decay=cautious)
        made = muon({"w": weight}, [{"params": []}], torch.float64, scale="original", nesterov=True,
                    cautious_decay=cautious)  # fmt: skip
        made.param_groups[0].update(weight_decay=decay, lr=0.1)
        return made

    ours, plain = (nn.Parameter(start.clone()) for _ in range(2))
    cautious, without = optimizer(ours, 0.3, True), optimizer(plain, 0.0, False)
    some = 0
    for _ in range(10):
        gradient = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            plain.copy_(ours)
        before = ours.detach().clone()
        ours.grad, plain.grad = gradient.clone(), gradient.clone()
        cautious.step()
        without.step()
        update = before - plain.detach()
        decays = update * before >= 0
        some += int(decays.sum())
        torch.testing.assert_close(ours.detach(), plain.detach() - 0.1 * 0.3 * before * decays, rtol=1e-12, atol=1e-14)
    assert 50 < some < 250
