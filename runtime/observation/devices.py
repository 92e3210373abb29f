"""Peak arithmetic of known accelerators, for MFU; `None` rather than a guess for all others."""

import torch

# Dense bf16 FLOP/s, without sparsity, from the vendors' data sheets. Longer names first: the first match counts.
BF16_PEAK = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}


def peak_flops(device: torch.device, compute: str) -> float | None:
    """FLOP/s of the device in the format it computes in; only bf16 on known GPUs has a figure that means something."""
    if device.type != "cuda" or compute != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in BF16_PEAK.items() if known in name), None)
