"""The tensors of a checkpoint in one process, one at a time, each put together from the shards of all ranks."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from xtrain.runtime.checkpoint.shard_reader import reader_of


class WholeTensors:
    """Reads a checkpoint of any layout and form. What lies where is read once. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._reader = reader_of(folder)
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        except Exception as error:  # what torch raises of a damaged file is of many kinds
            raise OSError(f"{folder} cannot be read: {error}") from error

    def read(self, name: str) -> Tensor:
        """All of a tensor, in its own format. In memory there is also one shard of it. Raises OSError."""
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise OSError(f"{self._folder} has no tensor {name}")
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        except Exception as error:
            raise OSError(f"{self._folder}: `{name}` cannot be read: {error}") from error
        return tensor
