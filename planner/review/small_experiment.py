"""Small experiments with the structure of a plan: what its ranks do, in widths and numbers that one machine computes in
seconds."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import prod
from typing import Any, Final

import attrs

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.actions import OnEvent
from xtrain.dsl.schema.cluster import CLUSTERS, FaultTolerance
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.data_components import SOURCES, Link, source_of
from xtrain.dsl.schema.losses import INITIAL, LOSSES, ReferredLoss
from xtrain.dsl.schema.model import Model
from xtrain.dsl.schema.optimizers import SCHEDULERS
from xtrain.dsl.schema.parallel import Activation, Compile, Ep, Parallel
from xtrain.dsl.schema.policy import REWARDS
from xtrain.dsl.schema.run import Alerts, Launch, Log, Workspace
from xtrain.dsl.schema.setting import AUTO, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import resolved_text
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.plan import Plan
from xtrain.planner.review.small_scope import (
    Shrunken,
    action_like,
    byte_tokenizer,
    changed_settings,
    small_events,
    small_ticks,
    uncovered_parts,
)
from xtrain.planner.review.small_sizes import near_layers, small_model, small_optimizer

AXES: Final = ("replicate", "fsdp", "tp", "pp", "ring", "ulysses")
"""Axes of a mesh that have ranks of their own; ep takes ranks of others."""
STEPS: Final = 4
SEQUENCE: Final = 64
CONVERSATION: Final = 256
ROWS_OF_PROMPT: Final = 4
REWARDED: Final = r"^[\x00-\x7f]()"
"""Pattern of answers that about half of the completions of a random model match."""


class NoSmallExperiment(Exception):
    """A plan without a small experiment; `hint` is what to do instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@frozen(kw_only=True)
class SmallLayout:
    """A layout of the experiment: sizes of the axes above 1, and the spec as text."""

    axes: Mapping[str, int]
    text: str

    @classmethod
    def of(cls, axes: Mapping[str, int], spec: Spec) -> "SmallLayout":
        """Return the layout with the text of its spec."""
        return cls(axes=axes, text=resolved_text(spec))

    @property
    def world(self) -> int:
        return prod(size for axis, size in self.axes.items() if axis != "ep")

    @property
    def name(self) -> str:
        return " · ".join(f"{axis} {size}" for axis, size in self.axes.items()) or "one rank"


@frozen(kw_only=True)
class SmallExperiment:
    """alone: the experiment in one process, a step in one part. layouts: of the plan. other: the layout that
    resumes. rehearsal: one of which a step can be taken without other ranks. uncovered: what of the plan none of them
    has."""

    alone: SmallLayout
    rehearsal: SmallLayout
    layouts: tuple[SmallLayout, ...]
    other: SmallLayout
    shrunken: tuple[Shrunken, ...]
    uncovered: tuple[str, ...]


def small_experiment(
    plan: Plan, files: Mapping[str, str], most_ranks: int, teacher: str | None = None, folder: str | None = None
) -> SmallExperiment:
    """Return the small experiment of a plan. files: by dataset, a file of small records. teacher: folder of a small
    teacher. folder: of a small model, if a folder gives the sizes of the model. Raises NoSmallExperiment."""
    spec = spec_of(plan)
    uncovered = [*uncovered_parts(spec, plan)]
    sizes = _small_sizes(plan)
    whole = {axis: size for axis, size in sizes.items() if axis != "ep"}
    if prod(whole.values()) <= most_ranks:
        chosen = [sizes]
    else:
        chosen = list(_parts(sizes, most_ranks))
        if len(chosen) == 0 or most_ranks < 4:
            needed = " · ".join(f"{axis} {size}" for axis, size in whole.items())
            hint = f"allow {prod(whole.values())} with `--ranks {prod(whole.values())}`, or 8, which covers every pair"
            raise NoSmallExperiment(f"the plan needs more than {most_ranks} small ranks: {needed}", hint)
        uncovered.append(
            f"all axes in one run, which takes {prod(whole.values())} ranks: "
            f"each run has at most {most_ranks} of {' · '.join(whole)}"
        )
    if plan.mesh.size("pp") > 2 and _stages(plan) == 1:
        chosen.append({"pp": 3})  # a stage that neither begins nor ends the model
    small = _without_scale(spec, plan, files, teacher)
    if folder is not None:
        small = attrs.evolve(small, model=_of_folder(folder, spec.model.frozen))
    other = {} if chosen[0] == {"fsdp": 2} else {"fsdp": 2}
    rows = _rows(plan, [*chosen, other])
    small = attrs.evolve(small, batch=_batch(spec, plan, rows), collate=_collate(small, chosen))
    layouts = tuple(_layout(small, each, rows) for each in chosen)
    # Without values of other ranks only these axes compute: an exchange of tokens reads their number.
    alike = {axis: size for axis, size in sizes.items() if axis in ("fsdp", "tp")}
    return SmallExperiment(
        alone=SmallLayout.of({}, _alone(small, rows)),
        rehearsal=SmallLayout.of(alike, _layout(small, alike, rows)),
        layouts=tuple(map(SmallLayout.of, chosen, layouts)),
        other=SmallLayout.of(other, _layout(_plain(small), other, rows)),
        shrunken=tuple(changed_settings(spec, layouts[0], plan)),
        uncovered=tuple(uncovered),
    )


def spec_of(plan: Plan) -> Spec:
    """Return the spec of a plan, as it was planned. Raises NoSmallExperiment."""
    if plan.serves:
        raise NoSmallExperiment("a server spec has no training step to prove", "give the plan of a training run")
    loaded = load_spec(plan.spec, (), {plan.spec: plan.spec_text})
    if loaded.spec is None:
        raise NoSmallExperiment("the spec of the plan no longer loads", "make the plan again from its spec")
    return attrs.evolve(loaded.spec, sweep=None)


def small_teacher(plan: Plan, files: Mapping[str, str], folder: str) -> SmallLayout:
    """Return an experiment of one process that exports a small model for a loss that learns from a teacher."""
    small = _without_scale(spec_of(plan), plan, files, folder)
    small = attrs.evolve(small, batch=_batch(small, plan, 2), loss=LOSSES.default(), rollout=None, reward=None)
    export = action_like(lambda action: action.publishes and "to" in settings_of(action))
    teacher = attrs.evolve(
        _alone(small, 2),
        experiment=attrs.evolve(small.experiment, seed=small.experiment.seed + 1, budget=Quantity(1, "steps")),
        adapter=None,
        tasks={},
        groups={},
        hooks={},
        phases={},
        ema=None,
        ticks=(),
        events=(OnEvent(event="finish", actions=(export(to=folder),)),),  # pyright: ignore[reportCallIssue]
    )
    return SmallLayout.of({}, teacher)


# Axes ----------------------------------------------------------------------------------------------------------------


def _small_sizes(plan: Plan) -> dict[str, int]:
    """Return the small size of each axis above 1. Experts that are spread and sharded take four ranks of other axes."""
    mesh = plan.mesh
    sizes = {axis: 2 for axis in AXES if mesh.size(axis) > 1}
    expert = {axis.name: axis.size for axis in mesh.expert_axes}
    if expert.get("ep", 1) > 1:
        inner = [axis for axis in ("fsdp", "tp", "ring", "ulysses") if axis in sizes]
        if expert.get("ep_fsdp", 1) > 1 and 2 ** len(inner) < 4:
            sizes[inner[0]] = 4
        sizes["ep"] = 2
    return sizes


def _parts(sizes: Mapping[str, int], most: int) -> Iterator[dict[str, int]]:
    """Yield the largest sets of axes with at most this many ranks, with experts wherever they have ranks."""
    own = [axis for axis in sizes if axis != "ep"]
    count = max((n for n in range(1, len(own)) if 2**n <= most), default=0)
    for axes in combinations(own, count):
        found = {axis: sizes[axis] for axis in axes}
        if prod(found.values()) <= most:
            inner = {"fsdp", "tp", "ring", "ulysses"} & found.keys()
            yield found | ({"ep": 2} if "ep" in sizes and inner else {})


def _layout(small: Spec, axes: Mapping[str, int], rows: int) -> Spec:
    parallel = small.parallel
    ranks = axes.get("replicate", 1) * axes.get("fsdp", 1)
    # The blocks of schedules and offsets stay, only sizes change.
    parallel = attrs.evolve(
        parallel,
        tp=attrs.evolve(parallel.tp, size=axes.get("tp", 1)),
        ep=Ep(axes.get("ep", 1)),
        pp=attrs.evolve(parallel.pp, size=axes.get("pp", 1)),
        cp=attrs.evolve(
            parallel.cp,
            size=axes.get("ring", 1) * axes.get("ulysses", 1),
            ring=axes.get("ring", 1 if "ulysses" in axes else AUTO),
            ulysses=axes.get("ulysses", 1 if "ring" in axes else AUTO),
        ),
        fsdp=attrs.evolve(parallel.fsdp, size=axes.get("fsdp", 1), replicate=axes.get("replicate", 1)),
    )
    # Not more microbatches than the layout needs: its time depends on their number most.
    micro = max(min(small.batch.micro, rows // ranks), rows // ranks // (4 if axes.get("pp", 1) > 1 else 2))
    return attrs.evolve(small, parallel=parallel, batch=attrs.evolve(small.batch, micro=micro))


def _plain(small: Spec) -> Spec:
    """Return the experiment without what belongs to a layout."""
    return attrs.evolve(small, parallel=Parallel.complete()(), activation=Activation(mode="none"))


def _alone(small: Spec, rows: int) -> Spec:
    """Return the experiment in one process."""
    return attrs.evolve(_plain(small), batch=attrs.evolve(small.batch, micro=rows))


def _collate(small: Spec, layouts: list[dict[str, int]]) -> tuple[Link, ...]:
    """Return the collate chain in which all layouts pad documents to the lengths that a ring of one of them needs."""
    ring = max(axes.get("ring", 1) for axes in layouts)
    if ring == 1:
        return small.collate
    return tuple(
        attrs.evolve(link, align=2 * ring) if getattr(link, "align", None) == AUTO else link for link in small.collate
    )


# Numbers -------------------------------------------------------------------------------------------------------------


def _rows(plan: Plan, layouts: list[dict[str, int]]) -> int:
    """Return the rows of a step: several microbatches where the plan has several, and enough for every pipeline."""
    args = plan.node("setup.loader").args
    several = args["accumulate"] > 1
    micro = min(args["micro"], 2)
    data = max(axes.get("replicate", 1) * axes.get("fsdp", 1) for axes in layouts)
    parts = 4 if any("pp" in axes for axes in layouts) else 2 if several else 1
    return micro * data * parts


def _batch(spec: Spec, plan: Plan, rows: int) -> Any:
    long = any(each.has_answers for each in spec.datasets.values()) or spec.rollout is not None
    batch = spec.batch
    return attrs.evolve(
        batch,
        sequence=min(batch.sequence, CONVERSATION if long else SEQUENCE),
        micro=min(batch.micro, 2),
        accumulate=AUTO,
        rows=rows,
        workers=0,
        pad_to=None if batch.pad_to is None else min(batch.pad_to, 16),
        ramp_from=None if batch.ramp_from is None else rows // 2,
        ramp=batch.ramp if batch.ramp_from is None else Quantity(2, "steps"),
    )


def _without_scale(spec: Spec, plan: Plan, files: Mapping[str, str], teacher: str | None) -> Spec:
    """Return the experiment with small sizes, in fp64, on the CPU, with its data in `files`."""
    layers, phases = small_layers(plan), {}
    for number, (name, phase) in enumerate(spec.phases.items(), start=1):
        phases[name] = attrs.evolve(phase, from_=Quantity(number, "steps"))
    steps = max(STEPS, len(phases) + 2)
    precision = spec.precision
    pp = spec.parallel.pp
    parallel = attrs.evolve(
        spec.parallel,
        tp=attrs.evolve(spec.parallel.tp, overlap=False),
        pp=attrs.evolve(pp, layers=AUTO),
        fsdp=attrs.evolve(
            spec.parallel.fsdp,
            reduce="auto" if spec.parallel.fsdp.reduce == "auto" else "fp64",
            offload=False,
            sync=_sync(plan),
        ),
    )
    changes: dict[str, Any] = {
        "experiment": attrs.evolve(spec.experiment, budget=Quantity(steps, "steps")),
        "workspace": Workspace(),
        "launch": Launch(device="cpu"),
        "cluster": CLUSTERS.default(),
        "launcher": None,
        "model": small_model(spec.model, plan.architecture, layers),
        "tokenizer": byte_tokenizer(),
        "datasets": {name: _dataset(each, files[name]) for name, each in spec.datasets.items()},
        "phases": phases,
        "optimizer": small_optimizer(spec.optimizer),
        "groups": {
            near_layers(name, layers): attrs.evolve(
                each, name=near_layers(name, layers), optimizer=each.optimizer and small_optimizer(each.optimizer)
            )
            for name, each in spec.groups.items()
        },
        "tasks": {
            name: attrs.evolve(
                each,
                adapter=each.adapter and _adapter(each.adapter, layers),
                optimizer=each.optimizer and small_optimizer(each.optimizer),
            )
            for name, each in spec.tasks.items()
        },
        "adapter": None if spec.adapter is None else _adapter(spec.adapter, layers),
        "precision": attrs.evolve(
            precision,
            params="fp64",
            compute="fp64",
            fp16=type(precision.fp16)(),
            fp8=type(precision.fp8)(),
            qat=type(precision.qat)(),
            matmul="highest",
        ),
        "parallel": parallel,
        "activation": attrs.evolve(spec.activation, every=min(spec.activation.every, 2), tile_mlp=_tiles(spec)),
        "compile": Compile(mode="none"),
        "checkpoint": attrs.evolve(
            spec.checkpoint, from_=None, pretrained=None, resume=True, enabled=True, keep=None, best=None, model=False,
            mode="sync" if spec.checkpoint.mode == "sync" else "async",
        ),
        "fault_tolerance": FaultTolerance(),
        "alerts": Alerts(),
        "log": Log.complete()(),
        "ticks": small_ticks(spec),
        "events": small_events(spec),
        "origins": {},
    }  # fmt: skip
    if not isinstance(spec.scheduler, UserComponent):
        changes["scheduler"] = SCHEDULERS.default()
    if spec.rollout is not None:
        changes["rollout"] = attrs.evolve(spec.rollout, group=ROWS_OF_PROMPT, max_tokens=4, show=None, stale=0)
        changes["engine"] = None  # the ranks of the proof sample
    if spec.reward is not None and not isinstance(spec.reward, UserComponent):
        answers = next(reward for reward in REWARDS.values() if "pattern" in settings_of(reward))
        changes["reward"] = answers(pattern=REWARDED)  # pyright: ignore[reportCallIssue]
    loss = spec.loss
    if isinstance(loss, ReferredLoss) and loss.reference_folder is not None:
        loss = attrs.evolve(loss, reference=INITIAL)
    if teacher is not None:
        loss = attrs.evolve(loss, teacher=teacher, live=True)
    return attrs.evolve(spec, loss=loss, **changes)


OF_FOLDER: Final = """
experiment small { budget = 1 step }
model "FOLDER" { weights = none }
tokenizer bytes
dataset lines { source = jsonl("x") }
batch { sequence = 64 }
optimizer adamw { lr = 1 }
"""


def _of_folder(folder: str, frozen: tuple[str, ...]) -> Model:
    """Return the model of a folder. Raises NoSmallExperiment."""
    text = OF_FOLDER.replace("FOLDER", folder)
    loaded = load_spec("small.xtrain", (), {"small.xtrain": text})
    if loaded.spec is None:
        raise NoSmallExperiment(next(iter(loaded.diagnostics.errors)).message, "use a model that xtrain can shrink")
    model: Any = loaded.spec.model
    layers = model.layers
    return attrs.evolve(model, frozen=tuple(near_layers(each, layers) for each in frozen))


def small_layers(plan: Plan) -> int:
    """Return the fewest first layers with every kind of layer, of which every stage of a small pipeline has one."""
    kinds = max(min(kind.layers) for kind in plan.architecture.kinds) + 1
    stages = 1
    if plan.mesh.size("pp") > 1:
        own = _stages(plan)
        stages = max(2 * own, 3 if own == 1 and plan.mesh.size("pp") > 2 else 2)
    return min(max(2, kinds, stages), plan.architecture.layers)


def _stages(plan: Plan) -> int:
    """Return the stages of a rank."""
    return plan.node("setup.parallel.pp").args["stages_per_rank"]


def _sync(plan: Plan) -> Any:
    """Return when the plan sums gradients, which a small experiment would settle otherwise."""
    found = next((node.args["sync"] for node in plan.nodes if "sync" in node.args), "auto")
    return found if found in ("step", "microbatch") else "auto"


def _tiles(spec: Spec) -> Any:
    return spec.activation.tile_mlp if spec.activation.tile_mlp == 1 else 3


def _dataset(dataset: Dataset, file: str) -> Dataset:
    source = SOURCES[source_of(file)](file)  # pyright: ignore[reportCallIssue]
    share = dataset.holdout.value
    # Documents of the whole data are left out, and not all of them are here.
    cleaning = {"deduplicate": "none", "decontaminate": (), "min_tokens": 0, "without": ()}
    changes: dict[str, Any] = {"source": source, "bad_records": 0, **cleaning}
    if 0 < share < 100:
        changes["holdout"] = Quantity(20, "%")
    if dataset.has_answers or dataset.prompt is not None:
        changes["template"] = "chatml" if dataset.template is AUTO else dataset.template
    return attrs.evolve(dataset, **changes)


def _adapter(adapter: Any, layers: int) -> Any:
    changes: dict[str, Any] = {"from_": None}
    for name in ("targets", "train", "layers"):
        if name in settings_of(type(adapter)):
            found = (near_layers(text, layers, alone=name == "layers") for text in getattr(adapter, name))
            changes[name] = tuple(dict.fromkeys(found))
    if "rank" in settings_of(type(adapter)):
        changes["rank"] = min(adapter.rank, 4)
    return attrs.evolve(adapter, **changes)
