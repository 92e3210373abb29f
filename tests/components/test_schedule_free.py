"""Schedule-free AdamW by the vectors of its authors' package: parameters are the average between steps."""

import torch
from torch import Tensor, nn

from xtrain.components.optimizers.schedule_free_torch import ScheduleFreeOptimizer


def matrix() -> tuple[Tensor, Tensor]:
    return torch.arange(4, dtype=torch.float64)[:, None], torch.arange(3, dtype=torch.float64)


def test_three_steps_are_those_of_the_package():
    """schedulefree 1.4: the weights of which gradients are taken in the third step, and behind it the average and the
    newest weights."""
    i, j = matrix()
    weight = nn.Parameter((((i * 3 + j) * 7) % 11 - 5) / 10)
    optimizer = ScheduleFreeOptimizer([{"params": [weight], "weight_decay": 0.1}], 0.01, (0.9, 0.95), 1e-8)
    for step in (1, 2, 3):
        optimizer.to_training_point()
        point = weight.detach().clone()
        weight.grad = (((i * 3 + j) * 5 + 3 * step) % 13 - 6) / 10
        optimizer.step()
    second = [
        [-0.48923077533315, 0.182539883812758, -0.186190034325459],
        [0.502315669374814, 0.0962907093100273, -0.287632471483222],
        [0.381923723133464, -0.00565851135654251, -0.392891296191883],
        [0.282636560418525, -0.0869346158569142, -0.506905606666573],
    ]
    average = [
        [-0.493092178609896, 0.184829121224752, -0.185362220650731],
        [0.495459344730576, 0.0998388117138768, -0.289655038578844],
        [0.384847765566316, -0.00392889264189761, -0.398424866578498],
        [0.283992762470769, -0.0873528679844487, -0.513368321858667],
    ]
    newest = [
        [-0.500766035163356, 0.188087574832879, -0.1830502358756],
        [0.480440453692067, 0.108096963623399, -0.293324258448856],
        [0.389300163547195, 0.000319706328626891, -0.410090424750252],
        [0.285420904772565, -0.0876502114498657, -0.527640226182231],
    ]
    for found, expected in ((point, second), (weight.detach(), average), (optimizer.state[weight]["z"], newest)):
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_with_a_warm_up_it_is_the_formula(monkeypatch):
    """Shares in proportion to the square of the largest rate so far, whose sum is in fp32: they are right to 6e-8."""
    monkeypatch.setattr("xtrain.plan.groups.ELEMENTS_AT_ONCE", 4)
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))
    optimizer = ScheduleFreeOptimizer([{"params": [weight], "weight_decay": 0.1}], 0.01, (0.9, 0.95), 1e-8)
    x = z = weight.detach().clone()
    v, total, largest = torch.zeros_like(x), 0.0, 0.0
    for step in range(1, 11):
        lr = optimizer.param_groups[0]["lr"] = 2.0**-7 * (min(1.0, step / 4) if step < 8 else 0.5)
        gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        y = 0.1 * z + 0.9 * x
        v = 0.95 * v + 0.05 * gradient**2
        z = z - lr * (gradient / ((v / (1 - 0.95**step)).sqrt() + 1e-8) + 0.1 * y)
        largest = max(largest, lr)
        total += largest**2
        x = x + (z - x) * largest**2 / total
        optimizer.to_training_point()
        torch.testing.assert_close(weight.detach(), y, rtol=0, atol=1e-8)
        weight.grad = gradient
        optimizer.step()
        torch.testing.assert_close(weight.detach(), x, rtol=0, atol=1e-8)


def test_weights_without_a_gradient_go_back():
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = ScheduleFreeOptimizer([{"params": [weight]}], 0.1, (0.9, 0.95), 1e-8)
    for _ in range(3):
        optimizer.to_training_point()
        weight.grad = torch.ones(3, dtype=torch.float64)
        optimizer.step()
    before, weight.grad = weight.detach().clone(), None
    optimizer.to_training_point()
    assert not torch.equal(weight, before)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before, rtol=1e-14, atol=0)
