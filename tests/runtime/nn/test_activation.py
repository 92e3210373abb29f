"""Blocks that run again in the backward compute what those do that keep everything."""

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mixtures import ROUTERS, architecture, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from towers import tower

from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn import recompute
from xtrain.runtime.nn.build import compile_blocks, recompute_blocks, replay_routing
from xtrain.runtime.nn.recompute import recomputing, remember
from xtrain.runtime.nn.transformer import ModelParts

RANK: Any = SimpleNamespace(coordinates={"pp": 0}, device=torch.device("cpu"))
MOE = architecture(**ROUTERS["sigmoid, biased, with shared experts"])
DENSE = architecture(family="qwen3", experts=0)
WINDOWED = architecture(family="qwen3", experts=0, own={"window": 4, "full_layers": [1]})
HOW: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "selective, matmul": {"mode": "selective", "save": ["matmul"]},
    "selective, attention": {"mode": "selective", "save": ["attention"]},
    "selective, all": {"mode": "selective", "save": ["matmul", "attention", "all_to_all", "reduce_scatter"]},
}


def model_parts(
    arch: Architecture, how: dict[str, Any] | None, *, every: int = 1, same_experts: bool = False
) -> ModelParts:
    model = tower(arch)
    if how is not None:
        matches = [arch.layers // every]
        recompute_blocks(model, RANK, **how, every=every, pattern="layers.*", matches=matches)
        if same_experts:
            replay_routing(model, RANK, matches)
    return model


def gradients(model: ModelParts, between: Any = None) -> list[Tensor]:
    """Of input and parameters; `between` is called between forward and backward."""
    x_BSD, real_BS = tokens(3, 9)
    loss = model.parts[0](x_BSD, real_BS).square().sum()
    if between is not None:
        between()
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    return [x_BSD.grad, *(p.grad for p in model.parameters())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def gates(model: ModelParts) -> list[Any]:
    return [block.mlp.gate for block in model.parts[0].layers.values()]


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

    def of(self, word: str) -> int:
        return sum(self.counts[operator] for operator in recompute.SAVED[word])


@pytest.mark.parametrize("same_experts", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_gradients_are_bitwise_those_of_blocks_that_keep_everything(how, every, same_experts):
    assert same(
        gradients(model_parts(MOE, HOW[how], every=every, same_experts=same_experts)), gradients(model_parts(MOE, None))
    )


@pytest.mark.parametrize("arch", [DENSE, WINDOWED], ids=["dense", "windows"])
@pytest.mark.parametrize("how", HOW)
def test_dense_blocks_too(how, arch):
    assert same(gradients(model_parts(arch, HOW[how])), gradients(model_parts(arch, None)))


@pytest.mark.parametrize(("how", "again"), [
    (None, {"matmul": 0, "attention": 0}),
    ("full", {"matmul": 1, "attention": 1}),
    ("selective, matmul", {"matmul": 0, "attention": 1}),
    ("selective, attention", {"matmul": 1, "attention": 0}),
    ("selective, all", {"matmul": 0, "attention": 0}),
])  # fmt: skip
@pytest.mark.parametrize("arch", [DENSE, MOE, WINDOWED], ids=["dense", "experts", "windows"])
def test_what_is_kept_is_not_computed_again(how, again, arch):
    def calls(how: dict[str, Any] | None) -> tuple[Calls, Calls]:
        forward, backward = Calls(), Calls()
        x_BSD, real_BS = tokens(3, 9)
        model = model_parts(arch, how)
        with forward:
            loss = model.parts[0](x_BSD, real_BS).square().sum()
        with backward:
            loss.backward()
        return forward, backward

    forward, plain = calls(None)
    _, backward = calls(HOW[how] if how else None)
    for word, times in again.items():
        more = backward.of(word) - plain.of(word)
        # The run stops where nothing is wanted any more: after the last product's inputs are there.
        assert (more > 0.7 * forward.of(word)) if times else (more == 0), (word, more)


def test_the_last_of_so_many_neighbours_is_recomputed():
    def chosen(every: int) -> list[int]:
        blocks = model_parts(architecture(layers=7), HOW["full"], every=every).parts[0].layers.items()
        return [int(name) for name, block in blocks if block.recompute is not None]

    assert chosen(1) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(2) == [1, 3, 5]
    assert chosen(7) == [6]


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_inputs_and_weights_can_be_taken_apart(how):
    wanted = gradients(model_parts(MOE, None))
    model = model_parts(MOE, HOW[how], same_experts=True)
    x_BSD, real_BS = tokens(3, 9)
    loss = model.parts[0](x_BSD, real_BS).square().sum()
    (x_grad,) = torch.autograd.grad(loss, x_BSD, retain_graph=True)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    assert same([x_grad, *grads], wanted)


@pytest.mark.parametrize("how", HOW)
def test_replay_takes_the_experts_of_the_forward(how):
    def change(model: ModelParts) -> None:
        for gate in gates(model):
            gate.e_score_correction_bias.mul_(-1)

    wanted = gradients(model_parts(MOE, None))
    replayed = model_parts(MOE, HOW[how], same_experts=True)
    assert same(gradients(replayed, lambda: change(replayed)), wanted)
    chosen_again = model_parts(MOE, HOW[how])
    try:
        found = gradients(chosen_again, lambda: change(chosen_again))
    except (RuntimeError, StopIteration):  # other numbers of tokens make other shapes
        return
    assert not same(found, wanted)


def test_calls_may_end_in_any_order():
    """As pipelines run them: several forwards before the first backward, the last one first."""
    model, plain = model_parts(MOE, HOW["selective, all"], same_experts=True), model_parts(MOE, None)
    batches = [tokens(2, 6, seed=seed) for seed in range(3)]
    losses = [model.parts[0](x, real).square().sum() for x, real in batches]
    for gate in gates(model):
        gate.e_score_correction_bias.mul_(-1)
    for loss in reversed(losses):
        loss.backward()
    for x_BSD, real_BS in reversed([tokens(2, 6, seed=seed) for seed in range(3)]):
        plain.parts[0](x_BSD, real_BS).square().sum().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("again", [False, True])
def test_an_exception_leaves_nothing_behind(again, monkeypatch):
    model = model_parts(MOE, HOW["selective, all"], same_experts=True)
    mlp, whole = model.parts[0].layers["1"].mlp, type(model.parts[0].layers["1"].mlp).forward

    def fails(*args: Any) -> Tensor:
        if recomputing() is again:
            raise ValueError("out of luck")
        return whole(mlp, *args)

    with monkeypatch.context() as patched:
        patched.setattr(mlp, "forward", fails)
        with pytest.raises(ValueError, match="out of luck"):
            gradients(model)
    assert not recomputing() and getattr(recompute._here, "run", None) is None
    assert same(gradients(model), gradients(model_parts(MOE, None)))


@pytest.mark.parametrize("how", [*HOW, None])
def test_loads_are_counted_once(how):
    model, plain = model_parts(MOE, HOW[how] if how else None, same_experts=bool(how)), model_parts(MOE, None)
    gradients(model)
    gradients(plain)
    for gate, other in zip(gates(model), gates(plain), strict=True):
        assert torch.equal(gate.loads_E, other.loads_E) and torch.equal(gate.aux, other.aux)
        # 27 positions less 3 of padding, three experts each
        assert gate.loads_E.sum() == 24 * 3


def test_kept_results_stay_out_of_the_graphs_they_are_used_in():
    """They would hold all that the second run computed."""
    product = torch.ops.aten.mm.default
    results: dict[Any, list[Any]] = {product: []}
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with recompute._Keeping(results):
        a @ b
    with recompute._Reusing(results):
        result = a @ b
    assert result.grad_fn is not None and len(results[product]) == 1 and results[product][0].grad_fn is None


def test_without_gradient_nothing_is_recorded():
    model = model_parts(MOE, HOW["selective, all"], same_experts=True)
    with torch.no_grad():
        out = model.parts[0](*tokens(3, 9))
        assert torch.equal(out, model_parts(MOE, None).parts[0](*tokens(3, 9)))


def test_runs_of_other_threads_are_others():
    """The backward of a GPU runs in a thread of its own."""
    seen = []
    with recompute._Run(None, again=True):
        thread = threading.Thread(target=lambda: seen.append(recomputing()))
        thread.start()
        thread.join()
        assert recomputing() and seen == [False]
    assert remember(lambda: torch.ones(1)).item() == 1


def test_what_the_plan_says_is_compared_with_the_model():
    with pytest.raises(PlanMismatch, match="fits 1 modules of the model, but the plan has 3"):
        recompute_blocks(tower(MOE), RANK, "full", 2, "layers.*", [3])
    with pytest.raises(PlanMismatch, match="mode `some`"):
        recompute_blocks(tower(MOE), RANK, "some", 1, "layers.*", [3])
    with pytest.raises(PlanMismatch, match="softmax"):
        recompute_blocks(tower(MOE), RANK, "selective", 1, "layers.*", [3], ["softmax"])
    with pytest.raises(PlanMismatch, match="0 blocks with experts are recomputed, but the plan has 3"):
        replay_routing(tower(MOE), RANK, [3])


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, "full", "selective, all"])
@pytest.mark.parametrize("arch", [DENSE, MOE, WINDOWED], ids=["dense", "experts", "windows"])
def test_compiled_blocks_compute_the_same(arch, how):
    torch.compiler.reset()
    model = model_parts(arch, HOW[how] if how else None, same_experts=bool(how) and arch.is_moe)
    names = [name for name, _ in model.named_parameters()]
    compile_blocks(model, RANK, "default", "layers.*", [arch.layers])
    assert [name for name, _ in model.named_parameters()] == names
    for _ in range(2):
        found = gradients(model)
    for ours, plain in zip(found, gradients(model_parts(arch, None)), strict=True):
        assert (ours - plain).abs().max() <= 1e-12 * plain.abs().max()
