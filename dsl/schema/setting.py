"""`setting`: one field of a block, with everything the compiler, the docs and the editor need to know of it."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import attrs


class Auto:
    """The value `auto`: the planner derives it, and the plan shows what it derived and why."""

    _instance: "Auto | None" = None

    def __new__(cls) -> "Auto":
        cls._instance = cls._instance or super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "auto"


AUTO: Final = Auto()


class Role(StrEnum):
    """What a setting is about; decides whether it belongs to the identity of an experiment (`config_id`)."""

    EXPERIMENT = "experiment"  # changes what is learned
    BUDGET = "budget"  # how long
    CADENCE = "cadence"  # when something is looked at or saved
    PATH = "path"  # where things lie
    MESH = "mesh"  # over which ranks, and how the work is cut
    EXECUTION = "execution"  # which kernel, how many threads: the same experiment


class Required:
    """Marks a setting without default."""


@attrs.frozen(kw_only=True)
class Setting:
    """Metadata of one field, stored under `attrs` metadata key `setting`.

    doc: one line for people. units: the units a `Quantity` may have here. check: returns what is wrong with a value as
    the end of a sentence ("must be above 0"), or None. role: see `Role`. example: a value as it is written in a spec.
    only: the block labels (a model family, a scheduler kind) that have this setting; empty means all of them.
    required_by: the labels that must give it although it has a default, which is what all other labels have.
    """

    doc: str
    units: tuple[str, ...] = ()
    check: Callable[[Any], str | None] | None = None
    role: Role = Role.EXPERIMENT
    only: tuple[str, ...] = ()
    required_by: tuple[str, ...] = ()
    example: str = ""


def setting(
    doc: str,
    *,
    default: Any = attrs.NOTHING,
    units: tuple[str, ...] = (),
    check: Callable[[Any], str | None] | None = None,
    role: Role = Role.EXPERIMENT,
    only: tuple[str, ...] = (),
    required_by: tuple[str, ...] = (),
    example: str = "",
) -> Any:
    """Declare a field of a block; without `default` the spec must give it."""
    meta = Setting(doc=doc, units=units, check=check, role=role, only=only, required_by=required_by, example=example)
    return attrs.field(default=default, metadata={"setting": meta}, kw_only=True)


def settings_of(block: type) -> dict[str, tuple[attrs.Attribute, Setting]]:
    """Name → (attribute, metadata) for every setting of a block class, in the order of its definition."""
    return {a.name: (a, a.metadata["setting"]) for a in attrs.fields(block) if "setting" in a.metadata}


# Checks ---------------------------------------------------------------------------------------------------------------


def _amount(value: Any) -> Any:
    return getattr(value, "value", value)


def positive(value: Any) -> str | None:
    return None if _amount(value) > 0 else "must be above 0"


def not_negative(value: Any) -> str | None:
    return None if _amount(value) >= 0 else "must not be negative"


def at_least(bound: float) -> Callable[[Any], str | None]:
    return lambda value: None if _amount(value) >= bound else f"must be at least {bound:g}"


def between(low: float, high: float) -> Callable[[Any], str | None]:
    """Both bounds belong to the range."""

    def check(value: Any) -> str | None:
        return None if low <= _amount(value) <= high else f"must lie between {low:g} and {high:g}"

    return check


def share(value: Any) -> str | None:
    """A percentage from 0 to 100; other units must not be negative."""
    if getattr(value, "unit", None) == "%":
        return None if 0 <= value.value <= 100 else "must lie between 0% and 100%"
    return not_negative(value)


def momentum_pair(value: tuple[float, ...]) -> str | None:
    ok = len(value) == 2 and all(0 <= beta < 1 for beta in value)
    return None if ok else "must be two numbers from 0 up to, but not including, 1"
