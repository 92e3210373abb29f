"""The norm computes what torch's does, and keeps less for its backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from xtrain.runtime.nn.fused import rms_norm

EPS = 1e-5


def torchs(x, weight, plus_one):
    """Rows in bf16 are computed in fp32, and rounded once."""
    exact, factor = (x.float(), weight.float()) if x.dtype == torch.bfloat16 else (x, weight)
    return F.rms_norm(exact, weight.shape, 1 + factor if plus_one else factor, EPS).to(x.dtype)


def inputs(dtype, shape=(3, 5, 16)):
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype).unbind()
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_computes_what_torchs_does(dtype, plus_one, device):
    x, weight, grad = (tensor.detach().to(device) for tensor in inputs(dtype))
    x.requires_grad_()
    weight.requires_grad_()
    ours, theirs = rms_norm(x, weight, EPS, plus_one=plus_one), torchs(x, weight, plus_one)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    grads = (torch.autograd.grad(out, (x, weight), grad) for out in (ours, theirs))
    for our_grad, their_grad in zip(*grads, strict=True):
        assert our_grad.dtype == dtype
        assert (our_grad - their_grad).abs().max() <= tolerance * their_grad.abs().max()


def test_its_gradient_is_that_of_its_values():
    x, weight, _ = inputs(torch.float64, (2, 3, 4))
    for plus_one in (False, True):
        assert gradcheck(lambda x, weight, one=plus_one: rms_norm(x, weight, EPS, plus_one=one), (x, weight))


@pytest.mark.parametrize("which", [0, 1])
def test_either_gradient_can_be_asked_for_alone(which):
    """Pipelines take those of inputs and of weights apart."""
    x, weight, grad = inputs(torch.float64)
    both = torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), grad)
    (alone,) = torch.autograd.grad(rms_norm(x, weight, EPS), ((x, weight)[which],), grad)
    assert torch.equal(alone, both[which])


def test_it_keeps_its_input_in_its_own_format_and_a_number_a_row():
    x, weight, _ = inputs(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        rms_norm(x, weight, EPS)
    assert [tensor.data_ptr() for tensor in saved[:2]] == [x.data_ptr(), weight.data_ptr()]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in saved[2:]] == [((3, 5, 1), torch.float32)]
