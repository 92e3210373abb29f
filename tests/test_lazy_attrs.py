"""`define` and `frozen` behave like those of attrs, and generate nothing before a class is used."""

import copy
import pickle
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from threading import Barrier

import attrs
import pytest
from attrs import evolve, field
from attrs.exceptions import FrozenInstanceError

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
