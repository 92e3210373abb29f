"""What a server needs of a spec, and which layouts and addresses it does not have."""

from typing import Final

from xtrain.dsl.schema.serving import Serve
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.mesh.sharding import folded_axes

CODE: Final = "X447"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def asked_key(serve: Serve) -> str:
    """Which key clients must show, in words."""
    if serve.key is not None:
        return f"the key in {serve.key}"
    return f"the key in {serve.key_variable}, or if that is not set one that the server makes and prints,"


def check_server(spec: Spec, arch: Architecture, layout: Layout, found: Findings) -> None:
    """An adapter that can be trained, losses that are those of clients alone, an address that is not open to everybody,
    and a mesh over which fsdp alone sums gradients."""
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
    for name, value in (("aux_loss", arch.router_aux_loss), ("z_loss", arch.router_z_loss)):
        if arch.is_moe and value > 0:
            message = "a server adds nothing to the losses of its clients, and routers are not trained"
            found.fail("serve.losses", CODE, f"model.router.{name}", message, f"use {name} 0")
    if serve.host not in LOOPBACK and serve.key is None:
        message = f"everybody who reaches {serve.host} could use the server, as it asks for no key"
        hint = 'write `key = "XTRAIN_KEY"`, the name of an environment variable, or `host = "127.0.0.1"`'
        found.fail("serve.key", CODE, "serve.host", message, hint)
    else:
        found.passed("serve.key", f"{asked_key(serve)} is asked for")
    if (serve.certificate is None) != (serve.private_key is None):
        given, other = ("certificate", "private_key") if serve.certificate else ("private_key", "certificate")
        message = f"a server with TLS needs both files, and there is no {other}"
        found.fail("serve.tls", CODE, f"serve.{given}", message, f'write `{other} = "FILE.pem"` beside it')
    if any(layout.size(axis) > 1 for axis in ("ring", "ulysses") if axis not in folded_axes(spec.parallel)):
        message = "a server sums gradients over ranks of cp by fsdp"
        found.fail("serve.mesh", CODE, "parallel.cp.fold", message, "use fold all")
        return
    if layout.size("pp") > 1 and arch.tie_embeddings and serve.mode == "full":
        message = "a server with pp has the embedding twice where it is the head, and does not train both copies"
        found.fail("serve.mesh", CODE, "parallel.pp.size", message, "use pp 1, or train adapters")
        return
    if not spec.parallel.execution.uses_fsdp:
        message = f"stack {spec.parallel.stack} sums gradients of all adapters in every backward"
        found.fail("serve.mesh", CODE, "parallel.stack", message, "use stack parallel")
        return
    whole = all(layout.size(axis) == 1 for axis in ("pp", "ring", "ulysses"))
    found.passed("serve.mesh", "every rank has whole texts and all layers" if whole else "fsdp sums gradients")
