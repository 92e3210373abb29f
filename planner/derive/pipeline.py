"""Pipeline stages from `pp` of a spec: stages per rank, layers per stage, and whether the schedule can run."""

from itertools import accumulate

from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import Architecture
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.findings import Findings, checks
from xtrain.plan.mesh import Layout, nearest_multiples
from xtrain.plan.parameters import block_matmul_parameters
from xtrain.plan.pipeline import SINGLE, TWO_STAGES, StageAssignment, balance, balance_unequal, pipeline_of

MOST_MICROBATCHES = 10_000  # per step: the plan simulates the order of all of them
IN_ROUNDS = ("interleaved_1f1b", "zero_bubble")  # schedules that need groups of equal size


def assign_stages(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> StageAssignment:
    """Assign layers to stages and stages to ranks. An invalid assignment is reported and replaced by a single stage.

    Modules that predict further tokens come with the head.
    """
    size = layout.size("pp")
    single = StageAssignment(pipeline=pipeline_of([architecture.layers], 1, "1f1b"), stages_per_rank=1)
    if size == 1:
        return single
    reasons: dict[str, tuple[object, str]] = {}
    each = _stages_per_rank(spec, reasons, found)
    stages = size * each
    if architecture.blocks < stages:
        message = f"{architecture.blocks} layers cannot fill pp {size} · stages_per_rank {each} = {stages} stages"
        hint = f"use pp {max(architecture.blocks // each, 1)}, or layers {stages}"
        found.fail("mesh.pp.layers", "X404", "parallel.pp.size", message, hint)
        return single
    weights = _weights(architecture)
    embedding, head = _costs(spec, architecture, weights, reasons)
    if min(weights) == max(weights):
        even = balance(architecture.blocks, stages, embedding, head)
    else:
        mean = sum(weights) / len(weights)
        even = balance_unequal([each / mean for each in weights], stages, embedding, head)
    counts = _counts(spec, architecture, even, each, reasons, found)
    _check_values(spec, architecture, counts, found)
    counts[-1] += architecture.mtp
    return StageAssignment(
        pipeline=pipeline_of(counts, size, spec.parallel.pp.schedule), stages_per_rank=each, reasons=reasons
    )


@checks("mesh.pp.schedule", reads="parallel.pp.size parallel.pp.schedule parallel.pp.stages_per_rank")
def _stages_per_rank(spec: Spec, reasons: dict[str, tuple[object, str]], found: Findings) -> int:
    pp = spec.parallel.pp
    wanted = 2 if pp.schedule in TWO_STAGES else 1
    each = pp.stages_per_rank
    if isinstance(each, Auto):
        why = f"schedule {pp.schedule} runs {'two stages' if wanted == 2 else 'one stage'} on a rank"
        reasons["parallel.pp.stages_per_rank"] = (wanted, why)
        return wanted
    rule, path = "mesh.pp.schedule", "parallel.pp.stages_per_rank"
    if each > 1 and pp.schedule in SINGLE:
        message = f"schedule {pp.schedule} runs one stage on a rank, not {each}"
        found.fail(rule, "X404", path, message, "use schedule interleaved_1f1b, or stages_per_rank 1")
    elif each != 2 and pp.schedule == "zbv":
        message = f"schedule zbv runs two stages on a rank, there and back, not {each}"
        found.fail(rule, "X404", path, message, "use stages_per_rank 2, or leave it auto")
        return 2
    else:
        found.passed(rule, f"schedule {pp.schedule} can run stages_per_rank {each}")
    return each


def _weights(architecture: Architecture) -> list[int]:
    """Return the number of weights of every layer that a token is multiplied with."""
    found = {}
    for kind in architecture.kinds:
        found |= dict.fromkeys(kind.layers, block_matmul_parameters(architecture, kind.first))
    return [found[layer] for layer in range(architecture.blocks)]


def _costs(
    spec: Spec, architecture: Architecture, weights: list[int], reasons: dict[str, tuple[object, str]]
) -> tuple[float, float]:
    """Return the costs of embedding and head, in layers: matrix products decide, and a lookup costs nothing."""
    pp = spec.parallel.pp
    embedding, head = pp.embedding_cost, pp.head_cost
    if isinstance(head, Auto):
        table, block = architecture.head_products, round(sum(weights) / len(weights))
        modules = sum(block_matmul_parameters(architecture, layer) for layer in architecture.further_layers)
        head = round((table + modules) / max(block, 1), 2)  # a block of only norms has none
        if isinstance(pp.layers, Auto):
            mean = "" if min(weights) == max(weights) else ", on average"
            of = "modules and head" if modules else "vocab · dim"
            why = f"{of} = {table + modules:,} / {block:,} weights of a block{mean}"
            why = why if table else "a reward head sees only the last token of each sequence"
            reasons["parallel.pp.head_cost"] = (head, why)
    return (0.0 if isinstance(embedding, Auto) else embedding), head


@checks("mesh.pp.layers", reads="{stages} parallel.pp.layers model.layers model.mtp")
def _counts(
    spec: Spec,
    architecture: Architecture,
    even: list[int],
    each: int,
    reasons: dict[str, tuple[object, str]],
    found: Findings,
) -> list[int]:
    """Return the layers of every stage: the given ones if they fit, otherwise `even`."""
    pp, stages = spec.parallel.pp, len(even)
    given = pp.layers
    if isinstance(given, Auto):
        reasons["parallel.pp.layers"] = (tuple(even), "minimizes the most expensive stage")
        found.passed("mesh.pp.layers", f"{architecture.blocks} layers on {stages} stages")
        return list(even)
    hint = f"use layers [{', '.join(map(str, even))}]"
    rule, path = "mesh.pp.layers", "parallel.pp.layers"
    if len(given) != stages:
        message = f"layers lists {len(given)} stages, but pp {pp.size} · stages_per_rank {each} = {stages}"
        found.fail(rule, "X404", path, message, hint)
    elif min(given) < 1:
        empty = next(stage for stage, count in enumerate(given) if count < 1)
        found.fail(rule, "X404", path, f"stage {empty} has {given[empty]} layers, and each needs at least one", hint)
    elif sum(given) != architecture.blocks:
        total = f"{' + '.join(map(str, given))} = {sum(given)}"
        message = f"the stages have {total} layers, but the model {architecture.blocks}"
        found.fail(rule, "X404", path, message, hint)
    else:
        found.passed(rule, f"{sum(given)} layers on {stages} stages")
        _check_costs(spec, found)
        return list(given)
    return even


@checks("mesh.pp.values", reads="{stages} parallel.pp.layers model.*")
def _check_values(spec: Spec, architecture: Architecture, counts: list[int], found: Findings) -> None:
    """Check that no block takes values that a block of another stage gives."""
    given: dict[str, int] = {}
    givers: dict[int, int] = {}  # layer → first layer whose values it takes
    for layer in range(architecture.blocks):
        for each in architecture.kind_of(layer).block.layers():
            if each.gives:
                given[each.gives] = layer
            if each.takes:
                givers[layer] = min(given.get(each.takes, 0), givers.get(layer, layer))
    if not givers:
        return
    spans = [range(giver + 1, layer + 1) for layer, giver in givers.items()]  # where no stage may begin
    begins = [layer for layer in range(1, architecture.blocks) if not any(layer in span for span in spans)]
    starts = list(accumulate(counts))[:-1]
    if wrong := next((start for start in starts if start not in begins), None):
        taker = next(layer for layer, giver in givers.items() if giver < wrong <= layer)
        message = f"a stage begins with layer {wrong}, but layer {taker} takes what layer {givers[taker]} makes, and "
        message += "stages do not send it"
        hint = "use pp 1, with fsdp or cp for more ranks"
        if len(begins) >= len(starts):
            last = f"layers {begins[0]} to {begins[-1]}" if len(begins) > 1 else f"layer {begins[0]}"
            hint = f"let stages begin at {last}: write `layers` of pp, the number of layers of each stage"
        path = "parallel.pp.size" if isinstance(spec.parallel.pp.layers, Auto) else "parallel.pp.layers"
        found.fail("mesh.pp.values", "X404", path, message, hint)
    else:
        found.passed("mesh.pp.values", f"stages begin at {', '.join(map(str, starts))}, where nothing is shared")


@checks("mesh.pp.costs", reads="parallel.pp.size parallel.pp.layers parallel.pp.embedding_cost parallel.pp.head_cost")
def _check_costs(spec: Spec, found: Findings) -> None:
    """Check that costs are not given together with the layers of each stage, which leave nothing to balance."""
    pp = spec.parallel.pp
    idle = [name for name in ("embedding_cost", "head_cost") if not isinstance(getattr(pp, name), Auto)]
    if idle:
        message = f"layers gives the layers of each stage, so {' and '.join(idle)} would change nothing"
        found.fail("mesh.pp.costs", "X404", f"parallel.pp.{idle[0]}", message, f"use {idle[0]} auto, or layers auto")


@checks("mesh.pp.microbatches", reads="parallel.pp.size parallel.pp.schedule {accumulate} {ramp}")
def check_microbatches(spec: Spec, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Check that there are enough microbatches for all ranks, not too many and, for some schedules, in rounds of equal
    size.

    torch.distributed.pipelining 2.13: n microbatches make n // pp rounds, which must divide n.
    """
    size = layout.size("pp")
    if size == 1 or (layout.unsettled and isinstance(spec.batch.accumulate, Auto)):
        return
    for count in reversed(batch.microbatches):
        if wrong := _wrong_microbatches(spec, layout, batch, count):
            found.fail("mesh.pp.microbatches", "X411", *wrong)
            return
    numbers = " to ".join(str(count) for count in dict.fromkeys((batch.microbatches[0], batch.accumulate)))
    found.passed("mesh.pp.microbatches", f"{numbers} microbatches for {size} pipeline ranks")


def _wrong_microbatches(spec: Spec, layout: Layout, batch: Arithmetic, count: int) -> tuple[str, str, str] | None:
    """Return (path, message, hint) if the pipeline cannot run steps of `count` microbatches."""
    size, pp = layout.size("pp"), spec.parallel.pp
    rounds = max(count // size, 1)
    if count < size:
        message = f"{count} microbatches of a step cannot fill a pipeline of {size} ranks"
        return _more(spec, layout, batch, count, message, f"{size}", " or more")
    if count > MOST_MICROBATCHES:
        message = f"{count} microbatches of a step are more than the {MOST_MICROBATCHES} that a pipeline may have"
        return _more(spec, layout, batch, count, message, f"{MOST_MICROBATCHES}", " or fewer")
    if pp.schedule in IN_ROUNDS and count % rounds:
        wanted = f"{count} // pp {size} = {rounds} equal rounds"
        message = f"schedule {pp.schedule} runs microbatches in {wanted}, not {count}"
        return _more(spec, layout, batch, count, message, nearest_multiples(count, size))
    return None


def _more(
    spec: Spec, layout: Layout, batch: Arithmetic, count: int, message: str, counts: str, rest: str = ""
) -> tuple[str, str, str]:
    """Return (path, message, hint) that asks for other microbatches than `count`, by the setting that is written."""
    if count < batch.accumulate:
        each = batch.micro * layout.mesh.data_ranks
        rows = layout.size("pp") * each
        hint = f"use multiples of {rows} rows for `ramp_from` and `rows`"
        return "batch.ramp_from", f"in the ramp, with {count * each} rows a step: {message}", hint
    if isinstance(spec.batch.accumulate, Auto) and not isinstance(spec.batch.rows, Auto):
        each = batch.micro * layout.mesh.data_ranks
        rows = " or ".join(str(int(count) * each) for count in counts.split(" or "))
        return "batch.rows", f"rows {batch.rows}: {message}", f"use rows {rows}{rest}"
    return "batch.accumulate", message, f"use accumulate {counts}{rest}"
