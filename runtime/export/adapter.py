"""An adapter as a folder that PEFT reads: its config, its tensors and a model card.

Written beside the folder, read back, and only then given its name, as a whole model is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...planner.architecture import ParameterSpec
from ...planner.model.peft import (
    PEFT_CONFIG,
    PeftFolder,
    PeftUnreadable,
    assign_peft,
    lay_out_adapter,
    not_written_for_peft,
    peft_config,
    read_peft,
)
from ...planner.plan import Plan
from ..checkpoint.model_folder import planned_adapter
from ..checkpoint.whole_tensors import WholeTensors
from ..errors import ExportFailed
from ..files import durable
from ..training.ema import Which
from .export import CARD, FORMATS, SMALL_BYTES, Exported, check_room, formats_of
from .model_card import last_loss, model_card
from .new_folder import check_free, new_folder
from .weights import Report, WeightsWriter


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

    def write(self, to: Path, report: Report) -> Exported:
        """Write the folder `to`. Raises EnvironmentFault, and then there is none."""
        check_adapter_exportable(self.plan)
        check_free(to)
        try:
            return self._write(to, report)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise ExportFailed(f"{where}{error.strerror or error}; nothing is left at {to}") from error

    @property
    def _trained(self) -> tuple[ParameterSpec, ...]:
        return tuple(tensor for tensor in self.plan.parameters.tensors if tensor.trained)

    def _write(self, to: Path, report: Report) -> Exported:
        arch, origin = self.plan.architecture, self._origin()
        usual = FORMATS[self.dtype or self.plan.node("setup.build_model").args["params"]]

        def format_of(parameter: ParameterSpec, name: str) -> str:
            if self.dtype is None and origin is not None and name in origin.files.tensors:
                return origin.files.tensors[name].format
            return usual

        file = lay_out_adapter(arch, self._trained, format_of)
        formats = formats_of((file,))
        contents = {PEFT_CONFIG: self._config(origin, {tensor.name for tensor in file.tensors})}
        loss = last_loss(self.run, self.state)
        contents[CARD] = model_card(self.plan, self.state, self.weights, formats, loss, adapter_alone=True).encode()
        check_room(to, file.bytes + SMALL_BYTES)
        with new_folder(to) as folder:
            for name, content in contents.items():
                durable.write(folder / name, content)
            tensors = WholeTensors(self.tensors)
            writer = WeightsWriter(
                (file,), lambda name: tensors.read(f"{self.prefix}{self.names.get(name, name)}"), folder, report
            )
            writer.write()
            writer.verify()
            self._verify(folder)
        return Exported(folder=to, tensors=len(file.tensors), files=1, formats=formats, remarks=())

    def _origin(self) -> PeftFolder | None:
        """The folder that the adapter was read from; None where it was drawn, or the folder is another by now."""
        args = next((node.args for node in self.plan.nodes if node.op == "setup.read_adapter"), None)
        if args is None:
            return None
        try:
            return planned_adapter(self.plan, str(self.base / args["folder"]), args["digest"])
        except OSError:
            return None

    def _config(self, origin: PeftFolder | None, names: set[str]) -> bytes:
        """That of the folder that the adapter was read from, byte for byte, where its tensors have the same names."""
        if origin is not None and names == origin.files.tensors.keys():
            return (Path(origin.folder) / PEFT_CONFIG).read_bytes()
        config = peft_config(self.plan.architecture, self._trained, self._base_name())
        return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()

    def _base_name(self) -> str | None:
        """The folder or repository of the model under the adapter; None where it has none."""
        args = next((node.args for node in self.plan.nodes if node.op == "setup.read_weights"), None)
        if args is None or any(node.op == "setup.pretrained" for node in self.plan.nodes):
            return None
        return args["repo"] if "repo" in args else str(self.base / args["folder"])

    def _verify(self, folder: Path) -> None:
        """Read the folder as `adapter { from }` does. Raises ExportFailed."""
        arch = self.plan.architecture
        assert arch.adapter is not None
        try:
            found = read_peft(str(folder), arch.base, arch.adapter.peft_keys)
            assign_peft(arch, self._trained, found.files)
        except (PeftUnreadable, ValueError) as problem:
            raise ExportFailed(f"what was written is not the adapter: {problem}") from problem


def check_adapter_exportable(plan: Plan) -> None:
    """Raise ExportFailed if PEFT has no form of the adapter of a plan."""
    trained = [tensor for tensor in plan.parameters.tensors if tensor.trained]
    if (problem := not_written_for_peft(plan.architecture, trained)) is not None:
        raise ExportFailed("; ".join(problem), "X525")
