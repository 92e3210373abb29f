"""Servers: adapter slots, each the adapter of a task whose rows clients send, and the rules on `serve`."""

from typing import Any, Final

from attrs import evolve

from xtrain.dsl.schema.adapters import AdapterTask, TaskAdapters
from xtrain.dsl.schema.cluster import Serve
from xtrain.dsl.schema.data import Batch
from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import Architecture
from xtrain.plan.findings import Findings, checks
from xtrain.plan.mesh import Layout, folded_axes

TURNS: Final = 2  # microbatches computed in a row before another client's turn
SCHEDULE: Final = "gpipe"  # all forwards, then all backwards: texts of any length, and no send waits for another
UPDATES: Final = "adamw"  # the optimizer of the protocol, whose settings come with every request


def slot_names(count: int) -> tuple[str, ...]:
    """Return the names of slots in the order of plans, which is alphabetical."""
    return tuple(f"slot_{number:03d}" for number in range(count))


def microbatches(spec: Spec) -> int:
    """Return the number of microbatches computed in a row; in a pipeline, enough to keep most stages busy most of the
    time."""
    pp = spec.parallel.pp.size
    return TURNS * pp if isinstance(pp, int) else TURNS


def as_training(spec: Spec) -> Spec:
    """Return the spec of a server as the spec of a training run with the server's microbatches and optimizer."""
    serve = spec.serve
    assert serve is not None
    # With several microbatches, the gradients of one are alive while the next is computed.
    batch = Batch(sequence=serve.max_tokens, micro=serve.rows, accumulate=microbatches(spec))
    parallel = evolve(spec.parallel, pp=evolve(spec.parallel.pp, schedule=SCHEDULE))
    # Clients give the learning rate with every update; only the optimizer state matters here.
    chosen: Any = OPTIMIZERS[UPDATES]
    return evolve(spec, batch=batch, parallel=parallel, optimizer=chosen(lr=1e-4))


def with_slots(spec: Spec) -> Spec:
    """Return this spec with an adapter in each slot, if the server trains adapters."""
    assert spec.serve is not None
    if spec.adapter is None:
        return as_training(spec)
    names = slot_names(spec.serve.adapters)
    tasks = {name: AdapterTask(name=name, adapter=spec.adapter) for name in names}
    return evolve(as_training(spec), adapter=None, tasks=tasks)


def architecture_with_slots(arch: Architecture, count: int) -> Architecture:
    """Return a model with one adapter as a model with one such adapter per slot."""
    if arch.adapter is None:
        return arch
    return evolve(arch, adapter=TaskAdapters(tasks=dict.fromkeys(slot_names(count), arch.adapter)))


CODE: Final = "X447"
NO_LOSSES: Final = "a server adds nothing to the losses of its clients"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def asked_key(serve: Serve) -> str:
    """Return text on the key that clients must show."""
    if serve.key is not None:
        return f"the key in {serve.key}"
    return f"the key in {serve.key_variable}, or a key that the server generates and prints if that is unset"


@checks("serve.adapter", reads="serve.adapters serve.mode adapter adapter.*")
@checks("serve.losses", reads="model.*")
@checks("serve.key", reads="serve.host serve.key")
@checks("serve.tls", reads="serve.certificate serve.private_key")
@checks("serve.mesh", reads="{context} parallel.pp.size parallel.stack")
def check_server(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """Check that the adapter can be trained, that losses come from clients only, that the address is not open to
    everybody, and that only fsdp sums gradients over the mesh."""
    serve = spec.serve
    assert serve is not None
    if serve.mode == "full":
        if spec.adapter is not None:
            message = "a server that trains all of the model has no adapters"
            found.fail("serve.adapter", CODE, "adapter", message, "remove it, or write `mode = adapters`")
        else:
            found.passed("serve.adapter", "one client at a time trains all of the model")
    elif spec.adapter is None:
        hint = "add one, such as `adapter lora { rank = 32, alpha = 32 }`: the largest that a client may ask for"
        found.fail("serve.adapter", CODE, "serve", "a server trains adapters, and the spec has none", hint)
    elif (unfit := spec.adapter.unfit_for_slot()) is not None:
        setting, message, hint = unfit
        found.fail("serve.adapter", CODE, f"adapter.{setting}", message, hint)
    else:
        found.passed("serve.adapter", f"{serve.adapters} adapters of up to {spec.adapter.resolved().title()}")
    aux_loss = "router_aux_loss" if hasattr(spec.model, "router_aux_loss") else "router.aux_loss"  # of its own code
    for name, value in ((aux_loss, arch.router_aux_loss), ("router.z_loss", arch.router_z_loss)):
        if arch.is_moe and value > 0:
            found.fail("serve.losses", CODE, f"model.{name}", NO_LOSSES, f"use {name.removeprefix('router.')} 0")
    if arch.learning_indexers:
        found.fail("serve.losses", CODE, "model.index_loss", NO_LOSSES, "use index_loss 0")
    if serve.host not in LOOPBACK and serve.key is None:
        message = f"everybody who reaches {serve.host} could use the server, because it needs no key"
        hint = 'write `key = "XTRAIN_KEY"`, the name of an environment variable, or `host = "127.0.0.1"`'
        found.fail("serve.key", CODE, "serve.host", message, hint)
    else:
        found.passed("serve.key", f"clients need {asked_key(serve)}")
    if (serve.certificate is None) != (serve.private_key is None):
        given, other = ("certificate", "private_key") if serve.certificate else ("private_key", "certificate")
        message = f"a server with TLS needs both files, and there is no {other}"
        found.fail("serve.tls", CODE, f"serve.{given}", message, f'write `{other} = "FILE.pem"` next to it')
    if any(layout.size(axis) > 1 for axis in ("ring", "ulysses") if axis not in folded_axes(spec.parallel)):
        message = "a server sums gradients over ranks of cp by fsdp"
        found.fail("serve.mesh", CODE, "parallel.cp.fold", message, "use fold all")
        return
    if layout.size("pp") > 1 and arch.tie_embeddings and serve.mode == "full":
        message = "a server with pp has a tied embedding on two stages, and does not train both copies"
        found.fail("serve.mesh", CODE, "parallel.pp.size", message, "use pp 1, or train adapters")
        return
    if not spec.parallel.execution.uses_fsdp:
        message = f"stack {spec.parallel.stack} sums gradients of all adapters in every backward"
        found.fail("serve.mesh", CODE, "parallel.stack", message, "use stack parallel")
        return
    whole = all(layout.size(axis) == 1 for axis in ("pp", "ring", "ulysses"))
    found.passed("serve.mesh", "every rank has whole texts and all layers" if whole else "fsdp sums gradients")
