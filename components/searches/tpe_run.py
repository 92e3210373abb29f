"""Optuna in a sweep: it suggests points and keeps a study for its dashboard.

Each suggestion comes from a new study of the results it is based on, with a sampler seeded by the seed and the trial's
number. It depends only on these, even after kills.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import optuna
from attrs import field
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from xtrain.dsl.schema.sweep import Method, Point
from xtrain.dsl.values import Between, Dimension, Listed
from xtrain.lazy_attrs import define
from xtrain.records.sweep import SweepState
from xtrain.records.sweep import TrialState as SweepTrial

STUDY_FILE: Final = "optuna.log"
_SEED_STRIDE: Final = 1_000_003  # so that adjacent seeds share no trial


def suggest(
    method: Method, over: Mapping[str, Dimension], told: Sequence[tuple[SweepTrial, SweepTrial]],
    number: int,
) -> Point:  # fmt: skip
    """Suggest a point. told: trials, each with the trial that was run for it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = (method.args()["seed"] * _SEED_STRIDE + number) % 2**32
    # The sweep itself draws the startup trials; without results the sampler draws at random.
    study = optuna.create_study(sampler=TPESampler(seed=seed, n_startup_trials=1))
    for trial, run in told:
        study.add_trial(_told(trial, run, over))
    asked = study.ask(_distributions(over))
    return {name: _text(dimension, asked.params[name]) for name, dimension in over.items()}


def _distributions(over: Mapping[str, Dimension]) -> dict[str, BaseDistribution]:
    return {name: _distribution(dimension) for name, dimension in over.items()}


def _distribution(dimension: Dimension) -> BaseDistribution:
    if isinstance(dimension, Listed):
        return CategoricalDistribution(dimension.values)
    assert isinstance(dimension, Between)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _text(dimension: Dimension, value: Any) -> str:
    return dimension.text(value) if isinstance(dimension, Between) else str(value)


def _params(over: Mapping[str, Dimension], point: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, dimension in over.items():
        found[name] = point[name]
        if isinstance(dimension, Between):
            # Rounding to the text's digits may lead just outside the range.
            value = min(max(dimension.number(point[name]), dimension.low), dimension.high)
            found[name] = int(value) if dimension.whole else value
    return found


def _told(trial: SweepTrial, run: SweepTrial, over: Mapping[str, Dimension]) -> FrozenTrial:
    """Convert an ended trial for Optuna: with its value, stopped at a rung, or failed."""
    state = TrialState.COMPLETE if run.finished else TrialState.PRUNED
    if run.failed or run.value is None:
        state = TrialState.FAIL
    return create_trial(
        state=state,
        value=run.value if state == TrialState.COMPLETE else None,
        params=_params(over, trial.point),
        distributions=_distributions(over),
        intermediate_values={rung: value for rung, value in enumerate(run.values) if value is not None},
        user_attrs={"trial": trial.number, "run": run.name, "steps": run.trained, "tokens": run.tokens},
    )


def open_study(name: str, over: Mapping[str, Dimension], folder: Path) -> "StudyFile":
    """Return the study of a sweep in its folder."""
    return StudyFile(name, over, folder / STUDY_FILE)


@define(eq=False)
class StudyFile:
    """`optuna.log`: every finished trial, in the order of their numbers. `sweep.jsonl` is authoritative: each driver
    rewrites the file, so that no truncated line remains."""

    name: str
    over: Mapping[str, Dimension]
    path: Path
    _study: optuna.Study | None = None
    _count: int = field(default=0, init=False)

    def update(self, state: SweepState) -> None:
        """Add ended trials up to the first unfinished one."""
        if self._study is None:
            self._study = self._begun()
        while (trial := state.trials.get(self._count)) is not None and state.of(trial).ended:
            self._study.add_trial(_told(trial, state.of(trial), self.over))
            self._count += 1

    def _begun(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        for path in (self.path, self.path.with_name(f"{self.path.name}.lock")):
            path.unlink(missing_ok=True)
        return optuna.create_study(storage=JournalStorage(JournalFileBackend(str(self.path))), study_name=self.name)
