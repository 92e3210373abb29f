"""`deepspeed { offload_optimizer = nvme, offload_param = nvme }`: files of a rank's state and parameters."""

import atexit
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtrain.components.stacks._deepspeed_settings import OFFLOADING
from xtrain.components.stacks.deepspeed_pieces_torch import WeightsInPieces
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.state import Rank
from xtrain.text.units import bytes_text


def in_folder_of_run(config: dict[str, Any], run: str) -> dict[str, Any]:
    """Return a configuration whose files are in a folder of this run alone. run: the folder's name."""
    zero = dict(config["zero_optimization"])
    for name in OFFLOADING:
        if "nvme_path" in zero.get(name, {}):
            zero[name] = {**zero[name], "nvme_path": str(Path(zero[name]["nvme_path"]).absolute() / run)}
    return {**config, "zero_optimization": zero}


def drop_at_exit(config: dict[str, Any], rank: Rank) -> None:
    """Remove this rank's files at exit; the files of a killed rank remain until it starts again."""
    for own in _folders(config, rank):
        atexit.register(shutil.rmtree, own, ignore_errors=True)


def check_room(config: dict[str, Any], rank: Rank, *, folder: str, bytes: int, setting: str) -> None:
    """Raise EnvironmentFault (X730) if a disk has less room than this rank's files need. Leftover files of a killed
    start are replaced."""
    there = next(each for each in (Path(folder).absolute(), *Path(folder).absolute().parents) if each.exists())
    left = (each for own in _folders(config, rank) for each in own.rglob("*") if each.is_file())
    free = shutil.disk_usage(there).free + sum(each.stat().st_size for each in left)
    if free < bytes:
        message = f"the files of this rank take {bytes_text(bytes)}, and {bytes_text(free)} are free in {there}"
        raise EnvironmentFault("X730", f"{message}; set {setting} to a folder on a disk with room")


def _folders(config: dict[str, Any], rank: Rank) -> list[Path]:
    """Return the folders that hold only this rank's files."""
    zero = config["zero_optimization"]
    places = {zero[name]["nvme_path"] for name in OFFLOADING if "nvme_path" in zero.get(name, {})}
    kinds = ("optimizer", "float32params", "bfloat16params")
    return [Path(place, "zero_stage_3", kind, f"rank{rank.rank}") for place in places for kind in kinds]


class WeightsInFiles(WeightsInPieces):
    """ZeRO 3 weights and moments in files, read for each update.

    Gradients are in host memory. The engine's files of gradients are not read, because they are not clipped.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        ends = list(accumulate(self.zero.fp16_partitioned_groups_flat_numel, initial=0))
        self._spans = [slice(*span) for span in pairwise(ends)]
        self.inner.register_step_pre_hook(self._take_gradients)

    def gradients(self) -> list[Tensor]:
        return [self.zero.grad_partitions_flat_buffer]

    @torch.no_grad()
    def _take_gradients(self, *_: Any) -> None:
        """Copy a group's gradients before its update."""
        (weights,) = (each for group in self.inner.param_groups for each in group["params"])
        place = next(number for number, each in enumerate(self.updated) if each is weights)
        weights.grad.copy_(self.zero.grad_partitions_flat_buffer[self._spans[place]])

    @contextmanager
    def at_hand(self, group: int, *, writes: bool) -> Iterator[None]:
        zero = self.zero
        if not zero._swappable_optimizer_subgroup(group):  # smaller than a block of a file
            yield
            return
        state, stored = self.inner.state[self.updated[group]], zero.optimizer_swapper
        written = stored.swap_params_info[stored.parameter_id(self.updated[group])].has_state_tensors
        zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if writes or (state and not written):
            zero._writeback_swap_state(group, write_opt_state=True, write_gradients=False)
        else:
            zero._release_swap_buffers(group)
