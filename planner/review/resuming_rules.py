"""Effects of changed node arguments on a resumed run: a row for every argument that a plan can have.

An argument without a row makes a checkpoint incompatible, so that none is forgotten; a test covers all of them.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import frozen

from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.dsl.schema.parallel import stack_of_node, stack_of_step
from xtrain.dsl.schema.policy import REWARDS
from xtrain.dsl.schema.run import OP as TRACKER
from xtrain.dsl.schema.setting import settings_of
from xtrain.plan.groups import OP as GROUP

Kind = Literal["same", "safe", "resharded", "incompatible"]
# Compared with a run that followed the second plan from its start: none: equal bit for bit; rounding: equal up to
# rounding; learning: something else is learned.
Effect = Literal["none", "rounding", "learning"]


@frozen(kw_only=True)
class Reason:
    """Difference of two plans and its meaning for a checkpoint of the first.

    path: the setting that it depends on. certain: False if it depends on files read when the run starts, which `text`
    names.
    """

    kind: Kind
    path: str
    text: str
    effect: Effect = "none"
    certain: bool = True


@frozen
class Rule:
    """Allowed change. path: the setting; text: the reason, as a clause."""

    path: str
    effect: Effect
    text: str


_STAYS = "what is trained stays the same"
_ORDER = "sums are computed in another order"
_KERNEL = Rule("model.attention", "rounding", "another kernel computes attention")
_FUSED = Rule("compile.mode", "rounding", "other kernels compute norms, rotations and SwiGLU")
_RECOMPUTE = Rule("activation", "rounding", "the same operations, some of them recomputed")
_TILE = Rule("activation.tile_mlp", "rounding", "gradients of feed-forward matrices are summed piece by piece")
_COMPILE = Rule("compile.mode", "rounding", "compiled blocks round differently")
_DEVICE = Rule("launch.device", "rounding", "another kind of device computes")
_REDUCE = Rule("parallel.fsdp.reduce", "rounding", "gradients are summed in another format")
_RESHARD = Rule("parallel.fsdp.reshard", "none", f"memory and traffic change, {_STAYS}")
_OFFLOAD = Rule("parallel.fsdp.offload", "rounding", "states live and are updated on another device")
_LEARNS = "the optimizer uses the new value from here on"
_FIRST = "it only affects the initial weights, which were those of A"
_TEACHER: Final = "the divergence is taken from it from here on"
_BEGUN = f"{_FIRST}; under an adapter the weights that are read must be the same"

_AVERAGE = "the averaged weights move"

_SAVING = ("backend", "keep", "mode", "overlap", "best", "failures")

# None: compared as a whole elsewhere: the model, the data, the layout, the learning-rate curve, the cadence.
_SHARDING: Final[dict[str, Rule | None]] = {
    "pattern": None,
    "matches": None,
    "dimension": None,
    "compute": None,
    "reduce": _REDUCE,
    "reshard": _RESHARD,
    "offload": _OFFLOAD,
}
RULES: Final[dict[str, dict[str, Rule | None]]] = {
    "setup.bootstrap": {
        "seed": None,
        "axes": None,
        "lazily": None,
        "device": _DEVICE,
        "threads": Rule("launch.threads", "rounding", _ORDER),
        "matmul": Rule("precision.matmul", "rounding", "fp32 products are computed differently"),
        "small_products": Rule("precision.matmul", "rounding", "fp32 products are computed differently"),
        "stop_deadline_seconds": Rule("launch.stop_deadline", "none", _STAYS),
    },
    "setup.deterministic": {"workspaces": Rule("precision.deterministic", "rounding", "other algorithms may compute")},
    "setup.watch": {"stuck_seconds": Rule("fault_tolerance.stuck", "none", _STAYS)},
    "setup.mesh": {"axes": None, "expert_axes": None, "shard_axes": None},
    "setup.build_model": {
        "architecture": None,
        "attention": _KERNEL,
        "pointwise": _FUSED,
        "params": None,
        "z_loss": Rule("loss.z_loss", "learning", "the loss uses the new weight from here on"),
        "chunk_bytes": Rule("loss.chunk", "rounding", _ORDER),
        "stages": None,
        "owners": None,
        "rows": None,
    },
    "setup.parallel.tp": {
        "size": None,
        "sequence": Rule("parallel.tp.sequence", "rounding", _ORDER),
        "loss": Rule("parallel.tp.loss", "rounding", _ORDER),
        "rules": None,
    },
    "setup.parallel.cp": {"ring": None, "ulysses": None, "matches": None},
    "setup.parallel.ep": {"size": None, "pattern": None, "matches": None, "meanwhile": None},
    "setup.freeze": {"parameters": None, "format": None},
    "setup.quantise": {"base": None, "matrices": None},
    "setup.float8": {"recipe": None, "matrices": None},
    "setup.base": {"parameters": None},
    "setup.decompose": {"matrices": None},
    "setup.residual": {"matrices": None},
    "setup.activation": {
        "mode": _RECOMPUTE,
        "every": _RECOMPUTE,
        "save": _RECOMPUTE,
        "pattern": None,
        "matches": None,
    },
    "setup.routing_replay": {"matches": None},
    "setup.tile_mlp": {"positions": _TILE, "pattern": None, "matches": None},
    "setup.async_tp": {},
    "setup.compile": {"mode": _COMPILE, "pattern": None, "matches": None},
    "setup.parallel.expert_fsdp": _SHARDING,
    "setup.parallel.fsdp": _SHARDING,
    "setup.parallel.root_fsdp": _SHARDING | {"reshard": None},
    "setup.parallel.prefetch": {"units": None},
    "setup.parallel.pp": {
        "size": None,
        "stages_per_rank": None,
        "schedule": Rule("parallel.pp.schedule", "rounding", "microbatches are added up in another order"),
    },
    "setup.weights": {
        "seed": None,
        "init_std": Rule("model.init_std", "learning", _FIRST),
        "offload": _OFFLOAD,
    },
    "setup.read_weights": {
        "digest": Rule("model.weights", "learning", _BEGUN),
        **dict.fromkeys(
            ("folder", "repo", "revision"), Rule("model.folder", "none", "it is only read at the start of a run")
        ),
    },
    "setup.head": {"seed": None, "init_std": Rule("model.init_std", "learning", _FIRST)},
    "setup.pretrained": {"path": Rule("checkpoint.pretrained", "learning", _BEGUN)},
    "setup.ema": {
        "decay": Rule("ema.decay", "learning", f"{_AVERAGE} by it from here on"),
        "every": Rule("ema.every", "learning", f"{_AVERAGE} so often from here on"),
        "format": None,
        "eval": Rule("ema.eval", "none", f"other weights are evaluated, {_STAYS}"),
        "publish": Rule("ema.publish", "none", f"other weights are published, {_STAYS}"),
    },
    "setup.tokenizer": {"source": None},
    "setup.data": dict.fromkeys(
        (
            "dataset",
            "kind",
            "patterns",
            "options",
            "reads",
            "holdout",
            "oversized",
            "bad_records",
            "seed",
            "sequence",
            "align",
            "method",
            "group",
        )
    ),
    "setup.teacher": {
        **{
            name: Rule(f"loss.{setting}", "learning", _TEACHER)
            for name, setting in (("folder", "teacher"), ("top", "top"), ("temperature", "temperature"))
        },
        **dict.fromkeys(("dataset", "precision", "sequence")),
    },
    "setup.teacher_model": dict.fromkeys(("architecture", "attention", "format", "owner", "cuts")),
    "setup.teacher_weights": {"offload": _OFFLOAD},
    "setup.read_teacher": dict.fromkeys(("folder", "digest"), Rule("loss.teacher", "learning", _TEACHER)),
    "setup.stack_optimizer": {},
    "collate.to_tensor": {},
    "collate.flatten": {},
    "collate.shift_tokens": {},
    "collate.pack": dict.fromkeys(
        ("method", "group", "capacity", "align", "unit", "columns", "computed", "values", "wide", "later")
    ),
    "collate.user": dict.fromkeys(("module", "function", "digest", "arguments", "variables", "takes", "gives")),
    "collate.shard": {"ring": None, "ulysses": None},
    "collate.microbatches": {"micro": None, "accumulate": None},
    "setup.loader": {
        **dict.fromkeys(
            (
                "datasets",
                "micro",
                "accumulate",
                "rows",
                "sequence",
                "seed",
                "steps",
                "epochs",
                "balance",
                "ramp",
                "task_of",
                "prompts",
            )
        ),
        "prefetch": Rule("batch.prefetch", "none", f"rows are read earlier or later, {_STAYS}"),
        "workers": Rule("batch.workers", "none", f"others read, {_STAYS}"),
        "again": Rule("rollout.updates", "learning", "prompts come again so often from here on"),
    },
    "setup.rollout_reference": dict.fromkeys(("reference", "bytes")),
    "setup.reference": dict.fromkeys(("dataset", "reference", "digest", "format", "task", "parts", "mismatched")),
    "step.reference_point": {},
    "setup.tasks": {"tasks": Rule("task", "learning", "adapters are trained on other datasets")},
    "setup.observe": {"peak_flops": Rule("cluster.flops", "none", _STAYS)},
    "setup.alerts": {
        **{name: Rule(f"alerts.{name}", "none", _STAYS) for name in ("loss_spike", "slow", "starvation", "memory")},
        "window": Rule("alerts.loss_spike", "none", _STAYS),
        "disk_share": Rule("alerts.disk", "none", _STAYS),
        "disk_most_bytes": Rule("alerts.disk", "none", _STAYS),
        "disk_bytes": Rule("alerts.disk", "none", _STAYS),
        "checkpoint_bytes": Rule("alerts.disk", "none", _STAYS),
        "stalled_seconds": Rule("alerts.stalled", "none", _STAYS),
    },
    "setup.schedule_cache": {"counts": None},
    "setup.resume": {
        "resume": None,
        "origin": Rule("checkpoint.from", "none", "it only affects the start of a run"),
        "verify": Rule("checkpoint.verify", "none", _STAYS),
    },
    "setup.horizon": {},
    "setup.checkpoint": {
        **{name: Rule(f"checkpoint.{name}", "none", _STAYS) for name in _SAVING},
        "copies": Rule("checkpoint.mode", "none", _STAYS),
        "highest": Rule("checkpoint.best_is", "none", _STAYS),
    },
    "step.put_off_save": {},
    "step.await_copy": {},
    "setup.dropout": {
        "share": Rule("adapter.dropout", "learning", "another share is dropped from here on"),
        "seed": None,
        "matrices": None,
    },
    "setup.mtp": {
        "modules": None,
        "weight": Rule("model.mtp_weight", "learning", "further tokens count by it from here on"),
    },
    "setup.embedding_noise": {
        "most": Rule("batch.neftune", "learning", "noise of another size is added from here on"),
        "seed": None,
    },
    "step.fetch": {"readers": None},
    "step.share_outline": {"source": None, "numbers": None},
    "step.agree": {
        "time_limit_seconds": Rule("launch.time_limit", "none", _STAYS),
        "stop_file": Rule("launch.stop_file", "none", _STAYS),
        "empty_steps": Rule(
            "fault_tolerance.empty_steps", "none", f"it only concerns steps without a valid token, {_STAYS}"
        ),
        "unit": None,
    },
    "setup.temperature": {"temperature": None},
    "setup.completions": {"steps": None, "updates": None},
    "setup.prompts": {"positions": None, "max_tokens": None},
    "setup.serve": {
        **{
            name: Rule(f"serve.{name}", "none", _STAYS)
            for name in (
                "adapters",
                "certificate",
                "host",
                "hosts",
                "key",
                "max_tokens",
                "origins",
                "port",
                "private_key",
                "queue",
                "rows",
            )
        },
        "key_needed": Rule("serve.key", "none", _STAYS),
        "model_name": Rule("serve.model", "none", _STAYS),
        "idle_seconds": Rule("serve.idle", "none", _STAYS),
        "texts": Rule("serve.rows", "none", _STAYS),
        "max_rank": None,
    },
    **{
        f"request.{name}": {}
        for name in ("open", "forward_backward", "optim_step", "keep", "load", "export", "forget", "close")
    },
    "request.sample": {"pages": None, "rows": None},
    "rollout.generate": {
        **{
            name: Rule(f"rollout.{name}", "learning", "completions are sampled by it from here on")
            for name in ("group", "max_tokens", "temperature", "top_k", "top_p")
        },
        "seed": None,
        "replay_routing": Rule("rollout.replay_routing", "learning", "tokens go to their experts by it from here on"),
        "show": Rule("rollout.show", "none", _STAYS),
        "steps": Rule("rollout.steps", "learning", "completions are sampled for so many steps at once from here on"),
        "updates": Rule("rollout.updates", "learning", "so many steps learn from each completion from here on"),
    },
    "rollout.advantages": {
        "scale": Rule("rollout.scale_rewards", "learning", "advantages are computed by it from here on"),
        "mask_truncated": Rule("rollout.mask_truncated", "learning", "completions are learned from by it from here on"),
    },
    "setup.scorer": {
        "folder": Rule("reward.folder", "learning", "completions are scored by it from here on"),
        "digest": Rule("reward.folder", "learning", "completions are scored by other weights from here on"),
        **dict.fromkeys(("architecture", "attention", "format")),
    },
    "rollout.reference": {},
    "rollout.compare": {"replay_routing": None},
    "step.zero_gradients": {},
    "step.router_rows": {},
    "step.mtp_weight": {"weight": None},
    "step.forward_backward": {
        "accumulate": None,
        "sync": Rule("parallel.fsdp.sync", "rounding", "gradients of microbatches are added up on one rank or on all"),
        "each": None,
    },
    "step.pipeline": {"accumulate": None, "each": None},
    "step.body": {
        "accumulate": None,
        "sync": Rule("parallel.fsdp.sync", "rounding", "gradients of microbatches are added up on one rank or on all"),
        "user": Rule("step", "learning", "the run calls other code, or the same with other arguments"),
    },
    "step.tensor_grad_sync": {"axes": None},
    "step.tied_grad_sync": {"axes": None},
    "step.context_grad_sync": {"axes": None},
    "step.clip": {
        "max_norm": Rule("optimizer.clip", "learning", "gradients are scaled by it from here on"),
        "deviations": Rule("optimizer.clip_spikes", "learning", "gradients are scaled by it from here on"),
        "decay": None,
        "first": None,
    },
    "step.task_gradients": {
        "tasks": Rule("task", "learning", "gradients of tasks are of other rows, or scaled otherwise"),
        "limit": Rule("on.nan", "none", f"it only concerns non-finite steps, {_STAYS}"),
    },
    "step.clip_value": {
        "largest": Rule("optimizer.clip_value", "learning", "gradients are limited by it from here on")
    },
    "step.gradient_norm": {},
    "step.check_finite": {"limit": Rule("on.nan", "none", f"it only concerns non-finite steps, {_STAYS}")},
    "step.schedule": {"decay": Rule("optimizer.scheduled_decay", "learning", "weights decay by it from here on")},
    "step.training_point": {},
    "step.optimizer": {},
    "step.router_bias": {"speed": Rule("model.router.bias_speed", "learning", "biases move by it from here on")},
    "step.ema": {},
    "step.measure": {"lets_go": None},
    "step.let_go": {},
    "step.hook": {
        "user": Rule("hook", "learning", "the run calls other code, or the same with other arguments"),
        "place": Rule("hook", "learning", "a function is called elsewhere"),
        "changes": Rule("hook", "learning", "a function changes something else"),
    },
}
# Ticks, events and the end of a run are compared as a whole.
OUTSIDE: Final = ("tick.", "event.", "shutdown.")


def rules_of(op: str, args: Mapping[str, Any]) -> Mapping[str, Rule | None] | None:
    """Return the rules of a node's arguments, including the rules of its component. None for an unknown op."""
    if op == "setup.optimizer":
        chosen = OPTIMIZERS.of(args) if "user" in args else OPTIMIZERS.get(args["kind"])
        own = chosen.resuming if chosen is not None else {}
        learned = {name: Rule(f"optimizer.{name}", "learning", own.get(name, _LEARNS)) for name in args}
        return {**learned, **dict.fromkeys(("kind", "lr", "state", "scalars"))}
    if op == "setup.adapter":
        path = f"task.{args['task']}.adapter" if "task" in args else "adapter"
        return {
            name: None if name in ("kind", "seed", "task") else Rule(f"{path}.{name}", "learning", _FIRST)
            for name in args
        }
    if op == "setup.read_adapter":
        path = f"task.{args['task']}.adapter.from" if "task" in args else "adapter.from"
        return {
            "digest": Rule(path, "learning", _FIRST),
            "folder": Rule(path, "none", "it is only read at the start of a run"),
            "task": None,
        }
    if op == "rollout.score":
        chosen = REWARDS.of_users if "user" in args else REWARDS.get(args["kind"])
        own = chosen.resuming if chosen is not None else {}
        text = "completions are scored by it from here on"
        return {name: Rule(f"reward.{name}", "learning", own.get(name, text)) for name in args}
    if op == GROUP:
        path = f"group.{args['pattern']}" if "pattern" in args else f"task.{args['task']}"
        return {
            "pattern": None,
            "task": None,
            "lr_scale": Rule(f"{path}.lr_scale", "learning", _LEARNS),
            "weight_decay": Rule(f"{path}.weight_decay", "learning", _LEARNS),
            "own": Rule(f"{path}.optimizer", "learning", _LEARNS),
        }
    if op in ("setup.loss", "setup.scheduler"):
        return dict.fromkeys(args)  # the loss and the curve are compared as a whole
    if op.startswith(TRACKER):
        return dict.fromkeys(args, tracker_rule(op, args))
    if op not in RULES and (stack := stack_of_node(op)) is not None:
        named = {} if stack.settings is None else settings_of(stack.settings)
        paths = {name: f"parallel.{stack.kind if name in named else 'stack'}.{name}" for name in stack.resuming}
        own = {name: Rule(paths[name], "rounding", text) if text else None for name, text in stack.resuming.items()}
        return {**_SHARDING, **own}
    if stack_of_step(op) is not None:
        return dict.fromkeys(args)  # covered by its own node and the layout
    if op not in RULES and op.partition(".")[2] in ACTIONS:
        return dict.fromkeys(args)  # requirements of actions on the step, covered by its ticks
    return RULES.get(op)


def tracker_rule(op: str, args: Mapping[str, Any]) -> Rule:
    """Return the rule of a tracker, shared by all of its arguments."""
    name = args["user"]["function"] if "user" in args else op.removeprefix(TRACKER)
    return Rule(f"log.{name}", "none", _STAYS)
