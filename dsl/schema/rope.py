"""Scaled rotary frequencies, and their keys in a transformers `config.json`."""

import math
from collections.abc import Callable
from typing import Any, Final, Literal

from attrs import evolve, fields_dict

from xtrain.dsl.schema.setting import AUTO, Auto, at_least, between, not_negative, positive, setting
from xtrain.lazy_attrs import frozen


def _turns(scaling: str, way: Literal["less", "more"], default: float) -> Any:
    """Return a setting with the number of turns that limits pairs."""
    then = {"less": "are scaled in full", "more": "keep their frequency"}[way]
    text = f"{scaling}: pairs that turn {way} than this often in `original` positions {then}"
    return setting(text, default=default, check=positive)


@frozen
class Rope:
    """`rope { … }` inside `model`: scaling of rotary positions to a longer context."""

    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = setting(
        "how frequencies are scaled; dynamic changes nothing up to `original` positions, and longer rows are refused; "
        "proportional: the pairs of a head beyond `share` do not turn",
        default="none",
    )
    factor: float = setting("ratio of the new to the old number of positions", default=1.0, check=at_least(1))
    original: int = setting(
        "positions that the model was trained on without scaling; required by dynamic, llama3, yarn and longrope",
        default=0,
        check=not_negative,
    )
    low: float = _turns("llama3", "less", 1.0)
    high: float = _turns("llama3", "more", 4.0)
    beta_fast: float = _turns("yarn", "more", 32.0)
    beta_slow: float = _turns("yarn", "less", 1.0)
    truncate: bool = setting("yarn: round the bounds between those pairs to whole pairs", default=True)
    attention_factor: float | Auto = setting(
        "yarn and longrope: factor of cosines and sines; auto: yarn 0.1 · ln(factor) + 1, longrope "
        "√(1 + ln(factor) / ln(original))",
        default=AUTO,
        check=positive,
    )
    short: tuple[float, ...] = setting(
        "longrope: divisors of frequencies of short rows, one for each pair", default=(), check=positive
    )
    long: tuple[float, ...] = setting(
        "longrope: divisors of frequencies of long rows, one for each pair", default=(), check=positive
    )
    divisors: Literal["short", "long"] | Auto = setting(
        "longrope: the divisors that all positions have; auto: long if rows have more than `original` positions",
        default=AUTO,
    )
    share: float = setting(
        "proportional: share of the pairs of a head that turn, the first ones",
        default=1.0,
        check=between(0, 1),
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """Settings that the scaling reads."""
        return ROPE_SCALINGS[self.scaling][0]

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines; it scales attention scores by its square."""
        if "attention_factor" not in self.reads:
            return 1.0
        if not isinstance(self.attention_factor, Auto):
            return self.attention_factor
        if self.scaling == "yarn":
            return yarn_magnitude(self.factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original)) if self.original > 1 else 1.0

    @property
    def limit(self) -> int | None:
        """Largest supported number of positions; None: unlimited."""
        return self.original if self.scaling == "dynamic" else None

    def resolved(self) -> dict[str, Any]:
        """Return the scaling and the settings it reads, as JSON; empty without scaling."""
        if self.scaling == "none":
            return {}
        chosen = evolve(self, attention_factor=self.magnitude)
        values = {name: getattr(chosen, name) for name in fields_dict(Rope) if name in ("scaling", *self.reads)}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {name: value for name, value in (values | lists).items() if not isinstance(value, Auto)}

    def in_files(self) -> dict[str, Any]:
        """Return those that files have: transformers chooses divisors by the length of each text, and warns of a factor
        of proportional positions."""
        plain = {"divisors"} | ({"factor"} if self.scaling == "proportional" and self.factor == 1 else set())
        return {name: value for name, value in self.resolved().items() if name not in plain}

    def of_rows(self, sequence: int) -> "Rope":
        """Return the scaling with the divisors for rows of `sequence` positions."""
        if self.scaling != "longrope" or not isinstance(self.divisors, Auto):
            return self
        return evolve(self, divisors="long" if sequence > self.original else "short")

    def idle(self) -> dict[str, tuple[str, str]]:
        """Return the settings that the scaling does not read, each with (reason, what to do)."""
        why = f"scaling {self.scaling} does not read it"
        return {name: (why, "remove it") for name in fields_dict(Rope) if name not in ("scaling", *self.reads)}

    def problem(self, sequence: int, pairs: int) -> tuple[str, str, str] | None:
        """Return (setting, what is wrong, what to do) for an invalid value. sequence: positions of a row. pairs: of
        numbers of a head that are rotated."""
        if "original" in self.reads and not self.original:
            needs = f"scaling {self.scaling} needs the number of positions before scaling"
            return "original", needs, "set `original`, such as 8192 for Llama 3.1"
        for low, high in (("low", "high"), ("beta_slow", "beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            # The ramp of yarn has a width even if both are equal, as in Kimi K2.
            if low in self.reads and (least > most or (least == most and low == "low")):
                found = f"{low} {least:g} is not below {high} {most:g}"
                return low, found, f"use {low} 1, and {high} {fields_dict(Rope)[high].default:g}"
        for name in ("short", "long"):
            if name in self.reads and (count := len(getattr(self, name))) != pairs:
                found = f"{name} has {count} divisors, and {pairs} pairs of a head are rotated"
                return name, found, "give one for each pair"
        if self.limit is not None and sequence > self.limit:
            why = f"scaling dynamic depends on the length of each text beyond original {self.original}"
            return "scaling", f"{why}, and rows have {sequence} positions", "use scaling yarn, or shorter rows"
        return None

    def frequencies(self, width: int, theta: float) -> list[float]:
        """Return the angle per position of each of the width / 2 pairs."""
        plain = [theta ** (-place / width) for place in range(0, width, 2)]
        return ROPE_SCALINGS[self.scaling][1](self, plain, theta)

    def __str__(self) -> str:
        if self.scaling == "proportional":
            return f"proportional, {self.share:.4g} of pairs" + (f" × {self.factor:g}" if self.factor != 1 else "")
        return f"{self.scaling} × {self.factor:g}" + (f" from {self.original:,}" if self.original else "")


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return 0.1 · weight · ln(factor) + 1 (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _plain(rope: Rope, plain: list[float], theta: float) -> list[float]:
    return plain


def _linear(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """Return f / factor (Chen et al. 2023, arXiv 2306.15595)."""
    return [each / rope.factor for each in plain]


def _llama3(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """Return f / factor if a pair turns less than `low` times in `original` positions, f if it turns more than `high`
    times, and in between (1 - s) · f / factor + s · f with s = (turns - low) / (high - low) (Llama 3.1)."""
    found = []
    for each in plain:
        turns = rope.original * each / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - rope.low) / (rope.high - rope.low)))
        found.append((1 - kept) * each / rope.factor + kept * each)
    return found


def _longrope(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """Return f / divisor, with a divisor for each pair (Ding et al. 2024, arXiv 2402.13753)."""
    divisors = rope.long if rope.divisors == "long" else rope.short
    return [each / divisor for each, divisor in zip(plain, divisors, strict=True)]


def _yarn(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """Return f / factor · r + f · (1 - r), where r grows from 0 to 1 between the pairs that turn `beta_fast` and
    `beta_slow` times in `original` positions (arXiv 2309.00071, section 3.2)."""
    width = 2 * len(plain)

    def place(turns: float) -> float:
        return width * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 if first == last else 0
    ramp = [min(1.0, max(0.0, (pair - first) / (last - first))) for pair in range(len(plain))]
    return [each / rope.factor * r + each * (1 - r) for each, r in zip(plain, ramp, strict=True)]


def _proportional(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """Return f / factor for the first share of pairs, and 0 for all others."""
    turned = int(rope.share * len(plain))
    return [each / rope.factor if pair < turned else 0.0 for pair, each in enumerate(plain)]


_Scale = Callable[[Rope, list[float], float], list[float]]
# Scaling → (settings it reads, function that scales the plain frequencies).
ROPE_SCALINGS: Final[dict[str, tuple[tuple[str, ...], _Scale]]] = {
    "none": ((), _plain),
    "linear": (("factor",), _linear),
    "dynamic": (("factor", "original"), _plain),
    "llama3": (("factor", "original", "low", "high"), _llama3),
    "yarn": (("factor", "original", "beta_fast", "beta_slow", "truncate", "attention_factor"), _yarn),
    "longrope": (("original", "factor", "attention_factor", "short", "long", "divisors"), _longrope),
    "proportional": (("factor", "share"), _proportional),
}

# Setting of `rope { … }` → its key inside `rope_parameters` or `rope_scaling`. For dynamic, `original` is always the
# context of the model; for others only if the key is absent.
ROPE_KEYS: Final = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "short": "short_factor",
    "long": "long_factor",
    "share": "partial_rotary_factor",
}
ORIGINAL: Final = "original_max_position_embeddings"
ROPE_NEEDED: Final = ("factor", "low", "high", "short", "long")  # if the scaling reads them
# Keys of yarn that together determine an absent `attention_factor`.
ROPE_WEIGHTS: Final = ("mscale", "mscale_all_dim")
