"""Op trace of a block on one rank, recorded by its pieces (`xtrain.blocks`) as `runtime/nn` runs them."""

from attrs import evolve

from xtrain.blocks.block import block_of
from xtrain.blocks.memory_simulator import without_frozen
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
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.plan.architecture import block_parameters, expert_widths, name_in_block
from xtrain.plan.estimates import Hardware
from xtrain.plan.mesh import device_kind
from xtrain.plan.parameters import block_tensors
from xtrain.plan.resolved import Resolved, TrainedKind, attention_kernels, pointwise_kernels
from xtrain.text.units import BYTES

HOPPER = 9  # the CUDA capability for which torch has grouped-product kernels
WIDEST_FLASH = 256  # the largest head width of flash attention


def local_of(run: Resolved, cluster: Hardware) -> Local:
    """Return the sizes on the rank that has the most."""
    arch, batch, spec = run.architecture, run.batch, run.spec
    tp, ulysses = run.size("tp"), run.size("ulysses")
    tokens = run.positions
    kv_heads = arch.kv_heads // tp
    device = "cpu" if device_kind(spec) == "cpu" else "cuda"
    compute = run.formats.compute
    exact = max(BYTES[compute], BYTES["fp32"])
    flash = device == "cpu" or (compute == "bf16" and arch.head_dim % 8 == 0 and arch.head_dim <= WIDEST_FLASH)
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
        attention=attention_kernels(run)[device],
        fused=pointwise_kernels(run)[device] == "fused",
        flash=flash,
        grouped=compute == "bf16"
        and _capability(cluster) == HOPPER
        and not any(each % 8 for each in expert_widths(arch))
        and not isinstance(arch.adapter, TaskAdapters),  # experts are then computed one after the other
        token_keys=INDEX * tokens if arch.adapter is not None and arch.adapter.drops else 0,
    )


def _capability(cluster: Hardware) -> int:
    """Return the major version of the CUDA capability; 0 if unknown."""
    sheet = CLUSTERS[cluster.preset].sheet
    return 0 if sheet is None else sheet.capability


def axes_of(run: Resolved) -> BlockAxes:
    # A teacher is frozen, so its routers take no losses of rows.
    row = run.wide("ring", "ulysses", "tp") if run.inventory.trained else ()
    return BlockAxes(
        tensor="tp" if run.size("tp") > 1 else "",
        sequence=run.spec.parallel.tp.sequence,
        ring=run.size("ring"),
        ulysses=run.size("ulysses"),
        row=" · ".join(row),
        row_node=CP if run.context > 1 else TP,
        experts=run.layout.ep,
    )


def block_trace(run: Resolved, local: Local, kind: TrainedKind, experts: FsdpUnit | None) -> OpTrace:
    """Return the op trace of a kind of layers. experts: the FSDP unit of its experts, if they form one."""
    shapes = {
        name_in_block(parameter.name): run.cuts.gathered_shape(parameter)
        for parameter in block_parameters(run.architecture, kind.first)
    }
    trace = OpTrace(TracedTensor(local.stream, local.stream))
    quantised = frozenset(
        name_in_block(each.name) for each in block_tensors(run.inventory, kind.first) if each.quantised
    )
    tracer = Tracer(
        trace, run, local, axes_of(run), experts, shapes, quantised=quantised, fp8=kind.fp8, frozen=kind.frozen
    )
    block_of(kind).trace(tracer, trace.input)
    if run.async_tp:
        _multiply_meanwhile(trace)
    if kind.below and not kind.frozen:
        return trace
    return without_frozen(trace, shapes, kind.frozen, below=kind.below)


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
