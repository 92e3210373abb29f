"""Weights that files have as codes with scales of blocks: mxfp4 (OCP Microscaling Formats 1.0) and fp8 (DeepSeek-V3,
arXiv 2412.19437, section 3.3).

mxfp4: `NAME_blocks` [E, R, G, 16] has two E2M1 codes a byte, the first one in the lower half, and `NAME_scales`
[E, R, G] an exponent for each 32 columns. fp8: `NAME` [R, C] has E4M3 numbers and `NAME_scale_inv` a factor for
each block.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import evolve

from xtrain.dsl.schema.model_config import QUANTISATION, stored_coding
from xtrain.lazy_attrs import frozen

MX_BLOCK: Final = 32  # numbers that share an exponent
SCALES: Final = ("F32", "BF16", "F16", "F8_E8M0")
Coding = Literal["plain", "mxfp4", "fp8"]


@frozen
class Codes:
    """Form of a tensor that is stored as codes. coding: of its numbers. file, start, format, shape: of its scales, as
    in `weight_files.StoredTensor`. block: rows and columns that share a scale."""

    coding: Coding
    file: str
    format: str
    shape: tuple[int, ...]
    start: int
    block: tuple[int, int]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.coding == "mxfp4" else 8


def decoded_tensors(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of files with codes and scales joined; a joined tensor has the shape of its values, and the
    format that they are written in again. config: content of `config.json`."""
    parts = (config, *(part for part in config.values() if isinstance(part, Mapping)))  # a model inside another
    given: Any = next((part[QUANTISATION] for part in parts if part.get(QUANTISATION) is not None), None)
    coding = stored_coding({QUANTISATION: given})
    found = dict(tensors)
    for name, tensor in tensors.items():
        if coding == "mxfp4" and name.endswith("_blocks"):
            scales_name = f"{name.removesuffix('_blocks')}_scales"
            scales, (*outer, groups, half) = tensors.get(scales_name), tensor.shape or (0, 0)
            shape, block = (*outer, groups * 2 * half), (1, MX_BLOCK)
            fits = len(outer) == 2 and half == MX_BLOCK // 2 and tensor.format == "U8"
            fits = fits and scales is not None and (scales.format, scales.shape) == ("U8", (*outer, groups))
        elif coding == "fp8" and tensor.format == "F8_E4M3" and len(tensor.shape) == 2:
            scales_name = f"{name}_scale_inv"
            scales, shape, block = tensors.get(scales_name), tensor.shape, tuple(given["weight_block_size"])
            grid = tuple(-(-extent // each) for extent, each in zip(shape, block, strict=True))
            fits = scales is not None and scales.format in SCALES and scales.shape == grid
        else:
            continue
        if fits and scales is not None:
            codes = Codes(coding, scales.file, scales.format, scales.shape, scales.start, block)
            found[name] = evolve(tensor, format="BF16", shape=shape, codes=codes)
            found.pop(scales_name)
    return found
