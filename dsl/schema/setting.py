"""Settings: one field of a block with its type, default, bounds, unit, docs, and checks of names and paths."""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache, partial
from math import ceil, floor
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import attrs
from attrs import field

from xtrain.lazy_attrs import frozen

# Bytes of UTF-8. File systems allow 255; suffixes, such as the time at which a run is set aside, need some of them.
LONGEST: Final = 200
_VARIABLE: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")
_ORIGIN: Final = re.compile(r"https?://[a-z0-9._-]+(:[0-9]+)?")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@frozen
class TextCheck:
    """Rule for allowed texts. words: the rule for the docs. hint: what to write instead. pattern: the part of the rule
    that editors can check; empty: none."""

    words: str
    hint: str | None
    pattern: str
    _problem: Callable[[str], str | None] = field(repr=False)

    def __call__(self, value: Any) -> str | None:
        """Return what is wrong with a text, or with one of a list, as the end of a sentence; None if valid."""
        texts = [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)]
        return next((problem for text in texts if (problem := self._problem(text)) is not None), None)


def _problem_of_name(text: str) -> str | None:
    if not text.strip():
        return "must not be empty"
    if text in (".", ".."):
        return f"must be a name, not the path `{text}`"
    if sign := re.search(r"[/\\]", text):
        return f"must not contain `{sign[0]}`"
    if sign := _CONTROL.search(text):
        return f"must be a name without control characters, but contains U+{ord(sign[0]):04X}"
    size = len(text.encode())
    return f"must have at most {LONGEST} bytes, not {size:,}" if size > LONGEST else None


def _problem_of_line(text: str) -> str | None:
    if sign := _CONTROL.search(text):
        return f"must be one line, but contains U+{ord(sign[0]):04X}"
    return None if text.strip() else "must not be empty"


def unless(pattern: re.Pattern[str], problem: str) -> Callable[[str], str | None]:
    """Return a function that gives the problem of a text which the whole pattern does not match."""
    return lambda text: None if pattern.fullmatch(text) else problem


file_name: Final = TextCheck("a name, not a path", "write one name, such as `mine`", r"^[^/\\]+$", _problem_of_name)
file_path: Final = TextCheck("", None, "", unless(re.compile("[^\0]*"), "must be a path, which cannot contain U+0000"))
variable_name: Final = TextCheck(
    "the name of an environment variable",
    "write a name, such as `XTRAIN_KEY`, and set that variable in the environment",
    f"^{_VARIABLE.pattern}$",
    unless(_VARIABLE, "must be the name of an environment variable, consisting of letters, digits and `_`"),
)
some_text: Final = TextCheck(
    "not empty", "write a text, or remove it", "", lambda text: None if text else "must not be empty"
)
one_line: Final = TextCheck("one line, not empty", "write a text, or remove it", "", _problem_of_line)
host_name: Final = TextCheck(
    "a name or an address, without a port",
    'write it as clients do, such as `"gpu1.lab"`',
    "",
    unless(_HOST, "must be a name or an address, without a port"),
)
server_url: Final = TextCheck(
    "the address of a server, without a path",
    'write for example `"http://gpu2:8000"`',
    "",
    unless(
        re.compile(r"https?://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?"), "must be the address of a server"
    ),
)
web_origin: Final = TextCheck(
    "the origin of a web page",
    'write it as browsers do, in lower case and without a path, such as `"https://lab.example"`',
    f"^{_ORIGIN.pattern}$",
    unless(_ORIGIN, "must be the origin of a web page: scheme, host and port"),
)


class Auto:
    """The value `auto`: the planner derives it, and the plan shows the derived value and why."""

    _instance: "Auto | None" = None

    def __new__(cls) -> "Auto":
        cls._instance = cls._instance or super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "auto"


AUTO: Final = Auto()


class Role(StrEnum):
    """Purpose of a setting; decides whether it belongs to the identity of an experiment (`config_id`)."""

    EXPERIMENT = "experiment"  # affects the result
    BUDGET = "budget"  # length of training
    CADENCE = "cadence"  # when something is evaluated or saved
    PATH = "path"  # file locations
    MESH = "mesh"  # ranks, and the division of work
    EXECUTION = "execution"  # kernels, threads: the same experiment


class UsualRange(NamedTuple):
    """Usual range of a number. source: published values in it. margin: factor beyond the range from which a value is
    reported (W433)."""

    low: float
    high: float
    source: str
    margin: float = 10

    def is_far(self, value: float) -> bool:
        return value * self.margin < self.low or value > self.high * self.margin

    def words(self, text: Callable[[float], str] = "{:g}".format) -> str:
        """Return the range and its source. text: writes one value."""
        return f"{text(self.low)} to {text(self.high)}: {self.source}"


@frozen(kw_only=True)
class Setting:
    """Metadata of one field, stored under `attrs` metadata key `setting`.

    doc: one line for the docs. units: the units of a `Quantity`. check: the range of the value, or the rule for a text.
    role: see `Role`. example: a value as written in a spec. only: block labels (a model family, a scheduler kind) that
    have this setting; empty: all. required_by: labels that must set it although it has a default for all other labels.
    block: kind of the block that the value names; it may be written without quotes.
    names: the meaning of the free names of a block, such as the datasets of `mixture`; the setting then is a dict of
    all of them without a name of its own. added: the setting is newer than existing plans; plans omit its default, so
    their ids stay. registry: of the components whose names it takes. without: settings that a nested block does not
    have there. resuming: effect of another value on a resumed run: of a model or an adapter one of `Resuming`
    (`dsl/schema/model.py`), of other components a clause; empty: the usual effect of a component's settings. usual: its
    usual range.
    """

    doc: str
    units: tuple[str, ...] = ()
    check: "Range | TextCheck | None" = None
    role: Role = Role.EXPERIMENT
    only: tuple[str, ...] = ()
    required_by: tuple[str, ...] = ()
    example: str = ""
    names: str = ""
    block: str = ""
    added: bool = False
    registry: Any = attrs.field(default=None, eq=False)
    without: tuple[str, ...] = ()
    resuming: str = attrs.field(default="", eq=False)
    usual: UsualRange | None = None


def setting(
    doc: str,
    *,
    default: Any = attrs.NOTHING,
    units: tuple[str, ...] = (),
    check: "Range | TextCheck | None" = None,
    role: Role = Role.EXPERIMENT,
    only: tuple[str, ...] = (),
    required_by: tuple[str, ...] = (),
    example: str = "",
    names: str = "",
    block: str = "",
    added: bool = False,
    without: tuple[str, ...] = (),
    resuming: str = "",
    usual: UsualRange | None = None,
) -> Any:
    """Declare a field of a block; without `default` the spec must set it.

    A name that Python reserves is declared with `_` appended, which specs do not see: `from_` is `from`.
    """
    meta = Setting(
        doc=doc,
        units=units,
        check=check,
        role=role,
        only=only,
        required_by=required_by,
        example=example,
        names=names,
        block=block,
        added=added,
        without=without,
        resuming=resuming,
        usual=usual,
    )
    return attrs.field(default=default, metadata={"setting": meta}, kw_only=True)


# Settings with another role, which all settings of some components have.
cadence_setting: Final = partial(setting, role=Role.CADENCE)
mesh_setting: Final = partial(setting, role=Role.MESH)
execution_setting: Final = partial(setting, role=Role.EXECUTION)


def component_name(registry: Any, *, role: Role | None = None) -> Any:
    """Declare a field that names a component; the default is the registry's default.

    The registered components are unknown until everything is imported: `settings_of` returns the words and their
    meaning.
    """
    meta = Setting(doc="", role=role or Role.EXPERIMENT, registry=registry)
    return attrs.field(factory=lambda: registry.default.kind, metadata={"setting": meta}, kw_only=True)


def is_unspoken(attribute: attrs.Attribute, meta: Setting, value: Any) -> bool:
    """Return True if plans omit a value: the default of a setting that is newer than existing plans."""
    default = attribute.default
    usual = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    return meta.added and value == usual


def label(*, check: TextCheck) -> Any:
    """Declare the text that a label fills and its rule; other labels need no declaration."""
    return attrs.field(metadata={"check": check})


def settings_of(block: type) -> Mapping[str, tuple[attrs.Attribute, Setting]]:
    """Return name → (attribute, metadata) of every named setting of a block class, in order of definition."""
    if (registry := block.__dict__.get("components")) is not None:
        return registry.settings()
    settings, of_components = _settings_of_class(complete(block))
    if not of_components:
        return settings
    # The words are the names registered by now.
    now = {name: _naming(settings[name][0]) for name in of_components}
    return {**settings, **{name: (attribute, attribute.metadata["setting"]) for name, attribute in now.items()}}


def values_of(block: Any) -> dict[str, Any]:
    """Return the values of a block's settings by name."""
    return {name: getattr(block, attribute.name) for name, (attribute, _) in settings_of(type(block)).items()}


# Called thousands of times per plan. Bounded, because each user function is a class.
@lru_cache(maxsize=1024)
def _settings_of_class(block: type) -> tuple[Mapping[str, tuple[attrs.Attribute, Setting]], tuple[str, ...]]:
    """Return the settings of a class, and the names of those that name a component."""
    settings = {
        spelled(a): (a, meta) for a in attrs.fields(block) if (meta := a.metadata.get("setting")) and not meta.names
    }
    return MappingProxyType(settings), tuple(name for name, (a, _) in settings.items() if _names_component(a))


@lru_cache(maxsize=1024)
def resuming_of(component: type | None) -> Mapping[str, str]:
    """Return setting → declared effect of another value on a resumed run. None: a component that is not installed.

    Settings of a nested block follow its name and `_`, as plans name them.
    """
    found: dict[str, str] = {}
    declaring = [base for base in reversed(component.__mro__) if attrs.has(base)] if component is not None else []
    for attribute in (attribute for base in declaring for attribute in attrs.fields(base)):
        if (meta := attribute.metadata.get("setting")) is None:
            continue
        if isinstance(attribute.type, type) and attrs.has(attribute.type):
            found |= {f"{attribute.name}_{name}": effect for name, effect in resuming_of(attribute.type).items()}
        if meta.resuming:
            found[spelled(attribute)] = meta.resuming
    return found


def complete(block: type) -> type:
    """Return the class of a block's objects: a different one if its settings are components, which are loaded late."""
    make = block.__dict__.get("complete")
    return block if make is None else make.__get__(None, block)()


def attributes_of(block: type) -> tuple[attrs.Attribute, ...]:
    """Return `attrs.fields`, with the registered names in settings that name a component."""
    return tuple(_naming(a) if _names_component(a) else a for a in attrs.fields(block))


def _names_component(attribute: attrs.Attribute) -> bool:
    meta = attribute.metadata.get("setting")
    return meta is not None and meta.registry is not None


def _naming(attribute: attrs.Attribute) -> attrs.Attribute:
    """Return the setting with all component names as its words, documented by the components' docstrings."""
    meta = attribute.metadata["setting"]
    first = {name: (each.__doc__ or "").partition("\n\n")[0] for name, each in meta.registry.items()}
    says = {name: " ".join(text.partition("`: ")[2].split()).removesuffix(".") for name, text in first.items()}
    meta = attrs.evolve(meta, doc="; ".join(f"{name}: {text}" for name, text in says.items()))
    return attribute.evolve(
        type=Literal[tuple(meta.registry)],  # type: ignore[valid-type]
        default=meta.registry.default.kind,
        metadata={**attribute.metadata, "setting": meta},
    )


def spelled(attribute: attrs.Attribute) -> str:
    """Return the name of an attribute as a spec writes it."""
    return attribute.name.removesuffix("_")


def open_setting(block: type) -> tuple[attrs.Attribute, Setting] | None:
    """Return the setting that takes every name a block has no other setting for; None if all names are fixed."""
    if "components" in block.__dict__:
        return None
    return next(((a, meta) for a in attrs.fields(block) if (meta := a.metadata.get("setting")) and meta.names), None)


# Ranges ---------------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Range:
    """Range of allowed values: a function for the compiler, and data for the docs and for editors.

    low and high are inclusive, above and below exclusive. percent: `high` bounds percentages only. count: the value is
    a list of this many numbers.
    """

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    percent: bool = False
    count: int | None = None

    def __call__(self, value: Any) -> str | None:
        """Return what is wrong with a value, as the end of a sentence ("must be above 0"); None if valid."""
        value = tuple(value.values()) if isinstance(value, dict) else value
        amounts = [getattr(each, "value", each) for each in (value if isinstance(value, tuple) else (value,))]
        if isinstance(value, str):  # a word, which the setting takes as well as numbers
            return None
        bounded = not self.percent or getattr(value, "unit", None) == "%"
        if self.count in (None, len(amounts)) and all(self._holds(amount, bounded) for amount in amounts):
            return None
        if self.percent and bounded:
            return f"must lie between {self.low:.12g}% and {self.high:.12g}%"
        return f"must {self._must}"

    def _holds(self, amount: float, bounded: bool) -> bool:
        if (self.low is not None and amount < self.low) or (self.above is not None and amount <= self.above):
            return False
        if not bounded:
            return True
        return not (self.high is not None and amount > self.high) and not (
            self.below is not None and amount >= self.below
        )

    def has_values(self, *, whole: bool) -> bool:
        """Return True if the range contains a number, or a whole number."""
        low = self.above if self.low is None else self.low
        high = self.below if self.high is None else self.high
        if low is None or high is None:
            return True
        candidates = (ceil(low), floor(low) + 1) if whole else (low / 2 + high / 2,)
        return any(self._holds(each, True) for each in candidates)

    @property
    def _must(self) -> str:
        if self.count is not None:
            number = {2: "two", 3: "three"}.get(self.count, str(self.count))
            bounds = "" if self.low is None else f" from {self.low:.12g} up to, but not including, {self.below:.12g}"
            return f"be {number} numbers{bounds}"
        if self.low is not None and self.high is not None and not self.percent:
            high = self.high if isinstance(self.high, int) else f"{self.high:.12g}"
            return f"lie between {self.low:.12g} and {high}"
        if self.above is not None:
            below = "" if self.below is None else f" and below {self.below:.12g}"
            return f"be above {self.above:.12g}{below}"
        if self.below is not None:
            return f"be at least {self.low:.12g} and below {self.below:.12g}"
        return "not be negative" if self.low == 0 else f"be at least {self.low:.12g}"

    @property
    def words(self) -> str:
        """Range for the docs: "above 0", "between 0.01 and 1", "0% to 100%"."""
        if self.percent:
            return f"{self.low:.12g}% to {self.high:.12g}%"
        return self._must.removeprefix("be ").removeprefix("lie ").replace("not be", "not")


# Largest integer of the int64 in tensors, records and files.
LARGEST: Final = 2**63 - 1


positive: Final = Range(above=0)
not_negative: Final = Range(low=0)
share: Final = Range(low=0, high=100, percent=True)  # a percentage, or a non-negative amount
momentum_pair: Final = Range(low=0, below=1, count=2)
proper_fraction: Final = Range(above=0, below=1)


def at_least(bound: float) -> Range:
    return Range(low=bound)


def between(low: float, high: float) -> Range:
    """Return a range that includes both bounds."""
    return Range(low=low, high=high)


# Accepted by the generators of torch and numpy.
seed_range: Final = between(0, 2**64 - 1)
# Ranks: more than any machine has, and few enough to try one by one.
rank_count: Final = between(1, 1_000_000)


@frozen
class Conflict:
    """A setting that conflicts with the rest of a spec. setting: its name. hint: what to write."""

    setting: str
    message: str
    hint: str
