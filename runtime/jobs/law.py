"""Scaling laws: finished runs below some folders, and the fit to them."""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from xtrain.dsl.values import Metric
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import PlanError, load_plan
from xtrain.records.law import Coefficients, ScalingLaw
from xtrain.records.lines import objects_since
from xtrain.records.names import METRICS_FILE, EndStatus
from xtrain.runtime.jobs.runs import last_end

Array = NDArray[np.float64]
HUBER: Final = 1e-3
"""Residuals of the logarithm up to this size count squared, larger ones linearly."""
SAMPLES: Final = 400
LEAST_RUNS: Final = 7
LEAST_SIZES: Final = 3
_STEPS: Final = 200
_SAMPLE_STEPS: Final = 40


class Unfittable(ValueError):
    """Runs that no law can be fitted to; the message says what is missing."""


@frozen
class RunLoss:
    """Result of a finished run. loss: in nats a token."""

    parameters: float
    tokens: float
    loss: float


def fit_law(runs: Sequence[RunLoss], metric: str, *, seed: int = 0) -> ScalingLaw:
    """Fit a scaling law, with bootstrap samples. Raises Unfittable if the runs are too few or too similar."""
    sizes, lengths = {measured.parameters for measured in runs}, {measured.tokens for measured in runs}
    if len(runs) < LEAST_RUNS or len(sizes) < LEAST_SIZES or len(lengths) < LEAST_SIZES:
        raise Unfittable(
            f"five coefficients need {LEAST_RUNS} runs with {LEAST_SIZES} numbers of parameters and {LEAST_SIZES} of "
            f"tokens at least; there are {len(runs)} with {len(sizes)} and {len(lengths)}"
        )
    if any(not np.isfinite(measured.loss) or measured.loss <= 0 for measured in runs):
        raise Unfittable("a loss is not a number above 0")
    log_n = np.log([measured.parameters for measured in runs])
    log_d = np.log([measured.tokens for measured in runs])
    log_l = np.log([measured.loss for measured in runs])
    starts = [
        _start(log_n, log_d, log_l, *initial) for initial in product((0.2, 0.5, 1.0), (0.2, 0.5, 1.0), (0.1, 0.6, 0.9))
    ]
    theta = min((_minimised(each, log_n, log_d, log_l, _STEPS) for each in starts), key=lambda each: each[1])[0]
    fitted = _predicted(theta, log_n, log_d)[0]
    residuals = log_l - fitted
    # Residuals of a fit are smaller than the true errors, by the degrees of freedom that its coefficients take.
    # A Huber fit centers residuals on the median: the mean would follow a single outlier.
    drawn = (residuals - np.median(residuals)) * np.sqrt(len(runs) / max(len(runs) - len(theta), 1))
    generator = np.random.default_rng(seed)
    samples = [
        _minimised(theta, log_n, log_d, fitted + generator.choice(drawn, len(runs)), _SAMPLE_STEPS)[0]
        for _ in range(SAMPLES)
    ]
    return ScalingLaw(
        metric=metric,
        runs=len(runs),
        fitted=_coefficients(theta),
        samples=tuple(map(_coefficients, samples)),
        parameters=(min(sizes), max(sizes)),
        tokens=(min(lengths), max(lengths)),
        error=float(np.sqrt(np.mean(residuals**2))),
    )


# theta: log E, log A, log B, log alpha, log beta; all five are positive.


def _coefficients(theta: Array) -> Coefficients:
    e, a, b, alpha, beta = np.exp(theta)
    return Coefficients(E=float(e), A=float(a), B=float(b), alpha=float(alpha), beta=float(beta))


def _start(log_n: Array, log_d: Array, log_l: Array, alpha: float, beta: float, share: float) -> Array:
    """Return a starting point where E is a share of the least loss, and the two terms split the rest at the mean of the
    runs."""
    rest = np.log(max(np.exp(log_l.min()) * (1 - share), 1e-6) / 2)
    a, b = rest + alpha * log_n.mean(), rest + beta * log_d.mean()
    return np.array([log_l.min() + np.log(share), a, b, np.log(alpha), np.log(beta)])


def _predicted(theta: Array, log_n: Array, log_d: Array) -> tuple[Array, Array]:
    """Return log L of each run, and its derivatives by theta: (runs, 5)."""
    alpha, beta = np.exp(theta[3]), np.exp(theta[4])
    terms = np.stack([np.full_like(log_n, theta[0]), theta[1] - alpha * log_n, theta[2] - beta * log_d])
    highest = terms.max(axis=0)
    parts = np.exp(terms - highest)
    total = parts.sum(axis=0)
    shares = parts / total
    slopes = np.stack([shares[0], shares[1], shares[2], -shares[1] * alpha * log_n, -shares[2] * beta * log_d], axis=1)
    return highest + np.log(total), slopes


def _huber(residuals: Array) -> float:
    size = np.abs(residuals)
    return float(np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum())


def _minimised(theta: Array, log_n: Array, log_d: Array, log_l: Array, steps: int) -> tuple[Array, float]:
    """Return the theta with the least Huber loss near a start, and that loss."""
    damping = 1e-3
    predicted, slopes = _predicted(theta, log_n, log_d)
    residuals = log_l - predicted
    cost = _huber(residuals)
    for _ in range(steps):
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-300))
        normal = slopes.T @ (weights[:, None] * slopes)
        step = np.linalg.lstsq(
            normal + damping * np.diag(np.diag(normal) + 1e-12), slopes.T @ (weights * residuals), rcond=None
        )[0]
        trial = theta + np.clip(step, -2.0, 2.0)
        predicted, trial_slopes = _predicted(trial, log_n, log_d)
        trial_cost = _huber(log_l - predicted)
        if not trial_cost < cost:
            damping *= 10
            if damping > 1e12:
                break
            continue
        gained = cost - trial_cost
        theta, slopes, residuals, cost = trial, trial_slopes, log_l - predicted, trial_cost
        damping = max(damping / 10, 1e-12)
        if gained < 1e-12 * max(cost, 1e-300):
            break
    return theta, cost


def finished_runs(paths: Iterable[Path]) -> list[tuple[Path, Plan]]:
    """Return the finished runs at some paths or below them, each once, with their plans."""
    finished: dict[Path, tuple[Path, Plan]] = {}
    for path in paths:
        plans = [path / "plan.json"] if (path / "plan.json").is_file() else sorted(path.rglob("plan.json"))
        for file in plans:
            end = last_end(file.parent)
            if end is None or end.status not in (EndStatus.DONE, EndStatus.COMPLETE):
                continue
            try:
                finished.setdefault(file.parent.resolve(), (file.parent, load_plan(file)))
            except PlanError:
                continue  # of another version, or damaged: not comparable
    return list(finished.values())


def measured_runs(runs: Sequence[tuple[Path, Plan]], metric: str | None) -> tuple[str, list[tuple[Path, RunLoss]]]:
    """Return the metric, and the runs that have measured it.

    metric: `eval.DATASET.loss`; None: of the one dataset that all runs evaluate. Raises Unfittable.
    """
    if not runs:
        raise Unfittable("there is no finished run")
    lines = {path: objects_since(path / METRICS_FILE) for path, _ in runs}
    name = _shared_metric(lines.values()) if metric is None else metric
    read = Metric.read(name)
    if read is None:
        raise Unfittable(f"`{name}` is not a metric; write for example --metric eval.web.loss")
    key = read.key
    measured = []
    for path, plan in runs:
        values = [(row[key], row) for row in lines[path] if isinstance(row.get(key), int | float)]
        tokens = [row["tokens"] for row in lines[path] if row.get("tokens")]
        if values and not (math.isfinite(values[-1][0]) and values[-1][0] > 0):
            raise Unfittable(f"{path} ended with {name} {values[-1][0]}, which is no loss above 0; leave the run out")
        if values and tokens:
            measured.append((path, RunLoss(float(plan.parameters.active), float(tokens[-1]), float(values[-1][0]))))
    if not measured:
        raise Unfittable(f"no run has measured {name}")
    return name, measured


def _shared_metric(runs: Iterable[Sequence[dict]]) -> str:
    """Return the loss that all runs measure. Raises Unfittable if there is none or several."""
    shared = set.intersection(*({key for row in rows for key in row} for rows in runs))
    names = sorted(key.replace("/", ".") for key in shared if key.startswith("eval/") and key.endswith("/loss"))
    if len(names) != 1:
        raise Unfittable(f"name a loss with --metric; all runs measure: {', '.join(names) or 'none'}")
    return names[0]
