"""Values of settings: quantities with units, intervals, measured numbers, dimensions of sweeps, environment variables.

A command with `env("NAME")` is shown as `env(NAME)` everywhere and gets the value where it runs. No file and no message
contains the value.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from hashlib import scrypt
from typing import Any, Final

from attrs import field

from xtrain.lazy_attrs import frozen

# Spelling in a spec → (stored unit, stored units per one of it).
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
        """Share of a percentage: `10%` is 0.1."""
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
# Better value of a metric, by the last word of its name.
LOWEST: Final = frozenset(("loss", "objective", "bits_per_byte"))
HIGHEST: Final = frozenset(("acc", "acc_norm", "acc_bytes", "accuracy", "reward", "margin"))


class Metric(str):
    """The held-out loss of a dataset, or its objective; less is better."""

    __slots__ = ()

    @classmethod
    def read(cls, text: str) -> "Metric | None":
        """Return the metric that a text names, or None."""
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
        """Name in `metrics.jsonl`."""
        return f"eval/{self.dataset}/{self.what}"

    def _part(self, name: str) -> str:
        match = _PATTERN.fullmatch(self)
        assert match is not None
        return match[name]


class MeasuredNumber(str):
    """A number that an evaluation measures or a hook returns: `eval.arc.acc`, `hook.quality.score`."""

    __slots__ = ()
    form = "eval.DATASET.METRIC or hook.NAME.METRIC"

    @classmethod
    def read(cls, text: str) -> "MeasuredNumber | None":
        """Return the metric that a text names, or None."""
        return cls(text) if _MEASURED.fullmatch(text) else None

    @property
    def dataset(self) -> str | None:
        """Evaluated dataset; None for a metric of a hook."""
        return self._parts["dataset"]

    @property
    def hook(self) -> str | None:
        """Hook that returns it; None for a metric of an evaluation."""
        return self._parts["hook"]

    @property
    def what(self) -> str:
        """Name of the metric, such as `loss` or `rewards/accuracy`."""
        return str(self._parts["what"]).replace(".", "/")

    @property
    def key(self) -> str:
        """Name in `metrics.jsonl`."""
        return f"eval/{self.dataset}/{self.what}" if self.hook is None else f"hook/{self.hook}/{self.what}"

    @property
    def better(self) -> str | None:
        """`lowest` or `highest` if the name says which value is better, else None."""
        last = self.what.rpartition("/")[2]
        return "lowest" if last in LOWEST else "highest" if last in HIGHEST and self.hook is None else None

    @property
    def _parts(self) -> dict[str, str | None]:
        match = _MEASURED.fullmatch(self)
        assert match is not None
        return match.groupdict()


_UNIT_WORDS: Final = {"seconds": "s", "bytes": "B"}
DIGITS: Final = 6
"""Significant digits of a real number drawn by a search."""


class Dimension:
    """Base of all dimensions."""

    def at(self, share: float) -> str:
        """Return the value at a share in [0, 1): equal shares are equally likely to be drawn."""
        raise NotImplementedError

    def grid(self) -> tuple[str, ...] | None:
        """Return the values of a grid; None if their number is not given."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """Return the number of these values, without creating them."""
        raise NotImplementedError

    def ends(self) -> tuple[str, ...]:
        """Return the values that reveal mistakes: all of a list, both ends of a range."""
        raise NotImplementedError


@frozen
class Listed(Dimension):
    """`[256, 512]`: these values, equally likely."""

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

    log: equally likely in the logarithm. whole: whole numbers. unit: of an amount, else empty. points: number of evenly
    spaced values of a grid.
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
        # Each whole number is as likely as the interval around it is wide.
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
        """Return a number of this dimension as a spec writes it."""
        shown = str(round(number)) if self.whole else repr(float(f"{number:.{DIGITS}g}"))
        return shown + (
            self.unit if self.unit == "%" else f" {_UNIT_WORDS.get(self.unit, self.unit)}" * bool(self.unit)
        )

    def number(self, text: str) -> float:
        """Return the number of such a text."""
        return float(text.partition(" ")[0].rstrip("%"))

    @property
    def _is_counted(self) -> bool:
        """True for `2..4`, which is a list of all its numbers."""
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
# About 50 ms per guess: nothing else protects an unknown value in a digest.
_SCRYPT: Final = {"n": 2**14, "r": 8, "p": 1, "dklen": 8}
# Shorter values are not masked in messages: too many words contain them.
SHORTEST_MASKED: Final = 6


@frozen
class Variable:
    """An environment variable with its value at the time of reading."""

    name: str
    value: str = field(repr=False)


class EnvText(str):
    """A text with the values of variables. pieces: its parts."""

    pieces: tuple[str | Variable, ...]

    @classmethod
    def of(cls, *pieces: str | Variable) -> "EnvText":
        """Join texts, some with pieces of their own, and variables."""
        flat = [part for piece in pieces for part in (piece.pieces if isinstance(piece, EnvText) else (piece,))]
        found = cls("".join(part.value if isinstance(part, Variable) else part for part in flat))
        found.pieces = tuple(flat)
        return found


class HiddenText(str):
    """A text with `env(NAME)` for the value of each variable. pieces: as in its EnvText."""

    pieces: tuple[str | Variable, ...]

    @property
    def value(self) -> str:
        """Text with the values, for checks."""
        return "".join(part.value if isinstance(part, Variable) else part for part in self.pieces)


def hidden(text: str) -> str:
    """Return a text with `env(NAME)` for the values of variables."""
    if not isinstance(text, EnvText):
        return text
    found = HiddenText("".join(f"env({part.name})" if isinstance(part, Variable) else part for part in text.pieces))
    found.pieces = text.pieces
    return found


def value_of(text: str) -> str:
    """Return a text with the values of its variables, for checks: no message may contain it."""
    return text.value if isinstance(text, HiddenText) else text


def variables_in(spec_text: str) -> frozenset[str]:
    """Return the names of the variables that a resolved spec reads where it is run."""
    return frozenset(_WRITTEN.findall(spec_text))


def digests_in(value: Any) -> dict[str, str]:
    """Return name → `digest` of the variables in hidden texts of a value, including lists and maps, sorted by name."""
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
    """Return 16 hex digits that distinguish values of a variable: scrypt, with the name as salt, so that the same spec
    has the same plan."""
    return scrypt(value.encode(errors="surrogateescape"), salt=f"xtrain env {name}".encode(), **_SCRYPT).hex()


def filled(value: Any, names: Collection[str], environment: Mapping[str, str]) -> Any:
    """Return shown texts, including lists and maps, with the values of these variables. Raises ValueError if one is not
    set."""
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
    """Return texts, including lists and maps, with `env(NAME)` for each occurrence of a variable's value."""
    if isinstance(value, str):
        for name in sorted(names, key=lambda name: -len(environment.get(name, ""))):
            secret = environment.get(name, "")
            value = value.replace(secret, f"env({name})") if len(secret) >= SHORTEST_MASKED else value
        return value
    if isinstance(value, Mapping):
        return {name: masked(item, names, environment) for name, item in value.items()}
    return type(value)(masked(item, names, environment) for item in value) if isinstance(value, tuple | list) else value
