"""`define` and `frozen` behave like those of attrs, and generate nothing before a class is used."""

import copy
import inspect
import os
import pickle
import pkgutil
import signal
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cached_property
from importlib import import_module
from threading import Barrier, Event, Thread
from typing import Any

import attrs
import pytest
from attrs import evolve, field
from attrs.exceptions import FrozenInstanceError

import xtrain
from xtrain import lazy_attrs
from xtrain.lazy_attrs import define, frozen


def is_built(cls: type) -> bool:
    return isinstance(vars(cls)["__attrs_attrs__"], tuple)


def declared(declare, **options):
    """A base and a class with a field of each kind."""

    @declare(**options)
    class Base:
        first: int
        second: str = "b"

    @declare(**options)
    class Derived(Base):
        numbers: tuple[int, ...] = field(factory=tuple)
        hidden: int = field(default=0, repr=False, eq=False)
        even: int = field(default=2, converter=int, validator=attrs.validators.ge(0))
        short: str = field(default="x", repr=lambda text: f"<{text}>")
        lower: str = field(default="", eq=str.lower)

        @cached_property
        def twice(self) -> int:
            return 2 * self.first

    return Base, Derived


@pytest.mark.parametrize("name", ["define", "frozen"])
@pytest.mark.parametrize("options", [{}, {"kw_only": True}, {"eq": False}, {"eq": False, "kw_only": True}])
def test_classes_behave_like_those_of_attrs(name, options):
    seen = []
    for module in (attrs, lazy_attrs):
        base, derived = declared(getattr(module, name), **options)
        one, other = derived(first=1, lower="A"), derived(first=1, lower="a", hidden=3)
        try:
            hashed = hash(one) == hash(other)
        except TypeError as error:
            hashed = str(error)
        with pytest.raises(TypeError) as missing:
            derived()
        with pytest.raises(ValueError) as refused:
            derived(first=1, even=-1)
        changed = evolve(one, second="c")
        with pytest.raises(FrozenInstanceError) if name == "frozen" else nullcontext():
            one.first = 2
        seen.append((
            one == other, one != other, one == base(first=1), hashed, repr(one), one.twice, one.first,
            str(missing.value).split("missing")[1], refused.type, changed.second, attrs.asdict(changed),
            [(a.name, a.default, a.kw_only, a.inherited, a.alias) for a in attrs.fields(derived)][1:2],
            copy.deepcopy(one).first, derived.__match_args__,
        ))  # fmt: skip
    assert seen[0] == seen[1]


def test_nothing_is_generated_before_a_class_is_used():
    base, derived = declared(frozen)
    assert not is_built(base) and not is_built(derived)
    assert base(1).first == 1
    assert is_built(base) and not is_built(derived)
    assert [a.name for a in attrs.fields(derived)][:3] == ["first", "second", "numbers"] and is_built(derived)


def test_a_base_is_built_before_its_subclass():
    base, derived = declared(frozen)
    with pytest.raises(FrozenInstanceError):
        derived(1).first = 2
    assert is_built(base)


@frozen
class Kept:
    """A class that a pickle can name."""

    name: str


@pytest.mark.parametrize("use", [repr, hash, lambda one: one == one, lambda one: one.name])
def test_objects_that_no_call_has_made_are_whole(use):
    stored = pickle.dumps(Kept("a"))

    @frozen
    class Fresh:
        name: str

    fresh = Fresh.__new__(Fresh)
    vars(fresh).update(name="a")
    assert use(fresh) is not None and use(pickle.loads(stored)) is not None
    assert fresh == Fresh("a") and pickle.loads(stored) == Kept("a")


def test_a_field_takes_the_place_of_a_property():
    class Contract(ABC):
        @property
        @abstractmethod
        def rows(self) -> int: ...

    @frozen
    class Source(Contract):
        rows: int

    assert Source(3).rows == 3


def test_methods_of_the_class_are_kept():
    @frozen
    class Named:
        name: str

        def __repr__(self) -> str:
            return self.name

    @frozen
    class Equal:
        name: str

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    assert repr(Named("a")) == "a" and Named("a") == Named("a")
    assert Equal("a") == Equal("b")

    @define
    class Failure(Exception):
        code: int

    with pytest.raises(Failure) as raised:
        raise Failure(3)
    assert raised.value.code == 3 and raised.value.args == (3,)


@pytest.mark.parametrize("turn", range(20))
def test_threads_may_be_the_first_to_use_a_class_at_once(turn):
    _, derived = declared(frozen)
    together = Barrier(8)

    def use(number: int) -> bool:
        together.wait()
        same = derived(number) == derived(number) and hash(derived(number)) == hash(derived(number))
        return same and repr(derived(number)) == repr(derived(number))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(8)))


def test_objects_have_no_attributes_but_fields():
    """Like objects with slots; those of subclasses that attrs does not make have others."""

    @define
    class Base:
        count: int = field(converter=int)

        @property
        def twice(self) -> int:
            return 2 * self.count

        @twice.setter
        def twice(self, value: int) -> None:
            self.count = value // 2

    @define
    class Derived(Base):
        name: str = ""

    class Other(Base):
        pass

    class Plain:
        pass

    @define
    class Mixed(Plain):
        name: str = ""

    for one in (Base(1), Derived(1)):
        with pytest.raises(AttributeError, match="has no field `cuont`"):
            one.cuont = 2
        one.count = "3"
        assert one.count == 3
        one.twice = 8
        assert one.count == 4 and vars(one).keys() <= {"count", "name"}
    Other(1).cuont = Mixed().cuont = 2


@pytest.mark.parametrize("declare", [define, frozen])
def test_objects_that_no_call_has_made_take_no_other_values(declare):
    @declare
    class Fresh:
        name: str

    fresh = Fresh.__new__(Fresh)
    vars(fresh).update(name="a")
    match fresh:
        case Fresh(name):
            assert name == "a"
    base, derived = declared(declare)
    assert [*inspect.signature(derived).parameters][:3] == ["first", "second", "numbers"] and is_built(derived)
    assert [*inspect.signature(type("Other", (base,), {})).parameters] == ["first", "second"]
    base, _ = declared(declare)
    other = base.__new__(base)
    with pytest.raises(AttributeError):
        other.third = 1
    with pytest.raises(FrozenInstanceError) if declare is frozen else nullcontext():
        other.first = 1
    _, derived = declared(declare)
    with pytest.raises(AttributeError):
        del derived.__new__(derived).first


def test_a_property_hides_no_field_that_a_base_annotates():
    class Contract(ABC):
        rows: int

    class Counted(Contract):
        @property
        def rows(self) -> int:
            return 3

    @frozen
    class Source(Counted):
        name: str

    assert not is_built(Source) and Source("a").rows == 3


def test_a_child_process_builds_classes_while_a_thread_of_its_parent_does():
    inside, leave = Event(), Event()

    def hold():
        with lazy_attrs._BUILDING:
            inside.set()
            leave.wait(0.2)

    thread = Thread(target=hold)
    thread.start()
    inside.wait()
    if not (child := os.fork()):
        signal.alarm(10)
        os._exit(declared(frozen)[1](1).first - 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_all_classes_of_the_product_can_be_built():
    """With all methods: attrs reports a wrong order of fields where it generates them."""
    built = 0
    for module in pkgutil.walk_packages(xtrain.__path__, "xtrain."):
        if module.name.startswith(("xtrain.tests", "xtrain.setup")) or module.name.endswith("__main__"):
            continue
        with suppress(ImportError):  # of packages that are not installed
            for cls in vars(import_module(module.name)).values():
                if not isinstance(cls, type) or cls.__module__ != module.name or "__attrs_attrs__" not in vars(cls):
                    continue
                assert isinstance(cls.__match_args__, tuple) and is_built(cls), cls
                for name, others in (("__eq__", [None]), ("__repr__", [])):
                    method: Any = vars(cls).get(name)
                    if getattr(method, "__globals__", None) is vars(lazy_attrs):
                        with suppress(AttributeError):
                            method(None, *others)
                        assert vars(cls)[name] is not method
                built += 1
    assert built > 450
