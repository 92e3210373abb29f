"""Rules about what is done to modules: recomputation that finds something to do, attention kernels that know a ring,
actions that need a certain model."""

from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.attention_kernels import EXACT, NARROWEST
from xtrain.planner.data.data_rules import actions_of
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.cluster import device_kind
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.resolved import exchanges, resolve_formats, resolve_tile
from xtrain.planner.schedule.arithmetic import Arithmetic


def check_modules(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Report settings that would change nothing in the model, and kernels that cannot do what the mesh asks for;
    and actions that cannot be done with the model."""
    _check_activation(spec, architecture, layout, found)
    _check_tiles(spec, architecture, layout, batch, found)
    _check_attention(spec, architecture, layout, found)
    _check_overlap(spec, layout, found)
    _check_deterministic(spec, found)
    _check_actions(spec, architecture, found)


def _check_overlap(spec: Spec, layout: Layout, found: Findings) -> None:
    """Products that go on while pieces travel are made by torch.compile, of collectives over positions, for CUDA."""
    tp, path, rule = spec.parallel.tp, "parallel.tp.overlap", "mesh.tp.overlap"
    if not tp.overlap or layout.size("tp") == 1:
        return
    if device_kind(spec) == "cpu":
        message, hint = "overlap uses memory that CUDA devices share, and the device is cpu", "use overlap false"
    elif spec.compile.mode == "none":
        message, hint = (
            "overlap is made by torch.compile, and nothing is compiled",
            "add `compile {}`, or use overlap false",
        )
    elif not tp.sequence:
        message = "overlap multiplies what is gathered and scattered along the sequence, and tp.sequence is false"
        hint = "use sequence true, or overlap false"
    elif device_kind(spec) == "cuda":
        found.passed(rule, "products of compiled blocks go on while pieces travel")
        return
    else:
        found.unknown(rule, "launch.device is auto: on a machine without cuda the run ends with an error")
        return
    found.fail(rule, "X446", path, message, hint)


def _check_deterministic(spec: Spec, found: Findings) -> None:
    """What is chosen by how long it takes may be another thing the next time."""
    if not spec.precision.deterministic or spec.compile.mode != "max_autotune":
        return
    message = "compile max_autotune chooses kernels by their time, and precision.deterministic wants the same each time"
    found.fail("compile.deterministic", "X448", "compile.mode", message, "use mode default, or deterministic false")


def _check_actions(spec: Spec, architecture: Architecture, found: Findings) -> None:
    """What ticks and events do to the model."""
    for path, action in actions_of(spec):
        kind, number, *_ = path.split(".")
        event = spec.events[int(number)].event if kind == "on" else ""
        for name, (code, message, hint) in action.faults(event, architecture, spec.precision.base).items():
            found.fail(f"model.{path}", code, f"{path}.{name}".rstrip("."), message, hint)


def _check_activation(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    chosen, layers = spec.activation, architecture.layers
    if chosen.mode == "none":
        return
    if chosen.every > layers:
        message = f"every {chosen.every} selects none of {layers} layers"
        found.fail("activation.every", "X418", "activation.every", message, f"use every {layers} or less")
    else:
        found.passed("activation.every", f"{layers // chosen.every} of {layers} layers are recomputed")
    if isinstance(chosen.save, Auto):
        return
    if chosen.mode == "full":
        message = "full recomputation keeps only the input of a block, so save has no effect"
        hint = "use save auto, or write `activation selective`"
        found.fail("activation.save", "X418", "activation.save", message, hint)
    elif not chosen.save:
        message = "selective recomputation that keeps nothing is full recomputation"
        hint = "use save [matmul], or write `activation full`"
        found.fail("activation.save", "X418", "activation.save", message, hint)
    elif "all_to_all" in chosen.save and "cp" not in layout.unsettled and not exchanges(spec, layout):
        others = ", ".join(word for word in chosen.save if word != "all_to_all") or "matmul"
        message = "save names all_to_all, and without ep or ulysses there is none"
        found.fail("activation.save", "X418", "activation.save", message, f"use save [{others}]")
    else:
        found.passed("activation.save", f"{', '.join(chosen.save)} are kept")


def _check_tiles(spec: Spec, architecture: Architecture, layout: Layout, batch: Arithmetic, found: Findings) -> None:
    """Feed-forward layers in pieces, of which there are some, and no more than there are positions."""
    pieces, path = spec.activation.tile_mlp, "activation.tile_mlp"
    if pieces == 1:
        return
    positions = batch.micro * batch.sequence // (layout.size("ring") * layout.size("ulysses"))
    if not any(kind.block.tiles for kind in architecture.kinds):
        message = "tile_mlp cuts feed-forward layers into pieces, and all blocks have experts in their place"
        found.fail(path, "X418", path, message, "use tile_mlp 1")
    elif isinstance(pieces, int) and pieces > positions and "cp" not in layout.unsettled:
        message = f"tile_mlp {pieces} is more than the {positions:,} positions of a microbatch that a rank has"
        found.fail(path, "X418", path, message, f"use tile_mlp auto, or {positions} or less")
    elif resolve_tile(spec.activation, architecture.dim, positions) is None:
        message = f"tile_mlp changes nothing, as the {positions:,} positions of a microbatch are one piece"
        found.warn(f"idle.{path}", "W401", path, message, "leave it out")
    else:
        found.passed(path, "feed-forward layers are computed in pieces of the positions")


def _not_in_blocks(spec: Spec) -> str:
    compute = resolve_formats(spec.precision, spec.parallel).compute
    if device_kind(spec) == "cuda":
        return "the device is cuda"
    if compute not in EXACT:
        return f"computation is in {compute}"
    return "" if spec.compile.mode == "none" else "the model is compiled"


def _check_attention(spec: Spec, architecture: Architecture, layout: Layout, found: Findings) -> None:
    """A ring has a kernel of its own, which goes document by document and block by block; flex is made for cuda, and
    blocks for a CPU."""
    kernel, ring = spec.model.attention, layout.size("ring")
    if kernel == "flex" and device_kind(spec) == "cpu":
        message = "attention flex has no backward on cpu, and launch.device is cpu"
        found.fail("model.attention", "X419", "model.attention", message, "use attention auto, or device cuda")
    elif kernel == "flex" and architecture.head_dim < NARROWEST:
        message = f"flex has no kernel for heads of less than {NARROWEST}, and these are {architecture.head_dim} wide"
        hint = "use attention auto, or documents, or wider heads"
        found.fail("model.attention_heads", "X419", "model.attention", message, hint)
    elif kernel == "blocks" and (reason := _not_in_blocks(spec)):
        message = f"attention blocks is made for plain products on cpu in fp32 and fp64, and {reason}"
        found.fail("model.attention", "X419", "model.attention", message, "use attention auto")
    if "cp" in layout.unsettled or ring == 1 or kernel in ("auto", "documents"):
        return
    message = f"attention {kernel} needs whole rows, and with ring {ring} they are split"
    found.fail("mesh.ring.attention", "X419", "model.attention", message, "use attention auto, or ring 1")
