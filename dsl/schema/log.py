"""Trackers, which take the records of a run beside its own files: `log`, whose settings they are."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import attrs
from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Role, setting, settings_of

if TYPE_CHECKING:
    from xtrain.planner.findings import Findings

TRACKERS: Final = Registry["Tracker"]("tracker", "trackers")
# The op and the node of a tracker are its name behind this.
OP: Final = "setup.log."


@TRACKERS.base
class Tracker(Component):
    """`log { NAME { … } }`: what takes the records of a run, on its first rank and beside training.

    The class of a tracker says what the rest of xtrain asks of it; what it does not say is as here. None changes what
    is trained: a run may be resumed with others, and with other settings of the same.
    """

    kind: ClassVar[str]  # type: ignore[misc]
    hands_on = True
    title: ClassVar[str] = ""
    """What people call it."""
    package: ClassVar[str] = ""
    """The package that it cannot run without."""
    install: ClassVar[str] = ""
    """What `pip install` takes for that package; else its name."""

    @classmethod
    def in_log(cls) -> tuple[type, Any]:
        """The setting of `log` that chooses it: type and field. A plan without it does not speak of it."""
        return cls, setting(cls.title, default=None, role=Role.EXECUTION, added=True)

    @classmethod
    def chosen(cls, value: Any) -> Self | None:
        """The tracker that a value of this setting chooses; None: none."""
        return value

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node: all of its settings."""
        values = {name: getattr(self, attribute.name) for name, (attribute, _) in settings_of(type(self)).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def does(self) -> str:
        """What it does, in words: the first rank …, beside training."""
        raise NotImplementedError

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        """How the page of a plan names it. args: of its node."""
        return cls.title

    def check(self, found: "Findings") -> None:
        """Judge its settings, as rules `log.NAME.SETTING`."""

    def idle(self) -> dict[str, tuple[str, str]]:
        """The settings that change nothing beside the others: (why, what to do instead)."""
        return {}


@frozen
class Log:
    """`log { … }`: trackers, which get the records of a run in addition to its own files."""

    members: ClassVar = TRACKERS

    @classmethod
    def complete(cls) -> "type[Log]":
        """The class with a setting for each tracker that there is."""
        return cls.of(dict(TRACKERS))

    @staticmethod
    def of(trackers: dict[str, type[Tracker]]) -> "type[Log]":
        """The class with a setting for each of some trackers."""
        return _log_class(tuple(trackers.items()))

    def written(self) -> Iterator[Tracker]:
        """What blocks inside it say, of trackers that are off too."""
        values = (getattr(self, attribute.name) for attribute in attrs.fields(type(self)))
        yield from (value for value in values if isinstance(value, Tracker))

    def trackers(self) -> Iterator[Tracker]:
        """Those that are on."""
        for attribute in attrs.fields(type(self)):
            tracker = TRACKERS.get(attribute.name, attribute.type)
            chosen = tracker.chosen(getattr(self, attribute.name))
            if chosen is not None:
                yield chosen


@cache
def _log_class(trackers: tuple[tuple[str, type[Tracker]], ...]) -> type[Log]:
    declared = {name: tracker.in_log() for name, tracker in trackers}
    body = {
        "__doc__": Log.__doc__,
        "__module__": __name__,
        "__annotations__": {name: kind for name, (kind, _) in declared.items()},
        **{name: field for name, (_, field) in declared.items()},
    }
    return frozen(type("Log", (Log,), body))


def tracker_of(op: str) -> type[Tracker] | None:
    """The tracker that an op of a plan is of; None for other ops, and where it is not installed."""
    return TRACKERS.of_kind(op.removeprefix(OP)) if op.startswith(OP) else None
