"""Ranks as a grid: axes and their strides, the expert view of the same ranks, and which axes leave a machine."""

from math import prod
from typing import Final

from xtrain.planner.plan import Axis, Mesh

AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp")
EXPERT_AXES = ("pp", "ep_replicate", "ep_fsdp", "ep")


def build_mesh(sizes: dict[str, int], *, ep: int, ranks_per_node: int) -> Mesh:
    """Lay ranks out over `sizes` (axis → size, all of AXES), and once more with experts in mind.

    `ep` must divide fsdp · ring · ulysses · tp; a group of `ep` consecutive ranks holds every expert once.
    """
    group = prod(sizes[axis] for axis in ("fsdp", "ring", "ulysses", "tp"))
    expert_sizes = {
        "pp": sizes["pp"],
        "ep_replicate": sizes["replicate"],
        "ep_fsdp": group // ep,
        "ep": ep,
    }
    world = prod(sizes.values())
    return Mesh(
        axes=_axes(sizes, AXES, world, ranks_per_node),
        expert_axes=_axes(expert_sizes, EXPERT_AXES, world, ranks_per_node),
        world_size=world,
        ranks_per_node=ranks_per_node,
    )


def mesh_of_group(mesh: Mesh) -> Mesh:
    """The ranks of one copy of the model (`replicate`), as a mesh of their own."""
    sizes = {axis.name: axis.size for axis in mesh.axes} | {"replicate": 1}
    ep = next(axis.size for axis in mesh.expert_axes if axis.name == "ep")
    return build_mesh(sizes, ep=ep, ranks_per_node=min(mesh.ranks_per_node, prod(sizes.values())))


def _axes(sizes: dict[str, int], names: tuple[str, ...], world: int, ranks_per_node: int) -> tuple[Axis, ...]:
    """Outer to inner; the innermost axis has stride 1.

    The ranks of an axis lie in an aligned block of stride · size. A group of them leaves its machine exactly when
    the end of a machine falls inside a block, and the first such end, rank `ranks_per_node`, decides it for all.
    """
    axes = []
    stride = world
    for name in names:
        block, stride = stride, stride // sizes[name]
        crosses = sizes[name] > 1 and ranks_per_node < world and ranks_per_node % block != 0
        axes.append(Axis(name=name, size=sizes[name], stride=stride, crosses_nodes=crosses))
    return tuple(axes)


# Ranks from which on those of gloo's groups connect only where they first need each other. At once, n of them ask the
# one store that they meet in for n² addresses of 8 n bytes, and each opens n sockets: benchmarks/startup.py.
LAZY_FROM: Final = 128


def groups(mesh: Mesh, axis: str) -> list[list[int]]:
    """The ranks of every group of an axis (of either view), each group in the order of its coordinate."""
    found = next(a for a in (*mesh.axes, *mesh.expert_axes) if a.name == axis)
    block = found.stride * found.size
    return [
        [base + offset + index * found.stride for index in range(found.size)]
        for base in range(0, mesh.world_size, block)
        for offset in range(found.stride)
    ]


def own_group(mesh: Mesh, axis: str, rank: int) -> list[int]:
    """That of `groups` which a rank is in."""
    found = next(a for a in (*mesh.axes, *mesh.expert_axes) if a.name == axis)
    first = rank - rank // found.stride % found.size * found.stride
    return [first + index * found.stride for index in range(found.size)]


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)


def nearest_multiples(number: int, step: int) -> str:
    """`4032 or 4096`: the multiples of `step` around `number`, above zero."""
    low = number // step * step
    return f"{low} or {low + step}" if low else f"{step}"
