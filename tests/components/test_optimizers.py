"""Optimizers by their formulas, over the groups that a plan makes."""

import numpy as np
import torch
from torch import nn

from xtrain.components.optimizers.lion_torch import LionOptimizer


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
