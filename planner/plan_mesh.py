"""The part of a plan that says who is where: the axes of the mesh and the coordinates of ranks."""

from attrs import frozen


@frozen(kw_only=True)
class Axis:
    """One axis of the mesh. `stride` is the distance in rank numbers between neighbours along it."""

    name: str
    size: int
    stride: int
    crosses_nodes: bool


@frozen(kw_only=True)
class Mesh:
    """The ranks as a grid, axes outer to inner, and the expert view of the same ranks."""

    axes: tuple[Axis, ...]
    expert_axes: tuple[Axis, ...]
    world_size: int
    ranks_per_node: int

    def size(self, axis: str) -> int:
        return next(a.size for a in self.axes if a.name == axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis."""
        return {a.name: rank // a.stride % a.size for a in self.axes}

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows: replicate · fsdp."""
        return self.size("replicate") * self.size("fsdp")

    def data_rank(self, rank: int) -> int:
        place = self.coordinates(rank)
        return place["replicate"] * self.size("fsdp") + place["fsdp"]
