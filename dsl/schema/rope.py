"""`rope { … }` inside `model`: how frequencies of rotary positions are scaled to more positions than were trained on.

Every formula is that of transformers 5 (`modeling_rope_utils.py`), which computes it in fp32; here it is computed in
fp64 and rounded once to the format of angles. w: width of a head; pair i of it turns by θ^(-2i/w) a position.
"""

import math
from collections.abc import Callable
from typing import Any, Final, Literal

from attrs import evolve, fields_dict, frozen

from xtrain.dsl.schema.setting import AUTO, Auto, at_least, not_negative, positive, setting


@frozen
class Rope:
    """`rope { … }` inside `model`: scaling of rotary positions to a longer context."""

    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = setting(
        "how frequencies are scaled; dynamic changes nothing up to `original` positions, and longer rows are refused",
        default="none",
    )
    factor: float = setting("how many times more positions there are than before", default=1.0, check=at_least(1))
    original: int = setting(
        "positions that the model was trained on without scaling; dynamic, llama3 and yarn need it",
        default=0,
        check=not_negative,
    )
    low: float = setting(
        "llama3: pairs that turn less than this often in `original` positions are scaled in full",
        default=1.0,
        check=positive,
    )
    high: float = setting(
        "llama3: pairs that turn more than this often in `original` positions keep their frequency",
        default=4.0,
        check=positive,
    )
    beta_fast: float = setting(
        "yarn: pairs that turn more than this often in `original` positions keep their frequency",
        default=32.0,
        check=positive,
    )
    beta_slow: float = setting(
        "yarn: pairs that turn less than this often in `original` positions are scaled in full",
        default=1.0,
        check=positive,
    )
    truncate: bool = setting("yarn: round the bounds between those pairs to whole pairs", default=True)
    attention_factor: float | Auto = setting(
        "yarn: factor of cosines and sines; auto: 0.1 · ln(factor) + 1", default=AUTO, check=positive
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """The settings that the scaling reads."""
        return ROPE_SCALINGS[self.scaling][0]

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by, so that scores are by its square."""
        if self.scaling != "yarn":
            return 1.0
        return yarn_magnitude(self.factor) if isinstance(self.attention_factor, Auto) else self.attention_factor

    @property
    def limit(self) -> int | None:
        """Positions of the longest text that is computed; None: of any length."""
        return self.original if self.scaling == "dynamic" else None

    def resolved(self) -> dict[str, Any]:
        """Its scaling and the settings that this reads, as JSON; nothing where frequencies are not scaled."""
        if self.scaling == "none":
            return {}
        chosen = evolve(self, attention_factor=self.magnitude)
        return {name: getattr(chosen, name) for name in fields_dict(Rope) if name in ("scaling", *self.reads)}

    def idle(self) -> dict[str, tuple[str, str]]:
        """The settings that the scaling does not read, each with why, and what to do."""
        why = f"scaling {self.scaling} does not read it"
        return {name: (why, "remove it") for name in fields_dict(Rope) if name not in ("scaling", *self.reads)}

    def problem(self, sequence: int) -> tuple[str, str, str] | None:
        """What does not fit: the setting, what is wrong, and what to do. sequence: positions of a row."""
        if "original" in self.reads and not self.original:
            needs = f"scaling {self.scaling} needs the number of positions before scaling"
            return "original", needs, "give `original`, as 8192 for Llama 3.1"
        for low, high in (("low", "high"), ("beta_slow", "beta_fast")):
            if low in self.reads and getattr(self, low) >= getattr(self, high):
                found = f"{low} {getattr(self, low):g} is not below {high} {getattr(self, high):g}"
                return low, found, f"use {low} 1, and {high} {fields_dict(Rope)[high].default:g}"
        if self.limit is not None and sequence > self.limit:
            why = f"scaling dynamic depends on the length of each text beyond original {self.original}"
            return "scaling", f"{why}, and rows have {sequence} positions", "use scaling yarn, or shorter rows"
        return None

    def frequencies(self, width: int, theta: float) -> list[float]:
        """Angle per position of each of the width / 2 pairs."""
        plain = [theta ** (-place / width) for place in range(0, width, 2)]
        return ROPE_SCALINGS[self.scaling][1](self, plain, theta)

    def __str__(self) -> str:
        return f"{self.scaling} × {self.factor:g}" + (f" from {self.original:,}" if self.original else "")


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1 (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _plain(rope: Rope, plain: list[float], theta: float) -> list[float]:
    return plain


def _linear(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """f / factor (Chen et al. 2023, arXiv 2306.15595)."""
    return [each / rope.factor for each in plain]


def _llama3(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """f / factor where a pair turns less than `low` times in `original` positions, f where it does more than `high`
    times, in between (1 - s) · f / factor + s · f with s = (turns - low) / (high - low) (Llama 3.1)."""
    found = []
    for each in plain:
        turns = rope.original * each / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - rope.low) / (rope.high - rope.low)))
        found.append((1 - kept) * each / rope.factor + kept * each)
    return found


def _yarn(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """f / factor · r + f · (1 - r), where r grows from 0 to 1 between the pairs that turn `beta_fast` and `beta_slow`
    times in `original` positions (arXiv 2309.00071, section 3.2)."""
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


_Scale = Callable[[Rope, list[float], float], list[float]]
# Scaling → the settings that it reads, and how it computes frequencies from those without scaling.
ROPE_SCALINGS: Final[dict[str, tuple[tuple[str, ...], _Scale]]] = {
    "none": ((), _plain),
    "linear": (("factor",), _linear),
    "dynamic": (("factor", "original"), _plain),
    "llama3": (("factor", "original", "low", "high"), _llama3),
    "yarn": (("factor", "original", "beta_fast", "beta_slow", "truncate", "attention_factor"), _yarn),
}
