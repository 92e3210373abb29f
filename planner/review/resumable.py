"""Verdict on a resume: whether a checkpoint of one plan can be resumed under another, why not, and what changes.

same: nothing that is trained differs. safe: differences that a run may have after a stop. resharded: safe, and pieces
of the state or the rows of a step are on other ranks. incompatible: the runtime refuses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.losses import LOSSES, PRECOMPUTED, REF
from xtrain.dsl.schema.parallel import stack_of_node, stack_of_step
from xtrain.dsl.schema.run import OP as TRACKER
from xtrain.dsl.schema.setting import settings_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.checkpoints import PRECISION, checkpoint_contents, mismatches, resuming, setting_path
from xtrain.plan.data import call_text
from xtrain.plan.graph import RESUMED, SWITCHES, Effect, Rule, Rules, component_rules, learns, rounds, stays
from xtrain.plan.plan import Node, Plan
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import as_known, known_arithmetic, resumed_plan
from xtrain.plan.views import actions_text, recurring
from xtrain.planner.graph import server  # noqa: F401 (declares, with its imports, the nodes of all plans)
from xtrain.planner.graph.data import OP as REFERENCE
from xtrain.planner.review.resuming_course import ResumedPlan, curve_reasons, phase_reasons
from xtrain.planner.review.resuming_data import Kind, Reason, data_reasons, refused, resharded, safe

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
EFFECTS: Final[tuple[Effect, ...]] = get_args(Effect)
# Ticks, events and the end of a run are compared as a whole.
OUTSIDE: Final = ("tick.", "event.", "shutdown.")
# Arguments that follow from the loss, which is compared itself.
_OF_THE_LOSS: Final = {"objective"}
# Without any of these nodes, the model is drawn.
_READS_BASE: Final = {"setup.read_weights", "setup.pretrained"}


@frozen(kw_only=True)
class Verdict:
    """Worst of the reasons, which are sorted by severity. certain: False if it depends on files read at the start."""

    kind: Kind
    effect: Effect
    reasons: tuple[Reason, ...]

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """Reasons for refusing a checkpoint."""
        return tuple(reason for reason in self.reasons if reason.kind == "incompatible")

    @property
    def certain(self) -> bool:
        return self.kind != "incompatible" or any(reason.certain for reason in self.refusals)


def resumable(a: Plan, b: Plan, step: int | None = None, past: StepSizes | None = None) -> Verdict:
    """Return the verdict on resuming a checkpoint of `a` under `b`. step: of the checkpoint, if known.

    past: the rows of these steps, None if `a` was the plan from the start. Lengths of `b` in tokens and epochs count
    from there.
    """
    reasons = [] if a.id == b.id else list(_reasons(a, b, step, past))
    reasons.sort(key=lambda reason: (-KINDS.index(reason.kind), -EFFECTS.index(reason.effect)))
    kind = reasons[0].kind if reasons else "same"
    effect = EFFECTS[max((EFFECTS.index(reason.effect) for reason in reasons), default=0)]
    return Verdict(kind=kind, effect=effect, reasons=tuple(reasons))


def _reasons(a: Plan, b: Plan, step: int | None, past: StepSizes | None) -> Iterator[Reason]:
    for difference in mismatches(checkpoint_contents(a), checkpoint_contents(b)):
        yield refused(difference.path, difference.text)
    yield from data_reasons(a, b)
    yield from _layout(a, b)
    yield from _formats(a, b)
    one, other = _sides(a, b, step, past)
    yield from phase_reasons(one.plan, other.plan, step)
    yield from curve_reasons(one, other, step)
    yield from _average(a, b)
    yield from _early(a, b)
    yield from _arguments(a, b)
    yield from _objective(a, b)
    yield from _cadence(a, b)
    yield from _restarts(a, b)
    yield from _changed("experiment.name", (a.name, b.name), "only the name of the run changes")


def _sides(a: Plan, b: Plan, step: int | None, past: StepSizes | None) -> tuple[ResumedPlan, ResumedPlan]:
    if step is None:
        return ResumedPlan(as_known(a), known_arithmetic(a)), ResumedPlan(as_known(b), known_arithmetic(b))
    past = known_arithmetic(a).row_sizes if past is None else past
    one, other = (ResumedPlan(*resumed_plan(plan, past, step)) for plan in (a, b))
    return one, other


def _layout(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for changed axes, folds and stages, which move pieces between ranks."""
    parts = [
        f"{one.name} {one.size} → {other.size}"
        for one, other in zip(_axes(a), _axes(b), strict=True)
        if one.size != other.size
    ]
    if not parts and _shards(a) != _shards(b):
        parts.append(f"sharded over {_shards(a)} → {_shards(b)}")
    if not parts and _pieces(a) != _pieces(b) and a.parameters == b.parameters:
        parts.append("the same axes, divided differently")
    if parts:
        yield resharded("parallel", f"{', '.join(parts)}: every rank reads its own shards")
    stacks = [plan.value("parallel.stack") for plan in (a, b)]
    yield from _changed("parallel.stack", stacks, "gradients are summed in another order", "rounding")
    where_a, where_b = ((plan.launch["nodes"], plan.mesh.ranks_per_node) for plan in (a, b))
    if where_a != where_b and a.mesh.world_size == b.mesh.world_size:
        text = f"{where_a[0]} · {where_a[1]} → {where_b[0]} · {where_b[1]} ranks: the same ranks on other machines"
        yield safe("launch.nodes", text)


def _changed(path: str, values: Sequence[Any], why: str, effect: Effect = "none") -> Iterator[Reason]:
    """Yield a reason if the values of both plans differ."""
    old, new = values
    if old != new:
        yield safe(path, f"{old} → {new}: {why}", effect)


def _restarts(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for changed restarts and worlds."""
    times = [plan.launch["restarts"] for plan in (a, b)]
    yield from _changed("fault_tolerance.restarts", times, "how often failed ranks are restarted")
    worlds = [", ".join(str(each.world) for each in plan.elastic) or "none" for plan in (a, b)]
    yield from _changed("fault_tolerance.elastic", worlds, "the world sizes on which the run may continue")


def _axes(plan: Plan) -> list[Any]:
    """Return the axes of the mesh, and `ep` of the expert view."""
    return [*plan.mesh.axes, next(axis for axis in plan.mesh.expert_axes if axis.name == "ep")]


def _shards(plan: Plan) -> str:
    sizes = {axis.name: axis.size for axis in plan.mesh.axes}
    wide = [axis for axis in plan.node("setup.mesh").args["shard_axes"] if sizes[axis] > 1]
    return " · ".join(wide) or "nothing"


def _pieces(plan: Plan) -> list[Any]:
    build, tensor = plan.node("setup.build_model").args, plan.args("setup.parallel.tp")
    cut = next(axis for axis in plan.mesh.expert_axes if axis.name == "ep_fsdp").size > 1
    experts = plan.args("setup.parallel.expert_fsdp") if cut else {}
    return [build["stages"], build["owners"], tensor.get("rules"), experts.get("dimension")]


def _formats(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for format changes that are allowed: parameters to a wider format, and the compute format."""
    params = [plan.node("setup.build_model").args["params"] for plan in (a, b)]
    if PRECISION[params[0]] < PRECISION[params[1]]:
        text = f"{params[0]} → {params[1]}: the saved state is represented exactly, in a wider format"
        yield safe("precision.params", text, "rounding")
    # Of parameters in the compute format, unless sharding casts them.
    casts = [plan.args("setup.parallel.root_fsdp") for plan in (a, b)]
    compute = [args.get("compute", format) for args, format in zip(casts, params, strict=True)]
    if compute != params:
        why = "forward and backward round differently; the state keeps its format"
        yield from _changed("precision.compute", compute, why, "rounding")
    rounded = [plan.args("setup.qat") for plan in (a, b)]
    if rounded[0] != rounded[1]:
        change = " → ".join(map(_roundings, rounded))
        yield safe("precision.qat", f"{change}; the state keeps its format", "rounding")
    products = [plan.args("setup.float8") for plan in (a, b)]
    if products[0] != products[1]:
        change = " → ".join(map(_products, products))
        yield safe(
            "precision.compute", f"{change}: they are rounded differently; the state keeps its format", "rounding"
        )


def _products(args: dict[str, Any]) -> str:
    """Return text on fp8 products, from the arguments of their node."""
    if not args:
        return "no products in fp8"
    return f"{sum(map(len, args['matrices'].values()))} matrices in fp8, {args['recipe']}"


def _roundings(args: dict[str, Any]) -> str:
    """Return text on rounded matrices, from the arguments of their node."""
    if not args:
        return "no rounded matrices"
    inputs = f", inputs to {args['activations']}" if args["activations"] != "none" else ""
    count, group = sum(map(len, args["matrices"].values())), args["group"]
    return f"{count} matrices rounded to {args['weights']} in groups of {group}{inputs}"


def _early(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for changed prefetching and overlap, whose node arguments only give a number of units."""
    if (said := _said(a, b, "parallel.fsdp.prefetch")) is not None:
        yield safe("parallel.fsdp.prefetch", f"{said[0]} → {said[1]}: memory changes, training does not")
    if (said := _said(a, b, "parallel.tp.overlap")) is not None:
        yield safe("parallel.tp.overlap", f"{said[0]} → {said[1]}: sums are computed in another order", "rounding")


def _arguments(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for every changed argument of every node, from the table of rules; a setting is named once."""
    before, after = ({node.id: node for node in plan.nodes} for plan in (a, b))
    named: set[str] = set()
    on_base = all("setup.base" in nodes and not nodes.keys() & _READS_BASE for nodes in (before, after))
    for id in {**before, **after}:
        one, other = before.get(id), after.get(id)
        op = (one or other).op  # type: ignore[union-attr]
        if op.startswith(OUTSIDE):
            continue
        old, new = (node.args if node else {} for node in (one, other))
        rules = rules_of(op, {**old, **new})  # an argument on only one side has its default on the other
        if rules is None:
            yield _unknown(id, one, other)
            continue
        if (one is None or other is None) and op not in SWITCHES and not op.startswith(TRACKER):
            continue
        if op.startswith(TRACKER) and not (old or new) and (one is None or other is None):
            yield _allowed(_tracker_rule(op, {}), "", *(("off", "on") if one is None else ("on", "off")))
        swapped = one is not None and other is not None and one.op != other.op
        for name in {**old, **new}:
            if old.get(name) == new.get(name) or (swapped and not (name in old and name in new)):
                continue
            if name not in rules:
                yield _unknown(f"{id}.{name}", one, other)
                continue
            rule = rules[name]
            if rule is not None and rule.path not in named:
                named.add(rule.path)
                if on_base and op == "setup.weights" and name == "init_std":
                    values = _spell(_given(old, name)), _spell(_given(new, name))
                    text = f"{values[0]} → {values[1]}: the model under the adapter is drawn again at every start"
                    yield refused(rule.path, text)
                    continue
                yield _allowed(rule, name, *(_said(a, b, rule.path) or (_given(old, name), _given(new, name))))


def rules_of(op: str, args: Mapping[str, Any]) -> Rules | None:
    """Return the rules of a node's arguments, including the rules of its component. None for an unknown op."""
    if (declared := RESUMED.get(op)) is not None:
        return declared(args)
    if op.startswith(TRACKER):
        return dict.fromkeys(args, _tracker_rule(op, args))
    if (stack := stack_of_node(op)) is not None:
        named = {} if stack.settings is None else settings_of(stack.settings)
        paths = {name: f"parallel.{stack.kind if name in named else 'stack'}.{name}" for name in stack.resuming}
        own = {name: rounds(paths[name], text) if text else None for name, text in stack.resuming.items()}
        return {**RESUMED["setup.parallel.fsdp"](args), **own}
    if stack_of_step(op) is not None:
        return dict.fromkeys(args)  # covered by its own node and the layout
    if op.partition(".")[2] in ACTIONS:
        return dict.fromkeys(args)  # requirements of actions on the step, covered by its ticks
    return None


def _tracker_rule(op: str, args: Mapping[str, Any]) -> Rule:
    """Return the rule of a tracker, shared by all of its arguments."""
    name = args["user"]["function"] if "user" in args else op.removeprefix(TRACKER)
    return stays(f"log.{name}")


def _given(args: Mapping[str, Any], name: str) -> Any:
    """Return an argument of a node; a user's call as text."""
    value = args.get(name)
    return call_text(value) if name == "user" and value is not None else value


def _said(a: Plan, b: Plan, path: str) -> tuple[str | None, str | None] | None:
    """Return a setting in both specs if it differs there. None: equal, so other differences follow from other
    settings."""
    before, after = (plan.value(path) for plan in (a, b))
    return None if before == after else (before, after)


def _unknown(what: str, one: Node | None, other: Node | None) -> Reason:
    change = "is new" if one is None else "is gone" if other is None else "has changed"
    return refused(what, f"{change}; the effect on a checkpoint is unknown")


def _allowed(rule: Rule, name: str, old: Any, new: Any) -> Reason:
    prefix = "" if rule.path.endswith(name) or "." in rule.path else f"{name} "
    return safe(rule.path, f"{prefix}{_spell(old)} → {_spell(new)}: {rule.text}", rule.effect)


def _average(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for averaged weights that only one side keeps."""
    before, after = (plan.args("setup.ema") for plan in (a, b))
    if after and not before:
        yield safe("ema", "none → ema: the average starts from the weights of the checkpoint", "learning")
    elif before and not after:
        yield safe("ema", "ema → none: the averaged weights of the checkpoint are dropped")


def _objective(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for a changed objective: the loss, and terms that the model's settings add to it."""
    before, after = (plan.args("setup.loss") or {"kind": LOSSES.default().kind} for plan in (a, b))
    if before["kind"] != after["kind"]:
        text = f"{before['kind']} → {after['kind']}: another loss is minimized from here on"
        yield safe("loss.kind", text, "learning")
    else:
        rules = component_rules(LOSSES, {**before, **after}, "the loss uses the new value from here on")
        for name in sorted(rules.keys() - {"reads"}):
            if before.get(name) != after.get(name):
                yield _allowed(rules[name], name, _given(before, name), _given(after, name))
    models = [_reference(plan) for plan in (a, b)]
    if None not in models and models[0] != models[1]:
        rule = learns("loss.reference", "the loss compares with another model from here on")
        yield _allowed(rule, "reference", *(each[0] for each in models if each is not None))
    old, new = a.architecture.to_json(), b.architecture.to_json()
    meaning = resuming(old, new)
    for name in {**old, **new}:
        if old.get(name) != new.get(name) and meaning(name) in ("loss", "stage"):
            uses = "the loss uses the new weight" if meaning(name) == "loss" else "the model uses the new value"
            rule = learns(setting_path(name), f"{uses} from here on")
            yield _allowed(rule, name, old.get(name), new.get(name))


def _reference(plan: Plan) -> tuple[str, str] | None:
    """Return the model that the loss compares with, and the digest of its weights; None without a reference."""
    if args := plan.args(REFERENCE):
        return args["reference"], args.get("digest", "")
    return (PRECOMPUTED, "") if REF in plan.node("collate.pack").args.get("columns", ()) else None


def _cadence(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for changed ticks, events and the end of a run: when something is evaluated or saved."""
    before, after = recurring(a), recurring(b)
    for path in {**before, **after}:
        why = "evaluating, logging and saving do not affect training"
        if path.startswith("on nan"):
            why = "it applies to bad steps from here on"
        yield from _changed(path, [side.get(path, "never") for side in (before, after)], why)
    old, new = ({node.id: node.args for node in plan.nodes if node.kind in ("tick", "event")} for plan in (a, b))
    for id in (id for id in old if id in new and old[id] != new[id]):
        changes = [
            f"{name} {_spell(old[id].get(name))} → {_spell(new[id].get(name))}"
            for name in {**old[id], **new[id]}
            if old[id].get(name) != new[id].get(name) and name not in _OF_THE_LOSS
        ]
        if not changes:
            continue
        yield safe(actions_text((id,), stop=False), f"{', '.join(changes)}: evaluating does not affect training")
    if not b.node("setup.resume").args["resume"]:
        text = "false: the run starts from step 0 and moves the old run aside; set it to true to resume"
        yield safe("checkpoint.resume", text)


def _spell(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case list() | tuple():
            return f"[{', '.join(map(_spell, value))}]"
        case dict():
            return ", ".join(f"{key} {_spell(each)}" for key, each in value.items())
    return str(value)
