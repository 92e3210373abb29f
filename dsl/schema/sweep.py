"""Sweeps: many runs of one experiment (`sweep`), and the methods that choose trial values."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import Role, at_least, setting, values_of
from xtrain.dsl.values import Dimension, Metric, Quantity
from xtrain.lazy_attrs import frozen

METHODS: Final = Registry["Method"]("method", "searches")

Point = Mapping[str, str]
"""Values of a trial: setting → value, as `--set` takes it; in the order of the sweep."""


@frozen
class Halving:
    """Early stopping: trials are compared at rungs, and only the best share continues.

    first: budget of a trial up to the first rung. factor: ratio of the budgets of consecutive rungs; one in `factor` of
    the trials that reach a rung continues.
    """

    first: Quantity
    factor: int


# The module `…_run` next to a method that suggests has `suggest` and `open_study`, see `runtime/jobs/sweep.py`.
@METHODS.base
class Method(Component):
    """`method NAME { … }` inside `sweep`: how the values of trials are chosen, and which trials are stopped early."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that the driver of such a sweep must be able to import."""
    everything: ClassVar[bool] = False
    """True if it tries all points, regardless of `trials`."""

    def points(self, over: Mapping[str, Dimension], trials: int) -> Sequence[Point]:
        """Return the points of the first trials, which do not depend on results: all points, unless `suggests`."""
        raise NotImplementedError

    @property
    def suggests(self) -> bool:
        """True if later points depend on the results of earlier ones."""
        return False

    @property
    def halving(self) -> Halving | None:
        """Rungs at which trials are compared; None: every trial runs to its end."""
        return None

    def needed(self) -> tuple[str, ...]:
        """Required ones of `packages` with these settings."""
        return self.packages

    def args(self) -> dict[str, Any]:
        """Return the method and its settings as JSON."""
        plain = {
            name: f"{value.value} {value.unit}" if isinstance(value, Quantity) else value
            for name, value in values_of(self).items()
        }
        return {"kind": self.kind, **plain}

    def does(self) -> str:
        """Return a description of the method."""
        raise NotImplementedError


@frozen
class Sweep:
    """`sweep { … }`: trials of this spec with other values, each a run of its own, in search of the best."""

    over: dict[str, Dimension] = setting(
        "values of a setting or a `param`, written `optimizer.lr in log(1e-4, 1e-2)`: a list, a range of whole "
        "numbers, `uniform(low, high)` or `log(low, high)`, with the number of points of a grid as a third argument",
        names="a setting or `param` of the spec",
        role=Role.EXECUTION,
        example="[256, 512]",
    )
    method: Method = setting(
        "method of choosing values", default=attrs.Factory(lambda: METHODS.default()), role=Role.EXECUTION
    )
    trials: int | None = setting(
        "number of trials; none: 20, or all points of a grid",
        default=None,
        check=at_least(1),
        role=Role.EXECUTION,
        example="40",
    )
    parallel: int = setting(
        ("trials that run concurrently"), default=1, check=at_least(1), role=Role.EXECUTION, example="4"
    )
    objective: Metric = setting(
        "metric to minimize: the last value that a trial measures",
        role=Role.EXECUTION,
        example="eval.web.loss",
    )
    retries: int = setting(
        "restarts of a trial that has failed without progress since its last start",
        default=2,
        check=at_least(0),
        role=Role.EXECUTION,
    )

    @property
    def count(self) -> int:
        """Number of trials, if the method does not try everything."""
        return 20 if self.trials is None else self.trials
