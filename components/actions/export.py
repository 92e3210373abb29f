"""`export { to = "…" }`: the model as a transformers folder, or as a GGUF file."""

from math import prod
from typing import Any, ClassVar, Final, Literal

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, TURN_OF_SAVE
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.setting import at_least, cadence_setting, file_path
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, parameters
from xtrain.plan.canonical import portable
from xtrain.plan.exported_config import ConfigValues, new_config, not_written
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.plan.llama_cpp import NO_FILE, SUFFIX, computed_otherwise
from xtrain.plan.resolved import Resolved
from xtrain.plan.weight_files import LOADED, SIZES
from xtrain.text.units import bytes_text

STEP: Final = "{step}"  # in the name of the folder


@ACTIONS.register()
@frozen
class ExportAction(PlannedAction):
    """`export { to = "…" }`: write the model as a folder that transformers reads, or as a GGUF file."""

    kind: ClassVar[str] = "export"
    writes_beside = True
    turn = TURN_OF_SAVE
    publishes = True
    lasting = True

    to: str = cadence_setting(
        "folder to write, which must not exist; {step} stands for the step; with the suffix .gguf a file for llama.cpp",
        check=file_path,
        example='"models/step-{step}"',
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = cadence_setting(
        "number format; auto: for a model from a folder, the format of each tensor there, else the format of the "
        "parameters",
        default="auto",
    )
    shard_size: Quantity = cadence_setting(
        "maximum size of a file; several files have an index",
        default=Quantity(5 * 2**30, "bytes"),
        units=("bytes",),
        check=at_least(1),
    )

    dequantise: bool = cadence_setting(
        "dequantize the matrices that `precision { base }` stores in codes", default=False, added=True
    )
    adapter: bool = cadence_setting("write only the adapter, in the format of PEFT", default=False, added=True)

    task: str | None = cadence_setting(
        "with `adapter` in a run with tasks: task whose adapter is written", default=None, added=True, example='"sql"'
    )

    def node(self, resolved: Resolved, place: ActionPlace) -> ActionNode:
        dtype = None if self.dtype == "auto" else self.dtype
        if self.adapter:
            return self._adapter_node(resolved, dtype)
        weights = "averaged weights" if resolved.spec.ema is not None and resolved.spec.ema.publish else "weights"
        if dtype is not None:
            written = f"as {dtype}, {bytes_text(resolved.inventory.total * _BYTES[dtype])}"
        elif resolved.weights is not None:
            formats = " and ".join(LOADED[each] for each in resolved.weights.formats)
            size = sum(prod(each.shape) * SIZES[each.format] for each in resolved.weights.tensors.values())
            read = "as in the files read" if resolved.weights.coding == "plain" else "not as codes"
            written = f"as {formats}, {read}, {bytes_text(size)}"
        else:
            from xtrain.plan.parameters import weight_bytes

            written = (
                f"as {resolved.formats.params}, {bytes_text(weight_bytes(resolved.inventory, resolved.formats.params))}"
            )
        to, reader = portable(self.to), "llama.cpp" if self._gguf else "transformers"
        if self._gguf:  # which has no fp64
            written = written.partition(",")[0].replace("fp64", "fp32") + ", vectors and routers as fp32"
        does = f"write the {weights} to {to} for {reader}, {written}; existing files are not overwritten"
        args: dict[str, Any] = {"to": to, "dtype": dtype, "most": int(self.shard_size.value)}
        if self._gguf:
            args["gguf"] = True
        if self.dequantise:
            args["dequantise"] = True
        return ActionNode("tick.export", args, does)

    @property
    def _gguf(self) -> bool:
        return self.to.endswith(SUFFIX)

    def _adapter_node(self, resolved: Resolved, dtype: str | None) -> ActionNode:
        weights = "averaged adapter" if resolved.spec.ema is not None and resolved.spec.ema.publish else "adapter"
        own = (each for each in resolved.inventory.tensors if each.trained and each.task in ("", self.task or ""))
        size = sum(each.size for each in own) * _BYTES[dtype or resolved.formats.params]
        to = portable(self.to)
        weights += f" of task {self.task}" if self.task else ""
        does = f"write the {weights} to {to} for PEFT, {bytes_text(size)}; existing files are not overwritten"
        args = {"to": to, "dtype": dtype, "most": int(self.shard_size.value), "adapter": True}
        args |= {"task": self.task} if self.task else {}
        return ActionNode("tick.export", args, does)

    def idle(self, spec: Spec, ranks: int) -> dict[str, tuple[str, str]]:
        if self.adapter:
            own = "an adapter is written by itself"
            return {"shard_size": (f"{own}, into one file", "remove it"), "dequantise": (own, "remove it")}
        found = {"shard_size": ("a GGUF file is not divided", "remove it")} if self._gguf else {}
        if self.dequantise and not spec.precision.base.stores:
            found["dequantise"] = "no matrix is quantized", "remove it"
        if self.task is not None:
            found["task"] = "the model itself is written", "remove it, or write `adapter = true`"
        return found

    def faults(self, event: str, arch: Architecture, spec: Spec) -> dict[str, tuple[str, str, str]]:
        from xtrain.plan.groups import unfit_task

        if self.adapter and (unfit := unfit_task(arch, self.task)) is not None:
            return {"task" if self.task else "": ("X525", *unfit)}
        if self.adapter and any(action.changes_base for _, action in spec.actions):
            message = "`merge` changes the model under the adapter, which PEFT would look for unchanged"
            return {"adapter": ("X525", message, "leave it out, and use `xtrain merge RUN` to write the whole model")}
        base, problem = spec.precision.base, _adapter_problem(arch) if self.adapter else not_written(arch)
        if problem is not None:
            return {"": ("X525", *problem)}
        if self._gguf and (unfit := self._unfit(arch, spec)) is not None:
            return {"to": ("X525", *unfit)}
        if base.stores and not self.dequantise and not self.adapter:
            message = f"matrices are stored as {base.words()}, and transformers reads no such folder"
            return {"": ("X525", message, "write `dequantise = true` to export dequantized values")}
        if event or STEP in self.to:
            return {}
        hint = f'to = "{self.to.rstrip("/")}-{STEP}"'
        return {"to": ("X304", f"every export would be written to {self.to}, and the second finds it there", hint)}

    def _unfit(self, arch: Architecture, spec: Spec) -> tuple[str, str] | None:
        """Return the reason and the remedy if no GGUF file is written."""
        if self.adapter or self.dtype == "fp64":
            return "a GGUF file holds a whole model in fp32, fp16 or bf16", f"name a folder, without `{SUFFIX}`"
        config = new_config(arch, ConfigValues(format="fp32", context=spec.batch.sequence, begin=0, end=0))
        known = FAMILIES[arch.family].config if arch.family in FAMILIES else None
        reason = computed_otherwise(config, None if known is None else known.llama_cpp)
        return None if reason is None else (f"{NO_FILE}: {reason}", f"name a folder, without `{SUFFIX}`")


def _adapter_problem(arch: Architecture) -> tuple[str, str] | None:
    from xtrain.plan.parameters import frozen_names
    from xtrain.plan.peft import not_written_for_peft

    frozen = frozen_names(arch, ())
    return not_written_for_peft(arch, [each for each in parameters(arch) if each.name not in frozen])


_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
