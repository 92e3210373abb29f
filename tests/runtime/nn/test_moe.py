"""The mixture of experts against one written token by token."""

# shapes: B rows, S positions, D dim, E experts, K experts of a token, T tokens

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import CLAMPED, PLAIN, ROUTERS, architecture, fill, mixture, tokens
from torch import Tensor
from towers import tower

from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.runtime.loop.metrics import RouterMetrics, balance
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.moe import (
    ExpertWeights,
    MoE,
    _WithoutGradient,
    can_group,
    gated_by,
    grouped,
    one_by_one,
    weighted_sum,
)

ROWS = 5


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def expert(moe: MoE, e: int, x: Tensor) -> Tensor:
    """What the expert `e` makes of a token."""
    own = moe.experts
    if own.limit is None:
        return swiglu(x, own.gate_proj[e], own.up_proj[e], own.down_proj[e])
    gate = (x @ own.gate_proj[e] + own.gate_proj_bias[e]).clamp(max=own.limit)
    up = (x @ own.up_proj[e] + own.up_proj_bias[e]).clamp(-own.limit, own.limit)
    return ((up + 1) * gate * torch.sigmoid(own.alpha * gate)) @ own.down_proj[e] + own.down_proj_bias[e]


def reference(moe: MoE, arch, x_BSD: Tensor, real_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Output and losses of the layer, nothing done for two tokens at once."""
    out, losses = [], torch.zeros((), dtype=torch.float64)
    for row in range(len(x_BSD)):
        taken = torch.zeros(arch.experts, dtype=torch.float64)
        probability, squares, real = 0.0, 0.0, 0
        for x, counts in zip(x_BSD[row], real_BS[row].tolist(), strict=True):
            logits = moe.gate.weight @ x + (0 if moe.gate.bias is None else moe.gate.bias)
            scores = torch.sigmoid(logits) if arch.router_score == "sigmoid" else torch.softmax(logits, 0)
            bias = moe.gate.e_score_correction_bias
            ranking = (scores if bias is None else scores + bias).tolist()
            chosen = sorted(range(arch.experts), key=lambda e: -ranking[e])[: arch.experts_per_token]
            whole = scores[chosen].sum() if arch.router_normalise else 1.0
            y = torch.zeros_like(x)
            for e in chosen:
                y = y + scores[e] / whole * expert(moe, e, x)
            if moe.shared_experts is not None:
                shared = moe.shared_experts
                y = y + swiglu(x, shared.gate_proj.weight.T, shared.up_proj.weight.T, shared.down_proj.weight.T)
            out.append(y)
            if counts:
                real += 1
                taken[chosen] += 1
                probability = probability + scores / scores.sum()
                squares = squares + torch.logsumexp(logits, 0) ** 2
        if real:
            aux = arch.experts * (taken / taken.sum() * (probability / real)).sum()
            losses = losses + arch.router_aux_loss * aux + arch.router_z_loss * squares / real
    return torch.stack(out).view_as(x_BSD), losses / (ROWS * arch.layers)


def gradients(moe: MoE, x_BSD: Tensor) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in moe.named_parameters()} | {"x": x_BSD.grad}
    assert all(grad is not None for grad in found.values())
    return found


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        assert (grad - theirs[name]).abs().max() <= tolerance * theirs[name].abs().max(), name


@pytest.mark.parametrize(("router", "layer"), [*((each, PLAIN) for each in ROUTERS), ("softmax", CLAMPED)])
def test_output_losses_and_gradients_are_those_of_the_loop_over_tokens(router, layer):
    arch = architecture(**ROUTERS[router])
    x_BSD, real_BS = tokens(4, 9)
    real_BS[2] = False  # a row of nothing but padding has no losses
    seed = torch.randn(x_BSD.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    moe = mixture(arch, rows=ROWS, layer=layer)
    out_BSD = moe(x_BSD, real_BS)
    (out_BSD * seed).sum().backward()
    ours, losses = gradients(moe, x_BSD), moe.gate(x_BSD, real_BS).loss

    moe, (x_BSD, _) = mixture(arch, rows=ROWS, layer=layer), tokens(4, 9)
    wanted_BSD, wanted = reference(moe, arch, x_BSD, real_BS)
    ((wanted_BSD * seed).sum() + wanted).backward()
    assert torch.allclose(out_BSD, wanted_BSD, rtol=0, atol=1e-12)
    assert torch.allclose(losses, wanted, rtol=1e-12)
    assert_close(ours, gradients(moe, x_BSD))


@pytest.mark.parametrize(("aux", "z"), [(0.7, 0.0), (0.0, 0.7)])
def test_the_attached_losses_have_the_gradients_of_finite_differences(aux, z):
    arch = architecture(router_aux_loss=aux, router_z_loss=z)
    moe, (x_BSD, real_BS) = mixture(arch, rows=ROWS), tokens(2, 6)
    (moe(x_BSD, real_BS) * 0).sum().backward()  # what comes after the layer does not matter
    step, entries = 1e-5, [(0, 0), (3, 5), (7, 15)]
    for entry in entries:
        values = []
        for move in (step, -2 * step):
            with torch.no_grad():
                moe.gate.weight[entry] += move
            values.append(moe.gate(x_BSD, real_BS).loss.item())
        with torch.no_grad():
            moe.gate.weight[entry] += step
        slope = (values[0] - values[1]) / (2 * step)
        assert moe.gate.weight.grad[entry].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_aux_is_one_at_perfect_balance_and_the_number_of_experts_at_collapse():
    arch = architecture(
        dim=8, experts_per_token=1, router_aux_loss=1.0, router_z_loss=0.0, layers=1, router_normalise=False
    )
    moe = mixture(arch, rows=1)
    with torch.no_grad():
        moe.gate.weight.copy_(torch.eye(8) * 50)
    real = torch.ones(1, 16, dtype=torch.bool)
    balanced = torch.eye(8, dtype=torch.float64).repeat(2, 1)[None]
    assert moe.gate(balanced, real).loss.item() == pytest.approx(1.0, rel=1e-12)
    assert moe.gate(balanced[:, :1].expand(1, 16, 8), real).loss.item() == pytest.approx(8.0, rel=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
def test_padding_changes_neither_losses_nor_loads_nor_what_comes_of_real_tokens(router):
    arch = architecture(**ROUTERS[router])
    results = []
    for noise in (0.0, 3.0):
        moe, (x_BSD, real_BS) = mixture(arch), tokens(3, 9)
        x_BSD = torch.where(real_BS[..., None], x_BSD, x_BSD * 2 + noise)
        out_BSD = moe(x_BSD, real_BS)
        loss = moe.gate(x_BSD, real_BS).loss
        results.append((out_BSD[real_BS], loss, moe.gate.loads_E, moe.gate.aux))
    # Products of other numbers of rows round in another order.
    (out, *losses), (other_out, *others) = results
    assert torch.allclose(out, other_out, rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
    # Two forwards have counted by now.
    assert results[0][2].sum() == 2 * int(real_BS.sum()) * arch.experts_per_token


def test_loads_are_counted_in_training_only():
    arch = architecture(router_aux_loss=0.0, router_z_loss=0.0)
    moe, (x_BSD, real_BS) = mixture(arch), tokens(3, 9)
    moe.eval()
    assert moe.gate(x_BSD, real_BS).loss is None and moe.gate.loads_E is None
    moe.train()
    chosen = moe.gate(x_BSD, real_BS).chosen_TK
    wanted = torch.bincount(chosen[real_BS.flatten()].flatten(), minlength=arch.experts)
    assert torch.equal(moe.gate.loads_E, wanted) and moe.gate.loads_E.dtype == torch.int64


def test_gradients_of_inputs_and_weights_can_be_taken_apart():
    moe, (x_BSD, real_BS) = mixture(architecture(**ROUTERS["sigmoid, biased, with shared experts"])), tokens(2, 6)
    moe(x_BSD, real_BS).square().sum().backward()
    wanted = gradients(moe, x_BSD)
    loss = moe(x_BSD, real_BS).square().sum()
    (x_grad,) = torch.autograd.grad(loss, x_BSD, retain_graph=True)
    grads = torch.autograd.grad(loss, list(moe.parameters()))
    assert torch.equal(x_grad, wanted["x"])
    assert all(torch.equal(a, wanted[n]) for (n, _), a in zip(moe.named_parameters(), grads, strict=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_the_loop(dtype, biased: bool):
    generator = torch.Generator().manual_seed(0)
    counts_E = torch.tensor([5, 0, 11, 0])  # experts without rows in the middle and at the end
    shapes = ((16, 16), (4, 16, 8), (4, 16, 8), (4, 8, 16), *(((4, 8), (4, 8), (4, 16)) if biased else ()))
    results = []
    for product in (grouped, one_by_one):
        generator.manual_seed(0)
        rows, *weights = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
        biases = {"biases": tuple(weights[3:]), "gated": gated_by(2.0, 1.0)} if biased else {}
        out = product(rows, counts_E, ExpertWeights(tuple(weights[:3]), **biases))
        out.float().square().sum().backward()
        results.append([out, rows.grad, *(w.grad for w in weights)])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    assert not can_group(rows, [weight.shape for weight in weights[:3]]), "only CUDA has the kernel"


@pytest.mark.parametrize("settings", [{"limit": 0.0}, {"limit": -7.0}, {"limit": 7.0, "alpha": 0.0}])
def test_bounds_of_experts_are_above_zero(settings):
    with pytest.raises(ValueError, match="must be above 0"):
        ExpertsLayer("mlp", **settings)


def test_the_router_works_in_fp32_and_its_bias_stays_so():
    arch = architecture(**ROUTERS["sigmoid, biased, with shared experts"])
    moe = mixture(arch).to(torch.bfloat16)
    assert moe.gate.weight.dtype == torch.bfloat16
    assert moe.gate.e_score_correction_bias.dtype == torch.float32
    x_BSD, real_BS = tokens(3, 9)
    x_BSD = x_BSD.detach().bfloat16()
    routing = moe.gate(x_BSD, real_BS)
    scores = torch.sigmoid(x_BSD.float() @ moe.gate.weight.float().T).flatten(0, 1)
    wanted = (scores + moe.gate.e_score_correction_bias).topk(arch.experts_per_token).indices
    assert torch.equal(routing.chosen_TK, wanted)
    assert routing.weights_TK.dtype == torch.float32 and moe(x_BSD, real_BS).dtype == torch.bfloat16


def test_sigmoids_that_are_all_zero_are_no_division_by_zero():
    moe, (x_BSD, real_BS) = mixture(architecture(router_score="sigmoid", router_z_loss=0.0)), tokens(1, 3)
    with torch.no_grad():
        moe.gate.weight.copy_(torch.full((8, 16), -1e4))
    assert moe.gate(torch.ones_like(x_BSD), real_BS).weights_TK.isfinite().all()


def test_names_and_shapes_are_those_of_the_plan():
    arch = architecture(shared_experts=2)
    moe = MoE(arch, Axes(), 1, PLAIN)
    fill(moe)
    assert {name: tuple(p.shape) for name, p in moe.named_parameters()} == {
        "gate.weight": (8, 16),
        "experts.gate_proj": (8, 16, 8),
        "experts.up_proj": (8, 16, 8),
        "experts.down_proj": (8, 8, 16),
        "shared_experts.gate_proj.weight": (16, 16),
        "shared_experts.up_proj.weight": (16, 16),
        "shared_experts.down_proj.weight": (16, 16),
    }
    assert dict(moe.named_buffers()) == {}
    assert list(dict(MoE(architecture(router_bias_speed=0.1), Axes(), 1, PLAIN).named_buffers())) == [
        "gate.e_score_correction_bias"
    ]


RANK: Any = SimpleNamespace(world_size=1, device=torch.device("cpu"))


def test_the_bias_moves_towards_the_mean_load():
    arch = architecture(layers=1, experts=4, dim=4, experts_per_token=1, router_bias_speed=0.25)
    model = tower(arch)
    gate = model.parts[0].layers["0"].mlp.gate
    gate.e_score_correction_bias.zero_()
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
    run = balance(planned(arch), model, RANK, speed=0.25)
    for load_E, wanted_E in (([1, 2, 3, 2], [0.25, 0, -0.25, 0]), ([1, 1, 1, 2], [0.5, 0.25, 0, -0.25])):
        x_BSD = torch.eye(4, dtype=torch.float64).repeat_interleave(torch.tensor(load_E), 0)[None] * 9
        gate(x_BSD, torch.ones(x_BSD.shape[:2], dtype=torch.bool))
        run(None)  # pyright: ignore[reportArgumentType]
        assert gate.e_score_correction_bias.tolist() == wanted_E


def test_the_log_has_means_over_steps_rows_and_layers_and_shares_of_loads():
    arch = architecture(layers=2)
    model = tower(arch, rows=ROWS)
    metrics = RouterMetrics.of(planned(arch), model, RANK)
    for times in (1, 2):  # what was told once is not told again
        for seed in range(3):
            model.parts[0](*tokens(ROWS, 6, seed=seed))
        taken = metrics.take(3 * ROWS)
        assert taken.keys() == {"moe/aux_loss", "moe/load/0", "moe/load/1"}
        gates = [block.mlp.gate for block in model.parts[0].layers.values()]
        again = torch.stack([gate.aux for gate in gates]).sum().item() / times / (2 * ROWS * 3)
        assert taken["moe/aux_loss"] == pytest.approx(again, rel=1e-12)
        for layer, gate in enumerate(gates):
            shares = (gate.loads_E.double() / gate.loads_E.sum()).tolist()
            assert taken[f"moe/load/{layer}"] == pytest.approx(shares, rel=1e-12)
    dense = architecture(family="qwen3", experts=0)
    assert RouterMetrics.of(planned(dense), tower(dense), RANK).take(3) == {}


def test_layers_without_experts_count_in_no_mean_and_have_no_loads():
    arch = architecture(layers=4, own={"expert_every": 2}, router_aux_loss=0.3, router_z_loss=0.2)
    model = tower(arch, rows=ROWS)
    metrics = RouterMetrics.of(planned(arch), model, RANK)
    model.parts[0](*tokens(ROWS, 6))
    taken = metrics.take(ROWS)
    assert taken.keys() == {"moe/aux_loss", "moe/load/1", "moe/load/3"}
    gates = [model.parts[0].layers[layer].mlp.gate for layer in ("1", "3")]
    assert taken["moe/aux_loss"] == pytest.approx(sum(gate.aux.item() for gate in gates) / (2 * ROWS), rel=1e-12)
    for layer, gate in zip((1, 3), gates, strict=True):
        assert taken[f"moe/load/{layer}"] == pytest.approx(
            (gate.loads_E.double() / gate.loads_E.sum()).tolist(), rel=1e-12
        )
        assert (gate.aux_weight, gate.z_weight) == pytest.approx((0.3 / (2 * ROWS), 0.2 / (2 * ROWS)), rel=1e-12)


def planned(arch) -> Any:
    """A plan, as far as routers read it."""
    return SimpleNamespace(architecture=arch, node=lambda name: SimpleNamespace(args={"rows": ROWS}))


@pytest.mark.slow
def test_sum_and_activation_of_experts_compile_to_the_same_numbers():
    """As Inductor gets them, for any number of rows, forward and backward, to 1e-6."""
    torch._dynamo.reset()
    compiled = partial(torch.compile, backend="aot_eager_decomp_partition", dynamic=True, fullgraph=True)
    generator = torch.Generator().manual_seed(2)
    both, gated = compiled(weighted_sum), {limit: gated_by(limit, 1.7) for limit in (None, 0.5)}
    for rows in (7, 12):
        out = torch.randn(rows, 3, 8, generator=generator).bfloat16()
        weights = torch.rand(rows, 3, generator=generator)
        for plain, ours, inputs in (
            (lambda *given: weighted_sum(*given, torch.bfloat16), lambda *given: both(*given, torch.bfloat16),
             (out, weights)),
            *((gated[limit], compiled(gated[limit]), out.float().unbind(1)[:2]) for limit in gated),
        ):  # fmt: skip
            found = []
            for call in (plain, ours):
                given = [each.clone().requires_grad_() for each in inputs]
                result = call(*given)
                result.float().square().sum().backward()
                found.append([result, *(each.grad for each in given)])
            for expected, got in zip(*found, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_experts_without_rows_get_no_gradient():
    """On Blackwell the kernel leaves what was in memory."""
    matrix = torch.ones(3, 2, 2, requires_grad=True)
    out = _WithoutGradient.apply(matrix, torch.tensor([2, 0, 1]))
    out.backward(torch.full((3, 2, 2), float("nan")).index_fill(0, torch.tensor([0, 2]), 5.0))
    assert matrix.grad is not None and matrix.grad.sum((1, 2)).tolist() == [20, 0, 20]
