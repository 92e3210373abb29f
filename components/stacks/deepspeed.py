"""`stack = deepspeed`: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) by the engine of DeepSpeed."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import evolve

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.components.stacks._deepspeed_offload import (
    BUCKET,
    aio_config,
    bucket_numbers,
    conflicts_of_offload,
    file_bytes,
    idle_offload,
    moved,
    offload_config,
    offload_text,
)
from xtrain.components.stacks._deepspeed_settings import DeepspeedSettings
from xtrain.contracts.stacks import PlannedStack
from xtrain.dsl.schema.parallel import STACKS
from xtrain.dsl.schema.setting import Conflict
from xtrain.lazy_attrs import frozen
from xtrain.text.units import BYTES, bytes_text, plural

if TYPE_CHECKING:
    from xtrain.blocks.stage_costs import StageCosts
    from xtrain.contracts.stacks import OwnedBytes
    from xtrain.dsl.spec import Spec
    from xtrain.plan.graph import Builder
    from xtrain.plan.resolved import Resolved

_AXES: Final = "spreads a model only over data ranks"
_SHARES: Final = {
    0: "nothing is sharded",
    1: "optimizer state is sharded",
    2: "optimizer state and gradients are sharded",
    3: "optimizer state, gradients and parameters are sharded",
}


@STACKS.register()
@frozen
class Deepspeed(PlannedStack):
    """`stack = deepspeed`: ZeRO by DeepSpeed's engine, in the stage `deepspeed { stage }`."""

    kind = "deepspeed"
    settings = DeepspeedSettings
    package = "deepspeed"
    install = "xtrain[deepspeed]"
    looks_at_machine = True
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("tp", "pp", "cp", "ep"), _AXES),
        "fsdp": "shards according to its stage",
        "reduce": "sums gradients in the format of the parameters",
        "reshard": "gathers according to its stage",
        "prefetch": "gathers according to its stage",
        "sync": "sums gradients according to its stage",
        "offload": "offloads what `deepspeed { offload_optimizer, offload_param }` says",
    }
    resuming: ClassVar[Mapping[str, str]] = {
        "stage": "gradients are summed in another order, and ranks have other shards",
        "offload_optimizer": "states live and are updated on another device",
        "offload_param": "parameters are stored elsewhere",
        "config": "",
    }

    def conflicts(self, spec: "Spec") -> "Iterator[Conflict]":
        stage, params = stage_of(spec), spec.precision.params
        other = "or use stack parallel"
        if params != "fp32":
            message = f"stack deepspeed keeps weights and sums in fp32, not in {params}"
            yield Conflict("precision.params", message, f"use params fp32, {other}")
        yield from _of_compute(spec, stage, other)
        if spec.precision.base.stores:
            message = "stack deepspeed does not support quantized matrices"
            yield Conflict("precision.base", message, f"remove it, {other}")
        if spec.tasks:
            message = "stack deepspeed has one norm of all gradients, and each task needs its own"
            yield Conflict("task", message, other.removeprefix("or "))
        if spec.step is not None:
            message = f"{spec.step.function} calls `backward` itself, and stack deepspeed has a backward of its own"
            yield Conflict("step.name", message, f"remove `step`, {other}")
        if spec.activation.tile_mlp != 1:
            message = "stack deepspeed sums a gradient when it first arrives, and with tile_mlp it arrives in parts"
            yield Conflict("activation.tile_mlp", message, f"use tile_mlp 1, {other}")
        if spec.optimizer.before_forward:
            message = f"{spec.optimizer.kind} moves weights before the forward, which stack deepspeed does not support"
            yield Conflict("optimizer.kind", message, f"use adamw, {other}")
        if stage:
            yield from _of_pieces(spec, stage, other)
        yield from conflicts_of_offload(spec, settings_of(spec))

    def idle(self, spec: "Spec") -> "Iterator[tuple[str, str]]":
        return idle_offload(spec, settings_of(spec))

    def savings(self, spec: "Spec") -> "Iterator[dict[str, Any]]":
        """Yield both kinds of offloading, one after the other."""
        chosen = settings_of(spec)
        if chosen.stage and chosen.offload_optimizer == "none":
            yield {"offload_optimizer": "cpu"}
        elif chosen.stage == 3 and chosen.offload_param == "none":
            yield {"offload_param": "cpu"}

    def wrap_optimizer(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        stage, ranks = stage_of(resolved.spec), resolved.size("replicate")
        numbers = sum(tensor.size for tensor in resolved.inventory.tensors if tensor.trained)
        whole, piece = (bytes_text(BYTES[resolved.formats.params] * each) for each in (numbers, -(-numbers // ranks)))
        does = f"ZeRO stage {stage} by DeepSpeed over {plural(ranks, 'rank')}: {_SHARES[stage]}"
        does += f", each tensor {whole} → {piece} a rank" if stage and ranks > 1 else ""
        does += offload_text(resolved, settings_of(resolved.spec))
        does += "; write its configuration to deepspeed.json of the run"
        axes, args = resolved.wide("replicate"), {"stage": stage, "config": config_of(resolved)}
        args |= settings_of(resolved.spec).offloading
        if size := file_bytes(resolved, settings_of(resolved.spec)):
            folder = settings_of(resolved.spec).nvme_path
            args["files"] = {"folder": folder, "bytes": size, "setting": "parallel.deepspeed.nvme_path"}
        last = graph.add("setup", self.node(), does, args=args, axes=axes, after=((last, "optimizer"),))
        does = "the engine updates the parameters" + (", each rank its shard" if stage and ranks > 1 else "")
        return graph.add("setup", "setup.stack_optimizer", does, after=((last, "wrapped"),))

    def held(self, resolved: "Resolved", states: "OwnedBytes") -> "OwnedBytes":
        """Return the bytes held by a rank. It computes with all parameters, or from stage 3 on with its pieces,
        gathered for one module at a time; it updates a copy of its piece of the trained parameters. Parameters for
        the computation are in the compute format."""
        stage, ranks = stage_of(resolved.spec), resolved.size("replicate")
        if stage == 0:
            return states
        piece = -(-states.trained // ranks)
        computed = (piece if stage == 3 else states.parameters) * BYTES[resolved.formats.compute]
        computed //= BYTES[resolved.formats.params]
        left = evolve(
            states,
            parameters=computed + piece,
            trained=states.trained if stage == 1 else piece,
            moments=-(-states.moments // ranks),
        )
        return moved(resolved, settings_of(resolved.spec), left, piece, computed)

    def gradients_spared(self, resolved: "Resolved", states: "OwnedBytes") -> int:
        if stage_of(resolved.spec) < 2:
            return 0
        piece = -(-states.trained // resolved.size("replicate"))
        return max(0, states.trained - piece - _bucket_bytes(resolved))

    def gathered(self, resolved: "Resolved") -> int:
        """Return the bytes gathered under stage 3: parameters outside of blocks, and the largest one in a block."""
        if stage_of(resolved.spec) < 3:
            return 0
        ends = sum(each.size for each in resolved.inventory.tensors if not each.name.startswith("layers."))
        largest = max(each.size for each in resolved.inventory.tensors if each.name.startswith("layers."))
        return BYTES[resolved.formats.compute] * (ends + largest)

    def beside_update(self, resolved: "Resolved", states: "OwnedBytes") -> int:
        """Return the bytes of a bucket buffer, and of a second copy of the rank's gradients in one tensor, if the
        device updates it."""
        whole = BYTES[resolved.formats.params] * states.elements
        piece = -(-whole // resolved.size("replicate")) if stage_of(resolved.spec) else 0
        return _bucket_bytes(resolved) + (piece if settings_of(resolved.spec).offload_optimizer == "none" else 0)

    def calls(self, resolved: "Resolved", stages: list["StageCosts"], pp: int) -> Iterator[tuple[CollectiveCall, int]]:
        """Yield the collective calls. Stages 0 and 1 sum gradients once per step, the others after every microbatch.
        Updated shards, or in stage 3 all parameters, are gathered before each forward and each backward."""
        ranks, stage = resolved.size("replicate"), stage_of(resolved.spec)
        if ranks == 1:
            return
        width, computed = BYTES[resolved.formats.params], BYTES[resolved.formats.compute]
        numbers = sum(tensor.size for tensor in resolved.inventory.tensors if tensor.trained)
        times = resolved.batch.accumulate if stage > 1 else 1
        for first in range(0, numbers, BUCKET):
            size = width * min(BUCKET, numbers - first)
            summed = "reduce_scatter" if stage == 3 else "all_reduce"
            yield CollectiveCall("replicate", summed, self.node(), size), times
            if stage in (1, 2):
                yield CollectiveCall("replicate", "all_gather", self.node(), size // width * computed), 1
        for tensor in resolved.inventory.tensors if stage == 3 else ():
            yield (
                CollectiveCall("replicate", "all_gather", self.node(), computed * tensor.size),
                2 * resolved.batch.accumulate,
            )


def settings_of(spec: "Spec") -> DeepspeedSettings:
    """Return the block `deepspeed` of a spec."""
    return spec.parallel.of_stacks()[Deepspeed.kind]


def stage_of(spec: "Spec") -> int:
    """Return the stage that a spec with this stack chooses."""
    return settings_of(spec).stage


def _of_compute(spec: "Spec", stage: int, other: str) -> Iterator[Conflict]:
    """Yield conflicts of number formats: the engine computes in bf16 with fp32 pieces of the weights."""
    from xtrain.plan.resolved import resolve_formats

    formats = resolve_formats(spec.precision, spec.parallel)
    compute = formats.compute if formats.fp8 is None else "fp8"
    if formats.params == "fp32" and compute not in ("fp32", "bf16"):
        message = f"stack deepspeed computes in fp32 or in bf16, not in {compute}"
        yield Conflict("precision.compute", message, f"use compute bf16 or fp32, {other}")
    if compute != "bf16":
        return
    if stage < 2:
        message = f"stage {stage} of stack deepspeed has an optimizer of its own for bf16, which is not supported"
        yield Conflict("precision.compute", message, f"use deepspeed.stage 2, or compute fp32, {other}")
    elif stage == 2:
        what = "parameters, which stack deepspeed has in bf16 outside of its own shards"
        yield from _of_readers(spec, what, f"use compute fp32, {other}")
        if spec.model.experts:
            message = "stack deepspeed supports mixtures of experts only in fp32: bf16 has not been verified"
            yield Conflict("model.experts", message, f"use compute fp32, {other}")


def _of_pieces(spec: "Spec", stage: int, other: str) -> Iterator[Conflict]:
    """Yield conflicts with features that need whole gradients or a parameter's whole state on each rank."""
    from xtrain.plan.groups import written_optimizers

    for before, chosen in written_optimizers(spec).items():
        if before:
            message = "stack deepspeed has one optimizer for all parameters"
            yield Conflict(f"{before}optimizer.kind", message, f"remove the group's `optimizer`, {other}")
        elif not chosen.elementwise:
            message = f"stage {stage} of stack deepspeed shards parameters anywhere, and {chosen.kind} needs more of a "
            message += "parameter than the element that it updates"
            yield Conflict("optimizer.kind", message, f"use adamw, lion or sgd, or deepspeed.stage 0, {other}")
    if stage == 3:
        yield from _of_gathered(spec, other)
    if spec.optimizer.clip_value is not None:
        message = f"stage {stage} of stack deepspeed has the norm of all gradients, but not each element"
        yield Conflict("optimizer.clip_value", message, f"remove clip_value, {other}")
    for hook in spec.hooks.values():
        if (what := hook.declared.get("changes", "nothing")) != "nothing":
            message = f"{hook.name} changes {what}, and stage {stage} of stack deepspeed has its own copies of shards"
            yield Conflict(f"hook.{hook.name}.name", message, f"use deepspeed.stage 0, {other}")
    for path, action in spec.actions:
        if action.reads_gradients:
            message = f"{action.kind} reads gradients of parameters, and stage {stage} of stack deepspeed releases them"
            hint = f"leave gradients out of `of`, use deepspeed.stage 0, {other}"
            yield Conflict(path, message, hint)


def _of_gathered(spec: "Spec", other: str) -> Iterator[Conflict]:
    """Yield conflicts with features that need parameters outside of their module's forward and backward."""
    less = f"use deepspeed.stage 2, {other}"
    if spec.model.experts:
        message = "stage 3 of stack deepspeed supports modules that return tensors, and a router returns more"
        yield Conflict("model.experts", message, less)
    what = "parameters, which stage 3 of stack deepspeed has only while their module computes"
    beside = {"model.mtp": (bool(spec.model.mtp), "mtp"), "compile.mode": (spec.compile.mode != "none", "compile")}
    yield from _of_readers(spec, what, less, beside)


def _of_readers(
    spec: "Spec", what: str, hint: str, beside: "Mapping[str, tuple[bool, str]]" = MappingProxyType({})
) -> Iterator[Conflict]:
    """Yield conflicts with features that read parameters which the stack does not keep in their saved form. what: these
    parameters, as a clause. beside: setting → (is it used, the feature that reads the parameters)."""
    reads = {
        "adapter": (spec.adapter is not None, "an adapter"),
        "model.frozen": (bool(spec.model.frozen), "frozen"),
        "ema": (spec.ema is not None, "ema"),
        "rollout": (spec.rollout is not None, "a rollout"),
        "hook": (bool(spec.hooks), "a hook"),
        "evaluation_step.name": (spec.evaluation_step is not None, "an evaluation_step"),
    }
    reads |= dict(beside) | {path: (action.reads_parameters, action.kind) for path, action in spec.actions}
    for path, (there, reader) in reads.items():
        if there:
            yield Conflict(path, f"{reader} reads {what}", hint)


def config_of(resolved: "Resolved") -> dict[str, Any]:
    """Return the engine's configuration. Nothing is left to its defaults, and nothing scales the loss or gradients.

    Gradients are summed, because the loss is divided by the tokens of all ranks; `step.clip` clips them. Stage 3 only
    averages, so it gets the loss times the number of ranks.
    """
    batch, stage = resolved.batch, stage_of(resolved.spec)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            "reduce_bucket_size": bucket_numbers(resolved),
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_scatter": True,
        }
    if stage in (1, 2):
        # Offloaded state needs the engine's own norm for its update; the norm is not used otherwise.
        norm = settings_of(resolved.spec).offload_optimizer != "none"
        zero |= {
            "allgather_bucket_size": bucket_numbers(resolved),
            "round_robin_gradients": False,
            "compute_grad_norm": norm,
        }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": bucket_numbers(resolved),
        }
    zero |= offload_config(resolved, settings_of(resolved.spec))
    return {
        "train_batch_size": batch.micro * batch.accumulate * resolved.size("replicate"),
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulate,
        **({"gradient_allreduce_op": "sum"} if stage < 3 else {}),
        "gradient_clipping": 0.0,
        "bf16": {"enabled": resolved.formats.compute == "bf16"},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        **aio_config(settings_of(resolved.spec)),
        **({"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}} if stage else {}),
    }


def _bucket_bytes(resolved: "Resolved") -> int:
    return BYTES[resolved.formats.params] * bucket_numbers(resolved)
