"""Which ranks a profile or a memory snapshot is of."""

from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

from xtrain.dsl.schema.setting import AUTO, Auto, Role, at_least, setting

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

# So many ranks say what all of them do, and their traces can be looked at.
MOST_BY_ITSELF: Final = 8


def ranks_setting(what: str) -> Any:
    """The setting `ranks`. what: the ranks do."""
    return setting(
        f"how many ranks {what}, evenly spread; auto: 8, or one per pipeline rank if those are more",
        default=AUTO,
        check=at_least(1),
        role=Role.CADENCE,
        example="2",
    )


def recorded_ranks(ranks: int | Literal["first", "all"] | Auto, world: int, pipeline: int) -> list[int] | None:
    """Ranks evenly spread over all of them, the first one among them; None: all.

    pipeline: pipeline coordinates, which are the outermost axis: of so many ranks or more each has one.
    """
    if ranks == "all":
        return None
    number = max(MOST_BY_ITSELF, pipeline) if isinstance(ranks, Auto) else 1 if ranks == "first" else int(ranks)
    return None if number >= world else [index * world // number for index in range(number)]


@frozen
class RecordedRanks:
    """The ranks of a setting in a run: None where they are all `world`."""

    ranks: list[int] | None
    world: int

    @classmethod
    def of(cls, ranks: int | Literal["first", "all"] | Auto, run: "Resolved") -> "RecordedRanks":
        world = run.layout.mesh.world_size
        return cls(recorded_ranks(ranks, world, run.size("pp")), world)

    @property
    def count(self) -> int:
        return self.world if self.ranks is None else len(self.ranks)

    @property
    def text(self) -> str:
        """`the rank`, `both ranks`, `8 of 1,024 ranks`."""
        if self.world == 1:
            return "the rank"
        if self.count == self.world:
            return f"all {self.world} ranks" if self.world > 2 else "both ranks"
        return "the first rank" if self.count == 1 else f"{self.count} of {self.world:,} ranks"
