"""`precision { base … }`: which matrices are stored in blocks of codes."""

from collections.abc import Iterator, Set

from xtrain.dsl.schema.bases import Base
from xtrain.planner.architecture import Architecture, BlockParameter, LayerKind


def quantised_names(arch: Architecture, base: Base, frozen: Set[str]) -> frozenset[str]:
    """The parameters that a base stores: matrices of products in blocks that are not trained, without routers."""
    if not base.stores:
        return frozenset()
    names = (
        f"layers.{layer}.{each.name}"
        for kind in arch.kinds
        for each in matrices_of(arch, kind)
        for layer in kind.layers
    )
    return frozenset(name for name in names if name in frozen)


def matrices_of(arch: Architecture, kind: LayerKind) -> Iterator[BlockParameter]:
    """The matrices of products in the block of one kind of layers, trained or not."""
    for layer in kind.block.layers():
        for each in layer.parameters(arch) if layer.adapts else ():
            if len(each.shape) == (3 if each.expert else 2) and not each.router:
                yield each
