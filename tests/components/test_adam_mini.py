"""Adam-mini as the library of its authors has it, and its blocks in a plan."""

import math

import pytest
import torch
from torch import Tensor, nn

from xtrain.components.optimizers.adam_mini_torch import AdamMiniOptimizer, BlockedParameter

DIM, HEADS, KV_HEADS, STEPS = 8, 4, 2, 10
# Name → shape, blocks and heads: those of a llama with biases.
SHAPES = {
    "embed_tokens.weight": ((6, DIM), "rows", 1),
    "layers.0.self_attn.q_proj.weight": ((DIM, DIM), "heads", HEADS),
    "layers.0.self_attn.k_proj.weight": ((DIM // 2, DIM), "heads", KV_HEADS),
    "layers.0.self_attn.k_proj.bias": ((DIM // 2,), "elements", 1),
    "layers.0.self_attn.v_proj.weight": ((DIM // 2, DIM), "rows", 1),
    "layers.0.self_attn.o_proj.weight": ((DIM, DIM), "rows", 1),
    "layers.0.mlp.up_proj.weight": ((12, DIM), "rows", 1),
    "layers.0.mlp.down_proj.weight": ((DIM, 12), "rows", 1),
    "norm.weight": ((DIM,), "whole", 1),
    "lm_head.weight": ((6, DIM), "rows", 1),
}
# Of each after ten steps of adam-mini 1.1.1 in fp64: the root of the mean square, and the sum of all numbers, each
# times its place from 1 on over how many there are.
EXPECTED = {
    "embed_tokens.weight": (0.06751562233949107, -0.3495678089979098),
    "layers.0.self_attn.q_proj.weight": (0.06819540371947282, 0.5488790243622235),
    "layers.0.self_attn.k_proj.weight": (0.06914873055242844, 0.1659829430870706),
    "layers.0.self_attn.k_proj.bias": (0.07119438358803497, -0.17869517678831393),
    "layers.0.self_attn.v_proj.weight": (0.06802820307403311, -0.18753180711816128),
    "layers.0.self_attn.o_proj.weight": (0.07053384666647773, -0.21655210939740868),
    "layers.0.mlp.up_proj.weight": (0.07059260338750825, -0.28074761118053204),
    "layers.0.mlp.down_proj.weight": (0.07045373032291347, -0.2852860860811011),
    "norm.weight": (0.06411321205982477, 0.24064046407645642),
    "lm_head.weight": (0.07543059071225833, -0.023364862774663105),
}


def numbers(shape: tuple[int, ...], place: int, step: int) -> Tensor:
    """Small ones without a pattern; gradients differ by two decades from step to step."""
    i = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    return (((i + 3 * place) * (5 + step) * 7919) % 101 - 50) / 500 * 10.0 ** (step % 3)


def weights() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(numbers(shape, place, 0)) for place, (name, (shape, _, _)) in enumerate(SHAPES.items())}


def train(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    for step in range(1, STEPS + 1):
        for place, parameter in enumerate(parameters.values()):
            parameter.grad = numbers(tuple(parameter.shape), place + 1, step)
        optimizer.step()


def make(parameters: dict[str, nn.Parameter]) -> AdamMiniOptimizer:
    args: dict = {"heads": {}, "rows": [], "columns": [], "whole": []}
    found = []
    for name, parameter in parameters.items():
        _, blocks, heads = SHAPES[name]
        pattern = name.replace("layers.0", "layers.*")
        if blocks == "heads":
            args["heads"][pattern] = heads
        elif blocks != "elements":
            args[blocks].append(pattern)
        found.append(BlockedParameter(name=name, parameter=parameter, blocks=blocks, heads=heads, expert=False))
    groups = [
        {"params": [each for name, each in parameters.items() if decays(name) == own], "weight_decay": 0.1 * own}
        for own in (True, False)
    ]
    return AdamMiniOptimizer(groups, found, 0.01, (0.9, 0.95), 1e-8, torch.device("cpu"), args)


def decays(name: str) -> bool:
    """As in the library, which takes the embedding for a matrix like others."""
    return "norm" not in name and "bias" not in name


def summary(parameter: Tensor) -> tuple[float, float]:
    flat = parameter.detach().flatten()
    places = torch.arange(1, len(flat) + 1, dtype=torch.float64) / len(flat)
    return float(flat.square().mean().sqrt()), float((flat * places).sum())


@pytest.mark.parametrize("at_once", [16, 2**24])
def test_it_is_that_of_its_authors(monkeypatch, at_once: int):
    """Ten steps in fp64: heads, rows, whole vectors and biases."""
    monkeypatch.setattr("xtrain.plan.groups.ELEMENTS_AT_ONCE", at_once)
    ours = weights()
    optimizer = make(ours)
    train(optimizer, ours)
    for name, parameter in ours.items():
        assert summary(parameter) == pytest.approx(EXPECTED[name], rel=1e-12), name
    shapes = {name: tuple(optimizer.state[each]["block_avg_sq"].shape) for name, each in ours.items()}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (DIM, 1) and shapes["norm.weight"] == (DIM,)


def test_the_library_itself_has_the_same_weights():
    library = pytest.importorskip("adam_mini")
    ours, theirs = weights(), weights()
    train(make(ours), ours)
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "verbose": False}
    train(library.Adam_mini(list(theirs.items()), dim=DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, **options), theirs)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-12, atol=1e-14)
        assert summary(theirs[name]) == pytest.approx(EXPECTED[name], rel=1e-12), name


def test_experts_have_an_average_for_each_output():
    """A stack [experts, inputs, outputs] is that of their transposed matrices, one by one."""
    generator = torch.Generator().manual_seed(1)
    stack = nn.Parameter(torch.randn(3, 4, 5, generator=generator, dtype=torch.float64))
    apart = {f"mlp.experts.{n}.up_proj.weight": nn.Parameter(each.mT.clone()) for n, each in enumerate(stack.detach())}

    def made(parameters: dict[str, nn.Parameter], blocks: str, expert: bool) -> AdamMiniOptimizer:
        found = [
            BlockedParameter(name=name, parameter=each, blocks=blocks, heads=1, expert=expert)
            for name, each in parameters.items()
        ]
        args = {"heads": {}, "rows": [], "columns": [], "whole": [], blocks: list(parameters)}
        groups = [{"params": list(parameters.values())}]
        return AdamMiniOptimizer(groups, found, 0.01, (0.9, 0.95), 1e-8, torch.device("cpu"), args)

    ours, theirs = made({"stack": stack}, "columns", True), made(apart, "rows", False)
    for _ in range(3):
        stack.grad = torch.randn(stack.shape, generator=generator, dtype=torch.float64)
        for each, gradient in zip(apart.values(), stack.grad, strict=True):
            each.grad = gradient.mT.clone()
        ours.step()
        theirs.step()
    expected = torch.stack([each.detach().mT for each in apart.values()])
    torch.testing.assert_close(stack.detach(), expected, rtol=1e-12, atol=1e-14)
