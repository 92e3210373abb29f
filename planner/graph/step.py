"""Nodes of a training step, from the rows that it takes to its measurements, and nodes of hooks."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from xtrain.contracts.actions import PlannedAction
from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.actions import FAILURE, action_of
from xtrain.dsl.schema.component import planned_class
from xtrain.dsl.schema.data import BIAS_SPEED, ROUTER
from xtrain.dsl.schema.losses import OLD
from xtrain.dsl.schema.policy import PolicyLoss
from xtrain.dsl.schema.run import Hook
from xtrain.dsl.spec import Spec
from xtrain.dsl.user_parts.kinds import AROUND, IN_STEP, NOTHING, PLACES, Place
from xtrain.plan.amounts import agree_args
from xtrain.plan.architecture import EMBEDDING
from xtrain.plan.arithmetic import microbatches_text
from xtrain.plan.estimates import Estimates
from xtrain.plan.graph import OTHER_CODE, Builder, StepNode, learns, resumes, rounds, stays
from xtrain.plan.groups import clip_args, optimizers_of
from xtrain.plan.mesh import AXES, folded_axes
from xtrain.plan.parameters import forward_flops
from xtrain.plan.plan import Edge
from xtrain.plan.resolved import Resolved
from xtrain.planner.graph.data import KEPT
from xtrain.planner.graph.rollouts import ENGINE, ENVIRONMENT, PROMPTS, SCORER, before_step, behind_forward
from xtrain.planner.graph.saving import bad_step_text, on_nan, put_off_text, saves_beside, update_text
from xtrain.planner.graph.timeline import Schedule
from xtrain.text.units import count_text, flops_text, plural, seconds_text


def hook_text(hook: Hook) -> str:
    """Return the description of a hook's node."""
    place, changes = hook.declared["place"], hook.declared["changes"]
    purpose = hook.purpose.removesuffix(".")
    does = f"{hook.function} of {hook.module}, {PLACES[place]}{f': {purpose}' if purpose else ''}"
    return does if changes == NOTHING else f"{does}; changes {changes}"


def add_hooks(graph: Builder, spec: Spec, after: str) -> None:
    """Add the loops of the user, and the hooks outside steps; hooks around nodes name the nodes."""
    for kind, loop in (("train", spec.train), ("epoch", spec.epoch)):
        if loop is not None:
            what = "the training" if kind == "train" else "each epoch"
            purpose = loop.purpose.removesuffix(".")
            does = f"{loop.function} of {loop.module} runs the steps of {what}{f': {purpose}' if purpose else ''}"
            args = {"kind": kind, "user": loop.call()}
            graph.add("event", "event.loop", does, id=f"loop.{kind}", args=args, after=(after,))
    for hook in spec.hooks.values():
        place = hook.declared["place"]
        if place in IN_STEP:
            continue
        args: dict[str, Any] = hook.args()
        if place in AROUND:
            hooked = {node.id: action.hooked for node in graph.nodes if (action := action_of(node.op)) is not None}
            args["nodes"] = [id for id, word in hooked.items() if word == place.partition("_")[2]]
        graph.add("event", "event.hook", hook_text(hook), id=f"hook.{hook.name}", args=args, after=(after,))


_SYNC: Final = rounds("parallel.fsdp.sync", "gradients of microbatches are added up on one rank or on all")
_LIMIT: Final = stays("on.nan", "it only concerns non-finite steps")
AWAITS: Final = "wait until the copy of the state being saved is complete"


@resumes(
    "step.put_off_save step.zero_gradients step.await_copy step.training_point step.router_rows step.reference_point "
    "step.gradient_norm step.optimizer step.ema step.let_go"
)
@resumes("step.fetch", "readers")
@resumes("step.share_outline", "source numbers")
@resumes(
    "step.agree",
    "unit",
    positions=stays("batch.pad_to"),
    harmless="time_limit_seconds=launch.time_limit launch.stop_file",
    empty_steps=stays("fault_tolerance.empty_steps", "it only concerns steps without a valid token"),
)
@resumes("step.mtp_weight", "weight")
@resumes(
    "step.router_weights",
    switch=True,
    router_aux_loss=learns("model.router.aux_loss", "routers learn by it from here on"),
    router_z_loss=learns("model.router.z_loss", "routers learn by it from here on"),
)
@resumes("step.pipeline", "accumulate each")
@resumes("step.forward_backward", "accumulate each", sync=_SYNC)
@resumes(
    "step.body",
    "accumulate",
    sync=_SYNC,
    user=learns("step", OTHER_CODE),
)
@resumes(
    "step.task_gradients",
    limit=_LIMIT,
    tasks=learns("task", "gradients of tasks come from other rows, or are scaled differently"),
)
@resumes(
    "step.clip",
    "decay first",
    switch=True,
    max_norm=learns("optimizer.clip", "gradients are scaled by it from here on"),
    deviations=learns("optimizer.clip_spikes", "gradients are scaled by it from here on"),
)
@resumes(
    "step.clip_value", switch=True, largest=learns("optimizer.clip_value", "gradients are limited by it from here on")
)
@resumes("step.check_finite", limit=_LIMIT)
@resumes("step.unscale")
@resumes(
    "step.kl_weight", switch=True, weight=stays("loss.kl_weight", "a resumed run has the weight as it was adapted")
)
@resumes(
    "step.adapt_kl_weight",
    switch=True,
    target=learns("loss.kl_target", "the weight of the divergence is adapted to it from here on"),
    gain=learns("loss.kl_gain", "the weight of the divergence is adapted by it from here on"),
)
@resumes("step.loss_scale", switch=True, scale=stays("precision.fp16.scale", "a resumed run has the scale it had"))
@resumes(
    "step.check_overflow",
    switch=True,
    interval=stays("precision.fp16.interval", "the scale of the loss changes no gradient that fp16 can hold"),
)
@resumes("step.schedule", decay=learns("optimizer.scheduled_decay", "weights decay by it from here on"))
@resumes("step.router_bias", "by_phase", speed=learns("model.router.bias_speed", "biases move by it from here on"))
@resumes("step.measure", "lets_go")
@resumes(
    "step.hook",
    user=learns("hook", OTHER_CODE),
    place=learns("hook", "a function is called elsewhere"),
    changes=learns("hook", "a function changes something else"),
)
def add_step(graph: Builder, resolved: Resolved, after: str, estimates: Estimates, schedule: Schedule) -> str:
    """Add the nodes of a step; return the id of the last one."""
    spec, batch = resolved.spec, resolved.batch
    everyone = resolved.wide(*AXES)
    last = after
    of_actions = _of_actions(resolved, schedule)

    def then(op: str, does: str, args: dict[str, Any] | None = None, axes: tuple[str, ...] = (), id: str = "") -> None:
        nonlocal last
        for extra in of_actions:
            if extra.before == op:
                last = graph.add("step", extra.op, extra.does, args=extra.args, after=(last,))
        last = graph.add("step", op, does, id=id, args=args, axes=axes, after=(last,))

    def hooks(place: Place) -> None:
        for hook in spec.hooks.values():
            if hook.declared["place"] == place:
                then("step.hook", hook_text(hook), hook.args(), everyone, f"hook.{hook.name}")

    for node in stack_of(resolved.spec).before_rows(resolved):
        then(node.op, node.does, node.args, resolved.wide("replicate"))
    readers = resolved.pipeline.readers
    ranks, sizes = resolved.layout.mesh.data_ranks, batch.row_sizes
    rows = plural(sizes.full // ranks, "row")
    does = f"take {f'{sizes.first // ranks:,} to ' if sizes.ramp else ''}{rows} a data rank from the loader"
    if len(readers) < resolved.size("pp"):
        does += f", on pp {' and '.join(map(str, readers))}, which hold the ends of the model"
    then("step.fetch", does, {"readers": readers}, resolved.wide("replicate", "fsdp"))
    if len(readers) < resolved.size("pp"):
        numbers = resolved.row_numbers
        named = "".join(f" and the number of each row's {each}" for each in numbers)
        does = f"send the lengths of documents{named} from pp {readers[0]} to the stages that read no rows"
        args = {"source": readers[0], **({"numbers": list(numbers)} if numbers else {})}
        then("step.share_outline", does, args, ("pp",))
    if spec.rollout is not None:
        for node in before_step(resolved, spec.rollout, spec.reward):
            then(node.op, node.does, node.args, node.axes)
        graph.edges.append(Edge(before=PROMPTS, after="rollout.generate", data="prompts"))
        if spec.engine is not None:
            graph.edges.append(Edge(before=ENGINE, after="rollout.weights", data="engine"))
        if spec.rollout.environment is not None:
            named = f"{ENVIRONMENT}.{spec.rollout.environment}"
            graph.edges.append(Edge(before=named, after="rollout.generate", data="environment"))
        if spec.reward is not None and spec.reward.model_folder is not None:
            graph.edges.append(Edge(before=SCORER, after="rollout.score", data="scorer"))
        if spec.loss.computed:
            graph.edges.append(Edge(before=KEPT, after="rollout.reference", data="weights of the reference"))
    for place in ("after_phase", "after_epoch", "before_epoch", "before_phase"):
        hooks(place)
    agree = "one all-reduce" if everyone else "count"
    empty = spec.fault_tolerance.empty_steps
    unit = spec.loss.unit
    args = {**agree_args(spec), "empty_steps": empty, **({"unit": unit} if unit != "token" else {})}
    args |= {"positions": True} if spec.batch.pad_to else {}
    asks = [f"a limit of {seconds_text(args['time_limit_seconds'])}"] if "time_limit_seconds" in args else []
    asks += [f"the file {args['stop_file']}"] if "stop_file" in args else []
    counted = "valid tokens" + (f", {unit}s" if unit != "token" else "")
    does = ", ".join((f"{agree}: {counted} and documents of the step", "stop requests", *asks, "clock"))
    does += f"; {plural(empty, 'step')} in a row without a valid token {'end' if empty > 1 else 'ends'} the run"
    then("step.agree", does, args, everyone)
    if put_off := put_off_text(spec, schedule):
        then("step.put_off_save", put_off)
    hooks("before_step")
    then("step.zero_gradients", "release the gradients of the previous step")
    waits = saves_beside(spec, schedule)
    moves = [chosen.before_forward for chosen in optimizers_of(spec).values() if chosen.before_forward]
    if moves:
        if waits:
            then("step.await_copy", AWAITS)
        then("step.training_point", moves[0])
    hooks("before_backward")
    if batch.ramp and (resolved.architecture.is_moe or resolved.architecture.learning_indexers):
        who = "losses of routers and indexers" if resolved.architecture.learning_indexers else "router losses"
        does = f"{who} are means over the rows of the step: weights × {batch.rows:,} / its rows"
        then("step.router_rows", does)
    if resolved.architecture.mtp and any(phase.mtp_weight is not None for phase in resolved.phases):
        weight = spec.model.mtp_weight
        each = [f"{weight if one.mtp_weight is None else one.mtp_weight:g} in {one.name}" for one in resolved.phases]
        then("step.mtp_weight", f"weight of the losses of further tokens: {', '.join(each)}", {"weight": weight})
    if weights := _router_weights(resolved):
        each = [f"{name} {text}" for name, text in _of_phases(resolved, weights)]
        then("step.router_weights", f"settings of routers: {', '.join(each)}", weights)
    if (fp16 := spec.precision.loss_scale) is not None:
        does = f"multiply the loss by a scale, {fp16.scale:,} at first, so that small gradients are not 0 in fp16"
        then("step.loss_scale", does, {"scale": fp16.scale})
    adapted = spec.loss if isinstance(spec.loss, PolicyLoss) and spec.loss.kl_target is not None else None
    if adapted is not None:
        does = f"weight of the divergence from the reference: {adapted.kl_weight:g} at first, then as adapted"
        then("step.kl_weight", does, {"weight": adapted.kl_weight})
    share = estimates.flops_per_step / resolved.layout.mesh.world_size
    if spec.loss.mismatched:
        does = "reference point of log-ratios: their mean over answers after the prompts of other documents of "
        forward = (
            forward_flops(resolved.architecture, batch.sequence)
            * batch.tokens_per_step
            / resolved.layout.mesh.world_size
        )
        does += f"their row, at least 0; a forward, {flops_text(forward)} a rank"
        then("step.reference_point", does, axes=everyone)
    does = f"{microbatches_text(batch)}, loss summed and divided by the {unit}s of the whole step"
    op, args = "step.forward_backward", {"accumulate": batch.accumulate, "sync": resolved.sync}
    if resolved.size("pp") > 1:
        op, args, does = "step.pipeline", {"accumulate": batch.accumulate}, f"{does}; bubble {estimates.bubble:.0%}"
    elif resolved.sync == "microbatch":
        does += ", gradients summed over ranks after each"
    if resolved.teacher is not None and spec.loss.learns_from is not None:
        does += f"; before the head of each microbatch, a forward of {spec.loss.learns_from.folder}"
    compares = spec.rollout is not None and OLD in spec.loss.columns
    if compares or any(action.reads_token_losses for tick in spec.ticks for action in tick.actions):
        args["each"] = True
        does += "; the cross-entropy of each token is kept"
    if spec.step is not None:
        op, args = "step.body", {**args, "user": spec.step.call()}
        does = f"{spec.step.function} of {spec.step.module}, instead of: {does}"
    then(op, f"{does}; {flops_text(share)} a rank", args, everyone, "step.forward_backward")
    if compares:
        node = behind_forward(resolved)
        then(node.op, node.does, node.args, node.axes)
    _add_syncs(resolved, then)
    for node in stack_of(resolved.spec).sums(resolved):
        then(node.op, node.does, node.args, resolved.wide("replicate"))
    if fp16 is not None:
        then("step.unscale", "divide gradients by the scale of the loss")
    hooks("after_backward")
    if spec.tasks:
        policy, own = on_nan(spec), clip_args(spec)
        clips = ", ".join(f"{name} {_clip_text(args)}" for name, args in own.items())
        does = f"gradients of each task, over its own tokens and with its own norm: {clips}"
        if policy.bears:
            does += "; a task without a token, or with a loss or norm that is not finite, skips the step"
        then("step.task_gradients", does, {"tasks": own, "limit": policy.limit}, everyone)
    else:
        args = spec.optimizer.clip_args()
        then("step.clip" if args else "step.gradient_norm", f"global gradient norm, {_clip_text(args)}", args, everyone)
    if (largest := spec.optimizer.clip_value) is not None:
        does = f"limit every element of the gradients to ±{largest:g}"
        then("step.clip_value", does, {"largest": largest})
    if fp16 is not None:
        does = "skip the step if gradients overflowed, and halve the scale of the loss; double it after "
        does += f"{plural(fp16.interval, 'step')} without"
        then("step.check_overflow", does, {"interval": fp16.interval})
    policy = on_nan(spec)
    then("step.check_finite", bad_step_text(policy), {"limit": policy.limit})
    scheduled = {"decay": "lr"} if spec.optimizer.scheduled_decay else None
    also = ", and weight decay in proportion" if scheduled else ""
    then("step.schedule", f"set the learning rate of this step from its number{also}", scheduled)
    if waits and not moves:
        then("step.await_copy", AWAITS)
    hooks("before_optimizer")
    kinds = dict.fromkeys(
        (spec.optimizer.kind, *(each["own"]["kind"] for each in resolved.groups.groups if "own" in each))
    )
    update = f"{' and '.join(kinds)} {'updates' if len(kinds) == 1 else 'update'}"
    then("step.optimizer", f"{update} the parameters a rank owns")
    hooks("after_optimizer")
    if adapted is not None:
        does = f"multiply the weight of the divergence by 1 + {adapted.kl_gain:g} · clip(policy/reference_kl / "
        does += f"{adapted.kl_target:g} − 1, −0.2, 0.2)"
        then("step.adapt_kl_weight", does, {"target": adapted.kl_target, "gain": adapted.kl_gain})
    if (speed := resolved.architecture.router_bias_speed) > 0:
        args = {"speed": speed}
        if any("router_bias_speed" in phase.router for phase in resolved.phases):
            args["by_phase"] = True
        ((_, text),) = _of_phases(resolved, {"router_bias_speed": speed})
        does = f"move each expert's bias by {text} toward an even load, from the counts of all ranks"
        then("step.router_bias", does, args, everyone)
    if spec.ema is not None:
        then("step.ema", update_text(resolved))
    keeps = any(hook.declared["place"] == "after_step" for hook in spec.hooks.values())
    does = "add the step to the statistics of the next log line and of alerts"
    then("step.measure", does, {"lets_go": False} if keeps else None)
    hooks("after_step")
    if keeps:
        then("step.let_go", "release the rows of the step")
    return last


def _router_weights(resolved: Resolved) -> dict[str, float]:
    """Return the weights of router losses of the model that some phase changes, by name."""
    if not resolved.architecture.is_moe:
        return {}
    changed = {name for phase in resolved.phases for name in phase.router}
    return {name: getattr(resolved.architecture, name) for name in ROUTER if name in changed and name != BIAS_SPEED}


def _of_phases(resolved: Resolved, model: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the name of a router's setting and its values as text, by phase if they differ. model: of the model."""
    for name, usual in model.items():
        values = {phase.name: phase.router.get(name, usual) for phase in resolved.phases}
        texts = [f"{value:g} in {phase}" for phase, value in values.items()]
        yield name, " and ".join(texts) if len({*values.values()}) > 1 else f"{usual:g}"


def _clip_text(args: Mapping[str, Any]) -> str:
    parts = [f"scaled down to {args['max_norm']:g}"] if "max_norm" in args else []
    if "deviations" in args:
        parts.append(
            f"scaled down if {args['deviations']:g} standard deviations above its running mean (decay "
            f"{args['decay']:g}), after the first {args['first']} steps"
        )
    return "; and ".join(parts) or "recorded, not clipped"


def _of_actions(resolved: Resolved, schedule: Schedule) -> list[StepNode]:
    """Return the nodes that actions of ticks, and of a failure, need in the step."""
    actions = [action for tick in schedule.ticks for action in tick.actions]
    actions += schedule.events.get(FAILURE, ())
    kinds = sorted({type(action) for action in actions}, key=lambda kind: kind.kind)
    by_kind = ((kind, [action for action in actions if isinstance(action, kind)]) for kind in kinds)
    return [node for kind, own in by_kind for node in planned_class(kind, PlannedAction).in_step(own, resolved)]


@resumes("step.tensor_grad_sync step.tied_grad_sync step.context_grad_sync", "axes")
def _add_syncs(resolved: Resolved, then: Any) -> None:
    """Add the sums of gradients that FSDP does not make."""
    tp, parallel = resolved.size("tp"), resolved.spec.parallel
    if tp > 1 and not resolved.dense_fsdp:
        does = f"sum gradients of norms and other weights that tp={tp} does not shard"
        then("step.tensor_grad_sync", does, {"axes": ["tp"]}, ("tp",))
    tied = resolved.size("pp") > 1 and resolved.architecture.embeds_behind
    if tied and any(each.trained for each in resolved.inventory.tensors if each.name == f"{EMBEDDING}.weight"):
        table = count_text(resolved.architecture.vocab * resolved.architecture.dim)
        copy = "used by the head" if resolved.architecture.tie_embeddings else "used by the further-token modules"
        does = f"sum the gradients of the embedding, {table} parameters, and of its copy on the last stage, {copy}"
        then("step.tied_grad_sync", does, {"axes": ["pp"]}, ("pp",))
    unfolded = resolved.wide(*(axis for axis in ("ring", "ulysses") if axis not in folded_axes(parallel)))
    if unfolded:
        does = f"sum gradients over {resolved.product(unfolded)}, which fsdp does not cover"
        then("step.context_grad_sync", does, {"axes": list(unfolded)}, unfolded)
