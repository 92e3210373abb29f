"""Warnings about values that are far from all published ones: a wrong unit, or an exponent left out."""

from typing import Final

from xtrain.dsl.schema.setting import Usual, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.findings import Findings, checks
from xtrain.plan.groups import written_optimizers
from xtrain.plan.timeline import times_due
from xtrain.planner.graph.timeline import Schedule, recurring
from xtrain.text.units import seconds_text

CODE: Final = "W433"
STEPS: Final = Usual(100, 10_000, "every 1,000 steps in Pythia (arXiv 2304.01373), 500 by default in torchtitan")
SECONDS: Final = Usual(300, 6 * 3600, "minutes (CheckFreq, FAST 2021) to some hours")
LONG: Final = 1000  # steps of a run from which a save every few steps is no trial


@checks("usual.*", reads="*")
def check_usual(spec: Spec, schedule: Schedule, batch: Arithmetic, found: Findings) -> None:
    """Warn of written values that are far from the usual ones of their settings."""
    blocks = {f"{group}optimizer": chosen for group, chosen in written_optimizers(spec).items()}
    for path, block in {**blocks, "model": spec.model, "launch": spec.launch}.items():
        for name, (attribute, meta) in settings_of(type(block)).items():
            value = getattr(block, attribute.name)
            number = value.value if isinstance(value, Quantity) else value
            if meta.usual is None or not isinstance(number, int | float):
                continue
            if _is_written(spec, f"{path}.{name}") and meta.usual.is_far(number):
                seconds = "seconds" in meta.units
                _warn(f"{path}.{name}", name, float(number), meta.usual, found, seconds=seconds)
    for tick, path in zip(schedule.ticks, schedule.paths, strict=True):
        if not path or not any(action.saves for action in tick.actions):
            continue
        known = recurring(tick, batch)
        if known.seconds is not None and SECONDS.is_far(known.seconds):
            _warn(path, "the time between checkpoints", known.seconds, SECONDS, found, seconds=True)
        elif batch.steps is not None and batch.steps > LONG and (known.steps or known.tokens):
            between = batch.steps / max(1, times_due(known, batch.steps, batch.sizes))
            if between * STEPS.margin < STEPS.low:
                _warn(path, "the number of steps between checkpoints", between, STEPS, found)


def _is_written(spec: Spec, path: str) -> bool:
    origin = spec.origins.get(path)
    return origin is not None and origin.kind not in ("config", "default")


def _warn(path: str, name: str, value: float, usual: Usual, found: Findings, *, seconds: bool = False) -> None:
    value_text, low, high = (seconds_text(each) if seconds else f"{each:g}" for each in (value, usual.low, usual.high))
    message = f"{name} is {value_text}, far from every published value"
    found.warn(f"usual.{path}", CODE, path, message, f"usual are {low} to {high}: {usual.source}")
