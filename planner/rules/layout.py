"""Rules on the layout: model shape, row length and mesh, multi-token prediction, live teachers.

Every rule is checked; none stops the next.
"""

from collections.abc import Iterator
from math import gcd, lcm, prod
from typing import Final

from attrs import evolve

from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.data_components import row_link
from xtrain.dsl.schema.model import expert_families
from xtrain.dsl.schema.parallel import Ep
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, parameters
from xtrain.plan.arithmetic import LONGEST_PADDING, Arithmetic
from xtrain.plan.findings import Findings, checks
from xtrain.plan.mesh import (
    AXES,
    DIMENSION,
    Layout,
    build_mesh,
    cuts_of,
    found_again,
    largest_divisor,
    nearest_multiples,
    piece,
    shard_axes,
)
from xtrain.plan.parameters import count_parameters
from xtrain.plan.pipeline import ZERO_BUBBLE
from xtrain.plan.resolved import Formats, Resolved, resolve_align
from xtrain.planner.derive.further_models import TEACHER_PATH as PATH
from xtrain.planner.derive.further_models import TEACHER_RULE as RULE
from xtrain.planner.derive.further_models import TeacherShape
from xtrain.planner.derive.layout import heads_allow
from xtrain.planner.derive.model import loads_weights
from xtrain.planner.derive.pipeline import assign_stages


def check_topology(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Report every way in which the model does not fit the mesh; axes of size 1 need nothing."""
    _check_heads(architecture, layout, found)
    _check_spread_heads(architecture, layout, found)
    _check_widths(spec, architecture, layout, found)
    if "cp" not in layout.unsettled:
        _check_ulysses(spec, architecture, layout, found)
        _check_sequence(spec, architecture, layout, batch, found)
        _check_align(spec, layout, batch, found)
        _check_pad_to(spec, architecture, layout, batch, found)
    _check_dealing(spec, layout, batch, found)
    if "ep" not in spec.parallel.execution.unsupported:
        _check_experts(spec, architecture, layout, found)


@checks("mesh.tp.heads", reads="parallel.tp.size model.heads")
@checks("mesh.tp.kv_heads", reads="parallel.tp.size {kv_heads}")
def _check_heads(architecture: Architecture, layout: Layout, found: Findings) -> None:
    tp = layout.size("tp")
    of_keys = [("X403", "kv_heads", count) for count in architecture.key_heads]
    for code, name, count in (("X402", "heads", architecture.heads), *of_keys):
        if tp == 1:
            return
        if count % tp:
            hint = f"use tp {_smaller_tp(architecture, tp)}, or {name} {nearest_multiples(count, tp)}"
            found.fail(
                f"mesh.tp.{name}", code, "parallel.tp.size", f"{name} {count} cannot be split over tp {tp}", hint
            )
            return  # if query heads cannot be split, neither can key/value heads, which divide them
        found.passed(f"mesh.tp.{name}", f"{name} {count} / tp {tp} = {count // tp}")


@checks("mesh.spread_heads", reads="parallel.tp.size {context} model.*")
def _check_spread_heads(architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Check that ranks of tensor parallelism and ulysses get equal numbers of heads of layers that have heads of their
    own; a ring that cannot share them passes states."""
    tp, ulysses = layout.size("tp"), 1 if "cp" in layout.unsettled else layout.size("ulysses")
    layers = (layer for kind in architecture.kinds for layer in kind.block.layers())
    counts = {layer.spread_heads(architecture) for layer in layers} - {None}
    if tp * ulysses == 1 or not counts:
        return
    (found_heads,) = counts
    assert found_heads is not None
    count, heads = found_heads
    if count % tp:
        message, hint = f"the {count} {heads} cannot be split over tp {tp}", f"use tp {gcd(count, tp)}"
        found.fail("mesh.spread_heads", "X402", "parallel.tp.size", message, hint)
    elif count % (tp * ulysses):
        message = f"the {count // tp} {heads} of a tp rank cannot be split over ulysses {ulysses}"
        best = gcd(count // tp, ulysses)
        hint = f"use ulysses {best} with ring {layout.size('ring') * ulysses // best}"
        found.fail("mesh.spread_heads", "X402", "parallel.cp.ulysses", message, hint)
    else:
        found.passed("mesh.spread_heads", f"{count} {heads} / {tp * ulysses} = {count // (tp * ulysses)}")


def _smaller_tp(architecture: Architecture, tp: int) -> int:
    """Return the largest size up to `tp` that divides everything that tensor parallelism must split evenly."""
    widths = [architecture.heads, *architecture.key_heads, *([] if architecture.is_moe else [architecture.ffn])]
    return largest_divisor(gcd(*widths), tp)


@checks("mesh.tp.ffn", reads="parallel.tp.size model.family {ffn}")
@checks("mesh.tp.vocab", reads="parallel.tp.size model.vocab tokenizer.source {world} parallel.cp.fold")
def _check_widths(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Check that feed-forward layers are cut evenly, and that every rank has rows of the vocabulary, which may be
    uneven."""
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
        message = f"vocab {vocab} in pieces of {each} leaves no rows for the last of tp {tp} ranks"
        hint = f"use vocab {each * tp}, or a smaller tp"
        found.fail("mesh.tp.vocab", "X420", "model.vocab", message, hint)
        return
    shards = prod(layout.size(axis) for axis in shard_axes(spec.parallel, layout.mesh))
    if vocab % tp and not layout.unsettled and not found_again(vocab, tp, shards):
        message = f"vocab {vocab} is not divisible by tp {tp}, which torch needs with {shards}-way fsdp"
        found.fail("mesh.tp.vocab", "X420", "model.vocab", message, f"use vocab {-(-vocab // tp) * tp}")
    else:
        found.passed("mesh.tp.vocab", f"vocab {vocab} / tp {tp}: {piece(vocab, tp, 0)} rows a rank, the last {last}")


@checks("mesh.tp.weights", reads="parallel.tp.size model.*")
def _check_weights(architecture: Architecture, tp: int, found: Findings) -> None:
    """Check that other widths of a block are cut evenly too."""
    if found.failed:
        return
    for weight in (each for kind in architecture.kinds for each in kind.block.parameters(architecture)):
        extent = weight.shape[min(DIMENSION[weight.cut], len(weight.shape) - 1)] if weight.cut else 0
        if extent % tp:
            shape = " × ".join(map(str, weight.shape))
            side = "inputs" if weight.cut == "row" else "outputs"
            message = f"the {extent} {side} of {weight.name} ({shape}) cannot be split over tp {tp}"
            hint = f"use tp {largest_divisor(extent, tp)}, or a width divisible by {tp}"
            found.fail("mesh.tp.weights", "X420", "parallel.tp.size", message, hint)
            return


@checks("mesh.ulysses.heads", reads="parallel.tp.size model.heads {context}")
@checks("mesh.ulysses.kv_heads", reads="parallel.tp.size {kv_heads} {context}")
def _check_ulysses(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """Check that query heads divide evenly; key/value heads too, or ranks divide them into equal numbers of copies."""
    tp, ulysses = layout.size("tp"), layout.size("ulysses")
    if ulysses == 1 or architecture.heads % tp or any(count % tp for count in architecture.key_heads):
        return
    own, of_keys = architecture.heads // tp, [count // tp for count in architecture.key_heads]
    hint = _ulysses_hint(spec, own, of_keys, ulysses)
    if own % ulysses:
        message = f"the {own} query heads of a tp rank cannot be split over ulysses {ulysses}"
        found.fail("mesh.ulysses.heads", "X402", "parallel.cp.ulysses", message, hint)
        return
    found.passed("mesh.ulysses.heads", f"{own} query heads / ulysses {ulysses} = {own // ulysses}")
    for own_kv in of_keys:
        if not heads_allow(ulysses, own, own_kv):
            verb = "split over" if ulysses <= own_kv else "copied evenly to"
            message = f"the {own_kv} key/value heads of a tp rank cannot be {verb} ulysses {ulysses}"
            found.fail("mesh.ulysses.kv_heads", "X403", "parallel.cp.ulysses", message, hint)
            return
        found.passed("mesh.ulysses.kv_heads", f"{own_kv} key/value heads on ulysses {ulysses}")


def _ulysses_hint(spec: Spec, heads: int, kv_heads: list[int], ulysses: int) -> str:
    cp = spec.parallel.cp

    def fits(size: int) -> bool:
        return cp.size % size == 0 and all(heads_allow(size, heads, count) for count in kv_heads)

    best = next(size for size in range(ulysses, 0, -1) if fits(size))
    if isinstance(cp.ring, Auto):
        return f"use ulysses {best}"
    return f"use ulysses {best} with ring {cp.size // best}, or leave both auto"


def _pieces_of_row(spec: Spec, architecture: Architecture, layout: Layout) -> tuple[int, str]:
    """Return the number of equal pieces that ranks cut a row into, and its factors as text."""
    ring, ulysses = layout.size("ring"), layout.size("ulysses")
    tp = layout.size("tp") if spec.parallel.tp.sequence or architecture.is_moe else 1
    chunks = 2 * ring if ring > 1 else 1
    parts = {f"2 · ring {ring}": chunks, f"ulysses {ulysses}": ulysses, f"tp {tp}": tp}
    return chunks * ulysses * tp, " · ".join(text for text, size in parts.items() if size > 1)


@checks("batch.sequence", reads="batch.sequence model.family parallel.tp.size parallel.tp.sequence {context}")
def _check_sequence(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Check that a row divides into two chunks per ring rank, one early and one late, which balances causal work
    (zigzag).

    The experts of a tensor-parallel model always work on a piece of the sequence.
    """
    divisor, shown = _pieces_of_row(spec, architecture, layout)
    if divisor == 1:
        return
    if batch.sequence % divisor:
        hint = f"use sequence {nearest_multiples(batch.sequence, divisor)}"
        message = f"sequence {batch.sequence} is not divisible by {shown} = {divisor}"
        found.fail("batch.sequence", "X405", "batch.sequence", message, hint)
    else:
        found.passed("batch.sequence", f"sequence {batch.sequence} is divisible by {shown} = {divisor}")


# Lengths of rows that are compiled, each once: a compilation takes seconds to minutes.
MOST_LENGTHS = 16


@checks(
    "batch.pad_to",
    reads="batch.pad_to batch.sequence collate compile.mode model.family parallel.tp.size parallel.tp.sequence "
    "{context}",
)
def _check_pad_to(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Check that shorter rows divide as whole rows do, and that there are not too many lengths to compile."""
    pad_to, path = spec.batch.pad_to, "batch.pad_to"
    if pad_to is None:
        return
    ring = layout.size("ring")
    divisor = lcm(_pieces_of_row(spec, architecture, layout)[0], resolve_align(spec, ring))
    lengths = -(-batch.sequence // pad_to)
    fewer = -(-batch.sequence // (MOST_LENGTHS * divisor)) * divisor
    if pad_to >= batch.sequence:
        message = f"pad_to {pad_to} shortens no row, because sequence is {batch.sequence}"
        found.warn(path, "W401", path, message, f"use less than {batch.sequence}, or remove it")
    elif pad_to % divisor:
        what = "the pieces that ranks take of a row, and what documents are padded to"
        message = f"pad_to {pad_to} is not divisible by {divisor}: {what}"
        found.fail(path, "X405", path, message, f"use pad_to {nearest_multiples(pad_to, divisor)}")
    elif lengths > MOST_LENGTHS and spec.compile.mode != "none":
        message = f"pad_to {pad_to} makes rows of {lengths} lengths, and every block is compiled for each of them"
        found.fail(path, "X405", path, message, f"use pad_to {fewer}, or leave the model uncompiled")
    else:
        found.passed(path, f"rows have one of {lengths} lengths")


@checks("data.align", reads="collate batch.sequence {context}")
def _check_align(spec: Spec, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Check that every document of a row, and the padding after the last one, divides into 2 · ring equal chunks."""
    given, ring = row_link(spec.collate).align, layout.size("ring")
    if isinstance(given, Auto) and ring == 1:
        return
    align, sequence = resolve_align(spec, ring), batch.sequence
    chunks = 2 * ring if ring > 1 else 1
    good = [d for d in range(chunks, min(LONGEST_PADDING, sequence) + 1, chunks) if sequence % d == 0]
    if isinstance(given, Auto) and not good:
        return  # the row length is at fault, which is reported elsewhere
    nearest = min(good, key=lambda d: (abs(d - align), d), default=chunks)
    hint = f"use align {nearest}" if good else f"use align {chunks}, and sequence {nearest_multiples(sequence, chunks)}"
    rule = "data.align"
    if align % chunks:
        message = f"align {align} is not divisible by 2 · ring {ring} = {chunks}"
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


@checks("data.dealing", reads="collate batch.micro {accumulate} {data_ranks}")
def _check_dealing(spec: Spec, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Check that there are several ranks and more rows in a step than ranks if rows are distributed by cost."""
    ranks = layout.mesh.data_ranks
    packing = row_link(spec.collate).packing
    if not packing.balances:
        return
    if ranks > 1 and batch.rows > ranks:
        found.passed(
            "data.dealing", f"{batch.rows} rows a step are distributed over {ranks} data ranks by attention cost"
        )
        return
    why = "one data rank takes all rows" if ranks == 1 else f"each of {ranks} data ranks takes one row a step"
    hint = f"write `pack({packing.rows()})`, which packs the same rows"
    hint += "" if ranks == 1 else ", or take more rows a step"
    found.warn("data.dealing", "W502", "collate", f"pack({packing.kind}) has nothing to balance: {why}", hint)


@checks("mesh.ep.family mesh.ep.experts", reads="parallel.ep.size model.family model.experts")
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


MTP_CODE: Final = "X445"
MTP_RULE: Final = "model.mtp"
MTP_PATH: Final = "model.mtp"

MtpProblem = tuple[str, str]


@checks(
    "model.mtp",
    reads="{model} loss.* parallel.pp.size parallel.pp.schedule checkpoint.pretrained checkpoint.from rollout "
    "rollout.* step step.* compile.mode",
)
def check_further(spec: Spec, layout: Layout, found: Findings) -> None:
    """Report why further tokens cannot be predicted."""
    if not spec.model.mtp:
        return
    problems = list(_problems(spec, layout))
    for message, hint in problems[:1]:
        found.fail(MTP_RULE, MTP_CODE, MTP_PATH, message, hint)
    if not problems:
        found.passed(MTP_RULE, f"{spec.model.mtp} after the last block, with its embedding and its head")


def _problems(spec: Spec, layout: Layout) -> Iterator[MtpProblem]:
    """Yield (message, hint) for each reason."""
    if not spec.loss.plain:
        yield (
            f"modules learn by the cross-entropy of each token, and the loss is {spec.loss.kind}",
            ("remove `mtp`, or choose the plain `loss cross_entropy`"),
        )
    if layout.size("pp") > 1 and spec.parallel.pp.schedule in ZERO_BUBBLE:
        yield (
            f"schedule {spec.parallel.pp.schedule} splits the backward, but the backward of modules, which starts at "
            "several losses, is not split",
            "use schedule 1f1b or interleaved_1f1b",
        )
    if spec.is_adapted:
        yield "an adapter needs the rest of the model frozen", "remove `mtp` or the adapter"
    if spec.model.frozen:
        yield "modules are trained with the whole model", "remove `mtp` or `frozen`"
    stored = planned(spec.model, PlannedModel).stored
    if loads_weights(spec) and stored is not None and not stored.further_tokens:
        message = f"files of {spec.model.family} have no modules that predict further tokens"
        yield message, "remove `mtp`, or write `weights = none`"
    if spec.rollout is not None:
        yield "the loss of a rollout is another one than cross-entropy", "remove `mtp` or `rollout`"
    if spec.step is not None:
        yield "your own step calls the model itself", "remove `mtp` or `step`"
    if spec.compile.mode != "none":
        yield "modules call the embedding, which is outside the compiled blocks", "use compile none"


@frozen
class FittedTeacher:
    """Teacher placed on the mesh. spec: of a run of the teacher alone, with the axes that cut it. layout: of the ranks
    that compute it together: one pipeline stage, and one rank of tp if tp does not cut it."""

    spec: Spec
    shape: TeacherShape
    layout: Layout

    def resolved(self, resolved: Resolved) -> Resolved:
        """Return the teacher as nodes and estimates take a model: frozen, and in the run's compute format."""
        arch, compute = self.shape.architecture, resolved.formats.compute
        everything = frozenset(tensor.name for tensor in parameters(arch))
        return Resolved(
            spec=self.spec,
            architecture=arch,
            layout=self.layout,
            batch=resolved.batch,
            training=(),
            phases=(),
            formats=Formats(params=compute, compute=compute, reduce=compute),
            inventory=count_parameters(arch, everything),
            cuts=cuts_of(self.spec.parallel, self.layout.mesh, arch),
            staging=assign_stages(self.spec, arch, self.layout, Findings(self.spec)),
            weights=self.shape.weights,
        )


def fit_teacher(
    spec: Spec, shape: TeacherShape | None, layout: Layout, batch: Arithmetic, found: Findings
) -> FittedTeacher | None:
    """Return the teacher cut like the model or, if tp cannot cut it, whole on the ranks of tp; None if there is none,
    or if it fits in neither way."""
    teacher = spec.loss.learns_from
    if teacher is None or not teacher.live or shape is None or found.failed or layout.unsettled:
        return None
    tp, sparse = layout.size("tp"), shape.architecture.is_moe
    first = None
    for each in dict.fromkeys((tp,) if sparse else (tp, 1)):
        fitted = _fitted(spec, shape, layout, each)
        own = Findings(fitted.spec)
        check_topology(fitted.spec, shape.architecture, fitted.layout, batch, own)
        if not own.failed:
            found.passed(f"{RULE}.layout", f"{teacher.folder} is cut by {_axes(fitted)}")
            return fitted
        first = first or own.diagnostics.errors[0]
    assert first is not None
    message = f"the teacher {teacher.folder} cannot compute alongside the model: {first.message}"
    hint = "store its probabilities, without `live`, or use a layout that cuts both models"
    found.fail(f"{RULE}.layout", first.code, PATH, message, hint)
    return None


def _fitted(spec: Spec, shape: TeacherShape, layout: Layout, tp: int) -> FittedTeacher:
    arch, mesh = shape.architecture, layout.mesh
    sizes = {axis: layout.size(axis) for axis in AXES} | {"pp": 1, "tp": tp}
    ep = layout.ep if arch.is_moe else 1
    parallel = spec.parallel
    parallel = evolve(parallel, ep=Ep(size=ep), tp=evolve(parallel.tp, size=tp), pp=evolve(parallel.pp, size=1))
    own = build_mesh(sizes, ep=ep, ranks_per_node=mesh.ranks_per_node)
    alone = evolve(shape.spec, parallel=parallel, launch=spec.launch, cluster=spec.cluster, collate=spec.collate)
    return FittedTeacher(alone, shape, evolve(layout, mesh=own, ep=ep, reasons={}))


def _axes(fitted: FittedTeacher) -> str:
    wide = [f"{axis} {fitted.layout.size(axis)}" for axis in AXES if fitted.layout.size(axis) > 1]
    return " · ".join(wide) or "no axis"
