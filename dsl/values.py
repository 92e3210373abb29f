"""Values of settings: quantities with units, intervals, measured numbers, dimensions of sweeps, environment variables.

A command with `env("NAME")` is shown as `env(NAME)` everywhere and gets the value where it runs. No file and no
message contains the value.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from hashlib import scrypt
from typing import Any, Final

from attrs import field, frozen

# Spelling in a spec → (the unit it is stored in, how many of that unit one of it is).
UNITS: dict[str, tuple[str, int | float]] = {
    "step": ("steps", 1),
    "steps": ("steps", 1),
    "token": ("tokens", 1),
    "tokens": ("tokens", 1),
    "epoch": ("epochs", 1),
    "epochs": ("epochs", 1),
    "sample": ("samples", 1),
    "samples": ("samples", 1),
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
    "d": ("seconds", 86400),
    "B": ("bytes", 1),
    "KiB": ("bytes", 2**10),
    "MiB": ("bytes", 2**20),
    "GiB": ("bytes", 2**30),
    "%": ("%", 1),
}


@frozen
class Quantity:
    """`value` of `unit`, where `unit` is one of steps, tokens, epochs, samples, seconds, bytes, %."""

    value: int | float
    unit: str = field()

    @property
    def fraction(self) -> float:
        """The share a percentage stands for: `10%` is 0.1."""
        assert self.unit == "%"
        return self.value / 100

    def __str__(self) -> str:
        if self.unit == "%":
            return f"{self.value:g}%"
        if isinstance(self.value, int):
            return f"{self.value:,} {self.unit}"
        return f"{self.value:g} {self.unit}"


@frozen
class Interval:
    """All whole numbers from `low` to `high`, both included; `low` is never above `high`."""

    low: int
    high: int

    def __contains__(self, number: int) -> bool:
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


_PATTERN: Final = re.compile(r"eval\.(?P<dataset>.+)\.(?P<what>loss|objective)")
FORM: Final = "eval.DATASET.loss"
_MEASURED: Final = re.compile(
    r"(?:eval\.(?P<dataset>.+?)|hook\.(?P<hook>[^.]+))\.(?P<what>rewards[./]\w+|\w+(?:/\w+)*)", re.ASCII
)
# The better value of a metric, by the last word of its name.
LOWEST: Final = frozenset(("loss", "objective", "bits_per_byte"))
HIGHEST: Final = frozenset(("acc", "acc_norm", "acc_bytes", "accuracy", "reward", "margin"))


class Metric(str):
    """The loss on what a dataset held out, or what is minimised there; less is better."""

    __slots__ = ()

    @classmethod
    def read(cls, text: str) -> "Metric | None":
        """None for a text that names no metric."""
        return cls(text) if _PATTERN.fullmatch(text) else None

    @property
    def dataset(self) -> str:
        return self._part("dataset")

    @property
    def what(self) -> str:
        """`loss` or `objective`."""
        return self._part("what")

    @property
    def key(self) -> str:
        """Its name in `metrics.jsonl`."""
        return f"eval/{self.dataset}/{self.what}"

    def _part(self, name: str) -> str:
        match = _PATTERN.fullmatch(self)
        assert match is not None
        return match[name]


class MeasuredNumber(str):
    """Any number that an evaluation measures, or that a hook returns: `eval.arc.acc`, `hook.quality.score`."""

    __slots__ = ()
    form = "eval.DATASET.METRIC or hook.NAME.METRIC"

    @classmethod
    def read(cls, text: str) -> "MeasuredNumber | None":
        """None for a text that names no metric."""
        return cls(text) if _MEASURED.fullmatch(text) else None

    @property
    def dataset(self) -> str | None:
        """The dataset that is evaluated; None of a metric of a hook."""
        return self._parts["dataset"]

    @property
    def hook(self) -> str | None:
        """The hook that returns it; None of a metric of an evaluation."""
        return self._parts["hook"]

    @property
    def what(self) -> str:
        """The name of the metric, as `loss` or `rewards/accuracy`."""
        return str(self._parts["what"]).replace(".", "/")

    @property
    def key(self) -> str:
        """Its name in `metrics.jsonl`."""
        return f"eval/{self.dataset}/{self.what}" if self.hook is None else f"hook/{self.hook}/{self.what}"

    @property
    def better(self) -> str | None:
        """`lowest` or `highest`, where the name tells which value is better."""
        last = self.what.rpartition("/")[2]
        return "lowest" if last in LOWEST else "highest" if last in HIGHEST and self.hook is None else None

    @property
    def _parts(self) -> dict[str, str | None]:
        match = _MEASURED.fullmatch(self)
        assert match is not None
        return match.groupdict()


_UNIT_WORDS: Final = {"seconds": "s", "bytes": "B"}
DIGITS: Final = 6
"""Significant digits of a real number that a search has drawn."""


class Dimension:
    """What all kinds of dimensions have."""

    def at(self, share: float) -> str:
        """The value at a share, 0 to 1 and never 1 itself: equal shares are equally likely to be drawn."""
        raise NotImplementedError

    def grid(self) -> tuple[str, ...] | None:
        """The values that a grid tries; None where nothing says how many."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """How many these are, without making them."""
        raise NotImplementedError

    def ends(self) -> tuple[str, ...]:
        """The values that a mistake would show at: all of a list, both ends of a range."""
        raise NotImplementedError


@frozen
class Listed(Dimension):
    """`[256, 512]`: these values, none more likely than another."""

    values: tuple[str, ...]

    def at(self, share: float) -> str:
        return self.values[int(share * len(self.values))]

    def grid(self) -> tuple[str, ...]:
        return self.values

    @property
    def size(self) -> int:
        return len(self.values)

    def ends(self) -> tuple[str, ...]:
        return self.values

    def __str__(self) -> str:
        return f"[{', '.join(self.values)}]"


@frozen(kw_only=True)
class Between(Dimension):
    """`uniform(low, high)`, `log(low, high)`, or `2..4`: numbers between two ends, both included.

    log: equally likely in the logarithm. whole: whole numbers. unit: of an amount, else empty. points: how many of
    them a grid tries, evenly spaced.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    unit: str = ""
    points: int | None = None

    def at(self, share: float) -> str:
        if not self.whole:
            return self.text(self._between(share, self.low, self.high))
        # Each whole number is as likely as the stretch around it is wide.
        number = round(self._between(share, self.low - 0.5, self.high + 0.5))
        return self.text(min(max(number, self.low), self.high))

    def grid(self) -> tuple[str, ...] | None:
        if self.points is None:
            return tuple(self.text(n) for n in range(int(self.low), int(self.high) + 1)) if self._is_counted else None
        last = self.points - 1
        values = (self._between(place / last, self.low, self.high) for place in range(self.points))
        return tuple(dict.fromkeys(map(self.text, values)))

    @property
    def size(self) -> int | None:
        return int(self.high) - int(self.low) + 1 if self.points is None and self._is_counted else self.points

    def ends(self) -> tuple[str, ...]:
        return self.text(self.low), self.text(self.high)

    def text(self, number: float) -> str:
        """A number of this dimension as a spec writes it."""
        shown = str(round(number)) if self.whole else repr(float(f"{number:.{DIGITS}g}"))
        return shown + (
            self.unit if self.unit == "%" else f" {_UNIT_WORDS.get(self.unit, self.unit)}" * bool(self.unit)
        )

    def number(self, text: str) -> float:
        """The number of such a text."""
        return float(text.partition(" ")[0].rstrip("%"))

    @property
    def _is_counted(self) -> bool:
        """Whether it is `2..4`, which is a list of all its numbers."""
        return self.whole and not self.log

    def _between(self, share: float, low: float, high: float) -> float:
        if not self.log:
            return low + share * (high - low)
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))

    def __str__(self) -> str:
        ends = ", ".join((*self.ends(), *([str(self.points)] if self.points else [])))
        if self._is_counted and self.points is None and not self.unit:
            return f"{self.ends()[0]}..{self.ends()[1]}"
        return f"{'log(' if self.log else 'uniform('}{ends})"


_SHOWN: Final = re.compile(r"env\(([^()\"\\]+)\)")
_WRITTEN: Final = re.compile(r'env\("([^"\\]+)"\)')
# About 50 ms a guess: an unknown value has no other protection in a digest.
_SCRYPT: Final = {"n": 2**14, "r": 8, "p": 1, "dklen": 8}
# Shorter values stand for themselves in messages: they are in too many words.
SHORTEST_MASKED: Final = 6


@frozen
class Variable:
    """An environment variable with its value at the time of reading."""

    name: str
    value: str = field(repr=False)


class EnvText(str):
    """A text with the values of variables. pieces: what it was put together from."""

    pieces: tuple[str | Variable, ...]

    @classmethod
    def of(cls, *pieces: str | Variable) -> "EnvText":
        """Join texts, some with pieces of their own, and variables."""
        flat = [part for piece in pieces for part in (piece.pieces if isinstance(piece, EnvText) else (piece,))]
        found = cls("".join(part.value if isinstance(part, Variable) else part for part in flat))
        found.pieces = tuple(flat)
        return found


class HiddenText(str):
    """A text with `env(NAME)` for the value of each variable. pieces: as of the EnvText that it was."""

    pieces: tuple[str | Variable, ...]

    @property
    def value(self) -> str:
        """The text with the values, for checks."""
        return "".join(part.value if isinstance(part, Variable) else part for part in self.pieces)


def hidden(text: str) -> str:
    """Return a text with `env(NAME)` for the values of variables."""
    if not isinstance(text, EnvText):
        return text
    found = HiddenText("".join(f"env({part.name})" if isinstance(part, Variable) else part for part in text.pieces))
    found.pieces = text.pieces
    return found


def value_of(text: str) -> str:
    """Return a text with the values of its variables, for checks: no message may have it."""
    return text.value if isinstance(text, HiddenText) else text


def variables_in(spec_text: str) -> frozenset[str]:
    """Names of the variables that a resolved spec reads where it is run."""
    return frozenset(_WRITTEN.findall(spec_text))


def digests_in(value: Any) -> dict[str, str]:
    """Name → `digest` of the variables in hidden texts of a value, also in its lists and maps; in order of names."""
    return {each.name: digest(each.name, each.value) for each in sorted(_variables(value), key=lambda each: each.name)}


def _variables(value: Any) -> Iterator[Variable]:
    if isinstance(value, HiddenText):
        yield from (piece for piece in value.pieces if isinstance(piece, Variable))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _variables(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _variables(item)


@cache
def digest(name: str, value: str) -> str:
    """16 hex digits that tell two values of a variable apart: scrypt, with the name as salt, so that the same spec has
    the same plan."""
    return scrypt(value.encode(errors="surrogateescape"), salt=f"xtrain env {name}".encode(), **_SCRYPT).hex()


def filled(value: Any, names: Collection[str], environment: Mapping[str, str]) -> Any:
    """Return shown texts, also in lists and maps, with the values of these variables. Raises ValueError where one is
    not set."""
    if isinstance(value, Mapping):
        return {name: filled(item, names, environment) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item, names, environment) for item in value]
    if not isinstance(value, str) or not names:
        return value

    def of_variable(found: re.Match[str]) -> str:
        if found[1] not in names:
            return found[0]
        if found[1] not in environment:
            raise ValueError(f"the environment variable {found[1]} is not set here")
        return environment[found[1]]

    return _SHOWN.sub(of_variable, value)


def masked(value: Any, names: Collection[str], environment: Mapping[str, str]) -> Any:
    """Return texts, also in lists and maps, with `env(NAME)` wherever the value of one of these variables stands."""
    if isinstance(value, str):
        for name in sorted(names, key=lambda name: -len(environment.get(name, ""))):
            secret = environment.get(name, "")
            value = value.replace(secret, f"env({name})") if len(secret) >= SHORTEST_MASKED else value
        return value
    if isinstance(value, Mapping):
        return {name: masked(item, names, environment) for name, item in value.items()}
    return type(value)(masked(item, names, environment) for item in value) if isinstance(value, tuple | list) else value
