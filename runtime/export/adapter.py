"""An adapter as a folder that PEFT reads: its config, its tensors and a model card.

Written beside the folder, read back, and only then given its name, as a whole model is.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from torch import Tensor

from xtrain.planner.architecture import Architecture, ParameterSpec, parameters
from xtrain.planner.blocks.adapted import AdaptedMatrix, adapted_matrices
from xtrain.planner.model.inventory import count_parameters
from xtrain.planner.model.peft import (
    PEFT_CONFIG,
    PeftFolder,
    PeftUnreadable,
    assign_peft,
    is_expert_magnitude,
    lay_out_adapter,
    not_written_for_peft,
    peft_config,
    read_peft,
    taken_for_experts,
)
from xtrain.planner.model.targets import name_of
from xtrain.planner.plan import Plan
from xtrain.runtime.checkpoint.model_folder import planned_adapter
from xtrain.runtime.checkpoint.whole_tensors import WholeTensors
from xtrain.runtime.errors import ExportFailed
from xtrain.runtime.export.export import CARD, FORMATS, SMALL_BYTES, Exported, check_room, formats_of
from xtrain.runtime.export.model_card import last_loss, model_card
from xtrain.runtime.export.new_folder import exporting, new_folder
from xtrain.runtime.export.weights import Report, WeightsWriter
from xtrain.runtime.files import durable
from xtrain.runtime.files.locks import HeldLock
from xtrain.runtime.models.adapted import written
from xtrain.runtime.training.ema import Which


@frozen(kw_only=True)
class AdapterExport:
    """What is exported, as of `Export`. dtype: number format, None: of an adapter from a folder that which each tensor
    has there, of others that of the run's parameters. names: of parameters that the checkpoint calls otherwise, which
    are those of a task (`plan_of`)."""

    plan: Plan
    run: Path
    base: Path
    tensors: Path
    prefix: str
    weights: Which
    state: dict[str, Any]
    dtype: str | None
    names: Mapping[str, str] = field(factory=dict)
    held: HeldLock | None = None

    def write(self, to: Path, report: Report) -> Exported:
        """Write the folder `to`. Raises EnvironmentFault, and then there is none."""
        check_adapter_exportable(self.plan)
        with exporting(to):
            return self._write(to, report)

    def _write(self, to: Path, report: Report) -> Exported:
        origin = self._origin()
        arch = self._as_written(origin)
        trained = self._trained(arch)
        usual = FORMATS[self.dtype or self.plan.node("setup.build_model").args["params"]]

        def format_of(parameter: ParameterSpec, name: str) -> str:
            if self.dtype is None and origin is not None and name in origin.files.tensors:
                return origin.files.tensors[name].format
            return usual

        file = lay_out_adapter(arch, trained, format_of)
        formats = formats_of((file,))
        contents = {PEFT_CONFIG: self._config(origin, arch)}
        loss = last_loss(self.run, self.state)
        frozen = frozenset(tensor.name for tensor in self.plan.parameters.tensors if not tensor.trained)
        plan = evolve(self.plan, architecture=arch, parameters=count_parameters(arch, frozen))
        contents[CARD] = model_card(plan, self.state, self.weights, formats, loss, adapter_alone=True).encode()
        check_room(to, file.bytes + SMALL_BYTES)
        with new_folder(to) as folder:
            for name, content in contents.items():
                durable.write(folder / name, content)
            writer = WeightsWriter((file,), self._reader(arch), folder, report)
            writer.write()
            writer.verify()
            self._verify(folder, arch)
        problems: list[str] = []
        if (module := taken_for_experts(arch, trained)) is not None:
            problems.append(f"may leave out {module} and others that are called as matrices of experts")
        if (stack := next((each.adapter for each in trained if is_expert_magnitude(each)), None)) is not None:
            problems.append(f"has no magnitudes of {stack}, and reads no such adapter")
        remarks = tuple(
            f"PEFT with transformers 5 {each}; `xtrain merge` writes a model with all of the adapter"
            for each in problems
        )
        return Exported(folder=to, tensors=len(file.tensors), files=1, formats=formats, remarks=remarks)

    def _as_written(self, origin: PeftFolder | None) -> Architecture:
        """The model with the adapter as the folder has it: one from a folder as it is there."""
        arch = self.plan.architecture
        if arch.adapter is None or origin is not None:
            return arch
        return evolve(arch, adapter=arch.adapter.as_written(arch.base))

    def _trained(self, arch: Architecture) -> tuple[ParameterSpec, ...]:
        """The parameters of such a model that the folder has."""
        trained = {tensor.name for tensor in self.plan.parameters.tensors if tensor.trained}
        return tuple(tensor for tensor in parameters(arch) if tensor.name in trained)

    def _reader(self, arch: Architecture) -> Callable[[str], Tensor]:
        """What gives all of a parameter of such a model."""
        tensors, before = WholeTensors(self.tensors), list(adapted_matrices(self.plan.architecture))
        made: dict[str, tuple[str, AdaptedMatrix, AdaptedMatrix]] = {}
        for (layer, matrix), (_, other) in zip(before, adapted_matrices(arch), strict=True):
            if matrix != other:
                start = name_of(layer, "")
                made |= dict.fromkeys(self._beside(f"{start}{matrix.name}"), (start, matrix, other))

        def stored(name: str) -> Tensor:
            return tensors.read(f"{self.prefix}{self.names.get(name, name)}")

        def read(name: str) -> Tensor:
            if name not in made:
                return stored(name)
            start, matrix, other = made[name]
            beside = {each.removeprefix(start): stored(each) for each in self._beside(f"{start}{matrix.name}")}
            return written(matrix, other, beside)[name.removeprefix(start)]

        return read

    def _beside(self, matrix: str) -> list[str]:
        """What the checkpoint has beside a matrix."""
        return [tensor.name for tensor in self.plan.parameters.tensors if tensor.adapter == matrix]

    def _origin(self) -> PeftFolder | None:
        """The folder that the adapter was read from; None where it was drawn, or the folder is another by now."""
        args = next((node.args for node in self.plan.nodes if node.op == "setup.read_adapter"), None)
        if args is None:
            return None
        try:
            return planned_adapter(self.plan, str(self.base / args["folder"]), args["digest"])
        except OSError:
            return None

    def _config(self, origin: PeftFolder | None, arch: Architecture) -> bytes:
        """That of the folder that the adapter was read from, byte for byte."""
        if origin is not None:
            return (Path(origin.folder) / PEFT_CONFIG).read_bytes()
        config = peft_config(arch, self._trained(arch), self._base_name())
        return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()

    def _base_name(self) -> str | None:
        """The folder or repository of the model under the adapter; None where it has none."""
        args = next((node.args for node in self.plan.nodes if node.op == "setup.read_weights"), None)
        if args is None or any(node.op == "setup.pretrained" for node in self.plan.nodes):
            return None
        return args["repo"] if "repo" in args else str(self.base / args["folder"])

    def _verify(self, folder: Path, arch: Architecture) -> None:
        """Read the folder as `adapter { from }` does. Raises ExportFailed."""
        assert arch.adapter is not None
        try:
            found = read_peft(str(folder), arch.base, arch.adapter.peft_keys)
            assign_peft(arch, self._trained(arch), found.files)
        except (PeftUnreadable, ValueError) as problem:
            raise ExportFailed(f"what was written is not the adapter: {problem}") from problem


def check_adapter_exportable(plan: Plan) -> None:
    """Raise ExportFailed if PEFT has no form of the adapter of a plan."""
    trained = [tensor for tensor in plan.parameters.tensors if tensor.trained]
    if (problem := not_written_for_peft(plan.architecture, trained)) is not None:
        raise ExportFailed("; ".join(problem), "X525")
