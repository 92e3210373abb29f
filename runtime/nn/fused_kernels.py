"""Numba kernels of the pointwise parts of a block: norms, rotations and the middle of SwiGLU, in one pass."""

import math
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from numba import types
from numba.extending import overload

from xtrain.runtime.base.jit import kernel

# Reordered sums and fused multiply-adds, which vector registers need. NaN and infinity are respected.
FAST: Final = frozenset({"reassoc", "contract", "nsz"})
ROWS: Final = 64  # rows whose part of a weight's gradient is summed separately, to limit rounding

LOG2_E, LN2_HIGH, LN2_LOW = (np.float32(each) for each in (1.44269504088896341, 0.693359375, -2.12194440e-4))
LEAST, MOST = np.float32(-87.0), np.float32(88.0)
HALF, ONE = np.float32(0.5), np.float32(1.0)
C7, C6, C5, C4, C3 = (
    np.float32(each) for each in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)
)


def _exp32(x):
    """Return e to the power of x in fp32, to 2 units in the last place (`expf` of S. L. Moshier's Cephes library):
    numba's own is a call for each number."""
    x = min(max(x, LEAST), MOST)
    power = np.floor(x * LOG2_E + HALF)
    rest = x - power * LN2_HIGH - power * LN2_LOW
    series = ((((C7 * rest + C6) * rest + C5) * rest + C4) * rest + C3) * rest + HALF
    bits = (np.int32(power) + np.int32(127)) << np.int32(23)
    return (series * rest * rest + rest + ONE) * np.int32(bits).view(np.float32)


exp32 = numba.njit(_exp32, inline="always")


def sigmoid(x):
    """Return 1 / (1 + e to the power of -x), in kernels."""
    raise NotImplementedError


@overload(sigmoid, inline="always")
def _sigmoid(x):
    if x == types.float32:
        return lambda x: ONE / (ONE + exp32(-x))
    return lambda x: 1 / (1 + math.exp(-x))


def fused(function: Callable[..., Any]) -> Any:
    """Compile `function` as one of these kernels."""
    return kernel(function, FAST, inlined=(_exp32, _sigmoid))


@fused
def norm_forward(first, last, x_RD, weight_D, eps, out_RD, inverse_R):
    number, width = x_RD.dtype.type, x_RD.shape[1]
    for r in range(first, last):
        squares = number(0)
        for d in range(width):
            squares += x_RD[r, d] * x_RD[r, d]
        inverse = number(1) / np.sqrt(squares / number(width) + eps)
        inverse_R[r] = inverse
        for d in range(width):
            out_RD[r, d] = x_RD[r, d] * inverse * weight_D[d]


@fused
def norm_backward(first, last, part, grad_RD, x_RD, weight_D, inverse_R, grad_x_RD, grad_weight_PD):
    """Compute the gradients. With n = x / rms: ∂weight = Σ grad · n, ∂x = (grad · weight - n · mean(grad · weight · n))
    / rms."""
    number, width = x_RD.dtype.type, x_RD.shape[1]
    summed_D = np.zeros(width, x_RD.dtype)
    for begin in range(first, last, ROWS):
        summed_D[:] = 0
        for r in range(begin, min(begin + ROWS, last)):
            inverse, share = inverse_R[r], number(0)
            for d in range(width):
                product = grad_RD[r, d] * x_RD[r, d] * inverse
                share += product * weight_D[d]
                summed_D[d] += product
            share = share * inverse / number(width)
            for d in range(width):
                grad_x_RD[r, d] = (grad_RD[r, d] * weight_D[d] - x_RD[r, d] * share) * inverse
        for d in range(width):
            grad_weight_PD[part, d] += summed_D[d]


@fused
def turn_forward(first, last, x_THA, cos_TA, sin_TA, out_THA):
    """Compute x · cos + rotated x · sin: pairs of a number of the first half of a head with one of the second."""
    heads, half = x_THA.shape[1], x_THA.shape[2] // 2
    for t in range(first, last):
        for h in range(heads):
            for a in range(half):
                left, right = x_THA[t, h, a], x_THA[t, h, a + half]
                out_THA[t, h, a] = left * cos_TA[t, a] - right * sin_TA[t, a]
                out_THA[t, h, a + half] = right * cos_TA[t, a + half] + left * sin_TA[t, a + half]


@fused
def turn_backward(first, last, grad_THA, cos_TA, sin_TA, grad_x_THA):
    heads, half = grad_THA.shape[1], grad_THA.shape[2] // 2
    for t in range(first, last):
        for h in range(heads):
            for a in range(half):
                left, right = grad_THA[t, h, a], grad_THA[t, h, a + half]
                grad_x_THA[t, h, a] = left * cos_TA[t, a] + right * sin_TA[t, a + half]
                grad_x_THA[t, h, a + half] = right * cos_TA[t, a + half] - left * sin_TA[t, a]


@fused
def norm_turn_forward(first, last, x_THA, weight_A, eps, cos_TA, sin_TA, out_THA, inverse_TH):
    """Compute `norm_forward` of each head, then `turn_forward`."""
    number, heads, width = x_THA.dtype.type, x_THA.shape[1], x_THA.shape[2]
    half = width // 2
    for t in range(first, last):
        for h in range(heads):
            squares = number(0)
            for a in range(width):
                squares += x_THA[t, h, a] * x_THA[t, h, a]
            inverse = number(1) / np.sqrt(squares / number(width) + eps)
            inverse_TH[t, h] = inverse
            for a in range(half):
                left = x_THA[t, h, a] * inverse * weight_A[a]
                right = x_THA[t, h, a + half] * inverse * weight_A[a + half]
                out_THA[t, h, a] = left * cos_TA[t, a] - right * sin_TA[t, a]
                out_THA[t, h, a + half] = right * cos_TA[t, a + half] + left * sin_TA[t, a + half]


@fused
def norm_turn_backward(
    first, last, part, grad_THA, x_THA, weight_A, inverse_TH, cos_TA, sin_TA, grad_x_THA, grad_weight_PA
):
    number, heads, width = x_THA.dtype.type, x_THA.shape[1], x_THA.shape[2]
    half = width // 2
    turned_A, summed_A = np.zeros(width, x_THA.dtype), np.zeros(width, x_THA.dtype)
    for begin in range(first, last, ROWS):
        summed_A[:] = 0
        for t in range(begin, min(begin + ROWS, last)):
            for h in range(heads):
                for a in range(half):
                    left, right = grad_THA[t, h, a], grad_THA[t, h, a + half]
                    turned_A[a] = left * cos_TA[t, a] + right * sin_TA[t, a + half]
                    turned_A[a + half] = right * cos_TA[t, a + half] - left * sin_TA[t, a]
                inverse, share = inverse_TH[t, h], number(0)
                for a in range(width):
                    product = turned_A[a] * x_THA[t, h, a] * inverse
                    share += product * weight_A[a]
                    summed_A[a] += product
                share = share * inverse / number(width)
                for a in range(width):
                    grad_x_THA[t, h, a] = (turned_A[a] * weight_A[a] - x_THA[t, h, a] * share) * inverse
        for a in range(width):
            grad_weight_PA[part, a] += summed_A[a]


@fused
def silu_times_forward(first, last, gate_N, up_N, out_N):
    """Compute silu(gate) · up."""
    gate_N, up_N, out_N = gate_N[first:last], up_N[first:last], out_N[first:last]
    for n in range(gate_N.size):  # from 0 on, so that no index can be negative
        out_N[n] = gate_N[n] * sigmoid(gate_N[n]) * up_N[n]


@fused
def silu_times_backward(first, last, grad_N, gate_N, up_N, grad_gate_N, grad_up_N):
    one, grad_N, gate_N, up_N = gate_N.dtype.type(1), grad_N[first:last], gate_N[first:last], up_N[first:last]
    grad_gate_N, grad_up_N = grad_gate_N[first:last], grad_up_N[first:last]
    for n in range(gate_N.size):
        share = sigmoid(gate_N[n])
        active = gate_N[n] * share
        grad_up_N[n] = grad_N[n] * active
        grad_gate_N[n] = grad_N[n] * up_N[n] * (share + active * (one - share))
