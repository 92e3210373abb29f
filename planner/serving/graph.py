"""The graph of a server: what is set up, what each kind of request does, how it ends."""

from collections.abc import Mapping
from typing import Any, Final

from xtrain.planner.graph.builder import Builder, check_graph
from xtrain.planner.graph.data_nodes import add_tokenizer
from xtrain.planner.graph.graph import ROOT, Graph, add_bootstrap, add_mesh, add_watch
from xtrain.planner.graph.model_nodes import add_model
from xtrain.planner.mesh.mesh import AXES
from xtrain.planner.plan import Estimates, PlanPhase, Timeline
from xtrain.planner.resolved import Resolved
from xtrain.planner.serving.fit import slot_bytes
from xtrain.planner.serving.pages import MOST_ROWS, PAGE, pages_bytes, read_bytes, sampling_pages
from xtrain.planner.serving.rules import asked_key
from xtrain.planner.serving.slots import microbatches, slot_names
from xtrain.planner.units import bytes_text, flops_text, plural

SETUP: Final = "setup.serve"
WHOLE: Final = 0  # the rank of a server that trains the model itself
FEWEST: Final = 16  # texts that a request may have at least
TIMELINE: Final = Timeline(
    steps=None,
    tokens=None,
    epochs=None,
    phases=(PlanPhase(name="requests", first=0, fraction=None, shares={}),),
    ticks=(),
    triggers=(),
)


def build_server(run: Resolved, estimates: Estimates) -> Graph:
    """Put the plan together. Raises GraphError for a mistake of the planner."""
    graph = Builder()
    add_bootstrap(graph, run)
    add_watch(graph, run)
    model = add_model(graph, run, add_mesh(graph, run))
    tokenizer = add_tokenizer(graph, run)
    last = _requests(graph, run, estimates, _slots(graph, run, model, tokenizer))
    drain = graph.add("shutdown", "shutdown.drain", "finish what is still being written", after=(last,))
    graph.add("shutdown", "shutdown.leave", "wait for the others and leave together", after=(drain,))
    nodes, edges = tuple(graph.nodes), tuple(graph.edges)
    return Graph(nodes=nodes, edges=edges, timeline=TIMELINE, proof=check_graph(nodes, edges, ROOT))


def _slots(graph: Builder, run: Resolved, model: str, tokenizer: str) -> str:
    serve = run.spec.serve
    assert serve is not None
    args: dict[str, Any] = {
        "model_name": serve.model or run.spec.experiment.name,
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
        "max_rank": run.spec.tasks[slot_names(1)[0]].adapter.largest if run.spec.tasks else WHOLE,
        "max_tokens": serve.max_tokens,
        "rows": serve.rows,
        "texts": max(FEWEST, microbatches(run.spec) * serve.rows * run.layout.mesh.data_ranks),
    }
    if run.size("pp") > 1:
        args["microbatches"] = microbatches(run.spec)
    each = bytes_text(slot_bytes(run))
    does = f"{plural(serve.adapters, 'slot')} for adapters, {each} each on a rank with gradients and moments; "
    if not run.spec.tasks:
        does = (
            f"one client trains all of the model, {each} on a rank with gradients and moments; what it began as, and "
        )
        does += "what is sampled from, stay in the memory of the machine; "
    does += f"listen on {serve.host}:{serve.port}"
    does += " with TLS" if serve.certificate else ""
    does += f"; {asked_key(serve)} is asked for"
    return graph.add("setup", SETUP, does, args=args, axes=run.wide(*AXES), after=((model, "model"), tokenizer))


def _requests(graph: Builder, run: Resolved, estimates: Estimates, after: str) -> str:
    """A node for every kind of request; they run in the order in which requests come."""
    everyone, data = run.wide(*AXES), run.layout.mesh.data_ranks
    rows, token = plural(run.batch.micro, "text"), flops_text(estimates.flops_per_token)
    spread = f"each of {plural(data, 'data rank')} computes {rows} at a time" if data > 1 else f"{rows} at a time"
    if run.size("pp") > 1:
        spread += f", forwards of {microbatches(run.spec)} microbatches before their backwards"
    if spread_over := run.wide("ring", "ulysses"):
        spread += f", each text over {run.product(spread_over)}"
    last = after

    def then(op: str, does: str, **args: Any) -> None:
        nonlocal last
        last = graph.add("request", f"request.{op}", does, args=args, axes=everyone, after=(last,))

    adapters = bool(run.spec.tasks)
    what, whose = ("an adapter", "the adapter") if adapters else ("the model", "the model")
    if adapters:
        does = "give a client's adapter a slot: A drawn from its seed, B zero; smaller ranks take part of the slot"
    else:
        does = "give a client the model, with the weights that it began with"
    then("open", does)
    does = f"losses of texts, {spread}; gradients are sums, added to those of {whose}; {token} a token"
    then("forward_backward", does)
    then("optim_step", "one all-reduce for the norm; Adam with the numbers of the request; gradients are released")
    then("keep", f"put {what} and its moments together, and write them to a folder that is whole or not there")
    slot = "into a slot of the same shape" if adapters else "into that of a client"
    then("load", f"read {what}, with its moments if asked for, {slot}")
    form = "write an adapter as PEFT reads it" if adapters else "write the model, as transformers reads it if it can"
    then("export", f"{form}; samples are drawn with that, whatever is trained meanwhile")
    weights = "an exported adapter, or with none" if adapters else "exported weights, or those that it began with"
    pages = sampling_pages(run, estimates)
    does = f"write up to {MOST_ROWS} texts at once with {weights}; keys and values in {_pages_text(pages)} of {PAGE} "
    does += f"positions, {bytes_text(pages_bytes(run, pages))} on a rank while nothing is trained, and up to "
    does += f"{bytes_text(read_bytes(run))} for what a layer reads"
    then("sample", does, rows=MOST_ROWS, pages=[[window, count] for window, count in pages.items()])
    then("forget", "release what sampling has kept of an export")
    then("close", "make the slot of an adapter free" if adapters else "make the model free for another client")
    return last


def _pages_text(pages: Mapping[int | None, int]) -> str:
    """How many there are, by the window of layers."""
    found = [
        f"{count:,} pages" if window is None else f"{count:,} for windows of {window:,}"
        for window, count in pages.items()
    ]
    return " and ".join(found)
