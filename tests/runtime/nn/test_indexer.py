"""The loss of an indexer against the formula of the paper, one document and one head at a time."""

# shapes: as in sparse_attention.py; S positions of a row or of a document

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from mixtures import fill
from torch import Tensor

from xtrain.planner.load import plan_from_text
from xtrain.runtime.nn.attention import KERNELS
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.latent_attention import ChosenPositions
from xtrain.runtime.nn.layers import Rotation
from xtrain.runtime.nn.sparse_attention import SparseLatentAttention

SPEC = """
experiment indexed {{ seed = 1, budget = 8 steps }}
model deepseek_v32 {{
  dim = 24, layers = 1, heads = 3, q_rank = 10, kv_rank = 8, nope_dim = 6, rope_dim = 4, value_dim = 6, experts = 2,
  experts_per_token = 1, expert_ffn = 8, index_heads = 5, index_dim = 6, index_topk = {chosen}, index_loss = 0.7
}}
tokenizer bytes
dataset made {{ source = synthetic() }}
batch {{ sequence = 32, rows = 2 }}
optimizer adamw {{ lr = 1e-3 }}
"""
ROWS, LENGTHS = 2, ((9, 4, 19), (17, 15))
PADDING = 6  # positions at the end of the second row that are not real
BOUNDS = torch.tensor([0, 9, 13, 32, 49, 64], dtype=torch.int32)


def attention(chosen: int, **changes: Any) -> tuple[SparseLatentAttention, Any]:
    """The attention of the block, and its settings."""
    compiled = plan_from_text(SPEC.format(chosen=chosen), "s.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    arch: Any = compiled.plan.architecture
    (layer,) = (each for each in arch.kinds[0].block.layers() if each.name == "self_attn")
    layer = evolve(layer, **changes)
    module = SparseLatentAttention(arch, KERNELS["documents"], Axes(), layer, ROWS).double()
    fill(module)
    return module, (arch, layer)


def computed(module: SparseLatentAttention, arch: Any, x_BSD: Tensor) -> Tensor:
    places_BS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    angles = arch.kinds[0].block.angles(arch)
    rotate = Rotation.of(places_BS, angles, x_BSD.dtype)
    packing = DocumentLayout.from_lengths(BOUNDS, ROWS, 32, x_BSD.device)
    return module(x_BSD, rotate, packing, None, {}, real())


def real() -> Tensor:
    real_BS = torch.ones(ROWS, 32, dtype=torch.bool)
    real_BS[1, -PADDING:] = False
    return real_BS


def input_of(seed: int = 1) -> Tensor:
    return torch.randn(
        ROWS, 32, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def turned(x_SA: Tensor, width: int, theta: float, *, adjacent: bool) -> Tensor:
    """The first `width` numbers of each position rotated, pairs of adjacent ones or of one from each half."""
    angles_SP = torch.arange(len(x_SA), dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    part, rest = x_SA[:, :width], x_SA[:, width:]
    one, other = (part[:, ::2], part[:, 1::2]) if adjacent else part.chunk(2, dim=1)
    one, other = one * angles_SP.cos() - other * angles_SP.sin(), other * angles_SP.cos() + one * angles_SP.sin()
    return torch.cat((one, other, rest), dim=1)


def rms(x_SR: Tensor, weight_R: Tensor) -> Tensor:
    return x_SR * (x_SR.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight_R


def divergences(w: Mapping[str, Tensor], layer: Any, arch: Any, x_SD: Tensor) -> Tensor:
    """KL(p_t ‖ softmax(I_t)) of every position of a document, with gradients by the weights of the indexer."""
    heads, nope, rope, theta = arch.heads, layer.nope_dim, layer.rope_dim, arch.rope_theta
    with torch.no_grad():
        narrow_SR = rms(x_SD @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])
        q_SHA = (narrow_SR @ w["q_b_proj.weight"].T).unflatten(-1, (heads, nope + rope))
        both_SR = x_SD @ w["kv_a_proj_with_mqa.weight"].T
        latent_SR, shared_SP = both_SR[:, : layer.kv_rank], both_SR[:, layer.kv_rank :]
        latent_SR = rms(latent_SR, w["kv_a_layernorm.weight"])
        k_SHA = (latent_SR @ w["kv_b_proj.weight"].T).unflatten(-1, (heads, nope + layer.value_dim))
    q_SJI = (narrow_SR @ w["indexer.wq_b.weight"].T).unflatten(-1, (layer.index_heads, layer.index_dim))
    k_SI = F.layer_norm(
        x_SD.detach() @ w["indexer.wk.weight"].T,
        (layer.index_dim,),
        w["indexer.k_norm.weight"],
        w["indexer.k_norm.bias"],
        1e-6,
    )
    weights_SJ = x_SD.detach() @ w["indexer.weights_proj.weight"].T / math.sqrt(layer.index_heads)
    k_SI = turned(k_SI, rope, theta, adjacent=False)
    scores_SL = torch.zeros(len(x_SD), len(x_SD), dtype=torch.float64)
    for j in range(layer.index_heads):
        q_SI = turned(q_SJI[:, j], rope, theta, adjacent=False)
        scores_SL = scores_SL + weights_SJ[:, j, None] * (q_SI @ k_SI.T / math.sqrt(layer.index_dim)).relu()
    found = []
    for t in range(len(x_SD)):
        seen = scores_SL[t, : t + 1].topk(min(layer.chosen, t + 1)).indices
        p = torch.zeros(len(seen), dtype=torch.float64)
        for h in range(heads):
            q = turned(q_SHA[:, h, nope:], rope, theta, adjacent=True)[t]
            k = turned(shared_SP, rope, theta, adjacent=True)[seen]
            p += ((k @ q + k_SHA[seen, h, :nope] @ q_SHA[t, h, :nope]) * layer.scale).softmax(0).detach()
        p = p / p.sum()
        found.append((p * (p.log() - scores_SL[t, seen].log_softmax(0))).sum())
    return torch.stack(found)


def by_formula(module: SparseLatentAttention, layer: Any, arch: Any, x_BSD: Tensor) -> Tensor:
    """The sum over rows of the mean divergence of their real positions."""
    weights, total = dict(module.named_parameters()), torch.zeros((), dtype=torch.float64)
    for x_SD, lengths, real_S in zip(x_BSD, LENGTHS, real(), strict=True):
        each = [divergences(weights, layer, arch, document_SD) for document_SD in x_SD.split(lengths)]
        total = total + torch.cat(each)[real_S].mean()
    return total


def gradients(module: SparseLatentAttention) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("chosen", [5, 40], ids=["some positions", "all positions, as in the warm-up"])
def test_an_indexer_learns_from_the_divergence_alone(chosen: int):
    module, (arch, layer) = attention(chosen)
    assert layer.index_loss == 0.7 and module.indexer is not None
    x_BSD = input_of()
    computed(module, arch, x_BSD).square().sum().backward()
    ours, of_input = gradients(module), x_BSD.grad
    module.zero_grad()
    loss = by_formula(module, layer, arch, x_BSD)
    assert module.indexer.aux is not None and module.indexer.aux.item() == pytest.approx(loss.item(), rel=1e-12)
    (loss * layer.index_loss / ROWS).backward()
    theirs = gradients(module)
    assert theirs.keys() == {name for name in ours if name.startswith("indexer.")} and len(theirs) == 5
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-10, atol=1e-12), name
    # The rest learns as without it, but for what masked products round.
    frozen, _ = attention(chosen, index_loss=0.0)
    again_BSD = input_of()
    computed(frozen, arch, again_BSD).square().sum().backward()
    assert of_input is not None and again_BSD.grad is not None
    assert torch.allclose(of_input, again_BSD.grad, rtol=1e-9, atol=1e-11)
    for name, gradient in gradients(frozen).items():
        assert name.startswith("indexer.") or torch.allclose(ours[name], gradient, rtol=1e-9, atol=1e-11), name


def test_an_evaluation_has_no_loss_of_indexers():
    module, (arch, _) = attention(5)
    computed(module.eval(), arch, input_of()).sum().backward()
    assert module.indexer is not None and module.indexer.aux is None
    assert not [name for name in gradients(module) if name.startswith("indexer.")]


def test_compiled_code_takes_chosen_positions():
    """As blocks do that share a choice."""
    given = torch.zeros(2, 3, 3, dtype=torch.bool)
    call = torch.compile(lambda seen: ChosenPositions(seen).seen_BSL.logical_not(), backend="eager", fullgraph=True)
    assert call(given).all()
