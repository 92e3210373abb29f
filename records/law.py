"""`ScalingLaw`: the loss of a model by its size and tokens, as `xtrain fit-law` writes it and `xtrain plan` reads it.

L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3), in nats a token: N
parameters that a token uses, D tokens.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import cattrs
from attrs import asdict
from cattrs.errors import BaseValidationError

from xtrain.lazy_attrs import frozen
from xtrain.regular_files import read_json

NAMES: Final = ("E", "A", "B", "alpha", "beta")
FORM: Final = "L(N, D) = E + A / N^alpha + B / D^beta"
SHARE: Final = 0.95
"""Probability of an interval."""


class LawError(ValueError):
    """An invalid file of a scaling law."""


@frozen(kw_only=True)
class Coefficients:
    """Coefficients of a scaling law. E is in nats per token; A and B have units that make the terms nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss in nats per token."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta


@frozen(kw_only=True)
class ScalingLaw:
    """A fitted scaling law. metric: the loss it predicts. samples: fits to the same runs with resampled residuals,
    which give the intervals. parameters, tokens: smallest and largest of the runs. error: root mean square of the
    residuals of the logarithm of the loss."""

    metric: str
    runs: int
    fitted: Coefficients
    samples: tuple[Coefficients, ...]
    parameters: tuple[float, float]
    tokens: tuple[float, float]
    error: float

    def interval(self, name: str) -> tuple[float, float]:
        """Return the interval that contains a coefficient with probability `SHARE`."""
        return spread([getattr(each, name) for each in self.samples])

    def predicted(self, parameters: float, tokens: float) -> tuple[float, tuple[float, float]]:
        """Return the predicted loss of a run, and the interval of the law's loss."""
        losses = [each.loss(parameters, tokens) for each in self.samples]
        return self.fitted.loss(parameters, tokens), spread(losses)

    def undetermined(self) -> tuple[str, ...]:
        """Return coefficients that the runs do not determine, whatever their intervals: those of a term that changes
        the loss over all runs by less than the residuals, and E if it is below them."""
        fitted, least = self.fitted, self.fitted.loss(self.parameters[1], self.tokens[1])
        by_size = fitted.A * (self.parameters[0] ** -fitted.alpha - self.parameters[1] ** -fitted.alpha)
        by_tokens = fitted.B * (self.tokens[0] ** -fitted.beta - self.tokens[1] ** -fitted.beta)
        terms = ((fitted.E, ("E",)), (by_size, ("A", "alpha")), (by_tokens, ("B", "beta")))
        return tuple(name for change, names in terms if change < self.error * least for name in names)

    def beyond(self, parameters: float, tokens: float) -> float:
        """Return how far a run lies outside of the fitted runs, as a factor of size or tokens; 1: inside."""
        pairs = ((parameters, self.parameters), (tokens, self.tokens))
        return max(1.0, *(max(low / value, value / high) for value, (low, high) in pairs))

    def write(self, path: Path) -> None:
        """Write the law to a file. Raises OSError."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "ScalingLaw":
        """Read a law. Raises LawError, also for an unreadable file."""
        try:
            return cattrs.structure(read_json(path), cls)
        except OSError as error:
            raise LawError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, BaseValidationError) as error:
            raise LawError(f"{path} is not a law that `xtrain fit-law --out` has written") from error


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the middle `SHARE` of the values."""
    ordered = sorted(values)
    cut = (1 - SHARE) / 2
    return _quantile(ordered, cut), _quantile(ordered, 1 - cut)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
