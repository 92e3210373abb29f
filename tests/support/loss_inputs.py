"""What the loss of a head is tried on."""

import torch

from xtrain.runtime.nn.loss import IGNORE, Head

T, D, V = 37, 16, 50


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(V, D, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[::5] = IGNORE
    labels[20:30] = IGNORE  # at some sizes a whole chunk has no valid label
    return hidden, weight, labels


def head(z_weight: float, per_chunk: int) -> Head:
    return Head(vocabulary=V, z_weight=z_weight, chunk_bytes=4 * V * per_chunk)
