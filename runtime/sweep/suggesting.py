"""Points that follow from results, and the file in which the library that suggests them keeps its own record."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from xtrain.dsl.schema.sweep import Point, Sweep
from xtrain.planner.sweep.sweep_plan import SweepPlan
from xtrain.records.sweep_state import SweepState, TrialState
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.ops import code_of


class Study(Protocol):
    """A record of a sweep for other programs."""

    def update(self, state: SweepState) -> None:
        """Take in what has ended since."""
        ...


class NoStudy:
    """Of a method that suggests nothing."""

    def update(self, state: SweepState) -> None:
        """Nothing is to be recorded."""


def check_method(sweep: Sweep) -> None:
    """Raise EnvironmentFault where a package is missing that the method needs, or where another package offers the
    method and what suggests cannot be imported."""
    for package in sweep.method.needed():
        try:
            import_module(package)
        except ImportError as error:
            remedy = "install it with `pip install 'xtrain[sweep]'`, or take another method"
            message = f"`method {sweep.method.kind}` needs the package {package}; {remedy}"
            raise EnvironmentFault("X715", message) from error
    if sweep.method.suggests:
        code_of(type(sweep.method), sweep.method.run_module())


def suggested(sweep: Sweep, state: SweepState, basis: Sequence[TrialState], number: int) -> Point:
    """The point of a trial, from the results of those that it rests on and nothing else."""
    told = [(each, state.of(each)) for each in basis]
    return import_module(sweep.method.run_module()).suggest(sweep.method, sweep.over, told, number)


def study_of(plan: SweepPlan, sweep: Sweep, folder: Path) -> Study:
    """The record of the library that suggests; made anew from what is known."""
    if not sweep.method.needed():
        return NoStudy()
    return import_module(sweep.method.run_module()).open_study(plan.name, sweep.over, folder)
