"""Export of an adapter as a folder that PEFT reads, and the choice of the weights that are exported."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, field, frozen
from torch import Tensor

from xtrain.blocks.adapted import AdaptedMatrix, adapted_matrices, alone_name
from xtrain.contracts.models import PlannedAdapter
from xtrain.dsl.schema.actions import action_of
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.component import planned
from xtrain.plan.architecture import Architecture, ParameterSpec, parameters
from xtrain.plan.groups import alone, unfit_task
from xtrain.plan.hardware import FP8
from xtrain.plan.parameters import count_parameters, name_of
from xtrain.plan.peft import (
    PEFT_CONFIG,
    PeftFolder,
    PeftUnreadable,
    assign_peft,
    lay_out_adapter,
    not_written_for_peft,
    peft_config,
    read_peft,
    unread_by_peft,
)
from xtrain.plan.plan import Node, Plan
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault, ExportFailed
from xtrain.runtime.base.locks import HeldLock
from xtrain.runtime.nn.adapters import written
from xtrain.runtime.nn.averages import Which
from xtrain.runtime.observe.provenance import started_in
from xtrain.runtime.store.base_weights import averaged_flaw, prefix, published
from xtrain.runtime.store.beginning import check_weights, find_for_reading, planned_adapter
from xtrain.runtime.store.checkpoints import CheckpointEntry, flaws
from xtrain.runtime.store.export import (
    CARD,
    FORMATS,
    SMALL_BYTES,
    Export,
    Exported,
    WeightsExport,
    check_exportable,
    check_room,
    formats_of,
)
from xtrain.runtime.store.export_folder import last_loss, model_card, new_folder
from xtrain.runtime.store.export_weights import Merging, Report, WeightsWriter
from xtrain.runtime.store.reading import WholeTensors

READ: Final = "setup.read_adapter"


def plan_of(plan: Plan, task: str | None) -> Plan:
    """Return the plan of a run with the adapter of one task; without tasks the plan itself. Raises ExportFailed if the
    task is unknown, or if none is named."""
    if (problem := unfit_task(plan.architecture, task)) is not None:
        raise ExportFailed("; ".join(problem), "X525")
    if task is None:
        return plan
    kept = (tensor for tensor in plan.parameters.tensors if tensor.task in ("", task))
    tensors = tuple(evolve(tensor, name=alone_name(tensor), task="") for tensor in kept)
    return evolve(
        plan,
        architecture=alone(plan.architecture, task),
        parameters=evolve(plan.parameters, tensors=tensors),
        nodes=tuple(_as_alone(node) for node in plan.nodes if node.op != READ or node.args["task"] == task),
    )


def _as_alone(node: Node) -> Node:
    """Rewrite a node that reads a task's adapter as in a run of that task alone; return other nodes unchanged."""
    return evolve(node, args={name: node.args[name] for name in ("folder", "digest")}) if node.op == READ else node


def stored_names(plan: Plan, task: str | None) -> Mapping[str, str]:
    """Map parameter names of `plan_of` to their names in checkpoints of a plan with tasks, where the two differ."""
    if task is None or not isinstance(plan.architecture.adapter, TaskAdapters):
        return {}
    return {alone_name(tensor): tensor.name for tensor in plan.parameters.tensors if tensor.task == task}


@frozen(kw_only=True)
class AdapterExport(WeightsExport):
    """Export of an adapter alone. dtype: None keeps the format of each tensor in the folder that the adapter was read
    from, or else the format of the run's parameters. names: parameter → its name in the checkpoint, where the two
    differ (adapters of tasks, `stored_names`)."""

    names: Mapping[str, str] = field(factory=dict)

    def _check(self) -> None:
        check_adapter_exportable(self.plan)

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
        remarks = tuple(
            f"PEFT with transformers 5 {problem}; `xtrain merge` writes a model with the whole adapter"
            for problem in unread_by_peft(arch, trained)
        )
        return Exported(folder=to, tensors=len(file.tensors), files=1, formats=formats, remarks=remarks)

    def _as_written(self, origin: PeftFolder | None) -> Architecture:
        """Return the architecture with the adapter as the folder stores it; unchanged if it was read from a folder."""
        arch = self.plan.architecture
        if arch.adapter is None or origin is not None:
            return arch
        return evolve(arch, adapter=planned(arch.adapter, PlannedAdapter).as_written(arch.base))

    def _trained(self, arch: Architecture) -> tuple[ParameterSpec, ...]:
        """Return the trained parameters of `arch`, which the folder stores."""
        trained = {tensor.name for tensor in self.plan.parameters.tensors if tensor.trained}
        return tuple(tensor for tensor in parameters(arch) if tensor.name in trained)

    def _reader(self, arch: Architecture) -> Callable[[str], Tensor]:
        """Return a function that reads a whole parameter of `arch` by name."""
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
            beside = {
                parameter_name.removeprefix(start): stored(parameter_name)
                for parameter_name in self._beside(f"{start}{matrix.name}")
            }
            return written(matrix, other, beside)[name.removeprefix(start)]

        return read

    def _beside(self, matrix: str) -> list[str]:
        """Return the names of the adapter's parameters for a matrix."""
        return [tensor.name for tensor in self.plan.parameters.tensors if tensor.adapter == matrix]

    def _origin(self) -> PeftFolder | None:
        """Return the folder that the adapter was read from; None if it was drawn, or if the folder has changed
        since."""
        args = self.plan.args(READ)
        if not args:
            return None
        try:
            return planned_adapter(self.plan, str(self.base / args["folder"]), args["digest"])
        except OSError:
            return None

    def _config(self, origin: PeftFolder | None, arch: Architecture) -> bytes:
        """Return the content of adapter_config.json: a copy of the original file if the adapter was read from a
        folder."""
        if origin is not None:
            return (Path(origin.folder) / PEFT_CONFIG).read_bytes()
        assert arch.adapter is not None
        adapter = planned(arch.adapter, PlannedAdapter)
        config = peft_config(arch, self._trained(arch), self._base_name(), adapter.for_peft)
        return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()

    def _base_name(self) -> str | None:
        """Return the folder or repository of the base model; None without one."""
        args = self.plan.args("setup.read_weights")
        if not args or any(node.op == "setup.pretrained" for node in self.plan.nodes):
            return None
        return args["repo"] if "repo" in args else str(self.base / args["folder"])

    def _verify(self, folder: Path, arch: Architecture) -> None:
        """Read the folder as `adapter { from }` does. Raises ExportFailed."""
        assert arch.adapter is not None
        try:
            written_adapter = read_peft(str(folder), arch.base, arch.adapter.peft_keys)
            assign_peft(arch, self._trained(arch), written_adapter.files)
        except (PeftUnreadable, ValueError) as problem:
            raise ExportFailed(f"the written folder does not match the adapter: {problem}") from problem


def check_adapter_exportable(plan: Plan) -> None:
    """Raise ExportFailed if PEFT has no form of the adapter of a plan, or the model under it has changed."""
    actions = (action_of(node.op) for node in plan.nodes)
    if any(action is not None and action.changes_base for action in actions):
        message = "the run merges its adapter into the model under it, which PEFT would look for unchanged"
        raise ExportFailed(f"{message}; `xtrain merge` writes the whole model", "X525")
    trained = [tensor for tensor in plan.parameters.tensors if tensor.trained]
    if (problem := not_written_for_peft(plan.architecture, trained)) is not None:
        raise ExportFailed("; ".join(problem), "X525")


def export_of(
    plan: Plan,
    directory: Path,
    *,
    checkpoint: str | None,
    averaged: bool | None,
    dtype: str | None,
    most: int,
    dequantise: bool = False,
    quantise: bool = False,
    merges: bool = False,
    task: str | None = None,
    gguf: bool = False,
) -> Export:
    """Return the export of a checkpoint of a run. merges: merge the adapter into the model; task: the adapter to merge,
    of several. gguf: as one file.

    checkpoint, averaged: see `chosen`. Raises EnvironmentFault if the checkpoint does not exist, is of another model,
    or lacks such weights.
    """
    check_exportable(plan, dequantise=dequantise, merges=merges, quantise=quantise, fp8=dtype == FP8)
    own = plan_of(plan, task) if merges else plan
    entry, source = _source(plan, directory, checkpoint=checkpoint, averaged=averaged)
    merging = Merging(own, source["base"], entry, stored_names(plan, task)) if merges else None
    how = {"most": most, "dequantise": dequantise, "quantise": quantise, "merging": merging, "gguf": gguf}
    return Export(plan=own, dtype=dtype, **how, **source)


def adapter_export_of(
    plan: Plan,
    directory: Path,
    *,
    checkpoint: str | None,
    averaged: bool | None,
    dtype: str | None,
    task: str | None = None,
) -> AdapterExport:
    """Return the export of the adapter in a checkpoint of a run; arguments as in `export_of`."""
    own = plan_of(plan, task)
    check_adapter_exportable(own)
    _, source = _source(plan, directory, checkpoint=checkpoint, averaged=averaged)
    return AdapterExport(plan=own, dtype=dtype, names=stored_names(plan, task), **source)


def _source(
    plan: Plan, directory: Path, *, checkpoint: str | None, averaged: bool | None
) -> tuple[CheckpointEntry, dict[str, Any]]:
    """Return a checkpoint of a run, and the fields of its export that say where it is and what it holds."""
    entry, weights, held = chosen(plan, directory, checkpoint=checkpoint, averaged=averaged)
    return entry, {
        "run": directory,
        # The paths of a run are relative to where it was started, not to where it is exported.
        "base": started_in(directory),
        "tensors": entry.path,
        "prefix": prefix(entry, weights),
        "weights": weights,
        "state": {**entry.state(), "step": entry.step},
        "held": held,
    }


def chosen(
    plan: Plan, directory: Path, *, checkpoint: str | None, averaged: bool | None
) -> tuple[CheckpointEntry, Which, HeldLock]:
    """Return a checkpoint of a run, the kind of its weights to use, and a lock that keeps the run from removing it.

    checkpoint: see `find_for_reading`. averaged: use averaged weights; None: the weights that the run publishes. Raises
    EnvironmentFault.
    """
    entry, held = find_for_reading(directory, checkpoint)
    check_weights(plan, entry)
    if averaged is not None and (flaw := averaged_flaw(entry, averaged=averaged)):
        other = "; another checkpoint of the run may have them, see `xtrain checkpoint show`" if entry.is_full else ""
        raise ExportFailed(f"{entry.name} {flaw}{other}")
    return entry, published(entry) if averaged is None else "averaged" if averaged else "trained", held


def check_sound(tensors: Path) -> None:
    """Read a whole checkpoint and compare its checksums. Raises EnvironmentFault that names a damaged file."""
    if damage := flaws(tensors, content=True):
        raise EnvironmentFault("X720", f"the checkpoint {tensors} is damaged: {'; '.join(damage)}")
