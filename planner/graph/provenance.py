"""Provenance of every value of a plan: text, `let`, `param`, `--set`, a default, or a derivation with its reason."""

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from xtrain.dsl.schema.actions import Action
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.blocks import is_block, is_of_servers, label_of
from xtrain.dsl.schema.component import Component
from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.data_components import row_link
from xtrain.dsl.schema.setting import Auto, is_unspoken, settings_of
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import Architecture
from xtrain.plan.data import reads, resolve_chain
from xtrain.plan.plan import Provenance
from xtrain.plan.resolved import SMALL_HEAD, SMALL_PRODUCT, Resolved, resolve_align, resolve_save
from xtrain.plan.views import spell
from xtrain.planner.graph.timeline import Schedule, alert_reasons
from xtrain.text.units import bytes_text, plural

AXIS_BLOCKS = ("tp", "ep", "fsdp", "pp", "cp")


def settings_provenance(spec: Spec) -> list[Provenance]:
    """Return an entry for every setting of this spec, by dotted path, in the order of the schema."""
    values = setting_values(spec) if spec.serve is None else _values_of_server(spec)
    return [_entry(spec, path, value) for path, value in values]


def _values_of_server(spec: Spec) -> Iterator[tuple[str, Any]]:
    yield from (
        (path, value) for path, value in setting_values(spec) if path == "experiment.name" or is_of_servers(path)
    )
    yield from _block("serve", spec.serve)


def setting_values(spec: Spec) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every setting that the chosen family or kind has."""
    yield "experiment.name", spec.experiment.name
    yield from _block("experiment", spec.experiment)
    yield "model.family", spec.model.family
    if spec.model.folder is not None:
        yield "model.folder", str(spec.model.folder)
    yield from _block("model", spec.model, spec.model.family)
    if spec.adapter is not None:
        yield "adapter.kind", spec.adapter.kind
        yield from _block("adapter", spec.adapter)
    for task in spec.tasks.values():
        yield from _block(f"task.{task.name}", task)
    yield "tokenizer", spec.tokenizer.source
    for dataset in spec.datasets.values():
        yield from _dataset(dataset)
    for name, weight in spec.mixture.weights.items():
        yield f"mixture.{name}", weight
    if spec.mixture.weights:
        yield from _block("mixture", spec.mixture)
    for phase in spec.phases.values():
        yield from _block(f"phase.{phase.name}", phase)
    yield from _block("batch", spec.batch)
    yield "collate", spec.collate
    for name, block in (("loss", spec.loss), ("optimizer", spec.optimizer), ("scheduler", spec.scheduler)):
        yield f"{name}.kind", block.kind
        yield from _block(name, block, block.kind)
    for group in spec.groups.values():
        yield from _block(f"group.{group.name}", group)
    if spec.ema is not None:
        yield from _block("ema", spec.ema)
    yield from _block("precision", spec.precision)
    yield "parallel.stack", spec.parallel.stack
    for axis in AXIS_BLOCKS:
        block = getattr(spec.parallel, axis)
        yield f"parallel.{axis}.size", block.size
        yield from _block(f"parallel.{axis}", block)
    for name, block in spec.parallel.of_stacks().items():
        yield from _block(f"parallel.{name}", block, silent=name != spec.parallel.stack)
    yield "activation.mode", spec.activation.mode
    yield from _block("activation", spec.activation)
    yield from _block("compile", spec.compile)
    for name, body in (("step", spec.step), ("evaluation_step", spec.evaluation_step)):
        if body is not None:
            yield f"{name}.name", body.name
            yield from _block(name, body)
    for hook in spec.hooks.values():
        yield from _block(f"hook.{hook.name}", hook)
    for number, tick in enumerate(spec.ticks):
        yield f"every.{number}.every", tick.every
        yield from _actions(f"every.{number}", tick.actions)
    for number, event in enumerate(spec.events):
        yield f"on.{number}.event", event.event
        if event.event == "nan":
            yield f"on.{number}.count", event.count
        yield from _actions(f"on.{number}", event.actions)
    yield from _block("checkpoint", spec.checkpoint)
    yield from _block("fault_tolerance", spec.fault_tolerance)
    yield from _block("alerts", spec.alerts)
    yield from _block("log", spec.log)
    yield from _block("workspace", spec.workspace)
    yield from _block("launch", spec.launch)
    yield "cluster.preset", spec.cluster.preset
    yield from _block("cluster", spec.cluster)
    if spec.launcher is not None:
        yield "launcher.kind", spec.launcher.kind
        yield from _block("launcher", spec.launcher, spec.launcher.kind)


def _actions(path: str, actions: tuple[Action, ...]) -> Iterator[tuple[str, Any]]:
    for number, action in enumerate(actions):
        if (label := label_of(type(action))) is not None:
            value = getattr(action, label.name)
            yield f"{path}.actions.{number}.{label.name}", value
        yield from _block(f"{path}.actions.{number}", action)


def _dataset(dataset: Dataset) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a dataset that apply to its form of records."""
    form = reads(dataset)["form"]
    turns = ("messages", "prompt", "response", "train_on", "template", "template_arguments", "lost")
    names = {
        "text": turns,
        "chat": ("text", "prompt", "response"),
        "choices": ("text", *turns, "oversized"),
        "preference": ("text", "messages", "response", "train_on"),
        "tokens": ("text", *turns),
    }
    left_out = names.get(form, ("text", "messages"))
    if form != "choices":
        left_out += ("choices", "question", "answer")
    for path, value in _block(f"dataset.{dataset.name}", dataset):
        if path.rpartition(".")[2] not in left_out:
            yield path, value


def _block(
    path: str, block: Any, label: str = "", without: tuple[str, ...] = (), *, silent: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a block. silent: omit values that plans do not show."""
    for name, (attribute, setting) in settings_of(type(block)).items():
        if setting.only and label not in setting.only:
            continue
        value = getattr(block, attribute.name)
        if name in without or (silent and is_unspoken(attribute, setting, value)):
            continue
        if is_block(attribute.type):
            if (chosen := label_of(attribute.type)) is not None and isinstance(value, Component):
                yield f"{path}.{name}.{chosen.name}", getattr(value, chosen.name)
            yield from _block(f"{path}.{name}", value, without=setting.without)
        else:
            yield f"{path}.{name}", value


def _entry(spec: Spec, path: str, value: Any) -> Provenance:
    origin = spec.origins.get(path)
    if origin is None:
        return Provenance(path=path, value=spell(value), origin="default")
    place = str(origin.span) if origin.span else ""
    return Provenance(path=path, value=spell(value), origin=origin.kind, place=place)


def derived_provenance(resolved: Resolved, shape_reasons: dict[str, str], schedule: Schedule) -> list[Provenance]:
    """Return the values that the planner derived: entries that replace `auto`, and numbers without a setting."""
    spec, architecture, layout, batch, formats = (
        resolved.spec,
        resolved.architecture,
        resolved.layout,
        resolved.batch,
        resolved.formats,
    )
    values: dict[str, Any] = {
        "parallel.fsdp.size": layout.size("fsdp"),
        "parallel.fsdp.replicate": layout.size("replicate"),
        "parallel.cp.ring": layout.size("ring"),
        "parallel.cp.ulysses": layout.size("ulysses"),
        "launch.nodes": layout.nodes,
        "launch.ranks_per_node": layout.mesh.ranks_per_node,
        "world_size": layout.mesh.world_size,
        "batch.accumulate": batch.accumulate,
        "batch.rows": batch.rows,
        "batch.ramp": plural(batch.ramp, "step"),
        "steps": batch.steps,
        "tokens_per_step": f"{batch.tokens_per_step:,}",
        "precision.compute": formats.compute,
        "parallel.fsdp.reduce": formats.reduce,
    }
    reasons = {**shape_reasons, **layout.reasons, **batch.reasons}
    reasons["tokens_per_step"] = f"rows {batch.rows:,} · sequence {batch.sequence:,}"
    if spec.precision.compute == "auto":
        reasons["precision.compute"] = "the format of the parameters"
    if spec.parallel.fsdp.reduce == "auto":
        reasons["parallel.fsdp.reduce"] = "the format of the parameters"
    chosen = {
        **{path: (_value(path, architecture, values), how) for path, how in reasons.items()},
        **resolved.staging.reasons,
    }
    chosen |= _parallel_choices(resolved) | alert_reasons(spec) | _cut_conversations(spec)
    found = []
    for path, (value, how) in chosen.items():
        if spec.serve is not None and not (path == "world_size" or is_of_servers(path)):
            continue
        found.append(Provenance(path=path, value=spell(value), origin="derived", how=how))
    for path, (value, how) in schedule.reasons.items():
        found.append(Provenance(path=path, value=value, origin="default", how=how))
    return found


def _value(path: str, architecture: Architecture, values: dict[str, Any]) -> Any:
    block, _, name = path.partition(".")
    if block == "task":
        adapter, (task, _, own) = architecture.adapter, name.split(".")
        assert isinstance(adapter, TaskAdapters)
        return getattr(adapter.tasks[task], own)
    if block == "adapter":
        adapter = architecture.adapter  # in a server, each slot has it
        return getattr(next(iter(adapter.tasks.values())) if isinstance(adapter, TaskAdapters) else adapter, name)
    if block == "model":
        found: Any = architecture.to_json()
        for part in name.split("."):
            found = found[part]
        return found
    return values[path]


def _cut_conversations(spec: Spec) -> dict[str, tuple[Any, str]]:
    """Return the reason for conversations that are truncated by default."""
    why = "what follows in another row would be without its beginning"
    paths = {f"dataset.{each.name}.oversized": each for each in spec.datasets.values() if each.is_conversation}
    unsaid = {path: each for path, each in paths.items() if spec.origins[path].kind == "default"}
    return {path: (each.oversized, why) for path, each in unsaid.items()}


def _parallel_choices(resolved: Resolved) -> dict[str, tuple[Any, str]]:
    """Return the choices that follow from the axes of the mesh and from sizes on a rank."""
    spec, layout, ring, pp = resolved.spec, resolved.layout, resolved.size("ring"), resolved.size("pp")
    found: dict[str, tuple[Any, str]] = {}
    if ring > 1 and isinstance(row_link(spec.collate).align, Auto):
        found["collate.pack.align"] = (resolve_align(spec, ring), f"2 · ring {ring} chunks of each document")
    group = row_link(spec.collate).grouped
    if group and isinstance(row_link(spec.collate).group, Auto):
        found["collate.pack.group"] = (group, "larger groups fill rows better by at most 0.01 %")
    chain = resolve_chain(spec, ring, layout.size("ulysses"))
    if chain != spec.collate:
        cut = any(link.by_layout for link in chain)
        why = f"rows are sharded over cp {spec.parallel.cp.size}" if cut else "cp is 1"
        found["collate"] = (chain, why)
    if spec.parallel.fsdp.sync == "auto" and resolved.dense_fsdp:
        found["parallel.fsdp.sync"] = (resolved.sync, _why_sync(resolved))
    if pp > 1 and isinstance(spec.parallel.fsdp.reshard, Auto):
        found["parallel.fsdp.reshard"] = (False, "a pipeline uses a block once for each microbatch")
    if spec.activation.mode == "selective" and isinstance(spec.activation.save, Auto):
        found["activation.save"] = (
            resolve_save(resolved),
            "operations that are expensive to recompute or to send again",
        )
    if isinstance(spec.activation.tile_mlp, Auto):
        pieces = 1 if resolved.tile is None else -(-resolved.positions // resolved.tile)
        why = f"{plural(resolved.positions, 'position')} of a microbatch / dim {resolved.architecture.dim}, rounded up"
        found["activation.tile_mlp"] = (pieces, why)
    if resolved.small_products:
        most = f"products of a block have at most {resolved.largest_product:,} multiply-adds, fewer than "
        most += f"{SMALL_PRODUCT:,}, and the head's {resolved.head_product:,}, fewer than {SMALL_HEAD:,}"
        found["precision.matmul"] = ("highest", most)
    return found


def _why_sync(resolved: Resolved) -> str:
    if resolved.size("pp") > 1:
        return "the schedule of a pipeline sums once a step"
    if resolved.batch.accumulate == 1:
        return "a step has one microbatch"
    whole = bytes_text(resolved.whole_gradients)
    return (
        f"{whole} of whole gradients {'are cheap to keep' if resolved.sync == 'step' else 'would be kept until then'}"
    )


def merge(stated: list[Provenance], derived: list[Provenance]) -> tuple[Provenance, ...]:
    """Merge derived values into the stated ones; each replaces its `auto` and keeps the place where that was
    written."""
    replacements = {entry.path: entry for entry in derived}
    merged = []
    for entry in stated:
        replacement = replacements.pop(entry.path, None)
        merged.append(entry if replacement is None else evolve(replacement, place=entry.place))
    return (*merged, *replacements.values())
