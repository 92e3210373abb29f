"""Rules between the shape of the model, the length of a row and the mesh. Every one is checked, none stops the next."""

from math import gcd, lcm, prod

from xtrain.dsl.schema.collators import row_link
from xtrain.dsl.schema.model import expert_families
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.context import heads_allow
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.mesh.mesh import largest_divisor, nearest_multiples
from xtrain.planner.mesh.sharding import DIMENSION, found_again, piece, shard_axes
from xtrain.planner.resolved import resolve_align
from xtrain.planner.schedule.arithmetic import Arithmetic

# Padding is cut into segments of at most this many positions: attention over it stays cheap, and no position in it is
# larger than a model may know.
LONGEST_PADDING = 1024


def check_topology(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Report every way in which the model does not fit the mesh; axes of size 1 ask for nothing."""
    _check_heads(architecture, layout, found)
    _check_widths(spec, architecture, layout, found)
    if "cp" not in layout.unsettled:
        _check_ulysses(spec, architecture, layout, found)
        _check_sequence(spec, architecture, layout, batch, found)
        _check_align(spec, layout, batch, found)
    _check_dealing(spec, layout, batch, found)
    if "ep" not in spec.parallel.execution.unsupported:
        _check_experts(spec, architecture, layout, found)


def _check_heads(architecture: Architecture, layout: Layout, found: Findings) -> None:
    tp = layout.size("tp")
    for code, name, count in (("X402", "heads", architecture.heads), ("X403", "kv_heads", architecture.kv_heads)):
        if tp == 1:
            return
        if count % tp:
            hint = f"use tp {_smaller_tp(architecture, tp)}, or {name} {nearest_multiples(count, tp)}"
            found.fail(
                f"mesh.tp.{name}", code, "parallel.tp.size", f"{name} {count} cannot be split over tp {tp}", hint
            )
            return  # where query heads cannot be split, key/value heads cannot either, which divide them
        found.passed(f"mesh.tp.{name}", f"{name} {count} / tp {tp} = {count // tp}")


def _smaller_tp(architecture: Architecture, tp: int) -> int:
    """The largest size up to `tp` over which everything can be split that tensor parallelism splits evenly."""
    widths = [architecture.heads, architecture.kv_heads, *([] if architecture.is_moe else [architecture.ffn])]
    return largest_divisor(gcd(*widths), tp)


def _check_widths(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Feed-forward layers are cut evenly; rows of the vocabulary need not be, but no rank may be left without any."""
    tp, ffn, vocab = layout.size("tp"), architecture.ffn, architecture.vocab
    if tp == 1:
        return
    layers = (layer for kind in architecture.kinds for layer in kind.block.layers())
    if not architecture.is_moe and any("ffn" in layer.reads for layer in layers):
        if ffn % tp:
            hint = f"use ffn {nearest_multiples(ffn, tp)}, or tp {_smaller_tp(architecture, tp)}"
            found.fail("mesh.tp.ffn", "X420", "model.ffn", f"ffn {ffn} cannot be split over tp {tp}", hint)
        else:
            found.passed("mesh.tp.ffn", f"ffn {ffn} / tp {tp} = {ffn // tp}")
    _check_weights(architecture, tp, found)
    last = piece(vocab, tp, tp - 1)
    if last == 0:
        each = piece(vocab, tp, 0)
        message = f"vocab {vocab} in pieces of {each} leaves nothing for the last of tp {tp} ranks"
        hint = f"use vocab {each * tp}, or a smaller tp"
        found.fail("mesh.tp.vocab", "X420", "model.vocab", message, hint)
        return
    shards = prod(layout.size(axis) for axis in shard_axes(spec.parallel, layout.mesh))
    if vocab % tp and not layout.unsettled and not found_again(vocab, tp, shards):
        message = (
            f"vocab {vocab} is uneven over tp {tp}, and torch cannot find such pieces again on {shards} fsdp shards"
        )
        found.fail("mesh.tp.vocab", "X420", "model.vocab", message, f"use vocab {-(-vocab // tp) * tp}")
    else:
        found.passed("mesh.tp.vocab", f"vocab {vocab} / tp {tp}: {piece(vocab, tp, 0)} rows a rank, the last {last}")


def _check_weights(architecture: Architecture, tp: int, found: Findings) -> None:
    """What a block has of other widths than heads and ffn is cut evenly too."""
    if found.failed:
        return
    for weight in (each for kind in architecture.kinds for each in kind.block.parameters(architecture)):
        extent = weight.shape[min(DIMENSION[weight.cut], len(weight.shape) - 1)] if weight.cut else 0
        if extent % tp:
            shape = " × ".join(map(str, weight.shape))
            side = "inputs" if weight.cut == "row" else "outputs"
            message = f"the {extent} {side} of {weight.name} ({shape}) cannot be split over tp {tp}"
            hint = f"use tp {largest_divisor(extent, tp)}, or a width that is a multiple of {tp}"
            found.fail("mesh.tp.weights", "X420", "parallel.tp.size", message, hint)
            return


def _check_ulysses(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Query heads are dealt out; key/value heads too, or copied where there are fewer of them than ranks."""
    tp, ulysses = layout.size("tp"), layout.size("ulysses")
    if ulysses == 1 or architecture.heads % tp or architecture.kv_heads % tp:
        return
    own, own_kv = architecture.heads // tp, architecture.kv_heads // tp
    hint = _ulysses_hint(spec, own, own_kv, ulysses)
    if own % ulysses:
        message = f"the {own} query heads of a tp rank cannot be split over ulysses {ulysses}"
        found.fail("mesh.ulysses.heads", "X402", "parallel.cp.ulysses", message, hint)
        return
    found.passed("mesh.ulysses.heads", f"{own} query heads / ulysses {ulysses} = {own // ulysses}")
    divides = own_kv % ulysses if ulysses <= own_kv else ulysses % own_kv
    if divides:
        verb = "split over" if ulysses <= own_kv else "copied evenly to"
        message = f"the {own_kv} key/value heads of a tp rank cannot be {verb} ulysses {ulysses}"
        found.fail("mesh.ulysses.kv_heads", "X403", "parallel.cp.ulysses", message, hint)
    else:
        found.passed("mesh.ulysses.kv_heads", f"{own_kv} key/value heads on ulysses {ulysses}")


def _ulysses_hint(spec: Spec, heads: int, kv_heads: int, ulysses: int) -> str:
    cp = spec.parallel.cp
    best = next(u for u in range(ulysses, 0, -1) if cp.size % u == 0 and heads_allow(u, heads, kv_heads))
    if isinstance(cp.ring, Auto):
        return f"use ulysses {best}"
    return f"use ulysses {best} with ring {cp.size // best}, or leave both auto"


def _check_sequence(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Each ring rank takes two chunks of a row, one early and one late, so that causal work is even (zigzag).

    The experts of a tensor-parallel model always work on a piece of the sequence.
    """
    ring, ulysses = layout.size("ring"), layout.size("ulysses")
    tp = layout.size("tp") if spec.parallel.tp.sequence or architecture.is_moe else 1
    chunks = 2 * ring if ring > 1 else 1
    divisor = chunks * ulysses * tp
    if divisor == 1:
        return
    parts = {f"2 · ring {ring}": chunks, f"ulysses {ulysses}": ulysses, f"tp {tp}": tp}
    shown = " · ".join(text for text, size in parts.items() if size > 1)
    if batch.sequence % divisor:
        hint = f"use sequence {nearest_multiples(batch.sequence, divisor)}"
        message = f"sequence {batch.sequence} is not a multiple of {shown} = {divisor}"
        found.fail("batch.sequence", "X405", "batch.sequence", message, hint)
    else:
        found.passed("batch.sequence", f"sequence {batch.sequence} is a multiple of {shown} = {divisor}")


def _check_align(spec: Spec, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """A ring cuts every document of a row, and the padding behind the last one, into 2 · ring equal chunks."""
    given, ring = row_link(spec.collate).align, layout.size("ring")
    if isinstance(given, Auto) and ring == 1:
        return
    align, sequence = resolve_align(spec, ring), batch.sequence
    chunks = 2 * ring if ring > 1 else 1
    good = [d for d in range(chunks, min(LONGEST_PADDING, sequence) + 1, chunks) if sequence % d == 0]
    if isinstance(given, Auto) and not good:
        return  # the length of the row is at fault, and that has been said
    nearest = min(good, key=lambda d: (abs(d - align), d), default=chunks)
    hint = f"use align {nearest}" if good else f"use align {chunks}, and sequence {nearest_multiples(sequence, chunks)}"
    rule = "data.align"
    if align % chunks:
        message = f"align {align} is not a multiple of 2 · ring {ring} = {chunks}"
        found.fail(rule, "X414", "collate", message, hint)
    elif sequence % align:
        message = f"align {align} does not divide sequence {sequence}"
        others = nearest_multiples(sequence, lcm(align, chunks))
        found.fail(rule, "X414", "collate", message, f"{hint}, or sequence {others}" if good else hint)
    elif align > LONGEST_PADDING:
        message = f"align {align} is longer than a segment of padding, {LONGEST_PADDING} positions"
        found.fail(rule, "X414", "collate", message, hint)
    else:
        found.passed(rule, f"documents are padded to multiples of {align}, {sequence // align} of them a row")


def _check_dealing(spec: Spec, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Rows can be dealt by what they cost if there are several ranks, and more of a step's rows than ranks."""
    ranks = layout.mesh.data_ranks
    packing = row_link(spec.collate).packing
    if not packing.balances:
        return
    if ranks > 1 and batch.rows > ranks:
        found.passed(
            "data.dealing", f"{batch.rows} rows a step are dealt to {ranks} data ranks by what attention costs"
        )
        return
    why = "one data rank takes all rows" if ranks == 1 else f"each of {ranks} data ranks takes one row a step"
    hint = f"write `pack({packing.rows()})`, which packs the same rows"
    hint += "" if ranks == 1 else ", or take more rows a step"
    found.warn("data.dealing", "W502", "collate", f"pack({packing.kind}) has nothing to balance: {why}", hint)


def _check_experts(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    ep = spec.parallel.ep.size
    if ep == 1:
        return
    if not architecture.is_moe:
        message = f"ep {ep}, but a {architecture.family} model has no experts"
        hint = f"use ep 1, or a family of {', '.join(expert_families())}"
        found.fail("mesh.ep.family", "X409", "parallel.ep.size", message, hint)
    elif architecture.experts % ep:
        experts = architecture.experts
        fitting = gcd(experts, layout.expert_group) if not layout.unsettled else experts
        hint = f"use ep {largest_divisor(fitting, ep)}, or experts {nearest_multiples(experts, ep)}"
        message = f"{experts} experts cannot be split over ep {ep}"
        found.fail("mesh.ep.experts", "X406", "parallel.ep.size", message, hint)
    else:
        found.passed("mesh.ep.experts", f"{architecture.experts} experts / ep {ep} = {architecture.experts // ep}")
