"""Op trace of a block on one rank, recorded by its pieces (`xtrain.blocks`) as `runtime/nn` runs them."""

from attrs import evolve

from xtrain.blocks.block import AxisRanks, BlockPiece, block_of
from xtrain.blocks.frozen import without_frozen
from xtrain.blocks.op_trace import (
    CP,
    INDEX,
    TP,
    FsdpUnit,
    OpTrace,
    TracedTensor,
)
from xtrain.blocks.tracer import BlockAxes, Local, Tracer
from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.plan.architecture import block_parameters, expert_widths, name_in_block
from xtrain.plan.hardware import has_flash
from xtrain.plan.kernels import attention_kernels, pointwise_kernels, resolve_save
from xtrain.plan.mesh import device_kind
from xtrain.plan.parameters import block_tensors
from xtrain.plan.resolved import Resolved, TrainedKind
from xtrain.text.units import BYTES

GROUPED = (9, 10)  # CUDA capabilities for which torch has grouped-product kernels


def local_of(resolved: Resolved) -> Local:
    """Return the sizes on the rank that has the most."""
    arch, batch, spec = resolved.architecture, resolved.batch, resolved.spec
    tp, ulysses = resolved.size("tp"), resolved.size("ulysses")
    tokens = resolved.positions
    kv_heads = arch.kv_heads // tp
    device = "cpu" if device_kind(spec) == "cpu" else "cuda"
    compute = resolved.formats.compute
    exact, ways = max(BYTES[compute], BYTES["fp32"]), AxisRanks(tp, resolved.size("ring"), ulysses)
    sheet = spec.cluster.data_sheet()
    return Local(
        rows=batch.micro,
        tokens=tokens,
        between=tokens // tp if spec.parallel.tp.sequence else tokens,
        routed=tokens // tp,
        sequence=batch.sequence,
        dim=arch.dim,
        heads=arch.heads // tp,
        kv_heads=kv_heads,
        spread_kv=kv_heads if kv_heads % ulysses == 0 else ulysses,
        head_dim=arch.head_dim,
        ffn=arch.ffn // tp,
        vocab=-(-arch.vocab // tp),
        width=BYTES[compute],
        exact=exact,
        attention=attention_kernels(resolved)[device],
        fused=pointwise_kernels(resolved)[device] == "fused",
        flash=has_flash(device, compute, arch.head_dim),
        grouped=compute == "bf16"
        and sheet is not None
        and sheet.capability in GROUPED
        and not any(each % 8 for each in expert_widths(arch))
        and not isinstance(arch.adapter, TaskAdapters),  # experts are then computed one after the other
        shared=max(
            block_of(kind).shared(arch, batch.micro, batch.sequence, (BYTES[compute], exact), ways)
            for kind in arch.kinds
        ),
        token_keys=INDEX * tokens if arch.adapter is not None and arch.adapter.drops else 0,
    )


def axes_of(resolved: Resolved) -> BlockAxes:
    # A teacher is frozen, so its routers take no losses of rows.
    row = resolved.wide("ring", "ulysses", "tp") if resolved.inventory.trained else ()
    return BlockAxes(
        tensor="tp" if resolved.size("tp") > 1 else "",
        sequence=resolved.spec.parallel.tp.sequence,
        ring=resolved.size("ring"),
        ulysses=resolved.size("ulysses"),
        row=" · ".join(row),
        row_node=CP if resolved.context > 1 else TP,
        experts=resolved.layout.ep,
    )


def block_trace(resolved: Resolved, local: Local, kind: TrainedKind, experts: FsdpUnit | None) -> OpTrace:
    """Return the op trace of a kind of layers. experts: the FSDP unit of its experts, if they form one."""
    shapes = {
        name_in_block(parameter.name): resolved.cuts.gathered_shape(parameter)
        for parameter in block_parameters(resolved.architecture, kind.first)
    }
    trace = OpTrace(TracedTensor(local.stream, local.stream))
    quantised = frozenset(
        name_in_block(each.name) for each in block_tensors(resolved.inventory, kind.first) if each.quantised
    )
    tracer = Tracer(
        trace,
        resolved,
        local,
        axes_of(resolved),
        experts,
        shapes,
        quantised=quantised,
        scaled=kind.scaled,
        frozen=kind.frozen,
    )
    block_of(kind).trace(tracer, trace.input)
    if resolved.async_tp:
        _multiply_meanwhile(trace)
    trained = _trained_values(resolved) if trace.taken else frozenset[str]()
    if kind.frozen or not kind.below or trace.taken.keys() - trained:
        trace = without_frozen(trace, shapes, kind.frozen, below=kind.below, taken=trained)
    if resolved.spec.compile.mode != "none":
        from xtrain.blocks.compiled import compile_trace  # most specs do without

        compile_trace(trace, compiled_graphs(trace, block_of(kind), resolved), frozenset(resolve_save(resolved)))
    return trace


def _trained_values(resolved: Resolved) -> frozenset[str]:
    """Return the names of values for later blocks that have a gradient."""
    found = set[str]()
    for kind in resolved.kinds:
        names = {name_in_block(each.name) for each in block_parameters(resolved.architecture, kind.first)}
        for layer in block_of(kind).layers():
            own = any(name.startswith(f"{layer.name}.") for name in names - kind.frozen)
            found |= {layer.gives} if layer.gives and (kind.below or own) else set()
    return frozenset(found)


def compiled_graphs(trace: OpTrace, block: BlockPiece, resolved: Resolved) -> list[range]:
    """Return the operations that torch.compile compiles together, as `setup.compile` does: a block; the layers of one
    with experts or with layers computed in pieces, which are not compiled as a whole; and what is before and after
    operations that it leaves out. It compiles nothing of a checkpoint with such operations."""
    parts = [layer.name for layer in block.layers() if layer.has_experts or (layer.tiles and resolved.tile is not None)]
    graphs = [range(len(trace.ops))]
    if parts:
        graphs = [graph for name, graph in trace.layers.items() if name not in parts]
    elif resolved.spec.activation.mode != "none" and any(op.apart for op in trace.ops):
        return []
    found: list[range] = []
    for graph in graphs:
        ends = [*(place for place in graph if trace.ops[place].apart), graph.stop]
        starts = [graph.start, *(end + 1 for end in ends[:-1])]
        found += [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    return found


def _multiply_meanwhile(trace: OpTrace) -> None:
    """Let a tp gather overlap the product that uses it, and a tp sum the product that makes it. If several products use
    one gather, only the first counts."""
    for place, op in enumerate(trace.ops):
        calls = [call for call in (*op.calls, *op.back_calls) if call.node == TP]
        gathers = any(call.op == "all_gather" for call in op.calls)
        if {call.op for call in calls} != {"all_gather", "reduce_scatter"}:
            continue
        ops = trace.ops[place + 1 :] if gathers else reversed(trace.ops[:place])
        flops = next((each.flops for each in ops if each.flops and each.parameters), 0)
        op.calls = tuple(evolve(call, meanwhile=flops) for call in op.calls)
        op.back_calls = tuple(evolve(call, meanwhile=flops) for call in op.back_calls)
