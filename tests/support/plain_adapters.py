"""A llama with LoRA, its losses and AdamW, written once more in plain torch: what a server is held against.

Shapes: S positions, D dim, H heads, A head width, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import define, field
from torch import Tensor


@define(eq=False)
class PlainLlama:
    """weights: of the model, by name. heads, kv_heads: as in its spec."""

    weights: Mapping[str, Tensor]
    layers: int
    heads: int
    kv_heads: int
    eps: float = 1e-6
    theta: float = 10_000.0

    def logprobs(self, tokens: np.ndarray, factors: Mapping[str, Tensor], scale: float) -> Tensor:
        """[S, V], with the adapter whose A and B are `factors`, by name; none are given for some matrices."""

        def matrix(name: str, under: str = "") -> Tensor:
            base = self.weights[f"{under or name}.weight"]
            if f"{name}.lora_A.weight" not in factors:
                return base
            return base + scale * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]

        x_SD = self.weights["embed_tokens.weight"][torch.from_numpy(tokens).long()]
        for layer in range(self.layers):
            at = f"layers.{layer}"
            h_SD = self._norm(x_SD, f"{at}.input_layernorm")
            x_SD = x_SD + self._attention(h_SD, f"{at}.self_attn", matrix)
            h_SD = self._norm(x_SD, f"{at}.post_attention_layernorm")
            gate, up, down = (matrix(f"{at}.mlp.{each}_proj") for each in ("gate", "up", "down"))
            x_SD = x_SD + (F.silu(h_SD @ gate.T) * (h_SD @ up.T)) @ down.T
        tied = "" if "lm_head.weight" in self.weights else "embed_tokens"
        return (self._norm(x_SD, "norm") @ matrix("lm_head", tied).T).log_softmax(-1)

    def _norm(self, x_SD: Tensor, name: str) -> Tensor:
        return self.weights[f"{name}.weight"] * x_SD / (x_SD.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def _attention(self, x_SD: Tensor, at: str, matrix: Any) -> Tensor:
        count = len(x_SD)
        q, k, v = (
            (x_SD @ matrix(f"{at}.{name}_proj").T).view(count, heads, -1).transpose(0, 1)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        width = q.shape[-1]
        angle = torch.arange(count).double()[:, None] * self.theta ** (-torch.arange(0, width, 2).double() / width)
        cos, sin = angle.cos(), angle.sin()

        def turned(x_HSA: Tensor) -> Tensor:
            left, right = x_HSA.chunk(2, -1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

        q, k = turned(q), turned(k).repeat_interleave(self.heads // self.kv_heads, 0)
        v = v.repeat_interleave(self.heads // self.kv_heads, 0)
        scores = (q @ k.mT) / math.sqrt(width)
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        out = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return out.transpose(0, 1).reshape(count, -1) @ matrix(f"{at}.o_proj").T


def loss_of(name: str, logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """The sum that the protocol names."""
    if name == "cross_entropy":
        return -(logprobs * inputs["weights"]).sum()
    advantages, ratio = inputs["advantages"], torch.exp(logprobs - inputs["logprobs"])
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        return -torch.min(ratio * advantages, torch.clip(ratio, low, high) * advantages).sum()
    if name == "cispo":
        return -(torch.clip(ratio.detach(), low, high) * advantages * logprobs).sum()
    assert name == "dro"
    beta = settings.get("beta", 0.05)
    return -(advantages * logprobs).sum() + beta / 2 * ((logprobs - inputs["logprobs"]) ** 2).sum()


@define(eq=False)
class PlainModel:
    """One client's adapter. first: its first values."""

    base: PlainLlama
    first: Mapping[str, Tensor]
    scale: float
    factors: dict[str, Tensor] = field(init=False)
    moments: dict[str, Tensor] = field(factory=dict)
    step: int = 0

    def __attrs_post_init__(self) -> None:
        self.factors = {name: value.clone().requires_grad_() for name, value in self.first.items()}

    def forward_backward(
        self, data: Sequence[Any], loss: str, settings: Mapping[str, float]
    ) -> tuple[float, list[np.ndarray]]:
        """The loss, and the log-probabilities of the targets of each text; gradients are added up."""
        total, outputs = torch.zeros((), dtype=torch.float64), []
        for each in data:
            every_SV = self.base.logprobs(each.tokens, self.factors, self.scale)
            targets = torch.from_numpy(each.inputs["target_tokens"])
            wide = targets.reshape(len(each.tokens), -1)
            found = every_SV.gather(1, wide).reshape(targets.shape)
            inputs = {n: torch.from_numpy(v).double() for n, v in each.inputs.items() if n != "target_tokens"}
            total = total + loss_of(loss, found, inputs, settings)
            outputs.append(found.detach().numpy())
        total.backward()
        return total.item(), outputs

    @torch.no_grad()
    def optim_step(self, rate: float, betas: tuple[float, float], eps: float, decay: float, clip: float) -> float:
        """The norm of the gradient before it is clipped."""
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.factors.items()}
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        factor = clip / (norm + 1e-6) if clip and norm > clip else 1.0
        self.step += 1
        for name, value in self.factors.items():
            grad = grads[name] * factor
            for moment, beta, power in (("exp_avg", betas[0], 1), ("exp_avg_sq", betas[1], 2)):
                key = f"{name}/{moment}"
                before = self.moments.get(key, torch.zeros_like(value))
                self.moments[key] = beta * before + (1 - beta) * grad**power
            mean = self.moments[f"{name}/exp_avg"] / (1 - betas[0] ** self.step)
            square = self.moments[f"{name}/exp_avg_sq"] / (1 - betas[1] ** self.step)
            value.mul_(1 - rate * decay).sub_(rate * mean / (square.sqrt() + eps))
            value.grad = None
        return norm
