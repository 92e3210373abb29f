"""Graph of a server: set-up, nodes of each kind of request, memory of adapter slots and key-value pages."""

from collections.abc import Mapping
from typing import Any, Final

from xtrain.plan.architecture import BlockLayer
from xtrain.plan.estimates import Estimates, Hardware
from xtrain.plan.findings import Findings
from xtrain.plan.graph import PAGE, SETUP, STATES, WHOLE, Builder, check_graph, resumes, slots_of, window_pages
from xtrain.plan.mesh import AXES
from xtrain.plan.plan import Plan, PlanPhase, Timeline
from xtrain.plan.resolved import Resolved, TrainedKind
from xtrain.planner.derive.further_models import plain_parameters
from xtrain.planner.derive.serving import asked_key, microbatches, slot_names
from xtrain.planner.graph.data import add_tokenizer
from xtrain.planner.graph.graph import ROOT, Graph, add_bootstrap, add_mesh, add_watch
from xtrain.planner.graph.model import add_model
from xtrain.text.units import BYTES, bytes_text, flops_text, plural

MOST_ROWS: Final = 64  # samples generated at once; others wait


def pages_of(positions: int) -> int:
    """Return the number of pages of a sample with `positions` positions, in layers without a window."""
    return -(-positions // PAGE)


def sampling_pages(resolved: Resolved, estimates: Estimates) -> dict[int | None, int]:
    """Return window of layers → number of pages; STATES → samples that have states.

    Pages and a layer's reads may use the memory of activations and loss at the peak of a forward_backward, because
    neither exists while samples are generated; the peak does not change. One sample of the longest text always fits,
    with one page for each other sample. MOST_ROWS of these samples never need more. States may use half of the memory.
    """
    assert resolved.spec.serve is not None
    bytes_of, longest = (
        [_page_bytes(resolved, own) for own in resolved.pipeline.owners],
        pages_of(resolved.spec.serve.max_tokens),
    )
    room = min(each.memory.activations + each.memory.loss for each in estimates.classes) - read_bytes(resolved)
    of_states = [each.pop(STATES, 0) for each in bytes_of]
    states = max(1, min(MOST_ROWS, room // 2 // max(of_states) - 1)) if any(of_states) else 0
    low, high = longest + MOST_ROWS, MOST_ROWS * max(longest, 2)
    while low < high:
        middle = (low + high + 1) // 2
        needs = (_all(middle, each) + (states + 1) * own for each, own in zip(bytes_of, of_states, strict=True))
        low, high = (middle, high) if max(needs) <= room else (low, middle - 1)
    windows = dict.fromkeys(window for each in bytes_of for window in each)
    return {window: _count(low, window) for window in windows} | ({STATES: states} if states else {})


def read_bytes(resolved: Resolved) -> int:
    """Return the bytes of all pages of MOST_ROWS rows of the longest text, or of their states, as read by one layer."""
    assert resolved.spec.serve is not None
    pages, found = MOST_ROWS * pages_of(resolved.spec.serve.max_tokens), 0
    for kind in resolved.kinds:
        for layer in kind.block.layers():
            if layer.keeps_state:
                found = max(found, MOST_ROWS * _cached_bytes(resolved, kind, layer))
            elif layer.attends:
                found = max(found, _count(pages, layer.window) * PAGE * _cached_bytes(resolved, kind, layer))
    return found


def pages_bytes(resolved: Resolved, pages: Mapping[int | None, int]) -> int:
    """Return the bytes on the rank with the most, including page 0, which is zero."""
    every = [_page_bytes(resolved, own) for own in resolved.pipeline.owners]
    return max(sum((pages[window] + 1) * each for window, each in own.items()) for own in every)


def _count(pages: int, window: int | None) -> int:
    """Return the pages needed with a window if `pages` are needed without one."""
    return pages if window is None else min(pages, MOST_ROWS * window_pages(window))


def _all(pages: int, bytes_of: Mapping[int | None, int]) -> int:
    return sum((_count(pages, window) + 1) * each for window, each in bytes_of.items())


def _page_bytes(resolved: Resolved, stages: tuple[int, ...]) -> dict[int | None, int]:
    """Return window → bytes of a page in all layers of a pipeline coordinate; STATES → of the states of a sample."""
    found: dict[int | None, int] = {}
    own = {
        layer
        for stage in stages
        for layer in range(resolved.pipeline.spans[stage][0], resolved.pipeline.spans[stage][1] + 1)
    }
    for kind in resolved.kinds:
        if count := len(own.intersection(kind.layers)):
            for layer in kind.block.layers():
                if layer.attends or layer.keeps_state:
                    window, positions = (STATES, 1) if layer.keeps_state else (layer.window, PAGE)
                    numbers = count * positions * _cached_bytes(resolved, kind, layer)
                    found[window] = found.get(window, 0) + numbers
    return found


def _cached_bytes(resolved: Resolved, kind: TrainedKind, layer: BlockLayer) -> int:
    """Return the bytes of a position in one layer, or of its states. Ranks of context and data parallelism hold all of
    them; ranks of tensor parallelism their own heads."""
    width, plain = BYTES[resolved.formats.compute], plain_parameters(resolved, kind)
    exact = max(BYTES["fp32"], width) // width
    return layer.cached(resolved.architecture, resolved.size("tp"), 1, plain, exact) * width


def slot_bytes(resolved: Resolved) -> int:
    """Return the bytes of one slot on a rank: its parameters, their gradients and Adam's state."""
    assert resolved.spec.serve is not None
    trained = [tensor for tensor in resolved.inventory.tensors if tensor.trained]
    moments = sum(resolved.moment_bytes(each, resolved.cuts.shape(each)) for each in trained)
    return (2 * BYTES[resolved.formats.params] * resolved.cuts.largest(trained) + moments) // resolved.spec.serve.places


def check_room(resolved: Resolved, cluster: Hardware, estimates: Estimates, found: Findings) -> None:
    """Report whether the requested slots fit, and how many would."""
    assert resolved.spec.serve is not None
    rule, slots, device = "memory.device", resolved.spec.serve.places, cluster.memory_bytes
    need = estimates.fullest.memory.total_bytes
    if device is None:
        found.unknown(rule, f"the fullest rank needs {bytes_text(need)}, and the memory of a device is unknown")
        return
    room, share = _room(device, need, slots, slot_bytes(resolved)), f"{bytes_text(need)} of {bytes_text(device)}"
    if room >= slots:
        more = f"; there is room for {plural(room, 'adapter')}" if resolved.spec.tasks else ""
        found.passed(rule, f"{share} on the fullest rank{more}")
    elif room:
        message = f"the server does not fit: {share} on the fullest rank"
        found.warn(rule, "W423", "serve.adapters", message, f"use adapters {room}")
    else:
        alone = ", even with a single adapter" if resolved.spec.tasks else ""
        message = f"the server does not fit{alone}: {share} on the fullest rank"
        hint = "use more ranks, fewer `rows`, a smaller `max_tokens` or rank, or store the model in codes"
        if not resolved.spec.tasks:
            hint = "use more ranks, fewer `rows` or a smaller `max_tokens`, or train adapters"
        found.warn(rule, "W423", "serve", message, hint)


def slots_that_fit(plan: Plan) -> int | None:
    """Return the number of slots that fit on the fullest rank; None if a device's memory is unknown, or the server
    trains the model itself."""
    if plan.cluster.memory_bytes is None or not slots_of(plan):
        return None
    fullest = plan.estimates.fullest.memory
    slots, own = len(slots_of(plan)), fullest.gradients * 2 + fullest.optimizer
    return _room(plan.cluster.memory_bytes, fullest.total_bytes, slots, own // len(slots_of(plan)))


def _room(device: int, need: int, slots: int, each: int) -> int:
    return max(0, (device - need + slots * each) // each)


FEWEST: Final = 16  # minimum number of texts that a request may have
TIMELINE: Final = Timeline(
    steps=None,
    tokens=None,
    epochs=None,
    phases=(PlanPhase(name="requests", first=0, fraction=None, shares={}),),
    ticks=(),
    triggers=(),
)


def build_server(resolved: Resolved, estimates: Estimates) -> Graph:
    """Build the graph. Raises GraphError for a bug of the planner."""
    graph = Builder()
    add_bootstrap(graph, resolved)
    add_watch(graph, resolved)
    model = add_model(graph, resolved, add_mesh(graph, resolved))
    tokenizer = add_tokenizer(graph, resolved)
    last = _requests(graph, resolved, estimates, _slots(graph, resolved, model, tokenizer))
    drain = graph.add("shutdown", "shutdown.drain", "finish pending writes", after=(last,))
    graph.add("shutdown", "shutdown.leave", "wait for all ranks, then exit together", after=(drain,))
    nodes, edges = tuple(graph.nodes), tuple(graph.edges)
    return Graph(nodes=nodes, edges=edges, timeline=TIMELINE, proof=check_graph(nodes, edges, ROOT))


@resumes(
    SETUP,
    "max_rank",
    harmless="serve.adapters serve.certificate serve.host serve.hosts serve.key serve.max_tokens serve.origins "
    "serve.port serve.private_key serve.queue serve.rows key_needed=serve.key model_name=serve.model "
    "idle_seconds=serve.idle texts=serve.rows",
)
def _slots(graph: Builder, resolved: Resolved, model: str, tokenizer: str) -> str:
    serve = resolved.spec.serve
    assert serve is not None
    args: dict[str, Any] = {
        "model_name": serve.model or resolved.spec.experiment.name,
        "host": serve.host,
        "port": serve.port,
        "key": serve.key_variable,
        "key_needed": serve.key is not None,
        **({"hosts": list(serve.hosts)} if serve.hosts else {}),
        **({"origins": list(serve.origins)} if serve.origins else {}),
        "certificate": serve.certificate,
        "private_key": serve.private_key,
        "queue": serve.queue,
        "idle_seconds": serve.idle.value,
        "adapters": serve.places,
        "max_rank": resolved.spec.tasks[slot_names(1)[0]].adapter.largest if resolved.spec.tasks else WHOLE,
        "max_tokens": serve.max_tokens,
        "rows": serve.rows,
        "texts": max(FEWEST, microbatches(resolved.spec) * serve.rows * resolved.layout.mesh.data_ranks),
    }
    if resolved.size("pp") > 1:
        args["microbatches"] = microbatches(resolved.spec)
    each = bytes_text(slot_bytes(resolved))
    does = f"{plural(serve.adapters, 'slot')} for adapters, {each} each on a rank with gradients and moments; "
    if not resolved.spec.tasks:
        does = f"one client trains the whole model, {each} on a rank with gradients and moments; initial weights and "
        does += "sampling weights stay in host memory; "
    does += f"listen on {serve.host}:{serve.port}"
    does += " with TLS" if serve.certificate else ""
    does += f"; clients need {asked_key(serve)}"
    return graph.add("setup", SETUP, does, args=args, axes=resolved.wide(*AXES), after=((model, "model"), tokenizer))


@resumes(
    "request.open request.forward_backward request.optim_step request.keep request.load request.export request.forget "
    "request.close"
)
@resumes("request.sample", "pages rows")
def _requests(graph: Builder, resolved: Resolved, estimates: Estimates, after: str) -> str:
    """Add a node for every kind of request; they run in the order in which requests arrive."""
    everyone, data = resolved.wide(*AXES), resolved.layout.mesh.data_ranks
    rows, token = plural(resolved.batch.micro, "text"), flops_text(estimates.flops_per_token)
    spread = f"each of {plural(data, 'data rank')} computes {rows} at a time" if data > 1 else f"{rows} at a time"
    if resolved.size("pp") > 1:
        spread += f", forwards of {microbatches(resolved.spec)} microbatches before their backwards"
    if spread_over := resolved.wide("ring", "ulysses"):
        spread += f", each text over {resolved.product(spread_over)}"
    last = after

    def then(op: str, does: str, **args: Any) -> None:
        nonlocal last
        last = graph.add("request", f"request.{op}", does, args=args, axes=everyone, after=(last,))

    adapters = bool(resolved.spec.tasks)
    what, whose = ("an adapter", "the adapter") if adapters else ("the model", "the model")
    if adapters:
        does = (
            "assign a slot to a client's adapter: A is drawn from its seed, B is zero; smaller ranks use part of "
            "the slot"
        )
    else:
        does = "assign the model, with its initial weights, to a client"
    then("open", does)
    does = f"losses of texts, {spread}; gradients are summed and added to the gradients of {whose}; {token} a token"
    then("forward_backward", does)
    then("optim_step", "one all-reduce for the norm, then Adam with the settings of the request; release gradients")
    then("keep", f"gather {what} and its moments, and write them to a folder atomically")
    slot = "into a slot of the same shape" if adapters else "into a client's model"
    then("load", f"read {what}, with its moments if requested, {slot}")
    form = "write an adapter for PEFT" if adapters else "write the model, for transformers if possible"
    then("export", f"{form}; samples use this export while training continues")
    weights = "an exported adapter, or none" if adapters else "exported weights, or the initial ones"
    pages = sampling_pages(resolved, estimates)
    does = f"sample up to {MOST_ROWS} texts at once with {weights}; keys and values in {_pages_text(pages)} of {PAGE} "
    does += "positions, " + (f"states of {plural(pages[STATES], 'text')}, " if STATES in pages else "")
    does += f"{bytes_text(pages_bytes(resolved, pages))} on a rank while no training runs, and up to "
    does += f"{bytes_text(read_bytes(resolved))} for the reads of a layer"
    then("sample", does, rows=MOST_ROWS, pages=[[window, count] for window, count in pages.items()])
    then("forget", "release an export kept for sampling")
    then("close", "free the slot of an adapter" if adapters else "free the model for another client")
    return last


def _pages_text(pages: Mapping[int | None, int]) -> str:
    """Return text on the number of pages, by the window of layers."""
    found = [
        f"{count:,} pages" if window is None else f"{count:,} for windows of {window:,}"
        for window, count in pages.items()
        if window != STATES
    ]
    return " and ".join(found)
