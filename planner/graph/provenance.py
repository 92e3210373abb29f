"""Provenance of every value of a plan: text, `let`, `param`, `--set`, a default, or a derivation with its reason."""

from collections.abc import Iterator
from typing import Any, Final

from attrs import evolve

from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.data import Dataset, Mixture
from xtrain.dsl.schema.data_components import row_link
from xtrain.dsl.schema.model import Model
from xtrain.dsl.schema.setting import Auto, is_unspoken, open_setting, settings_of
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import Architecture
from xtrain.plan.data import reads, resolve_chain
from xtrain.plan.kernels import resolve_save
from xtrain.plan.plan import Provenance
from xtrain.plan.resolved import SMALL_HEAD, SMALL_PRODUCT, Resolved, resolve_align
from xtrain.plan.views import spell
from xtrain.planner.graph.timeline import Schedule, alert_reasons
from xtrain.text.units import bytes_text, plural

# Settings of a dataset that do not describe its records.
_CLEANED: Final = ("deduplicate", "decontaminate", "min_tokens", "without")
_OF_ANY_RECORDS: Final = ("source", "holdout", "oversized", "bad_records", *_CLEANED)


def settings_provenance(spec: Spec) -> list[Provenance]:
    """Return an entry for every setting of this spec, by dotted path, in the order of the schema."""
    return [_entry(spec, path, value) for path, value in setting_values(spec)]


def setting_values(spec: Spec) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every label and setting that the blocks of a spec have with these labels."""
    serves = spec.serve is not None
    for kind, without in blocks.blocks_of(serves=serves).items():
        if kind in blocks.NAMED:
            for name, block in getattr(spec, blocks.NAMED[kind]).items():
                yield from _block(f"{kind}.{name}", block, named=True)
        elif kind == "tokenizer":
            yield kind, spec.tokenizer.source
        elif kind != "sweep" and getattr(spec, kind) not in (None, Mixture()):  # a plan is of one trial
            yield from _block(kind, getattr(spec, kind), without)
    if serves:
        return
    yield "collate", spec.collate
    for number, tick in enumerate(spec.ticks):
        yield f"every.{number}.every", tick.every
        for place, action in enumerate(tick.actions):
            yield from _block(f"every.{number}.actions.{place}", action)
    for number, event in enumerate(spec.events):
        yield f"on.{number}.event", event.event
        if event.event == "nan":
            yield f"on.{number}.count", event.count
        for place, action in enumerate(event.actions):
            yield from _block(f"on.{number}.actions.{place}", action)


def _block(
    path: str, block: Any, without: tuple[str, ...] = (), *, named: bool = False, spoken: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the label and the settings of a block. named: the path has its label. spoken: include values that plans do
    not show."""
    if (label := blocks.label_of(type(block))) is not None and not named:
        yield f"{path}.{label.name}", getattr(block, label.name)
    if isinstance(block, Model) and block.folder is not None:
        yield f"{path}.folder", str(block.folder)
    if (free := open_setting(type(block))) is not None:
        yield from ((f"{path}.{name}", value) for name, value in getattr(block, free[0].name).items())
    unread = _unread(block) if isinstance(block, Dataset) else ()
    # A block that was not made from a text may lack the blocks of components.
    settings = {name: each for name, each in settings_of(type(block)).items() if hasattr(block, each[0].name)}
    components = {getattr(block, attribute.name) for attribute, setting in settings.values() if setting.registry}
    for name, (attribute, setting) in settings.items():
        value = getattr(block, attribute.name)
        if name in without or (setting.only and label is not None and getattr(block, label.name) not in setting.only):
            continue
        shown = spoken or name in components or not is_unspoken(attribute, setting, value)
        if name in unread or not shown:
            continue
        if blocks.is_block(attribute.type):
            yield from _block(f"{path}.{name}", value, setting.without, spoken=name in components)
        else:
            yield f"{path}.{name}", value


def _unread(dataset: Dataset) -> tuple[str, ...]:
    """Return the settings of a dataset that its form of records does not have."""
    form = reads(dataset)
    kept = {*form, *_OF_ANY_RECORDS} - ({"oversized"} if form["form"] == "choices" else set[str]())
    return tuple(name for name in settings_of(Dataset) if name not in kept)


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
        if spec.serve is not None and not (path == "world_size" or blocks.is_of_servers(path)):
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
    if resolved.dense_fsdp and not resolved.reshard and isinstance(spec.parallel.fsdp.reshard, Auto):
        why = "a pipeline uses a block once for each microbatch" if pp > 1 else NOTHING_SHARDED
        found["parallel.fsdp.reshard"] = (False, why)
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


NOTHING_SHARDED: Final = "no rank has only a piece of a parameter"


def _why_sync(resolved: Resolved) -> str:
    if resolved.size("pp") > 1:
        return "the schedule of a pipeline sums once a step"
    if resolved.batch.accumulate == 1:
        return "a step has one microbatch"
    if not resolved.sharded:
        return NOTHING_SHARDED
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
