"""An adapter put into the matrices that it is of, one matrix at a time, and how much of it the number format keeps.

Sums are taken in fp32, in fp64 where the run has trained in that, and rounded once, to the format that is written.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import define, field, frozen
from torch import Tensor

from xtrain.planner.blocks.adapted import adapted_matrices
from xtrain.planner.model.targets import name_of
from xtrain.planner.plan import Plan
from xtrain.planner.weights.written import WrittenFile
from xtrain.runtime.checkpoint.base_weights import BaseWeights
from xtrain.runtime.checkpoint.layout import CheckpointEntry
from xtrain.runtime.checkpoint.stored_weights import TYPES
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.models.adapted import begun_part, merged


@frozen(kw_only=True)
class MergedMatrix:
    """What became of the change of one matrix. rms: of its elements. error: of what is written, as a share of it.
    unchanged: share of elements that are written as they were."""

    name: str
    rms: float
    error: float
    unchanged: float


@define
class Merging:
    """plan: of the run; folder: where it was started; entry: its checkpoint. names: of parameters that the checkpoint
    calls otherwise. matrices: filled while it is written."""

    plan: Plan
    folder: Path
    entry: CheckpointEntry
    names: Mapping[str, str] = field(factory=dict)
    matrices: list[MergedMatrix] = field(factory=list)

    @contextmanager
    def into(
        self, trained: Callable[[str], Tensor], files: tuple[WrittenFile, ...]
    ) -> Iterator[Callable[[str], Tensor]]:
        """What gives all of a parameter of the merged model. trained: gives those that the checkpoint has."""
        exact = torch.float64 if self.plan.node("setup.build_model").args["params"] == "fp64" else torch.float32
        matrices = {
            name_of(layer, each.name): (layer, each) for layer, each in adapted_matrices(self.plan.architecture)
        }
        formats = {name: TYPES[tensor.format] for file in files for tensor in file.tensors for name, _ in tensor.parts}
        factors: dict[str, list[str]] = {}
        for tensor in self.plan.parameters.tensors:
            if tensor.adapter:
                factors.setdefault(tensor.adapter, []).append(tensor.name)

        def read(name: str) -> Tensor:
            if name not in base.specs:
                return trained(name)
            if name not in matrices:
                return base.read(name)
            layer, matrix = matrices[name]
            start = name_of(layer, "")
            beside = {each.removeprefix(start): trained(self.names.get(each, each)).to(exact) for each in factors[name]}
            before = weight = base.read(name).to(exact)
            if matrix.decomposes:
                weight = base.read(name, less=begun_part(matrix, beside)).to(exact)
            whole = merged(matrix, weight, beside)
            self.matrices.append(_compared(name, before, whole, formats[name]))
            return whole

        with self._base() as base:
            yield read

    def check(self) -> None:
        """Read all of the model. Raises ResumeRefused if it is not the one that the adapter was trained on, and
        EnvironmentFault if it cannot be read."""
        try:
            with self._base() as base:
                base.check(self.entry)
        except OSError as error:
            raise EnvironmentFault("X524", f"the model under the adapter cannot be read: {error}") from error

    def _base(self) -> BaseWeights:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where the run has drawn it
        return BaseWeights.of(self.plan, self.folder, device)


def _compared(name: str, before: Tensor, after: Tensor, format: torch.dtype) -> MergedMatrix:
    change, written = after - before, after.to(format)
    size = float(change.norm())
    lost = float((written.to(after.dtype) - after).norm())
    unchanged = float((written == before.to(format)).float().mean())
    return MergedMatrix(
        name=name, rms=size / change.numel() ** 0.5, error=lost / size if size else 0.0, unchanged=unchanged
    )
