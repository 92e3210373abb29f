"""Rules between the shape of the model, the length of a row and the mesh. Every one is checked, none stops the next."""

from ..dsl.schema.model import MOE
from ..dsl.schema.setting import Auto
from ..dsl.spec import Spec
from .architecture import Architecture
from .arithmetic import Arithmetic
from .findings import Findings
from .layout import Layout
from .mesh import largest_divisor, nearest_multiples


def check_topology(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Report every way in which the model does not fit the mesh; axes of size 1 ask for nothing."""
    _check_tensor(architecture, layout, found)
    _check_pipeline(spec, architecture, layout, batch, found)
    if "cp" not in layout.doubtful:
        _check_sequence(spec, layout, batch, found)
    _check_experts(spec, architecture, found)


def _check_tensor(architecture: Architecture, layout: Layout, found: Findings) -> None:
    tp, ulysses = layout.size("tp"), layout.size("ulysses")
    for code, name, count in (("X402", "heads", architecture.heads), ("X403", "kv_heads", architecture.kv_heads)):
        if tp == 1:
            continue
        if count % tp:
            hint = f"use tp {largest_divisor(count, tp)}, or {name} {nearest_multiples(count, tp)}"
            found.fail(
                f"mesh.tp.{name}", code, "parallel.tp.size", f"{name} {count} cannot be split over tp {tp}", hint
            )
        else:
            found.passed(f"mesh.tp.{name}", f"{name} {count} / tp {tp} = {count // tp}")
    # Fewer key/value heads than ulysses ranks are repeated; query heads have to be split.
    own = architecture.heads // tp
    if ulysses > 1 and architecture.heads % tp == 0:
        if own % ulysses:
            hint = f"use ulysses {largest_divisor(own, ulysses)}"
            message = f"the {own} query heads of a tp rank cannot be split over ulysses {ulysses}"
            found.fail("mesh.ulysses.heads", "X402", "parallel.cp.ulysses", message, hint)
        else:
            found.passed("mesh.ulysses.heads", f"{own} query heads / ulysses {ulysses} = {own // ulysses}")


def _check_pipeline(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    pp = spec.parallel.pp
    if pp.size == 1:
        return
    stages = pp.size * pp.stages_per_rank
    if pp.stages_per_rank > 1 and pp.schedule in ("gpipe", "1f1b"):
        message = f"schedule {pp.schedule} runs one stage on a rank, not {pp.stages_per_rank}"
        hint = "use schedule interleaved_1f1b, or stages_per_rank 1"
        found.fail("mesh.pp.schedule", "X404", "parallel.pp.stages_per_rank", message, hint)
    if architecture.layers < stages:
        message = (
            f"{architecture.layers} layers cannot fill pp {pp.size} · stages_per_rank {pp.stages_per_rank} = {stages}"
        )
        hint = f"use pp {max(architecture.layers // pp.stages_per_rank, 1)}, or layers {stages}"
        found.fail("mesh.pp.layers", "X404", "parallel.pp.size", f"{message} stages", hint)
    else:
        found.passed("mesh.pp.layers", f"{architecture.layers} layers on {stages} stages")
    if layout.doubtful and isinstance(spec.batch.accumulate, Auto):
        return
    if batch.accumulate < pp.size:
        message = f"{batch.accumulate} microbatches of a step cannot fill a pipeline of {pp.size} ranks"
        found.fail("mesh.pp.microbatches", "X411", "batch.accumulate", message, f"use accumulate {pp.size} or more")
    else:
        found.passed("mesh.pp.microbatches", f"{batch.accumulate} microbatches for {pp.size} pipeline ranks")


def _check_sequence(spec: Spec, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Each ring rank takes two chunks of a row, one early and one late, so that causal work is even (zigzag)."""
    ring, ulysses = layout.size("ring"), layout.size("ulysses")
    tp = layout.size("tp") if spec.parallel.tp.sequence else 1
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


def _check_experts(spec: Spec, architecture: Architecture, found: Findings) -> None:
    ep = spec.parallel.ep.size
    if ep == 1:
        return
    if not architecture.is_moe:
        message = f"ep {ep}, but a {architecture.family} model has no experts"
        found.fail(
            "mesh.ep.family", "X409", "parallel.ep.size", message, f"leave ep out, or use a family of {', '.join(MOE)}"
        )
    elif architecture.experts % ep:
        experts = architecture.experts
        hint = f"use ep {largest_divisor(experts, ep)}, or experts {nearest_multiples(experts, ep)}"
        message = f"{experts} experts cannot be split over ep {ep}"
        found.fail("mesh.ep.experts", "X406", "parallel.ep.size", message, hint)
    else:
        found.passed("mesh.ep.experts", f"{architecture.experts} experts / ep {ep} = {architecture.experts // ep}")
