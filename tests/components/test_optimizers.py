"""Optimizers by their formulas, over the groups that a plan makes."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xtrain.components.optimizers.adamw_torch import LocalAdamW
from xtrain.components.optimizers.ademamix_torch import AdEMAMixOptimizer
from xtrain.components.optimizers.lion_torch import LionOptimizer
from xtrain.components.optimizers.muon import polar_express
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
        orthogonal=partial(newton_schulz, series=[COEFFICIENTS] * 5),
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


def polar_express_of_singular_values(values: np.ndarray, steps: int) -> np.ndarray:
    """Amsel et al. 2025, algorithm 1: the quintic of each step is nearest to 1 on the interval that the step before
    leaves, of which no less than a cushion counts; all but the converged ones are made 1% flatter."""
    low, high, powers = 1e-3, 1.0, np.array([1, 3, 5])
    for step in range(steps):
        least = max(low, 0.02407327424182761 * high)
        found = np.array([15, -10, 3]) / 8 / high**powers
        if least / high < 1 - 5e-6:
            points = np.array([least, (3 * least + high) / 4, (least + 3 * high) / 4, high])
            for _ in range(50):  # of Remez' exchange
                errors = np.array([[1], [-1], [1], [-1]])
                found = np.linalg.solve(np.hstack([points[:, None] ** powers, errors]), np.ones(4))[:3]
                root = np.sqrt(9 * found[1] ** 2 - 20 * found[0] * found[2])
                points[1:3] = np.sqrt((np.array([-root, root]) - 3 * found[1]) / (10 * found[2]))
        if least > low:
            found *= 2 / sum((found * end**powers).sum() for end in (low, high))
        values = ((values[..., None] / (1.01 if step < 7 else 1)) ** powers * found).sum(-1)
        low = float((found * low**powers).sum())
        high = 2 - low
    return values


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_polar_express_is_the_best_polynomial_of_each_step(steps: int):
    generator = torch.Generator().manual_seed(6)
    matrices = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    left, values, right = np.linalg.svd(matrices.numpy(), full_matrices=False)
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    values = polar_express_of_singular_values(values / (norms * 1.01), steps)
    ours = newton_schulz(matrices, polar_express(steps), margin=1.01)
    np.testing.assert_allclose(ours.numpy(), (left * values[:, None]) @ right, rtol=1e-8, atol=1e-8)
    assert (np.abs(values - 1).max() < 1e-3) == (steps == 9)


def test_updates_of_neurons_are_divided_as_by_the_authors_of_normuon():
    """Li et al. 2025 in numpy, from Muon's own updates: a tall and a wide matrix, and a stack of which outputs are
    columns."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"layers.0.tall": (6, 4), "layers.0.wide": (3, 8), "layers.0.stack": (2, 4, 6)}
    first = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    ours, plain = ({name: nn.Parameter(each.clone()) for name, each in first.items()} for _ in range(2))
    neurons = {"decay": 0.9, "columns": ["layers.*.stack"]}
    rest, options = [{"params": []}], {"scale": "original", "nesterov": True}
    divided = muon(ours, rest, torch.float64, neurons=neurons, **options)
    undivided = muon(plain, rest, torch.float64, **options)
    means = dict.fromkeys(shapes, np.zeros(()))
    weights = {name: each.numpy().copy() for name, each in first.items()}
    for _ in range(4):
        before = {name: each.detach().numpy().copy() for name, each in plain.items()}
        for name, each in ours.items():
            each.grad = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            plain[name].grad = each.grad.clone()
        divided.step()
        undivided.step()
        for name, each in ours.items():
            u = before[name] * (1 - 0.02 * 0.1) - plain[name].detach().numpy()  # with rate and scale
            sides = (1, 2) if u.ndim == 3 else (0, 1)
            outputs, inputs = sides[::-1] if u.ndim == 3 else sides
            size = 0.02 * max(1.0, u.shape[outputs] / u.shape[inputs]) ** 0.5
            means[name] = 0.9 * means[name] + 0.1 * ((u / size) ** 2).mean(inputs, keepdims=True)
            v = u / (np.sqrt(means[name]) + 1e-10)
            norms = [np.sqrt((x**2).sum(sides, keepdims=True)) for x in (u, v)]
            weights[name] = weights[name] * (1 - 0.02 * 0.1) - v * norms[0] / (norms[1] + 1e-10)
            np.testing.assert_allclose(each.detach().numpy(), weights[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("warmup", [None, 3])
def test_ademamix_is_the_update_of_its_paper(warmup: int | None):
    """Pagliardini et al. 2024, algorithm 1 with the authors' warm-ups, in numpy."""
    generator = torch.Generator().manual_seed(8)
    weight = nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.float64))
    groups = [{"params": [weight], "weight_decay": 0.3}]
    ours = AdEMAMixOptimizer(
        groups, lr=0.1, betas=(0.9, 0.99), beta3=0.999, alpha=4.0, alpha_warmup=warmup, beta3_warmup=warmup, eps=1e-8
    )
    w = weight.detach().numpy().copy()
    m, s, v = (np.zeros_like(w) for _ in range(3))
    for step in range(1, 7):
        g = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        weight.grad = g.clone()
        ours.step()
        alpha, beta = 4.0, 0.999
        if warmup is not None and step < warmup:
            ends = [np.log(0.5) / np.log(each + 1e-8) - 1 for each in (0.9, 0.999)]
            alpha, time = 4.0 * step / warmup, ends[0] + (ends[1] - ends[0]) * step / warmup
            beta = 0.5 ** (1 / (time + 1))
        m, s, v = 0.9 * m + 0.1 * g.numpy(), beta * s + (1 - beta) * g.numpy(), 0.99 * v + 0.01 * g.numpy() ** 2
        update = (m / (1 - 0.9**step) + alpha * s) / (np.sqrt(v) / np.sqrt(1 - 0.99**step) + 1e-8)
        w = w - 0.1 * (update + 0.3 * w)
        np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-12, atol=1e-15)


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
