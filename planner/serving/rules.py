"""What a server needs of a spec, and which layouts and addresses it does not have."""

from typing import Final

from ...dsl.spec import Spec
from ..findings import Findings
from ..mesh.layout import Layout

CODE: Final = "X447"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def check_server(spec: Spec, layout: Layout, found: Findings) -> None:
    """An adapter that can be trained, an address that is not open to everybody, and a mesh on which every rank has
    whole texts and the whole depth of the model."""
    serve = spec.serve
    assert serve is not None
    if spec.adapter is None:
        hint = "add one, such as `adapter lora { rank = 32, alpha = 32 }`: the largest that a client may ask for"
        found.fail("serve.adapter", CODE, "serve", "a server trains adapters, and the spec has none", hint)
    elif (unfit := spec.adapter.unfit_for_task()) is not None:
        setting, message, hint = unfit
        found.fail("serve.adapter", CODE, f"adapter.{setting}", message, hint)
    else:
        found.passed("serve.adapter", f"{serve.adapters} adapters of up to {spec.adapter.resolved().title()}")
    if serve.host not in LOOPBACK and serve.key is None:
        message = f"everybody who reaches {serve.host} could use the server, as it asks for no key"
        hint = 'write `key = "XTRAIN_KEY"`, the name of an environment variable, or `host = "127.0.0.1"`'
        found.fail("serve.key", CODE, "serve.host", message, hint)
    else:
        asked = f"the key in {serve.key} is asked for" if serve.key else "no key is asked for on this machine"
        found.passed("serve.key", asked)
    for axis, path in (("pp", "parallel.pp.size"), ("ring", "parallel.cp.size"), ("ulysses", "parallel.cp.size")):
        if layout.size(axis) > 1:
            name = path.split(".")[1]
            message = f"a server has no {name}: every rank computes whole texts with all layers"
            found.fail("serve.mesh", CODE, path, message, f"use {name} 1, and fsdp or tp")
            return
    if not spec.parallel.execution.uses_fsdp:
        message = f"stack {spec.parallel.stack} sums gradients of all adapters in every backward"
        found.fail("serve.mesh", CODE, "parallel.stack", message, "use stack parallel")
        return
    found.passed("serve.mesh", "every rank has whole texts and all layers")
