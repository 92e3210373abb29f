"""Which data sheet a device has, by the name it gives itself; none rather than a guess."""

import re
from typing import Final

import torch

from xtrain.planner.mesh.hardware_specs import PEAKS, Product

# Whole names of devices as their drivers write them, in small letters, with one space for any run of other characters,
# and without the vendor. Every word counts: neither an H200 is an H20, nor a slice of a device (MIG), a notebook's or a
# custom one the device of the same number.
_NAMES: Final[dict[str, str]] = {
    r"v100 sxm[23] (16|32)gb": "V100 SXM",
    r"v100 pcie (16|32)gb": "V100 PCIe",
    r"t4": "T4",
    r"a10": "A10",
    r"a10g": "A10G",
    r"a30": "A30",
    r"a40": "A40",
    r"a100 (sxm4?|pcie) [48]0gb|a100 80gb pcie": "A100",
    r"a800 (sxm4|pcie) [48]0gb|a800 80gb pcie": "A800",
    r"h100 (80|96)gb hbm3|h100 sxm5( (80|96)gb)?": "H100 SXM",
    r"h100 pcie": "H100 PCIe",
    r"h100 nvl": "H100 NVL",
    r"h800( sxm5)?( 80gb( hbm3)?)?": "H800 SXM",
    r"h800 pcie": "H800 PCIe",
    r"h200": "H200 SXM",
    r"h200 nvl": "H200 NVL",
    r"h20( 3e)?": "H20",
    r"gh200 (96|120|144|480)gb?( hbm3e?)?": "GH200",
    r"b200": "B200",
    r"gb200": "GB200",
    r"l4": "L4",
    r"l40": "L40",
    r"l40s": "L40S",
    r"geforce rtx 3090": "RTX 3090",
    r"geforce rtx 4090": "RTX 4090",
    r"geforce rtx 5090": "RTX 5090",
    r"rtx a6000": "RTX A6000",
    r"rtx 6000 ada generation": "RTX 6000 Ada",
    r"instinct mi250x": "MI250X die",
    r"instinct mi300x( oam)?": "MI300X",
    r"instinct mi325x( oam)?": "MI325X",
}


def kind_of(name: str) -> str | None:
    """The kind in `PEAKS` of a device that calls itself `name`; None if its whole name is not a known one."""
    words = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    plain = re.sub(r"^(nvidia |amd |tesla )+", "", words)
    return next((kind for pattern, kind in _NAMES.items() if re.fullmatch(pattern, plain)), None)


def peak_of(name: str, product: Product) -> float | None:
    """FLOP/s of a device by its name, in dense products of a format; None where no data sheet is known."""
    kind = kind_of(name)
    return None if kind is None else PEAKS[kind].get(product)


def peak_flops(device: torch.device, product: Product) -> float | None:
    """The same of a device that is there; CPUs have no such figure."""
    return peak_of(torch.cuda.get_device_name(device), product) if device.type == "cuda" else None
