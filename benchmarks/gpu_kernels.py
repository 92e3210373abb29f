"""Kernels apart, each beside a plain one: milliseconds, and how far results are from the plain one's.

A part of `gpu_pieces.py`: each function gives (name, work) one after the other.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Work = Callable[[], dict[str, Any]]
Pieces = Iterator[tuple[str, Work]]


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: str, turns: int) -> float:
    """The least milliseconds of some turns, behind one that counts not."""
    work()
    least = float("inf")
    for _ in range(turns):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        least = min(least, time.perf_counter() - begin)
    return round(least * 1e3, 4)


def apart(found: Tensor, exact: Tensor) -> float:
    """The largest difference, of the largest number."""
    exact = exact.double()
    return float((found.double() - exact).abs().max() / exact.abs().max())


def short(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]


def products(device: str, dry: bool) -> Pieces:
    """TFLOP/s of matrix products alone: those of an 8B block, in bf16 and in fp8 with a scale a row."""
    tokens, wide, dim = (64, 128, 64) if dry else (16384, 14336, 4096)
    random = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": random}
    x, w = torch.randn(tokens, dim, **shape), torch.randn(wide, dim, **shape)

    def of(way: Callable[[], Tensor]) -> dict[str, Any]:
        ms = timed(way, device, 2 if dry else 20)
        return {"ms": ms, "tflops": round(2 * tokens * wide * dim / ms / 1e9, 4)}

    def scaled() -> Tensor:
        one, other = (each.to(torch.float8_e4m3fn) for each in (x, w))
        by_row, by_column = torch.ones(tokens, 1, device=device), torch.ones(1, wide, device=device)
        out = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return of(lambda: torch._scaled_mm(one, other.t(), scale_a=by_row, scale_b=by_column, **out))  # pyright: ignore

    yield "bf16", lambda: of(lambda: x @ w.t())
    yield "fp8", (lambda: {"skipped": "CUDA alone has it"}) if device != "cuda" else scaled


def attention(device: str, dry: bool) -> Pieces:
    """32 heads of 128 on 8 keys, forward and backward, of rows of one document and of rows of several: each kernel
    beside the one that masks, in fp32."""
    from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel

    from xtrain.plan.hardware import FLASH
    from xtrain.runtime.base.errors import EnvironmentFault
    from xtrain.runtime.nn.attention import KERNELS, activate, causal, with_block_masks, with_bounds
    from xtrain.runtime.nn.attention_blocks import PLAIN
    from xtrain.runtime.nn.batch import DocumentLayout

    sequence = 256 if dry else 4096
    random = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(1, heads, sequence, 128, device=device, generator=random) for heads in (32, 8, 8)]
    given = [each.to(torch.bfloat16).requires_grad_() for each in drawn]

    def passed(kernel: Callable[..., Tensor], given: list[Tensor] = given) -> list[Tensor]:
        out = kernel(*given)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), given)]

    for rows, cuts in (("single", [0, sequence]), ("packed", [0, sequence // 3, sequence // 2, sequence])):
        bounds = torch.tensor(cuts, dtype=torch.int32)
        layout = DocumentLayout.from_lengths(bounds, 1, sequence, torch.device(device))

        @cache
        def masked(layout: DocumentLayout = layout) -> DocumentLayout:  # once for all layers of a step
            return with_block_masks(layout, ((PLAIN, True),))

        def backend(which: SDPBackend) -> Callable[..., Tensor]:
            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(which):
                    return causal(q, k, v)

            return call

        kernels: dict[str, Callable[..., Tensor]] = {
            "mask": lambda q, k, v, layout=layout: KERNELS["mask"](q, k, v, layout),
            "documents": lambda q, k, v, layout=layout: KERNELS["documents"](q, k, v, layout),
            "flex": lambda q, k, v, masked=masked: KERNELS["flex"](q, k, v, masked()),
            # torch's own FlashAttention 2, and the releases whose packages are installed
            **{
                name: lambda q, k, v, layout=layout: KERNELS["flash3"](q, k, v, with_bounds(layout))
                for name in ("varlen", *FLASH)
            },
        }
        if rows == "single":
            kernels |= {"cuDNN": backend(SDPBackend.CUDNN_ATTENTION), "flash": backend(SDPBackend.FLASH_ATTENTION)}

        def exact(kernel: Callable[..., Tensor] = kernels["mask"]) -> list[Tensor]:
            return passed(kernel, [each.detach().float().requires_grad_() for each in given])

        for name, kernel in kernels.items():
            if device != "cuda" and name in ("flex", "cuDNN", "flash"):
                continue

            def work(name: str = name, kernel: Callable = kernel, exact: Callable = exact) -> dict[str, Any]:
                if (name == "varlen" or name in FLASH) and device != "cuda":
                    return {"skipped": "varlen attention is for CUDA"}
                restore_flash_attention_impl(_raise_warn=False)
                try:
                    activate(name)
                except EnvironmentFault as fault:
                    return {"skipped": str(fault)}
                errors = [apart(a, b) for a, b in zip(passed(kernel), exact(), strict=True)]
                return {"ms": timed(lambda: passed(kernel), device, 2 if dry else 10), "apart": max(errors)}

            yield f"{rows}, {name}", work


def head(device: str, dry: bool) -> Pieces:
    """The loss in pieces beside whole logits, forward and backward."""
    from xtrain.runtime.nn.loss import Head, token_losses

    tokens, dim, vocabulary = (64, 32, 1000) if dry else (8192, 4096, 128256)
    random = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": random}
    hidden = torch.randn(tokens, dim, **shape).requires_grad_()
    weight = (torch.randn(vocabulary, dim, **shape) * dim**-0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device, generator=random)

    def whole() -> list[Tensor]:
        loss = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def pieces(chunk: int) -> list[Tensor]:
        how = Head(vocabulary=vocabulary, z_weight=0.0, chunk_bytes=chunk)
        loss = token_losses(hidden, weight, labels, how).objective
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def of(way: Callable[[], list[Tensor]]) -> dict[str, Any]:
        exact, before = [each.cpu() for each in whole()], 0
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        found = way()
        peak = (torch.cuda.max_memory_allocated() - before) >> 20 if device == "cuda" else None
        errors = [apart(a.cpu(), b) for a, b in zip(found, exact, strict=True)]
        return {"ms": timed(way, device, 2 if dry else 5), "peak_mib": peak, "apart": max(errors)}

    yield "whole", lambda: of(whole)
    for mib in (1024, 256, 64):
        yield f"{mib} MiB", lambda mib=mib: of(lambda: pieces(mib << 20))


def experts(device: str, dry: bool) -> Pieces:
    """Grouped products beside a loop over experts, empty ones included, forward and backward."""
    dim, wide, number, tokens = (32, 48, 8, 64) if dry else (2048, 1024, 64, 16384)
    random = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": random}
    x = torch.randn(tokens, dim, **shape).requires_grad_()
    w = (torch.randn(number, dim, wide, **shape) * dim**-0.5).requires_grad_()
    drawn = torch.randint(0, number - 1, (tokens,), generator=random, device=device)
    counts = torch.bincount(drawn, minlength=number)
    ends, lengths = counts.cumsum(0).to(torch.int32), counts.tolist()

    def passed(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, (x, w), torch.ones_like(out))]

    def loop() -> list[Tensor]:
        return passed(torch.cat([part @ w[e] for e, part in enumerate(x.split(lengths))]))

    def grouped() -> list[Tensor]:
        return passed(torch._grouped_mm(x, w, offs=ends))

    def of(way: Callable[[], list[Tensor]]) -> dict[str, Any]:
        errors = [apart(a, b) for a, b in zip(way(), loop(), strict=True)]
        return {"ms": timed(way, device, 2 if dry else 10), "apart": max(errors)}

    yield "loop", lambda: of(loop)
    yield "grouped", lambda: of(grouped)


def nf4(device: str, dry: bool) -> Pieces:
    """A product with a matrix of 4-bit codes and the gradient of its input, beside the matrix in bf16."""
    from xtrain.components.bases.nf4 import NormalFloat4
    from xtrain.runtime.nn.number_formats import QuantisedMatrix

    tokens, outputs, inputs = (16, 64, 128) if dry else (4096, 14336, 4096)
    random = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": random}
    x = torch.randn(tokens, inputs, **shape).requires_grad_()
    whole = torch.randn(outputs, inputs, **shape) * inputs**-0.5
    matrix = QuantisedMatrix(NormalFloat4(), (outputs, inputs), (outputs, inputs), (0, 0), "scales")
    packed, beside = matrix.pack(whole)
    near = matrix.values(packed, beside, torch.bfloat16)

    def passed(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, (x,), torch.ones_like(out))]

    def plain() -> list[Tensor]:
        return passed(x @ near.T)

    def coded() -> list[Tensor]:
        return passed(matrix.product(x, packed, beside, torch.matmul, turned=True))

    def of(way: Callable[[], list[Tensor]]) -> dict[str, Any]:
        errors = [apart(a, b) for a, b in zip(way(), plain(), strict=True)]
        return {"ms": timed(way, device, 2 if dry else 10), "apart": max(errors)}

    yield "bf16", lambda: of(plain)
    yield "codes", lambda: of(coded)
    yield (
        "values alone",
        lambda: {
            "ms": timed(lambda: matrix.values(packed, beside, torch.bfloat16), device, 2 if dry else 10),
            "apart": apart(near, whole),
        },
    )


def optimizers(device: str, dry: bool) -> Pieces:
    """An update of matrices, and how far the weights are from torch's AdamW after five, in learning rates."""
    from xtrain.components.optimizers.adamw8bit_torch import AdamW8bitOptimizer

    size, number, rate = (128, 2, 1e-3) if dry else (4096, 8, 1e-3)
    given: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-8}

    def weights() -> list[Tensor]:
        random = torch.Generator(device).manual_seed(0)
        found = []
        for _ in range(number):
            weight = torch.randn(size, size, device=device, generator=random).requires_grad_()
            weight.grad = torch.randn(size, size, device=device, generator=random)
            found.append(weight)
        return found

    def fused(given_weights: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(given_weights, weight_decay=0.0, fused=True, **given)

    def eight(given_weights: list[Tensor]) -> torch.optim.Optimizer:
        names = {id(each): f"w{place}" for place, each in enumerate(given_weights)}
        return AdamW8bitOptimizer(given_weights, names=names, block=128, quantised=[*names.values()], **given)

    def of(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> dict[str, Any]:
        ours, theirs = weights(), weights()
        optimizer, exact = make(ours), fused(theirs)
        for _ in range(5):
            optimizer.step()
            exact.step()
        error = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / rate
        return {"ms": timed(optimizer.step, device, 2 if dry else 10), "apart": error}

    yield "AdamW, fused", lambda: of(fused)
    yield "AdamW, 8 bits", lambda: of(eight)


def orthogonal(device: str, dry: bool) -> Pieces:
    """Muon's orthogonalisation beside fp64."""
    from xtrain.components.optimizers.muon_torch import newton_schulz

    size = 32 if dry else 4096
    x = torch.randn(1, size, size, device=device, generator=torch.Generator(device).manual_seed(0))

    def made(dtype: torch.dtype) -> Tensor:
        return newton_schulz(x.to(dtype), [(3.4445, -4.775, 2.0315)] * 5)

    for dtype in (torch.bfloat16, torch.float32):
        yield (
            short(dtype),
            lambda dtype=dtype: {
                "ms": timed(lambda: made(dtype), device, 3),
                "apart": apart(made(dtype), made(torch.float64)),
            },
        )


KERNELS: dict[str, Callable[[str, bool], Pieces]] = {
    each.__name__: each for each in (products, attention, head, experts, nf4, optimizers, orthogonal)
}
