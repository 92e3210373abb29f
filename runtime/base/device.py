"""The device of a rank: peak rates, memory in use, random streams, and code that also runs on meta tensors."""

import os
import random
import re
import resource
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xtrain.plan.hardware import PEAKS, Product

# Full names of devices as their drivers report them: lower case, one space for each run of other characters, without
# the vendor. Every word counts: an H200 is not an H20, and a MIG slice, a notebook's device or a custom one is not the
# device with the same number.
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
    """Return the kind in `PEAKS` of a device with the name `name`; None if its whole name is unknown."""
    words = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    plain = re.sub(r"^(nvidia |amd |tesla )+", "", words)
    return next((kind for pattern, kind in _NAMES.items() if re.fullmatch(pattern, plain)), None)


def peak_of(name: str, product: Product) -> float | None:
    """Return the dense FLOP/s of a device with the name `name` in a number format; None without a data sheet."""
    kind = kind_of(name)
    return None if kind is None else PEAKS[kind].get(product)


def peak_flops(device: torch.device, product: Product) -> float | None:
    """Return the dense FLOP/s of `device` in a number format; None on a CPU."""
    return peak_of(torch.cuda.get_device_name(device), product) if device.type == "cuda" else None


STATM: Final = "/proc/self/statm"
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank: allocated on a GPU since `forget_peak`, resident on a CPU since the process
    began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak(device: torch.device) -> int:
    """Reset the peak of a GPU (the peak of a process cannot be reset). Returns the peak before."""
    before = peak_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return before


class MemoryNow:
    """Memory of a rank at the time of a call, for its records."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = 0
        self._statm: int | None = None
        if device.type != "cuda":
            with suppress(OSError):  # kept open: reading it takes two microseconds in a logged step
                self._statm = os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, self._statm)

    def take(self) -> dict[str, int]:
        """Return the current memory in bytes.

        On a GPU `allocated_bytes` and `reserved_bytes`, and the allocator's `retries` since the last call; on a CPU
        `resident_bytes` where the system reports it.
        """
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            before, self._retries = self._retries, stats["num_alloc_retries"]
            return {
                "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
                "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
                "retries": self._retries - before,
            }
        if self._statm is None:
            return {}
        return {"resident_bytes": int(os.pread(self._statm, 64, 0).split()[1]) * PAGE}


_WATT: Final = 1 if torch.version.hip else 1000  # torch gives milliwatts on CUDA
# Name in the records → its reading.
READINGS: Final[dict[str, Callable[[torch.device], float]]] = {
    "gpu_utilization": lambda device: torch.cuda.utilization(device) / 100,
    "gpu_temperature": lambda device: float(torch.cuda.temperature(device)),
    "gpu_power": lambda device: torch.cuda.power_draw(device) / _WATT,
}


class DeviceGauges:
    """Readings of the GPU of a rank, through torch from NVML (extra `nvml`) or AMD SMI: none on a CPU and without the
    package."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names = list(READINGS) if device.type == "cuda" else []

    def take(self) -> dict[str, float]:
        """Return the readings of now: a share of time, degrees Celsius, watts. A reading that fails once, such as the
        utilization of a MIG slice, is not tried again."""
        found: dict[str, float] = {}
        for name in [*self._names]:
            try:
                found[name] = READINGS[name](self._device)
            except Exception:  # NVML has errors of its own, and torch raises others without the package or the driver
                self._names.remove(name)
        return found


def streams(device: torch.device) -> dict[str, Tensor]:
    """Return name → a copy of the state of each random stream, in host memory; `cuda` is the stream of the rank's own
    device."""
    states = {"torch": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def put_back(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the random streams to the states that `streams` copied."""
    for name, state in states.items():
        match name:
            case "torch":
                torch.set_rng_state(state)
            case "cuda":
                torch.cuda.set_rng_state(state, device)
            case "python":
                version, *words, has_next, following = state.tolist()
                random.setstate((int(version), tuple(map(int, words)), following if has_next else None))
            case "numpy":
                *words, position, has_next, following = state.tolist()
                key = np.array(words, dtype=np.uint32)
                np.random.set_state(("MT19937", key, int(position), int(has_next), following))
            case _:
                raise AssertionError(name)


def begin(seed: int, step: int, data_rank: int) -> None:
    """Seed all random streams from the seed, the number of finished steps and the part of the data that this rank
    reads.

    Ranks that read the same rows start with the same state: they must draw the same values for these rows.
    """
    digest = blake2b(f"{seed}:{step}:{data_rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1  # some generators take signed seeds
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed([number >> 32, number & 0xFFFFFFFF])


def _of_python() -> Tensor:
    """Return [version, 625 words, whether a normal sample is left over, that sample]; whole numbers are exact
    in fp64."""
    version, words, following = random.getstate()
    return torch.tensor([version, *words, following is not None, following or 0.0], dtype=torch.float64)


def _of_numpy() -> Tensor:
    """Return [624 words, position, whether a normal sample is left over, that sample]."""
    state: Any = np.random.get_state(legacy=True)
    kind, key, position, has_next, following = state
    assert kind == "MT19937"  # the global stream has no other
    return torch.tensor([*key.tolist(), position, has_next, following], dtype=torch.float64)


class FakeDevice(FakeTensorMode):
    """Fake tensors of a plan's device: without memory, on the CPU, with the kernels of `kind` where code chooses
    kernels.

    capability: major version of a CUDA device's compute capability, 0 if unknown.
    """

    def __init__(self, kind: str, capability: int) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kind, self.capability = kind, capability

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch an operation; pinning, which torch does not define on fake tensors, becomes a copy."""
        if func is torch.ops.aten._pin_memory.default:
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], None
        return super().dispatch(func, types, args, kwargs or {})


def numbers(x: Tensor, otherwise: Any) -> Any:
    """Return the values of `x` as nested lists, for which the host waits; `otherwise` if `x` is a fake tensor."""
    return otherwise if isinstance(x, FakeTensor) else x.tolist()


def device_type(x: Tensor) -> str:
    """Return the kind of device whose kernels compute with `x`."""
    if isinstance(x, FakeTensor) and isinstance(x.fake_mode, FakeDevice):
        return x.fake_mode.kind
    return x.device.type


def capability(x: Tensor) -> int:
    """Return the major version of the compute capability of the CUDA device that computes with `x`."""
    if isinstance(x, FakeTensor) and isinstance(x.fake_mode, FakeDevice):
        return x.fake_mode.capability
    return torch.cuda.get_device_capability(x.device)[0]
