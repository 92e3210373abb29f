"""The weights that a run has begun with, whole and one at a time, in a process of its own: of a folder, of another run,
or drawn. For checkpoints that hold an adapter alone."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from attrs import define, field
from torch import Tensor

from xtrain.dsl.schema.bases import Base
from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.graph.checkpoint_fit import base_names
from xtrain.planner.mesh.placement import base_of_plan
from xtrain.planner.plan import Plan
from xtrain.planner.weights.fit import assign
from xtrain.runtime.checkpoint.base import digest_of, piece_of
from xtrain.runtime.checkpoint.chosen_weights import prefix, published
from xtrain.runtime.checkpoint.layout import CheckpointEntry
from xtrain.runtime.checkpoint.model_check import check_base, check_origin
from xtrain.runtime.checkpoint.model_folder import planned_files
from xtrain.runtime.checkpoint.sources import find
from xtrain.runtime.checkpoint.stored_weights import WeightReader
from xtrain.runtime.checkpoint.whole_tensors import WholeTensors
from xtrain.runtime.models.build import DTYPES
from xtrain.runtime.models.quantised import QuantisedMatrix
from xtrain.runtime.models.weights import drawing

# A parameter → all of it, in some number format; of a stack of experts the matrix of one, if a number is given.
Read = Callable[[ParameterSpec, int | None], Tensor]


@define
class BaseWeights:
    """specs: the parameters that no checkpoint of the run holds, by name. format: of those that are no codes."""

    specs: dict[str, ParameterSpec]
    format: str
    base: Base | None
    _read: Read
    _one_by_one: bool = False
    _open: ExitStack = field(factory=ExitStack)

    @classmethod
    def of(cls, plan: Plan, folder: Path, device: torch.device) -> "BaseWeights":
        """As a run of the plan reads them that is started in `folder`; device: where it draws them. Raises
        EnvironmentFault or OSError."""
        opened, names, one_by_one = ExitStack(), base_names(plan), False
        args = {node.op: node.args for node in plan.nodes}
        if "setup.pretrained" in args:
            read = _of_run(plan, folder / args["setup.pretrained"]["path"])
        elif "setup.read_weights" in args:
            where = dict(args["setup.read_weights"])
            if "folder" in where:
                where["folder"] = str(folder / where["folder"])
            files = planned_files(**where)
            reader = WeightReader(files, assign(plan.architecture, files), lambda done: None)
            read, one_by_one = _of_folder(opened.enter_context(reader), args["setup.freeze"]["format"]), True
        else:
            chosen = args["setup.weights"]
            read = _drawn(plan, chosen["seed"], chosen["init_std"], device)
        specs = {each.name: each for each in plan.parameters.tensors if each.name in names}
        return cls(specs, args["setup.freeze"]["format"], base_of_plan(plan), read, one_by_one, opened)

    def __enter__(self) -> "BaseWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def whole(self, name: str) -> Tensor:
        """All of a parameter as it was read or drawn, before it is stored in codes. Raises OSError."""
        return self._read(self.specs[name], None)

    def experts(self, name: str) -> Callable[[int], Tensor]:
        """What gives all of the matrix of an expert of a stack: of a folder each is read by itself. Raises OSError."""
        spec = self.specs[name]
        if self._one_by_one:
            return lambda number: self._read(spec, number)
        whole = self.whole(name)
        return lambda number: whole[number]

    def read(self, name: str, less: Tensor | None = None) -> Tensor:
        """All of a parameter as the run computes with it; fp32 of one that is stored in codes. less: what is taken out
        of it before it is stored, in the format of the difference. Raises OSError."""
        stored = self._stored(name, less)
        if (matrix := self._matrix(name)) is None:
            return stored[name]
        return matrix.values(stored[name], stored.get(matrix.scales), torch.float32)

    def check(self, entry: CheckpointEntry, take: Callable[[str, Tensor], object] = lambda name, whole: None) -> None:
        """Read all of them, and raise ResumeRefused if the checkpoint is of an adapter of another base. take: is given
        each tensor as the run stores it. Raises OSError."""
        sums: dict[str, int] = {}
        for name in sorted(self.specs):
            for stored, whole in self._stored(name).items():
                sums[stored] = piece_of(stored, whole).sum
                take(stored, whole)
        check_base(entry, digest_of(sums))

    @property
    def digest(self) -> str:
        """Of all of them. Raises OSError."""
        return digest_of(
            {each: piece_of(each, whole).sum for name in self.specs for each, whole in self._stored(name).items()}
        )

    def _stored(self, name: str, less: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of a parameter in a run: its values, or its codes and the scales beside them."""
        whole = self.whole(name)
        whole = whole if less is None else whole.to(less.dtype) - less.to(whole.device)
        if (matrix := self._matrix(name)) is None:
            return {name: whole.to(DTYPES[self.format])}
        codes, scales = matrix.pack(whole)
        return {name: codes} if scales is None else {name: codes, matrix.scales: scales}

    def _matrix(self, name: str) -> QuantisedMatrix | None:
        spec = self.specs[name]
        if not spec.quantised or self.base is None:
            return None
        scales = f"{name}_scales" if self.base.double else ""
        return QuantisedMatrix(self.base, spec.shape, spec.shape, (0,) * len(spec.shape), scales)


def _of_run(plan: Plan, path: Path) -> Read:
    entry = find(path, weights=True)
    check_origin(plan, entry)
    if "base" in entry.state():
        message = f"{entry.path} has matrices in codes; export it with --dequantise, and begin with that folder"
        raise OSError(message)
    tensors, before = WholeTensors(entry.path), prefix(entry, published(entry))
    return lambda spec, expert: tensors.read(f"{before}{spec.name}")


def _of_folder(reader: WeightReader, format: str) -> Read:
    def read(spec: ParameterSpec, expert: int | None) -> Tensor:
        shape = spec.shape if expert is None else spec.shape[1:]
        whole = torch.empty(shape, dtype=torch.float32 if spec.quantised else DTYPES[format])
        if expert is None:
            reader.read([(spec.name, whole)])
        else:
            reader.read_whole(spec.name, whole, expert)
        return whole

    return read


def _drawn(plan: Plan, seed: int, init_std: float, device: torch.device) -> Read:
    draw = drawing(plan.architecture, seed, init_std, device)
    return lambda spec, expert: draw(spec.name, spec.shape).cpu()
