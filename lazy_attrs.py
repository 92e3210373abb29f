"""`define` and `frozen` of attrs, whose methods are generated when a class is first used.

Generating the methods of a class takes attrs about 0.5 ms. A command makes objects of a third of the classes that it
imports, and compares those of a few.
Instances have a `__dict__` instead of slots: a class with slots is a new class, which cannot be made later.
"""

from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field

_BUILDING = RLock()
_FIELDS = "__attrs_attrs__"
# Methods that attrs leaves alone, or replaces in its own way, if a class has them.
_OWN = {"__init__", "__eq__", "__ne__", "__hash__", "__setattr__", "__slots__"}
_OPTIONS = {"eq", "frozen", "kw_only"}


class _Fields:
    """Fields of a class: reading them builds the class."""

    def __init__(self, build: Callable[[], None]) -> None:
        self.build = build

    def __get__(self, instance: object, owner: type) -> Any:
        self.build()
        return owner.__attrs_attrs__


def _needs_slots(cls: type) -> bool:
    """Return True for exceptions, and if a field has the name of a property of a base, which a slot alone hides."""
    names = vars(cls).get("__annotations__", ())
    hides = any(isinstance(vars(base).get(name), property) for base in cls.__mro__[1:-1] for name in names)
    return hides or issubclass(cls, BaseException)


def _declare(decorate: Callable[..., type], cls: type | None = None, /, **options: Any) -> Any:
    """Return the class with methods that replace themselves by those of attrs, by `decorate` with `options`."""
    if cls is None:
        return partial(_declare, decorate, **options)
    own = vars(cls)
    if not (own.keys().isdisjoint(_OWN) and _OPTIONS.issuperset(options)) or _needs_slots(cls):
        return decorate(cls, **options)

    def build() -> None:
        with _BUILDING:
            if isinstance(vars(cls)[_FIELDS], _Fields):
                for base in cls.__mro__[1:-1]:
                    getattr(base, _FIELDS, None)
                # Few classes are compared or printed.
                decorate(cls, auto_detect=False, slots=False, **{**options, "eq": False, "repr": False})

    def compare() -> None:
        with _BUILDING:
            fields = {a.name: field(eq=a.eq_key or a.eq, hash=a.hash, repr=a.repr) for a in attrs.fields(cls)}
            other = vars(decorate(type(cls.__name__, (), fields), slots=False, **options))
            for name in stubs.keys() - {"__init__"}:
                setattr(cls, name, other[name])

    def __init__(self: Any, /, *args: Any, **fields: Any) -> None:
        build()
        cls.__init__(self, *args, **fields)

    def __repr__(self: Any) -> str:
        compare()
        return cls.__repr__(self)

    def __eq__(self: Any, other: object) -> Any:
        compare()
        return cls.__eq__(self, other)

    def __hash__(self: Any) -> int:
        compare()
        return hash(self)

    methods = [__init__, *([__eq__, __hash__] if options.get("eq", True) else []), __repr__]
    stubs = {method.__name__: method for method in methods if method.__name__ not in own}
    for name, method in stubs.items():
        setattr(cls, name, method)
    setattr(cls, _FIELDS, _Fields(build))
    return cls


if TYPE_CHECKING:
    from attrs import define, frozen
else:
    define, frozen = partial(_declare, attrs.define), partial(_declare, attrs.frozen)
