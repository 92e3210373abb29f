"""`Calibration`: measured step times of runs, and the step times that other plans then get.

`xtrain calibrate RUNS --out FILE` writes one, and `cluster h100 { calibration = FILE }` reads it.

log(measured / planned) of a step is a Gaussian process (Rasmussen and Williams 2006, chapter 2) with the covariance

    KIND² · s · s' + [same machine] (MACHINE² + SHAPE² exp(-|x - x'|² / (2 REACH²))) + NOISE² [same run]

where s has the shares of the planned step by kind of operation and of link, and x the shape of the plan (`SCALES`). The
coefficient of a kind is its slowness: minus the logarithm of its efficiency over the planned one. Measured parts of a
step have the first term alone, with NOISE_OF_PARTS. The constants are round numbers, not fitted; docs/accuracy.md says
what they give for published runs. A range holds the ceil(0.8 (n + 1))-th smallest error of n runs, each predicted from
the others (jackknife, Barber et al. 2021, arXiv 1905.02928).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import mul
from pathlib import Path
from typing import Final

import cattrs
from attrs import asdict
from cattrs.errors import BaseValidationError

from xtrain.lazy_attrs import frozen
from xtrain.plan.estimates import Label
from xtrain.regular_files import read_json

KINDS: Final = ("products", "scaled products", "attention", "link", "network")
ASSUMED: Final = 0.5
"""Efficiency of products and attention in the planned seconds that measured ones are divided by."""
COVERED: Final = 0.8
"""Share of runs that lie in their range."""
KIND, MACHINE, SHAPE, REACH, NOISE, NOISE_OF_PARTS = 0.3, 0.3, 0.3, 2.0, 0.05, 0.15
DEVIATIONS: Final = 1.28
"""Standard deviations of a normal distribution that hold `COVERED` of it, to each side."""
WIDEST: Final = 0.25
"""Width up to which an extrapolated range is stated: errors of runs, which are measured, have not made it wider."""
LEAST: Final = 4
"""Runs without which there is no range: with three, the largest error would hold 3 of 4."""
MOST: Final = 100
SCALES: Final[Mapping[str, tuple[float, bool]]] = {
    "ranks": (1 / 3, True),
    "tp": (1.0, True),
    "cp": (1.0, True),
    "pp": (1.0, True),
    "ep": (1.0, True),
    "tokens a rank": (1.0, True),
    "exposed communication": (3.0, False),
    "overlapped communication": (3.0, False),
    "bubble": (3.0, False),
    "attention": (3.0, False),
    "scaled products": (3.0, False),
    "experts": (2.0, False),
}
"""Quantity of a plan's shape → its factor in x, and True if its logarithm (of base 2) counts."""
FORMAT: Final = 1
NEAR: Final = 0.15
"""Distance in x up to which a quantity counts as one of those measured."""


class CalibrationError(ValueError):
    """An invalid calibration file."""


@frozen(kw_only=True)
class PlannedTiming:
    """Parts of a plan that decide its step time. machine: where it runs. seconds: planned for a step at the efficiency
    `ASSUMED`. shares: of these seconds, by kind. shape: quantity of `SCALES` → value."""

    machine: str
    seconds: float
    shares: Mapping[str, float]
    shape: Mapping[str, float]

    @cached_property
    def place(self) -> tuple[float, ...]:
        """x of the covariance."""
        return tuple(
            factor * (math.log2(self.shape[name]) if logarithm else self.shape[name])
            for name, (factor, logarithm) in SCALES.items()
        )

    def same(self, other: "PlannedTiming") -> bool:
        """Return True if both are the timing of one plan."""
        return self.machine == other.machine and all(
            math.isclose(own, others, rel_tol=1e-6, abs_tol=1e-6)
            for own, others in zip((self.seconds, *self.place), (other.seconds, *other.place), strict=True)
        )


@frozen(kw_only=True)
class TimedPart:
    """Measured part of a step. seconds, planned: of the part. shares: of the planned seconds, by kind."""

    name: str
    seconds: float
    planned: float
    shares: Mapping[str, float]


@frozen(kw_only=True)
class TimedRun:
    """Measured run. source: its directory, or who has published it. plan: id of its plan. samples: number of measured
    records; low, high: the middle 80 % of them. date: of the last record, UTC."""

    source: str
    plan: str
    torch: str
    date: str
    samples: int
    seconds: float
    low: float
    high: float
    timing: PlannedTiming
    parts: tuple[TimedPart, ...] = ()

    @property
    def slowness(self) -> float:
        """log(measured / planned)."""
        return math.log(self.seconds / self.timing.seconds)


@frozen(kw_only=True)
class CalibratedTime:
    """Step time of a plan by measured runs. factor: of planned seconds at the efficiency `ASSUMED`; low, high: its
    range, both equal to factor if there is none. beyond: quantities outside of the measured ones, with both, and why
    there is no range."""

    label: Label
    factor: float
    low: float
    high: float
    beyond: tuple[str, ...] = ()


@frozen(kw_only=True)
class Calibration:
    """Measured runs, and predictions from them. error: half of the range's width, of the logarithm of a step time."""

    runs: tuple[TimedRun, ...]
    error: float

    @classmethod
    def of(cls, runs: Sequence[TimedRun]) -> "Calibration":
        """Return the calibration from runs. Raises CalibrationError if they are too few or too many."""
        found = cls(runs=tuple(runs), error=0.0)
        if reason := found.invalid():
            raise CalibrationError(reason)
        errors = sorted(map(abs, found.left_out_errors()))
        return cls(runs=found.runs, error=errors[min(len(errors), math.ceil(COVERED * (len(errors) + 1))) - 1])

    def predicted(self, timing: PlannedTiming) -> CalibratedTime:
        """Return the step time of a plan. Beyond the measured shapes its range is wider if the process says so, and
        there is none if it were wider than `WIDEST`."""
        measured = [run for run in self.runs if run.timing.same(timing)]
        if measured:
            factors = [run.seconds / timing.seconds for run in measured]
            factor = math.exp(sum(map(math.log, factors)) / len(factors))
            wide = math.exp(DEVIATIONS * NOISE * math.sqrt(1 + 1 / len(factors)))  # between two runs of one plan
            low = min(factor / wide, *(run.low / timing.seconds for run in measured))
            high = max(factor * wide, *(run.high / timing.seconds for run in measured))
            return CalibratedTime(label="exact", factor=factor, low=low, high=high)
        own = _Seen.step(timing)
        covariances = [_covariance(own, seen) for seen in self._seen]
        weights = self._factor.solved(covariances)
        mean = _dot(weights, [seen.slowness for seen in self._seen])
        beyond = self.beyond(timing)
        wide = self.error
        if beyond:
            variance = _covariance(own, own) + NOISE**2 - _dot(weights, covariances)
            assumed = DEVIATIONS * math.sqrt(variance)
            if assumed > max(wide, math.log1p(WIDEST)):
                beyond += (f"no range: by the assumptions of the process alone it is ± {math.expm1(assumed):.0%}",)
                assumed = wide = 0.0
            wide = max(wide, assumed)
        return CalibratedTime(
            label="extrapolated" if beyond else "interpolated",
            factor=math.exp(mean),
            low=math.exp(mean - wide),
            high=math.exp(mean + wide),
            beyond=beyond,
        )

    def beyond(self, timing: PlannedTiming) -> tuple[str, ...]:
        """Return what of a plan lies outside of the measured runs on its machine."""
        near = [run.timing for run in self.runs if run.timing.machine == timing.machine]
        if not near:
            machines = ", ".join(sorted({run.timing.machine for run in self.runs}))
            return (f"machine {timing.machine}, measured on {machines}",)
        found = []
        for place, name in enumerate(SCALES):
            values = sorted(near, key=lambda each: each.place[place])
            if values[0].place[place] - NEAR <= timing.place[place] <= values[-1].place[place] + NEAR:
                continue
            low, high = (_shown(name, values[end].shape[name]) for end in (0, -1))
            measured = low if low == high else f"{low} to {high}"
            found.append(f"{name} {_shown(name, timing.shape[name])}, measured {measured}")
        return tuple(found)

    def left_out_errors(self) -> list[float]:
        """Return log(measured / predicted) of each run, predicted from the others."""
        # Rasmussen and Williams, equation 5.12, for all observations of a run at once: no other fit is needed.
        weights, found = self._factor.solved([seen.slowness for seen in self._seen]), []
        for run in self.runs:
            own = [number for number, seen in enumerate(self._seen) if seen.timing is run.timing]
            columns = [self._factor.solved([float(row == number) for row in range(len(self._seen))]) for number in own]
            block = _Cholesky.of([[column[number] for number in own] for column in columns])
            found.append(block.solved([weights[number] for number in own])[0])
        return found

    def efficiencies(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield kind, efficiency, and the 80 % interval of it; of links the share of their stated bandwidth. Kinds that
        no run spends time in are left out."""
        for number, kind in enumerate(KINDS):
            shares = [KIND**2 * seen.shares[number] for seen in self._seen]
            if not any(shares):
                continue
            weights = self._factor.solved(shares)
            slowness = _dot(weights, [seen.slowness for seen in self._seen])
            wide = DEVIATIONS * math.sqrt(KIND**2 - _dot(weights, shares))
            planned = 1.0 if kind in ("link", "network") else ASSUMED
            likely = planned * math.exp(-slowness)
            yield kind, likely, likely * math.exp(-wide), likely * math.exp(wide)

    @cached_property
    def _seen(self) -> list["_Seen"]:
        whole = [_Seen.step(run.timing, run.slowness) for run in self.runs]
        return whole + [_Seen.part(run.timing, part) for run in self.runs for part in run.parts]

    @cached_property
    def _factor(self) -> "_Cholesky":
        return _Cholesky.of(
            [[_covariance(row, column) + row.noise**2 * (row is column) for column in self._seen] for row in self._seen]
        )

    def text(self) -> str:
        """Return the content of its file."""
        return json.dumps({"calibration": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read a calibration. Raises CalibrationError, also for an unreadable file."""
        try:
            content = read_json(path)
            if content.get("calibration") != FORMAT:
                raise CalibrationError(f"{path} is not a calibration of this version: run `xtrain calibrate` again")
            found = cattrs.structure(content, cls)
        except OSError as error:
            raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, AttributeError, BaseValidationError) as error:
            if isinstance(error, CalibrationError):
                raise
            raise CalibrationError(f"{path} is not a file that `xtrain calibrate --out` has written") from error
        if reason := found.invalid():
            raise CalibrationError(f"{path}: {reason}")
        return found

    def invalid(self) -> str:
        """Return why no step time can be predicted from these runs; empty if it can."""
        if not LEAST <= len(self.runs) <= MOST:
            return f"a range needs {LEAST} measured runs, and {MOST} at most; there are {len(self.runs)}"
        for run in self.runs:
            values = [
                run.seconds,
                run.timing.seconds,
                *(value for part in run.parts for value in (part.seconds, part.planned)),
            ]
            logarithms = [run.timing.shape.get(name, 0.0) for name, (_, logarithm) in SCALES.items() if logarithm]
            if run.timing.shape.keys() != SCALES.keys() or min(values + logarithms) <= 0 or run.samples < 1:
                return f"the figures of {run.source} are invalid"
        return ""


def calibration_of(path: str) -> Calibration:
    """Return the calibration of a file, which is read again only if it has changed. Raises CalibrationError."""
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Calibration:
    return Calibration.read(Path(path))


@frozen(kw_only=True)
class _Seen:
    """Observation of the process: a `whole` step, or a part of one."""

    timing: PlannedTiming
    shares: tuple[float, ...]
    whole: bool = True
    slowness: float = 0.0
    noise: float = NOISE

    @classmethod
    def step(cls, timing: PlannedTiming, slowness: float = 0.0) -> "_Seen":
        return cls(timing=timing, shares=_shares(timing.shares), slowness=slowness)

    @classmethod
    def part(cls, timing: PlannedTiming, part: TimedPart) -> "_Seen":
        slowness = math.log(part.seconds / part.planned)
        return cls(timing=timing, shares=_shares(part.shares), whole=False, slowness=slowness, noise=NOISE_OF_PARTS)


def _shares(shares: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(shares.get(kind, 0.0) for kind in KINDS)


def _covariance(one: _Seen, other: _Seen) -> float:
    """Return the covariance of two observations, without noise."""
    found = KIND**2 * _dot(one.shares, other.shares)
    if one.whole and other.whole and one.timing.machine == other.timing.machine:
        far = sum((a - b) ** 2 for a, b in zip(one.timing.place, other.timing.place, strict=True))
        found += MACHINE**2 + SHAPE**2 * math.exp(-far / (2 * REACH**2))
    return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(mul, left, right))


@frozen
class _Cholesky:
    """Lower triangular factor of a symmetric positive definite matrix."""

    rows: list[list[float]]

    @classmethod
    def of(cls, matrix: list[list[float]]) -> "_Cholesky":
        rows: list[list[float]] = []
        for number, given in enumerate(matrix):
            row: list[float] = []
            for place, upper in enumerate(rows):
                row.append((given[place] - _dot(row, upper[:place])) / upper[place])
            row.append(math.sqrt(given[number] - _dot(row, row)))
            rows.append(row)
        return cls(rows)

    def solved(self, right: Sequence[float]) -> list[float]:
        """Return the solution for a right-hand side."""
        found: list[float] = []
        for row, value in zip(self.rows, right, strict=True):
            found.append((value - _dot(row, found)) / row[-1])  # `_dot` ends with the shorter one
        for number in reversed(range(len(found))):
            value = found[number] - _dot(self._columns[number][1:], found[number + 1 :])
            found[number] = value / self.rows[number][number]
        return found

    @cached_property
    def _columns(self) -> list[list[float]]:
        """Each column from the diagonal on."""
        return [[row[number] for row in self.rows[number:]] for number in range(len(self.rows))]


def _shown(name: str, value: float) -> str:
    return f"{value:,.0f}" if SCALES[name][1] else ("yes" if value else "no") if name == "experts" else f"{value:.0%}"
