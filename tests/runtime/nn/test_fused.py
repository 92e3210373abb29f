"""Norms, rotations and SwiGLU of one pass each, beside the same of plain operations."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.dsl.schema.rope import Rope
from xtrain.plan.architecture import RotaryAngles
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.nn import fused
from xtrain.runtime.nn.fused import Fusible, normed_and_turned, rms_norm, silu_times, turned
from xtrain.runtime.nn.layers import Rotation

CLOSE = {torch.float64: 1e-13, torch.float32: 2e-6}
B, S, H, A, D = 3, 70, 2, 8, 24


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request, monkeypatch):
    """Kernels on one thread, and rows shared by three of them."""
    monkeypatch.setattr(fused, "LEAST_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    fused._threads.cache_clear()
    yield
    fused._threads.cache_clear()


def hold(one: Callable[..., Tensor], other: Callable[..., Tensor], *shapes: tuple[int, ...], dtype: torch.dtype):
    """Both give the same, and so do their backwards; `one` in `dtype` and the other in fp64."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    given, exact = ([each.to(form).requires_grad_() for each in drawn] for form in (dtype, torch.float64))
    found, wanted = one(*given), other(*exact)
    assert found.dtype == dtype
    seed = torch.randn(wanted.shape, dtype=torch.float64, generator=generator).to(dtype)
    grads = zip(torch.autograd.grad(found, given, seed), torch.autograd.grad(wanted, exact, seed.double()), strict=True)
    for a, b in ((found, wanted), *grads):
        assert (a.double() - b).abs().max() <= CLOSE[dtype] * max(1, b.abs().max())


def rotation(dtype: torch.dtype) -> Rotation:
    positions_BS = torch.arange(B * S).view(B, S) % 19
    return Rotation.of(positions_BS, RotaryAngles(width=A, theta=100.0, rope=Rope()), dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("plus_one", [False, True])
def test_norms(dtype, plus_one):
    def norm(fused: bool) -> Callable[..., Tensor]:
        return lambda x, weight: rms_norm(x[:, 1:], weight, 1e-6, plus_one=plus_one, fused=fused)

    hold(norm(True), norm(False), (B, S, D), (D,), dtype=dtype)


@pytest.mark.parametrize("dtype", CLOSE)
def test_heads_that_are_turned(dtype):
    def plain(x_BSHA: Tensor) -> Tensor:
        return rotation(torch.float64)(x_BSHA.transpose(1, 2)).transpose(1, 2)

    hold(lambda x: turned(x, rotation(dtype)), plain, (B, S, H, A), dtype=dtype)


@pytest.mark.parametrize("dtype", CLOSE)
def test_heads_that_are_normed_and_turned(dtype):
    def plain(x_BSHA: Tensor, weight_A: Tensor) -> Tensor:
        return rotation(torch.float64)(rms_norm(x_BSHA, weight_A, 1e-6).transpose(1, 2)).transpose(1, 2)

    hold(lambda x, w: normed_and_turned(x, w, 1e-6, rotation(dtype)), plain, (B, S, H, A), (A,), dtype=dtype)


@pytest.mark.parametrize("dtype", CLOSE)
def test_the_middle_of_swiglu(dtype):
    hold(silu_times, lambda gate, up: F.silu(gate) * up, (B, S, D), (B, S, D), dtype=dtype)
    wide = torch.linspace(-120, 120, 4801, dtype=dtype)
    exact = F.silu(wide.double())
    assert ((silu_times(wide, torch.ones_like(wide)) - exact).abs() <= 4e-7 * exact.abs() + 1e-35).all()
    assert silu_times(torch.tensor([torch.nan], dtype=dtype), torch.ones(1, dtype=dtype)).isnan().all()


SPEC = """
experiment fused { budget = 3 steps }
model qwen3 { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, vocab = 300 }
tokenizer bytes
dataset stdlib { source = python_stdlib(), holdout = 5% }
batch { sequence = 32, rows = 2, micro = 2 }
optimizer adamw { lr = 1e-3 }
launch { device = cpu }
checkpoint { keep = none }
"""


def test_a_plan_with_fused_kernels_computes_with_them(tmp_path, monkeypatch):
    """And one for bf16 without them; the modules that the plan speaks of are those that the model has."""
    monkeypatch.chdir(tmp_path)
    for compute, expected in (("fp32", True), ("bf16", False)):
        (tmp_path / "spec.xtrain").write_text(SPEC + f"precision {{ params = {compute}, compute = {compute} }}\n")
        plan = plan_from_spec(tmp_path / "spec.xtrain").plan
        assert plan is not None
        node = plan.node("setup.build_model")
        assert node.args["pointwise"] == {"cpu": "fused" if expected else "plain", "cuda": "plain"}
        assert ("one pass each" in node.does) == expected
        executor = Executor(plan, tmp_path / compute, rank=0)
        executor._set_up(0.0)
        modules = [each for each in executor.resources["model"].modules() if isinstance(each, Fusible)]
        # two norms, an attention with two norms and a SwiGLU a block, and the last norm
        assert len(modules) == 2 * 6 + 1 and {each.fused for each in modules} == {expected}
