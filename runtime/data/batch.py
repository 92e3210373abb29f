"""What a training or evaluation step is fed."""

# shapes: B rows of the microbatch, S positions of a row

import torch
from attrs import define
from torch import Tensor

# Label of a position that no loss is taken at; torch's cross entropy leaves it out by default.
IGNORE_INDEX = -100


@define(kw_only=True, eq=False)
class Microbatch:
    """Rows of packed segments. A segment is a run of positions that attend to each other and to nothing else."""

    input_ids_BS: Tensor
    """int64."""
    labels_BS: Tensor
    """int64: the token to predict at each position, or IGNORE_INDEX."""
    positions_BS: Tensor
    """int64: position within the segment, from 0."""
    cumulative_lengths: Tensor
    """int32 [segments + 1]: segment bounds over the flattened B·S positions, none across rows, padding included."""
    max_length: int
    """Positions of the longest segment."""
    num_valid: int
    """Labels that are not IGNORE_INDEX, counted where the microbatch was made so that no device has to be asked."""

    def document_ids_BS(self) -> Tensor:
        """int32: the index of the segment each position belongs to, so equal ids mean the same segment."""
        lengths = self.cumulative_lengths.diff()
        ids = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return ids.repeat_interleave(lengths, output_size=self.input_ids_BS.numel()).view_as(self.input_ids_BS)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Microbatch":
        """The same microbatch with its tensors on `device`."""
        return Microbatch(
            input_ids_BS=self.input_ids_BS.to(device, non_blocking=non_blocking),
            labels_BS=self.labels_BS.to(device, non_blocking=non_blocking),
            positions_BS=self.positions_BS.to(device, non_blocking=non_blocking),
            cumulative_lengths=self.cumulative_lengths.to(device, non_blocking=non_blocking),
            max_length=self.max_length,
            num_valid=self.num_valid,
        )
