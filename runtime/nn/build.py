"""Set-up nodes that build the model on the meta device and configure its computation.

The model is compared with the plan's inventory name by name. Then follow frozen parameters, dropout, noise,
temperature, fp8, rounded matrices, recomputation, tiles and compilation.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import torch
from attrs import evolve, frozen
from torch import nn
from torch._dynamo import config as dynamo

from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.precision import RECIPES, Qat, Recipe
from xtrain.plan.architecture import EMBEDDING, Architecture
from xtrain.plan.hardware import kernel_on
from xtrain.plan.mesh import fits, tensor_rules
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import PlanMismatch, op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.base.user_parts import spec_folder
from xtrain.runtime.nn.attention import AttentionModule, activate
from xtrain.runtime.nn.axes import Axes, matching
from xtrain.runtime.nn.block import DecoderBlock, LayerBlock
from xtrain.runtime.nn.fused import Fusible
from xtrain.runtime.nn.head_product import TaskRouting
from xtrain.runtime.nn.layers import Dropout, DropsInputs, EmbeddingNoise, HasKeys, Linear, OwnModule
from xtrain.runtime.nn.loss import Head
from xtrain.runtime.nn.moe import Experts, MoE
from xtrain.runtime.nn.number_formats import Fp8Matrix, SharedScales
from xtrain.runtime.nn.recompute import SAVED, RecomputeFunction, TiledModule
from xtrain.runtime.nn.transformer import ModelParts, StageSpan, Transformer

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "uint8": torch.uint8,
}


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
    code: str = "",
) -> ModelParts:
    """Build the model on the meta device; `setup.weights` loads its values.

    attention: device type → kernel. stages: [first, last] layer of every stage. owners: the stages of each pipeline
    coordinate. z_loss, chunk_bytes: of a `Head` for logits. rows: per step, over which a router's losses are averaged.
    pointwise: device type → `plain` or `fused` norms, rotations and SwiGLU; None in older plans, where they are plain.
    code: digest of the source of a model that transformers computes. Raises PlanMismatch if it has changed.
    """
    adapter = architecture.adapter
    axes = Axes(tasks=TaskRouting(tuple(adapter.tasks)) if isinstance(adapter, TaskAdapters) else None)
    cap = architecture.ends.logit_cap
    head = Head(vocabulary=architecture.vocab, z_weight=z_loss, chunk_bytes=chunk_bytes, cap=cap)
    kernel = kernel_on(rank.device.type, torch.get_float32_matmul_precision(), attention)
    if rank.device.type == "cuda":
        activate(kernel)
    make = stage_class(architecture)
    with torch.device("meta"):
        parts = tuple(
            make(architecture, span, axes=axes, kernel=kernel, head=head, rows=rows, base=spec_folder(plan.spec)).to(
                DTYPES[params]
            )
            for span in spans(stages, owners[rank.coordinates["pp"]])
        )
    for part in parts:
        part.check_code(code)
    model = ModelParts(parts, axes)
    if pointwise is not None and pointwise[rank.device.type] == "fused":
        for module in model.modules():
            if isinstance(module, Fusible):
                module.fused = True
    assert_matches_plan(model, plan)
    return model


def stage_class(arch: Architecture) -> type[Transformer]:
    """Return the class of an architecture's stages."""
    if "code" not in arch.own:
        return Transformer
    from xtrain.runtime.nn.code_transformer import CodeTransformer

    return CodeTransformer


@op("setup.mtp")
def begin_further(model: ModelParts, modules: int, weight: float) -> None:
    """Set the weight of the mean loss of modules that predict further tokens."""
    for part in model.parts:
        if part.arch.mtp != modules:
            raise PlanMismatch(f"the model has {part.arch.mtp} modules that predict further tokens, not {modules}")
        part.further_weight = weight


@op("setup.tasks")
def route(plan: Plan, model: ModelParts, tasks: dict[str, list[str]]) -> None:
    """Route rows through the adapter of their task. tasks: the datasets of each."""
    routing = model.axes.tasks
    if routing is None or set(routing.names) != tasks.keys():
        raise PlanMismatch(f"the model has no adapters of {', '.join(tasks)}")
    place = {dataset: number for number, name in enumerate(routing.names) for dataset in tasks[name]}
    routing.of_dataset = tuple(place[name] for name in plan.node("setup.loader").args["datasets"])


def compute_format(plan: Plan) -> str:
    """Return the number format of forward and backward: the parameters' format, unless sharding casts them."""
    casts = [node.args["compute"] for node in plan.nodes if node.op == "setup.parallel.root_fsdp"]
    return casts[0] if casts else plan.node("setup.build_model").args["params"]


def spans(stages: list[list[int]], own: list[int]) -> list[StageSpan]:
    """Return the layers of the stages `own`."""
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
    arch = model.parts[0].arch
    behind, before = arch.embeds_behind, arch.ends.before
    for span in (part.span for part in model.parts):
        if name.startswith("layers."):
            mine = span.first <= int(name.split(".")[1]) <= span.last
        elif name.startswith("embed_tokens."):
            mine = span.embeds or (span.predicts and behind)
        else:
            mine = span.embeds if name in before else span.predicts
        if mine:
            return True
    return False


@op("setup.freeze")
def freeze(plan: Plan, model: ModelParts, parameters: int, format: str) -> None:
    """Disable gradients of parameters that the plan does not train, and store them in `format`.

    Raises PlanMismatch unless the plan freezes this number of `parameters`.
    """
    frozen = {tensor.name for tensor in plan.parameters.tensors if not tensor.trained}
    if (frozen_count := plan.parameters.total - plan.parameters.trained) != parameters:
        raise PlanMismatch(f"the plan freezes {frozen_count:,} parameters, but its node says {parameters:,}")
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if f"{path}.{name}" in frozen:
                still = nn.Parameter(parameter.detach().to(DTYPES[format]), requires_grad=False)
                module.register_parameter(name, still)
    stages = plan.node("setup.build_model").args["stages"]
    for part in model.parts:
        span = part.span
        part.begins_backward = len(stages) > 1 and not _trains_before(
            plan, span.last + 1 if span.embeds else span.first
        )


def _trains_before(plan: Plan, layer: int) -> bool:
    """Return True if the model trains a parameter before the block of a layer."""
    for tensor in plan.parameters.tensors:
        kind, number, *_ = tensor.name.split(".")
        if tensor.trained and (kind == EMBEDDING or (kind == "layers" and int(number) < layer)):
            return True
    return False


@op("setup.dropout")
def set_dropout(plan: Plan, model: ModelParts, seed: int, share: float, matrices: int) -> None:
    """Let A of every adapter drop a share of its inputs in training.

    Raises PlanMismatch unless the plan has this number of `matrices` with an adapter, and all their modules support
    dropout.
    """
    names = {tensor.adapter for tensor in plan.parameters.tensors if tensor.adapter}
    if len(names) != matrices:
        raise PlanMismatch(f"{len(names)} matrices have an adapter, but the node of dropout says {matrices}")
    own = names & {name for name, _ in model.named_parameters()}
    for path, block in model.named_modules():
        if not isinstance(block, LayerBlock):
            continue
        for name, module in block.named_modules():
            if isinstance(module, DropsInputs):
                module.dropout = Dropout.of(f"{path}.{name}.weight", share, seed)
                block.dropping.append(module)
                own.discard(f"{path}.{name}.weight")
                continue
            experts, place = (module.experts, f"{name}.experts") if isinstance(module, MoE) else (module, name)
            if isinstance(module, HasKeys) and isinstance(experts, Experts) and experts.adapters:
                stacks = {matrix: f"{path}.{place}.{matrix}" for matrix in experts.adapters}
                experts.dropout = {matrix: Dropout.of(stack, share, seed) for matrix, stack in stacks.items()}
                block.dropping.append(module)
                own.difference_update(stacks.values())
    if own:
        raise PlanMismatch(f"nothing drops what goes into the adapter of {min(own)}")
    for part in model.parts:
        part.drops = True


@op("setup.embedding_noise")
def set_embedding_noise(model: ModelParts, seed: int, most: float) -> None:
    """Add noise to embeddings in training, on the stage that embeds."""
    for part in model.parts:
        if part.span.embeds:
            part.noise = EmbeddingNoise.of(most, seed)


@op("setup.temperature")
def set_temperature(model: ModelParts, temperature: float) -> None:
    """Divide logits by `temperature` for the losses of training."""
    for part in model.parts:
        part.temperature = temperature


@op("setup.float8")
def multiply_in_fp8(plan: Plan, model: ModelParts, rank: Rank, recipe: str, matrices: dict[str, list[int]]) -> None:
    """Multiply matrices of blocks in fp8. matrices: name inside a block → its layers.

    Raises PlanMismatch if one of them is not of a `Linear`, and EnvironmentFault X443 on a CUDA device without fp8
    products.
    """
    chosen = RECIPES[recipe]()
    check_device(rank.device, chosen)
    for module, cut in _linears(plan, model, matrices, "multiplied in fp8"):
        if chosen.scales == "block":
            from xtrain.runtime.nn.block_scales import BlockScaledMatrix  # most runs do without

            module.scaled = BlockScaledMatrix(chosen)
        else:
            module.scaled = Fp8Matrix(chosen, SharedScales(model.axes, cut, own_tokens=module.partial))


@op("setup.qat")
def round_matrices(
    plan: Plan, model: ModelParts, weights: str, group: int | str, activations: str, matrices: dict[str, list[int]]
) -> None:
    """Round matrices of blocks for each product, and their inputs with `activations`. matrices: name inside a block →
    its layers.

    Raises PlanMismatch if one of them is not of a `Linear`.
    """
    from xtrain.runtime.nn.rounding import FloatMatrix, RoundedMatrix  # most runs round nothing

    qat = Qat(weights=weights, group=group, activations=activations)  # pyright: ignore[reportArgumentType]
    for module, cut in _linears(plan, model, matrices, "rounded"):
        shared = SharedScales(model.axes, cut, own_tokens=module.partial)
        module.scaled = FloatMatrix(qat, shared) if qat.floats else RoundedMatrix(qat, shared)


def _linears(
    plan: Plan, model: ModelParts, matrices: dict[str, list[int]], what: str
) -> Iterator[tuple[Linear, str | None]]:
    """Yield the modules of matrices, and how tensor parallelism cuts each. Raises PlanMismatch for other modules."""
    wanted = {f"layers.{layer}.{name}" for name, layers in matrices.items() for layer in layers}
    rules = tensor_rules(plan.architecture) if model.axes.tensor is not None else ()
    for part in model.parts:
        for path, module in part.named_modules():
            if path not in wanted:
                continue
            if not isinstance(module, Linear):
                raise PlanMismatch(f"`{path}` is {what} by the plan, but a {type(module).__name__} is not")
            yield module, next((style for pattern, style in rules if fits(path, pattern)), None)


def check_device(device: torch.device, recipe: Recipe) -> None:
    """Raise EnvironmentFault X443 for a CUDA device without the products of a recipe."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= recipe.capability:
        return
    name, own = torch.cuda.get_device_name(device), ".".join(map(str, torch.cuda.get_device_capability(device)))
    message = f"precision.compute is fp8, but {name} has no {recipe.kind} products: its compute capability is {own}, "
    raise EnvironmentFault("X443", f"{message}below {recipe.needs}; use compute bf16")


@op("setup.activation")
def recompute_blocks(
    model: ModelParts,
    rank: Rank,
    mode: str,
    every: int,
    pattern: str,
    matches: list[int],
    save: list[str] | None = None,
) -> None:
    """Recompute blocks in the backward: the last of every `every` adjacent blocks of the whole model.

    mode: `full` keeps a block's inputs, `selective` also the results of the operators named in `save`. matches: number
    of recomputed blocks. Raises PlanMismatch for another number of them, and for an unknown mode or word of `save`.
    """
    words = (save or []) if mode == "selective" else []
    unknown = [word for word in words if word not in SAVED]
    if mode not in ("full", "selective") or unknown:
        raise PlanMismatch(f"activation mode `{mode}` with save {unknown or words} is unknown")
    operators = frozenset(chain.from_iterable(SAVED[word] for word in words))
    for _, block in matching(_Every(model, every), pattern, matches, rank):
        assert isinstance(block, LayerBlock)
        block.recompute = RecomputeFunction(save=operators, routes=block.routes)


@frozen
class _Every:
    """The last of every `number` adjacent blocks, counted in the whole model."""

    model: ModelParts
    number: int

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            if isinstance(module, LayerBlock) and (int(name.rsplit(".", 1)[1]) + 1) % self.number == 0:
                yield name, module


@op("setup.routing_replay")
def replay_routing(model: ModelParts, rank: Rank, matches: list[int]) -> None:
    """Let recomputed blocks reuse the experts of the forward. `matches`: number of such blocks.

    A second choice can differ, and ranks that disagree about who sends to whom hang.
    """
    routing_blocks = [block for block in model.modules() if isinstance(block, LayerBlock) and block.routes]
    recomputes = [block.recompute for block in routing_blocks if isinstance(block.recompute, RecomputeFunction)]
    expected = matches[rank.coordinates["pp"]]
    if len(recomputes) != expected:
        raise PlanMismatch(f"{len(recomputes)} blocks with experts are recomputed, but the plan has {expected}")
    for recompute in recomputes:
        recompute.keep_choices = True


@op("setup.tile_mlp")
def tile_layers(model: ModelParts, rank: Rank, positions: int, pattern: str, matches: list[int]) -> None:
    """Let layers of blocks compute `positions` positions at a time. matches: number of blocks with such layers."""
    for _, block in matching(_Tiled(model), pattern, matches, rank):
        for module in block.children():
            if isinstance(module, TiledModule) and module.tiles:
                module.positions = positions


@frozen
class _Tiled:
    """Blocks with layers that can compute some positions at a time."""

    model: ModelParts

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            layers = module.children() if isinstance(module, DecoderBlock) else ()
            if any(isinstance(layer, TiledModule) and layer.tiles for layer in layers):
                yield name, module


# Compiled variants of a block: kinds of layers, rows of one document or several, frozen weights below, evaluations,
# smaller last batches. Families with windows exceed torch's own limit of 8.
VARIANTS: Final = 64


@op("setup.compile", traced=False)
def compile_blocks(
    model: ModelParts,
    rank: Rank,
    mode: str,
    pattern: str,
    matches: list[int],
    cuda: Sequence[str] = (),
    lengths: int = 1,
) -> None:
    """Compile every block in place, so that no name changes; shapes are fixed, as those of packed rows are, of which
    there may be several `lengths`.

    In a block with experts no shape is fixed: its other parts are compiled one by one. The same applies to a block with
    layers that compute some positions at a time; of these layers the computation of a piece is compiled.

    cuda: parts of the model that are compiled on CUDA alone: `loss`, of a piece of logits; `experts`, their activation
    and their sum, for any number of rows.

    Code of a block that cannot be compiled raises torch's error instead of running uncompiled, except in blocks that
    leave compiled code on purpose.
    """
    dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS * lengths)
    if rank.device.type != "cuda":
        cuda = ()
    if "loss" in cuda:
        for part in model.parts:
            part.head = evolve(part.head, compiled=True)
    for module in model.modules() if "experts" in cuda else ():
        if isinstance(module, MoE):
            module.experts.gated = torch.compile(module.experts.gated, dynamic=True, mode=mode)
            module.combine = torch.compile(module.combine, dynamic=True, mode=mode)
    for _, block in matching(model, pattern, matches, rank):
        assert isinstance(block, DecoderBlock)
        whole = not block.routes and not block.tiled
        for module in block.modules():
            if isinstance(module, Linear) and module.quantised is not None:
                module.quantised.prepare(rank.device)
                module.quantised = evolve(module.quantised, again=not whole or block.recompute is None)
        how: dict[str, Any] = {"dynamic": False, "mode": mode, "fullgraph": _stays_compiled(block)}
        if whole:
            if isinstance(block.recompute, RecomputeFunction):
                block.recompute.compiled = True
            block.compile(**how)
            continue
        for part in block.children():
            for module in (part.shared_experts, part.shared_expert) if isinstance(part, MoE) else (part,):
                if isinstance(module, TiledModule) and module.positions is not None:
                    module.of_piece = torch.compile(module.of_piece, **how)
                elif module is not None:
                    module.compile(**how)


def _stays_compiled(block: DecoderBlock) -> bool:
    """Return True unless the block has attention that runs uncompiled, or a user's function, which may use what torch
    cannot compile."""
    attention = (module for module in block.modules() if isinstance(module, AttentionModule))
    return all(layer.compiles for layer in attention) and not any(isinstance(m, OwnModule) for m in block.modules())
