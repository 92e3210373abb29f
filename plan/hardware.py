"""Peak rates of accelerators from vendors' data sheets, attention kernels by device, and installed packages.

Planned and measured MFU use the same table of peak rates: dense products, without sparsity, with sums in fp32. GeForce
cards then have half of their largest figure. If a sheet gives only the sparse figure, half of it is used. fp32 and fp64
are the fastest product in that format, on tensor or matrix cores if the device has any.

Attention kernels: `documents` is one product per document with torch's own kernel. `blocks` computes rows of a single
document some queries at a time, with plain products over the keys up to the last of these queries; other rows as
`documents`. `flex` uses a block mask of all documents; `mask` a plain mask. `cudnn` gives rows of a single document to
cuDNN's kernel, which is faster than FlashAttention 2 on Hopper and Blackwell, and computes others as `flex`.
`flash3` and `flash4` compute all documents in one call of a package.
"""

from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

Product = Literal["bf16", "fp16", "fp8", "tf32", "fp32", "fp64"]
Peaks = dict[Product, float]

T: Final = 1e12


def _peaks(**teraflops: float) -> Peaks:
    return {name: value * T for name, value in teraflops.items()}  # pyright: ignore[reportReturnType]


_A100 = _peaks(bf16=312, fp16=312, tf32=156, fp32=19.5, fp64=19.5)
_H100 = _peaks(bf16=989, fp16=989, fp8=1979, tf32=494.5, fp32=67, fp64=67)
_H100_PCIE = _peaks(bf16=756, fp16=756, fp8=1513, tf32=378, fp32=51, fp64=51)
_H100_NVL = _peaks(bf16=835.5, fp16=835.5, fp8=1670.5, tf32=417.5, fp32=60, fp64=60)
_MI300X = _peaks(bf16=1307.4, fp16=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4, fp64=163.4)

FP8: Final = "fp8"
# Speed of fp8 products relative to bf16, if a spec gives only the speed of bf16; it holds for all devices below.
FP8_SPEED: Final = 2

# FLOP/s of one device, by kind and by the format of products.
PEAKS: Final[dict[str, Peaks]] = {
    "V100 PCIe": _peaks(fp16=112, fp32=14, fp64=7),
    "V100 SXM": _peaks(fp16=125, fp32=15.7, fp64=7.8),
    "T4": _peaks(fp16=65, fp32=8.1),
    "A10": _peaks(bf16=125, fp16=125, tf32=62.5, fp32=31.2),
    "A10G": _peaks(bf16=70, fp16=70, tf32=35, fp32=35),
    "A30": _peaks(bf16=165, fp16=165, tf32=82, fp32=10.3, fp64=10.3),
    "A40": _peaks(bf16=149.7, fp16=149.7, tf32=74.8, fp32=37.4),
    "A100": _A100,
    # Export variant: links are slower than an A100's, products are not.
    "A800": _A100,
    "H100 SXM": _H100,
    "H100 PCIe": _H100_PCIE,
    "H100 NVL": _H100_NVL,
    "H800 SXM": {**_H100, "fp64": 1 * T},
    "H800 PCIe": _peaks(bf16=756, fp16=756, fp8=1513, tf32=378, fp32=51),
    "H200 SXM": _H100,
    "H200 NVL": _H100_NVL,
    "H20": _peaks(bf16=148, fp16=148, fp8=296, tf32=74, fp32=44, fp64=1),
    "GH200": _H100,
    "B200": _peaks(bf16=2250, fp16=2250, fp8=4500, tf32=1125, fp32=75, fp64=37),
    "GB200": _peaks(bf16=2500, fp16=2500, fp8=5000, tf32=1250, fp32=80, fp64=40),
    "L4": _peaks(bf16=121, fp16=121, fp8=242.5, tf32=60, fp32=30.3),
    "L40": _peaks(bf16=181, fp16=181, fp8=362, tf32=90.5, fp32=90.5),
    "L40S": _peaks(bf16=362, fp16=362, fp8=733, tf32=183, fp32=91.6),
    "RTX 3090": _peaks(bf16=71, fp16=71, tf32=35.6, fp32=35.6),
    "RTX 4090": _peaks(bf16=165.2, fp16=165.2, fp8=330.3, tf32=82.6, fp32=82.6),
    "RTX 5090": _peaks(bf16=209.5, fp16=209.5, fp8=419, tf32=104.8, fp32=104.8),
    "RTX A6000": _peaks(bf16=154.8, fp16=154.8, tf32=77.4, fp32=38.7),
    "RTX 6000 Ada": _peaks(bf16=364.2, fp16=364.2, fp8=728.5, tf32=182.1, fp32=91.1),
    # One of the two dies of a card, which torch calls a device.
    "MI250X die": _peaks(bf16=191.5, fp16=191.5, fp32=47.9, fp64=47.9),
    "MI300X": _MI300X,
    "MI325X": _MI300X,
}


def product_format(compute: str, matmul: str) -> Product:
    """Return the format in which a GPU computes products of `compute` numbers under a setting of `precision.matmul`."""
    if compute == "fp32" and matmul in ("high", "medium"):
        return "tf32"
    return compute  # pyright: ignore[reportReturnType]


QUERIES: Final = 64  # queries per block
EXACT: Final = ("fp32", "fp64")  # for shorter rows: torch's kernel has an fp32 softmax, blocks use the compute format

WIDEST_FLASH: Final = 256  # the largest head width of flash attention
NARROWEST: Final = 16  # narrowest head for which torch's compiler has a flex kernel on CUDA


# Key of the kernel of a CPU whose fp32 products use their highest precision.
HIGHEST: Final = "cpu, highest"


def kernel_on(device: str, matmul: str, kernels: dict[str, str]) -> str:
    """Return the kernel of a kind of device for the value of `matmul` in force."""
    return kernels.get(f"{device}, {matmul}", kernels[device])


BLOCK_MASKS: Final = ("flex", "cudnn")  # kernels that need block masks of documents
# Major CUDA compute capabilities on which cuDNN's attention is faster than torch's other kernels (about 1.4 times on an
# H200), and the widest heads of its backward.
CUDNN_ON: Final = (9, 10)
WIDEST_CUDNN: Final = 128


class FlashAttention(NamedTuple):
    """A release of FlashAttention, whose package registers its kernels with torch. They compute all documents of a
    microbatch in one call.

    title: its name, and `registered` in torch (`torch.nn.attention.activate_flash_attention_impl`). module: what torch
    imports. on: major CUDA compute capabilities. widest: numbers of a head, in steps of 8.
    """

    title: str
    registered: str
    module: str
    install: str
    on: tuple[int, ...]
    widest: int


# Capabilities and widths are those that torch 2.13 (`torch/nn/attention/_fa3.py`, `_fa4.py`) and the packages accept.
FLASH: Final = {
    "flash3": FlashAttention(
        title="FlashAttention 3",
        registered="FA3",
        module="flash_attn_interface",
        install="build it from the folder `hopper` of https://github.com/Dao-AILab/flash-attention",
        on=(9,),
        widest=256,
    ),
    "flash4": FlashAttention(
        title="FlashAttention 4",
        registered="FA4",
        module="flash_attn.cute.interface",
        install="install it with `pip install 'xtrain[flash]'`",
        on=(9, 10),
        widest=128,
    ),
}


def has_cudnn(compute: str, head_dim: int) -> bool:
    """Return True if cuDNN has a kernel for heads of this width."""
    return compute == "bf16" and head_dim % 8 == 0 and NARROWEST <= head_dim <= WIDEST_CUDNN


def plain_kernels(head_dim: int) -> dict[str, str]:
    """Return device type → kernel without further conditions."""
    return {"cpu": "documents", "cuda": "flex" if head_dim >= NARROWEST else "documents"}


def has_flash(device: str, compute: str, head_dim: int) -> bool:
    """Return True if kernels for heads of this width store no attention scores."""
    return device == "cpu" or (compute in ("bf16", "fp16") and head_dim % 8 == 0 and head_dim <= WIDEST_FLASH)


OF_SERVER: Final = {"protobuf": "google.protobuf", "starlette": "starlette", "uvicorn": "uvicorn"}


def is_installed(package: str) -> bool:
    """Return True if a package can be imported."""
    found = find_spec(package)
    # A folder of that name without a package, such as W&B's in a working directory, must not count.
    return found is not None and found.origin is not None


def missing_for_server() -> str | None:
    """Return a message with the packages that the server needs and that are not installed; None if all are
    installed."""
    missing = []
    for package, module in OF_SERVER.items():
        try:
            missing += [] if find_spec(module) else [package]
        except ModuleNotFoundError:  # of the module's parent
            missing.append(package)
    return f"the server needs {' and '.join(missing)}: pip install 'xtrain[serve]'" if missing else None
