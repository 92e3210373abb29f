"""What DeepSpeed's compiled reading and writing of files does, in Python, for machines that cannot compile it."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from rank_mutations import mutation
from torch import Tensor


class PlainFiles:
    """An `aio_handle` that has done everything once it returns."""

    locked: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, **_: Any) -> None:
        self._ended = 0

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        found = torch.full((count,), torch.nan, dtype=like.dtype)
        self.locked.append((found.data_ptr(), found.data_ptr() + found.nbytes))
        return found

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(first <= tensor.data_ptr() < end for first, end in self.locked)

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        with Path(path).open("rb") as file:
            file.seek(offset)
            assert file.readinto(_bytes(tensor)) == tensor.nbytes, path
        self._ended += 1
        return 0

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        assert offset == 0 and self.is_pinned(tensor) and tensor.nbytes % 1024 == 0
        Path(path).write_bytes(_bytes(tensor))
        self._ended += 1
        return 0

    def wait(self) -> int:
        ended, self._ended = self._ended, 0
        return ended


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(torch.uint8).numpy().data


@mutation
def plain_files() -> None:
    """No fault: files are read and written by `PlainFiles`, and each rank writes how many bytes they have in the end to
    RANK.files."""
    from xtrain.components.stacks import deepspeed_torch
    from xtrain.components.stacks.deepspeed_pieces_torch import PiecesOptimizer

    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    builder: Any = type(accelerator.create_op_builder("AsyncIOBuilder"))
    builder.is_compatible = lambda self, verbose=False: True
    builder.load = lambda self, verbose=False: SimpleNamespace(aio_handle=PlainFiles)
    drop_at_exit, step, places = deepspeed_torch.drop_at_exit, PiecesOptimizer.step, set()

    def taken(config: Any, rank: Any) -> None:
        places.update(each["nvme_path"] for each in config["zero_optimization"].values() if "nvme_path" in str(each))
        drop_at_exit(config, rank)

    def weighed(self: Any, closure: Any = None) -> None:
        step(self, closure)
        rank = self.rank.rank
        found = (each for place in places for each in Path(place).glob(f"zero_stage_3/*/rank{rank}/**/*"))
        Path(f"{rank}.files").write_text(str(sum(each.stat().st_size for each in found if each.is_file())))

    deepspeed_torch.drop_at_exit = taken
    PiecesOptimizer.step = weighed  # pyright: ignore[reportAttributeAccessIssue]


@mutation
def weigh_offloaded() -> None:
    """No fault: each rank writes what DeepSpeed's engine has in host memory for an update, in bytes, to RANK.bytes."""
    from xtrain.components.stacks.deepspeed_pieces_torch import PiecesOptimizer

    original = PiecesOptimizer.step

    def step(self: Any, closure: Any = None) -> None:
        original(self, closure)
        zero, found = self.zero, [*self.updated, *(each.grad for each in self.updated)]
        found += [tensor for state in self.inner.state.values() for tensor in state.values() if tensor.dim()]
        if zero.__class__.__name__.endswith("Stage3"):
            found += [zero.grad_partitions_flat_buffer, *zero.param_groups_fp16_flat_cpu_memory]
        else:
            found += [*zero.param_buffer_of_bit16_for_cpu_offload_groups, zero.temp_grad_buffer_for_cpu_offload]
            found += zero.accumulated_grads_in_cpu.values()
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
        Path(f"{self.rank.rank}.bytes").write_text(str(sum(storages.values())))

    PiecesOptimizer.step = step  # pyright: ignore[reportAttributeAccessIssue]
