"""What goes on with the steps behind the one in which it began: profiles, and memory that is watched."""

from typing import Protocol


class LongAction(Protocol):
    """Something that has begun and that further steps go on with. `kind`: of each there is one at a time."""

    kind: str

    def after_step(self) -> bool:
        """Whether it goes on behind this step. Collective."""
        ...

    def cut_short(self, why: str) -> None:
        """It cannot go on: keep what there is, and say why there is no more. Collective."""
        ...

    def drop(self) -> None:
        """The run has failed: let go of everything, without the other ranks, which may be gone. Never raises."""
        ...


class UnderWay:
    """All that is under way. All ranks begin and end the same things in the same places."""

    def __init__(self) -> None:
        self._all: list[LongAction] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def has(self, kind: str) -> bool:
        """Whether one of a kind is under way."""
        return any(each.kind == kind for each in self._all)

    def begin(self, lasting: LongAction) -> None:
        """Go on with something from the next step on."""
        self._all.append(lasting)

    def after_step(self) -> None:
        """A step has ended, and its ticks are still to come. Collective."""
        self._all = [each for each in self._all if each.after_step()]

    def cut_short(self, why: str) -> None:
        """The steps do not go on as they were going to. Collective."""
        while self._all:
            self._all.pop(0).cut_short(why)

    def drop(self) -> None:
        """The run has failed."""
        while self._all:
            self._all.pop(0).drop()
