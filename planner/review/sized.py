"""Specs of the same experiment with a wider or deeper model, for a few steps on one rank of this machine."""

from typing import Any, Final

from attrs import evolve, fields_dict

from xtrain.dsl.spec import Origin, Spec
from xtrain.dsl.values import Quantity
from xtrain.plan.architecture import Architecture

# Sizes that grow with the width; the width of a head stays.
GROWING: Final = ("dim", "heads", "kv_heads", "ffn", "expert_ffn")


class Unsized(Exception):
    """A model cannot have a size. The message is the reason."""


def sized(spec: Spec, arch: Architecture, *, steps: int, width: int | None = None, depth: int | None = None) -> Spec:
    """Return the spec with the model of another width or depth, `steps` steps without ticks, events and checkpoints.

    arch: the model of the spec. Raises Unsized if a size would not be a whole number.
    """
    known = fields_dict(type(spec.model))
    changes: dict[str, Any] = {} if depth is None else {"layers": depth}
    if width is not None:
        for name in (name for name in _growing(arch) if name in known):
            size = getattr(arch, name) * width / arch.dim
            if not size.is_integer():
                raise Unsized(f"width {width:,} would have {size:g} for `{name}`: take multiples of {_unit(arch):,}")
            changes[name] = int(size)
        if "head_dim" in known:
            changes["head_dim"] = arch.head_dim
    origins = spec.origins | dict.fromkeys((f"model.{name}" for name in changes), Origin("set"))
    return evolve(
        spec,
        experiment=evolve(spec.experiment, budget=Quantity(steps, "steps")),
        model=evolve(spec.model, **changes),
        phases={},
        ticks=(),
        events=(),
        checkpoint=evolve(spec.checkpoint, enabled=False, resume=False, from_=None, best=None),
        launch=type(spec.launch)(device="cpu"),
        parallel=type(spec.parallel)(),
        compile=type(spec.compile)(mode="none"),
        ema=None,
        origins=origins,
    )


def _growing(arch: Architecture) -> list[str]:
    """Return the sizes of a model that grow with its width; a single key/value head, which all share, stays single."""
    return [name for name in GROWING if getattr(arch, name) and (name, arch.kv_heads) != ("kv_heads", 1)]


def _unit(arch: Architecture) -> int:
    """Return a width whose multiples have whole numbers of heads and of everything else that grows."""
    sizes = [getattr(arch, name) for name in _growing(arch)]
    return next(width for width in range(1, arch.dim + 1) if all(not size * width % arch.dim for size in sizes))
