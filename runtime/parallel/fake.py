"""Tensors without memory, and what code that asks one for more than its shape is told.

`xtrain plan --trace` runs the program of a rank on them: they have shapes and storages, but no values and no device.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class FakeDevice(FakeTensorMode):
    """Tensors made under it have no memory. Their device is the CPU; kernels are those of `kind`, where code chooses.

    capability: major number of a CUDA device's compute capability, 0 if it is not known.
    """

    def __init__(self, kind: str, capability: int) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kind, self.capability = kind, capability

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch does not say what pinning is to a tensor without memory: a copy of it."""
        if func is torch.ops.aten._pin_memory.default:
            func, args, kwargs = torch.ops.aten.clone.default, args[:1], None
        return super().dispatch(func, types, args, kwargs or {})


def numbers(x: Tensor, otherwise: Any) -> Any:
    """What is in `x`, as nested lists, for which the host waits; `otherwise` where there are none."""
    return otherwise if isinstance(x, FakeTensor) else x.tolist()


def device_type(x: Tensor) -> str:
    """The kind of device whose kernels are to compute with `x`."""
    if isinstance(x, FakeTensor) and isinstance(x.fake_mode, FakeDevice):
        return x.fake_mode.kind
    return x.device.type


def capability(x: Tensor) -> int:
    """Major number of the compute capability of the CUDA device that is to compute with `x`."""
    if isinstance(x, FakeTensor) and isinstance(x.fake_mode, FakeDevice):
        return x.fake_mode.capability
    return torch.cuda.get_device_capability(x.device)[0]
