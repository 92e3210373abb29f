"""The nodes by which several ranks compute one row: tp → cp → ep."""

from typing import Any, Final

from xtrain.planner.architecture import EMBEDDING, HEAD, expert_module
from xtrain.planner.graph.builder import Builder
from xtrain.planner.mesh.sharding import tensor_rules
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import plural

BLOCKS: Final = "layers.*"


def _tensor_parallel(graph: Builder, run: Resolved, last: str) -> str:
    size, tp, arch = run.size("tp"), run.spec.parallel.tp, run.architecture
    if size == 1:
        return last
    rules = [
        {"pattern": pattern, "style": style, "matches": _owners(run, pattern)} for pattern, style in tensor_rules(arch)
    ]
    args = {"size": size, "sequence": tp.sequence, "loss": tp.loss, "rules": rules}
    extras = [name for name, on in (("sequence between blocks", tp.sequence), ("loss over vocabulary", tp.loss)) if on]
    matrices = sum(sum(rule["matches"]) for rule in rules)
    does = f"split {plural(matrices, 'matrix')} over tp={size}: {arch.heads // size} of {arch.heads} heads a rank"
    if extras:
        does += f"; {' and '.join(extras)} sharded"
    return graph.add("setup", "setup.parallel.tp", does, args=args, axes=("tp",), after=((last, "model"),))


def _owners(run: Resolved, pattern: str) -> list[int]:
    """How many modules on each pipeline coordinate a rule of tensor parallelism means."""
    pipeline = run.pipeline
    if pattern.startswith(BLOCKS):
        owner = pattern.removeprefix(f"{BLOCKS}.")
        arch = run.architecture
        having = [kind for kind in arch.kinds if any(each.owner == owner for each in kind.block.parameters(arch))]
        return run.matches({layer for kind in having for layer in kind.layers})
    behind = run.architecture.embeds_behind
    found = []
    for pp in range(run.size("pp")):
        first, last = pipeline.holds_first(pp), pipeline.holds_last(pp)
        found.append(int({EMBEDDING: first or (last and behind), HEAD: last}[pattern.partition(".")[0]]))
    return found


def _context_parallel(graph: Builder, run: Resolved, last: str) -> str:
    if run.context == 1:
        return last
    ring, ulysses, arch = run.size("ring"), run.size("ulysses"), run.architecture
    args = {"ring": ring, "ulysses": ulysses, "matches": run.pipeline.blocks()}
    heads = arch.heads // run.size("tp")
    parts = []
    if ulysses > 1:
        parts.append(f"{heads // ulysses} of {heads} heads over whole parts (ulysses={ulysses})")
    if ring > 1:
        parts.append(f"keys and values go round {ring} ranks (ring={ring})")
    does = f"attention over rows spread over {run.context} ranks: {', '.join(parts)}"
    axes = run.wide("ring", "ulysses")
    return graph.add("setup", "setup.parallel.cp", does, args=args, axes=axes, after=((last, "model"),))


def _expert_parallel(graph: Builder, run: Resolved, last: str) -> str:
    size, arch = run.layout.ep, run.architecture
    if size == 1:
        return last
    does = f"keep {arch.experts // size} of {arch.experts} experts a rank, tokens travel over ep={size}"
    args: dict[str, Any] = {"size": size, "pattern": f"{BLOCKS}.{expert_module(arch)}"}
    args["matches"] = run.matches(arch.expert_layers)
    if run.shared_meanwhile:
        args["meanwhile"] = "shared"
        does += "; shared experts are computed while they go, and their gradients while gradients come back"
    return graph.add("setup", "setup.parallel.ep", does, args=args, axes=("ep",), after=((last, "model"),))


# The nodes by which several ranks compute one row.
SPREADING: Final = (_tensor_parallel, _context_parallel, _expert_parallel)
