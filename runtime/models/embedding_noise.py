"""Noise on what is embedded (NEFTune, Jain et al. 2023, arXiv 2310.05914).

What is drawn for a number depends on the seed of the run, the number of the row in the run, the position in the row and
the feature: every layout and a run that goes on add the same.

Shapes: B rows, S positions, T = B · S, D features.
"""

import torch
from attrs import frozen
from torch import Tensor

from xtrain.dsl.schema.adapters import DROPOUT_CHUNK
from xtrain.runtime.models.dropout import mixed
from xtrain.runtime.models.splitmix import splitmix64, stream_of


@frozen
class EmbeddingNoise:
    """Even numbers from −most up to most. stream: of the seed."""

    most: float
    stream: int

    @classmethod
    def of(cls, most: float, seed: int) -> "EmbeddingNoise":
        return cls(most, stream_of(f"{seed}:embedding"))

    def add(self, x_BSD: Tensor, keys_BS: Tensor) -> Tensor:
        """To x, in place. keys_BS: as of `token_keys`, of its positions."""
        x_TD = x_BSD.detach().view(-1, x_BSD.shape[-1])  # gradients pass as if it were not there
        features = x_TD.shape[1]
        feature_D = splitmix64(torch.arange(features, device=x_TD.device), self.stream).to(torch.int32)
        token_T = splitmix64(keys_BS.flatten(), self.stream).to(torch.int32)
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        each = max(1, DROPOUT_CHUNK // features)
        for begin in range(0, len(token_T), each):
            bits = mixed(token_T[begin : begin + each, None] + feature_D)
            x_TD[begin : begin + each] += (bits.to(exact) * (self.most * 2.0**-31)).to(x_TD.dtype)
        return x_BSD
