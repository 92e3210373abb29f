"""Rules about what is trained on: one dataset, or those that `mixture` and the phases give a weight."""

from functools import partial

from ...dsl.fixes import renamed
from ...dsl.resolved import is_plain
from ...dsl.schema.data import Phase
from ...dsl.schema.setting import settings_of
from ...dsl.spec import Spec
from ...dsl.suggest import did_you_mean
from ..mixing import shares, trainable, trains, weights
from .findings import Findings


def check_training(spec: Spec, found: Findings) -> None:
    """Something is trained on, every name is that of a dataset that can be, and every phase has one."""
    written = "mixture" in spec.origins and spec.origins["mixture"].kind != "default"
    _check_training(spec, written, found)
    _check_names(spec, "data.mixture", "mixture", spec.mixture.weights, found)
    for phase in spec.phases.values():
        _check_names(spec, f"data.mix.{phase.name}", f"phase.{phase.name}.mix", phase.mix, found)
    if spec.mixture.weights and "temperature" in spec.datasets:
        message = "a dataset called `temperature` has no weight: in `mixture` this is the name of a setting"
        found.fail("data.mixture", "X513", "dataset.temperature", message, "call the dataset otherwise")
    if spec.mixture.weights or spec.phases:
        _check_weights(spec, found)
    if len(spec.mixture.weights) == 1 and not spec.phases:
        name = next(iter(spec.mixture.weights))
        message = f"mixture changes nothing, as {name} is the only dataset in it"
        if [each.name for each in trainable(spec)] == [name]:
            found.warn("idle.mixture", "W401", "mixture", message, "leave it out, or give another dataset a weight")


def _check_training(spec: Spec, written: bool, found: Findings) -> None:
    training = trainable(spec)
    names = [dataset.name for dataset in training]
    if written and not spec.mixture.weights:
        example = ", ".join(f"{name} = 1" for name in filter(is_plain, names)) or "web = 1"
        hint = f"write `mixture {{ {example} }}`, or leave it out"
        found.fail("data.training", "X502", "mixture", "nothing to train on: the mixture has no dataset", hint)
    elif not training:
        message = "every dataset is held out whole" if spec.datasets else "there is no dataset"
        path = f"dataset.{next(iter(spec.datasets))}.holdout" if spec.datasets else "dataset"
        hint = "lower its holdout" if spec.datasets else "add one, such as `dataset web { source = python_stdlib() }`"
        found.fail("data.training", "X502", path, f"nothing to train on: {message}", hint)
    elif len(training) > 1 and not spec.mixture.weights:
        example = ", ".join(f"{name} = 1" for name in names)
        hint = f"say how much of each: `mixture {{ {example} }}`, or set `holdout = 100%` on what is only evaluated"
        if quoted := [name for name in names if not is_plain(name)]:
            hint = f"call `{quoted[0]}` by a name of letters, digits and `_`, and give each a weight in `mixture`"
        path, shown = f"dataset.{names[1]}", ", ".join(names)
        found.fail("data.training", "X503", path, f"several datasets to train on: {shown}", hint)
    elif spec.mixture.weights:
        found.passed("data.training", "`mixture` says what is trained on")
    else:
        found.passed("data.training", f"`{names[0]}` is trained on")


def _check_names(spec: Spec, rule: str, path: str, given: dict[str, float], found: Findings) -> None:
    """Every weight is that of a dataset which is not held out whole."""
    settings = tuple(settings_of(type(spec.mixture))) if path == "mixture" else ()
    good = True
    for name, weight in given.items():
        place = f"{path}.{name}.name"
        dataset = spec.datasets.get(name)
        if dataset is None:
            known = (*spec.datasets, *settings)
            hint = did_you_mean(name, known) or f"datasets of this spec: {', '.join(spec.datasets) or 'none'}"
            mend = partial(renamed, word=name, candidates=known, taken=given)
            found.fail(rule, "X513", place, f"a weight of unknown dataset `{name}`", hint, mend)
        elif weight > 0 and not trains(dataset):
            message = f"`{name}` has a weight of {weight:g}, and is held out whole"
            hint = f"lower the holdout of `dataset {name}`, or set its weight to 0"
            found.fail(rule, "X515", place, message, hint)
        good = good and dataset is not None and (weight == 0 or trains(dataset))
    if given and good:
        found.passed(rule, ", ".join(f"{name} {weight:g}" for name, weight in given.items()))


def _check_weights(spec: Spec, found: Findings) -> None:
    """In every phase some dataset has a share."""
    begins = any(not phase.from_.value for phase in spec.phases.values())
    stretches: list[Phase | None] = [*([] if begins else [None]), *spec.phases.values()]
    for phase in stretches:
        rule = f"data.weights.{phase.name}" if phase is not None else "data.weights"
        path = f"phase.{phase.name}.mix" if phase is not None else "mixture"
        mixed = shares(weights(spec, phase), spec.mixture.temperature)
        if any(mixed.values()):
            found.passed(rule, ", ".join(f"{name} {share:.1%}" for name, share in mixed.items() if share))
        elif phase is not None or spec.mixture.weights:
            where = f"in phase {phase.name} every weight is 0" if phase is not None else "every weight is 0"
            hint = "give one of them a weight above 0"
            found.fail(rule, "X514", path, f"nothing to train on: {where}", hint)
