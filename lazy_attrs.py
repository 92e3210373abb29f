"""`define` and `frozen` of attrs that generate the methods of a class when the class is first used.

attrs takes about 0.5 ms to generate the methods of a class. A command imports about 500 such classes, makes objects of
a third of them, and compares or prints objects of a few. The class that is declared is the class that is used, so it
cannot have slots: attrs makes a new class for them. Its objects refuse attributes that are no fields, like those of a
class with slots.
"""

import os
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

import attrs
from attrs import field

_BUILDING = RLock()
# A child process has the thread that forked alone: it would wait forever for a lock of another one.
os.register_at_fork(before=_BUILDING.acquire, after_in_parent=_BUILDING.release, after_in_child=_BUILDING.release)
_FIELDS = "__attrs_attrs__"
_COMPUTED = (_FIELDS, "__match_args__", "__signature__")  # the last belongs to `__init__`
# Methods that attrs leaves alone, or replaces in its own way, if a class has them.
_OWN = {"__init__", "__eq__", "__ne__", "__hash__", "__setattr__", "__delattr__", "__slots__", *_COMPUTED[1:]}
_OPTIONS = {"eq", "frozen", "kw_only"}


class _Unbuilt:
    """Attribute of a class that attrs computes: reading it builds the class."""

    def __init__(self, name: str, build: Callable[[], None]) -> None:
        self.name, self.build = name, build

    def __get__(self, instance: object, owner: type) -> Any:
        self.build()
        return getattr(owner, self.name)


def _needs_slots(cls: type) -> bool:
    """Return True for exceptions, and if a field has the name of a property of a base, which a slot alone hides."""
    names = cls.__annotations__  # its own: a class without any has an empty dict
    hides = any(isinstance(vars(base).get(name), property) for base in cls.__mro__[1:-1] for name in names)
    return hides or issubclass(cls, BaseException)


def _refuse_others(cls: Any) -> None:
    """Let objects of a class raise AttributeError if an attribute is set that is no field, unless a base would give
    them a `__dict__` even if attrs made slots."""
    if not all(hasattr(base, _FIELDS) or "__slots__" in vars(base) for base in cls.__mro__[1:-1]):
        return
    names, assign = {a.name for a in attrs.fields(cls)}, cls.__setattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name not in names and type(self) is cls and not hasattr(getattr(cls, name, None), "__set__"):
            raise AttributeError(f"`{cls.__name__}` has no field `{name}`", name=name, obj=self)
        assign(self, name, value)

    cls.__setattr__ = __setattr__


def _declare(decorate: Callable[..., type], cls: Any = None, /, **options: Any) -> Any:
    """Return the class with methods that replace themselves by those of attrs, by `decorate` with `options`."""
    if cls is None:
        return partial(_declare, decorate, **options)
    own = vars(cls)
    if not (own.keys().isdisjoint(_OWN) and _OPTIONS.issuperset(options)) or _needs_slots(cls):
        return decorate(cls, **options)

    def build() -> None:
        with _BUILDING:
            if isinstance(vars(cls)[_FIELDS], _Unbuilt):
                for base in cls.__mro__[1:-1]:
                    getattr(base, _FIELDS, None)
                for name in ("__setattr__", "__delattr__", *_COMPUTED[1:]):
                    if name in vars(cls):
                        delattr(cls, name)
                # Few classes are compared or printed.
                decorate(cls, auto_detect=False, slots=False, **{**options, "eq": False, "repr": False})
                if cls.__delattr__ is object.__delattr__:  # not frozen, and no base is
                    _refuse_others(cls)

    def compare() -> None:
        with _BUILDING:
            fields = {a.name: field(eq=a.eq_key or a.eq, hash=a.hash, repr=a.repr) for a in attrs.fields(cls)}
            other = vars(decorate(type(cls.__name__, (), fields), slots=False, **options))
            for name in ("__eq__", "__hash__", "__repr__"):
                if vars(cls).get(name) in stubs:
                    setattr(cls, name, other[name])

    def __init__(self: Any, /, *args: Any, **fields: Any) -> None:
        build()
        cls.__init__(self, *args, **fields)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        build()
        cls.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        build()
        cls.__delattr__(self, name)

    def __repr__(self: Any) -> str:
        compare()
        return cls.__repr__(self)

    def __eq__(self: Any, other: object) -> Any:
        compare()
        return cls.__eq__(self, other)

    def __hash__(self: Any) -> int:
        compare()
        return hash(self)

    compared = [__eq__, __hash__] if options.get("eq", True) else []
    stubs = [__init__, __setattr__, __delattr__, *compared, *([] if "__repr__" in own else [__repr__])]
    for stub in stubs:
        setattr(cls, stub.__name__, stub)
    for name in _COMPUTED:
        setattr(cls, name, _Unbuilt(name, build))
    return cls


if TYPE_CHECKING:
    from attrs import define, frozen
else:
    define, frozen = partial(_declare, attrs.define), partial(_declare, attrs.frozen)
