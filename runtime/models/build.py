"""`setup.build_model`: a rank's own stages on the meta device, held against the plan's inventory name by name."""

import torch

from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.planner.architecture import Architecture
from xtrain.planner.attention_kernels import kernel_on
from xtrain.planner.plan import Plan
from xtrain.runtime.data.user_parts import spec_folder
from xtrain.runtime.models.fused import Fusible
from xtrain.runtime.models.loss import Head
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.task_routing import TaskRouting
from xtrain.runtime.models.transformer import StageSpan, Transformer
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.state import Rank

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "uint8": torch.uint8}


@op("setup.build_model", gives="model")
def build_model(
    plan: Plan,
    rank: Rank,
    architecture: Architecture,
    attention: dict[str, str],
    params: str,
    stages: list[list[int]],
    owners: list[list[int]],
    z_loss: float = 0.0,
    chunk_bytes: int = 0,
    rows: int = 1,
    pointwise: dict[str, str] | None = None,
) -> ModelParts:
    """Build without memory; `setup.weights` gives it values.

    attention: device type → kernel. stages: [first, last] layer of every stage. owners: the stages of each pipeline
    coordinate. z_loss, chunk_bytes: of a `Head` that gives logits. rows: those of a step, over which the losses of a
    router are averaged. pointwise: device type → whether norms, rotations and SwiGLU are `plain` or `fused`; None in
    plans of before, where they are plain.
    """
    adapter = architecture.adapter
    axes = Axes(tasks=TaskRouting(tuple(adapter.tasks)) if isinstance(adapter, TaskAdapters) else None)
    cap = architecture.ends.logit_cap
    head = Head(vocabulary=architecture.vocab, z_weight=z_loss, chunk_bytes=chunk_bytes, cap=cap)
    kernel = kernel_on(rank.device.type, torch.get_float32_matmul_precision(), attention)
    with torch.device("meta"):
        parts = tuple(
            Transformer(
                architecture, span, axes=axes, kernel=kernel, head=head, rows=rows, base=spec_folder(plan.spec)
            ).to(DTYPES[params])
            for span in spans(stages, owners[rank.coordinates["pp"]])
        )
    model = ModelParts(parts, axes)
    if pointwise is not None and pointwise[rank.device.type] == "fused":
        for module in model.modules():
            if isinstance(module, Fusible):
                module.fused = True
    assert_matches_plan(model, plan)
    return model


@op("setup.mtp")
def begin_further(model: ModelParts, modules: int, weight: float) -> None:
    """Let the mean of the losses of modules that predict further tokens count `weight`."""
    for part in model.parts:
        if part.arch.mtp != modules:
            raise PlanMismatch(f"the model has {part.arch.mtp} modules that predict further tokens, not {modules}")
        part.further_weight = weight


@op("setup.tasks")
def route(plan: Plan, model: ModelParts, tasks: dict[str, list[str]]) -> None:
    """Let rows go through the adapter of their task. tasks: the datasets of each."""
    routing = model.axes.tasks
    if routing is None or set(routing.names) != tasks.keys():
        raise PlanMismatch(f"the model has no adapters of {', '.join(tasks)}")
    place = {dataset: number for number, name in enumerate(routing.names) for dataset in tasks[name]}
    routing.of_dataset = tuple(place[name] for name in plan.node("setup.loader").args["datasets"])


def compute_format(plan: Plan) -> str:
    """The number format of forward and backward: that of the parameters, unless sharding casts them."""
    casts = [node.args["compute"] for node in plan.nodes if node.op == "setup.parallel.root_fsdp"]
    return casts[0] if casts else plan.node("setup.build_model").args["params"]


def spans(stages: list[list[int]], own: list[int]) -> list[StageSpan]:
    """What the stages `own` are made of."""
    last = len(stages) - 1
    return [StageSpan(*stages[stage], embeds=stage == 0, predicts=stage == last) for stage in own]


def assert_matches_plan(model: ModelParts, plan: Plan) -> None:
    """Raise PlanMismatch unless the parts have the plan's parameters of their layers, by name and whole shape."""
    built = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wanted = {p.name: p.shape for p in plan.parameters.tensors if _belongs(p.name, model)}
    if built == wanted:
        return
    missing, extra = wanted.items() - built.items(), built.items() - wanted.items()
    raise PlanMismatch(
        f"the model is not the planned one: planned but not built {sorted(missing)[:5]}, "
        f"built but not planned {sorted(extra)[:5]}"
    )


def _belongs(name: str, model: ModelParts) -> bool:
    behind = model.parts[0].arch.embeds_behind
    for span in (part.span for part in model.parts):
        if name.startswith("layers."):
            mine = span.first <= int(name.split(".")[1]) <= span.last
        elif name.startswith("embed_tokens."):
            mine = span.embeds or (span.predicts and behind)
        else:
            mine = span.predicts
        if mine:
            return True
    return False
