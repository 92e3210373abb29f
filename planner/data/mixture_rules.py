"""Rules about what is trained on: one dataset, or those that `mixture` and the phases give a weight."""

from functools import partial

from xtrain.dsl.diagnostics.fixes import renamed
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.data import Phase, Weight
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import is_plain
from xtrain.planner.findings import Findings
from xtrain.planner.schedule.mixing import amount, amounts, in_epochs, shares, trainable, trains, weight_text, weights
from xtrain.planner.units import amount_in_epochs


def check_training(spec: Spec, found: Findings) -> None:
    """Something is trained on, every name is that of a dataset that can be, and every phase has one."""
    written = "mixture" in spec.origins and spec.origins["mixture"].kind != "default"
    _check_training(spec, written, found)
    _check_names(spec, "data.mixture", "mixture", spec.mixture.weights, found)
    for phase in spec.phases.values():
        _check_names(spec, f"data.mix.{phase.name}", f"phase.{phase.name}.mix", phase.mix, found)
    settings = (name for name in settings_of(type(spec.mixture)) if name in spec.datasets)
    if spec.mixture.weights and (name := next(settings, None)) is not None:
        message = f"a dataset called `{name}` cannot have a weight: in `mixture` this is the name of a setting"
        found.fail("data.mixture", "X513", f"dataset.{name}", message, "rename the dataset")
    if spec.mixture.weights or spec.phases:
        _check_weights(spec, found)
        _check_epochs(spec, found)
    if len(spec.mixture.weights) == 1 and not spec.phases:
        name, weight = next(iter(spec.mixture.weights.items()))
        message = f"mixture changes nothing, because {name} is its only dataset"
        longer = isinstance(weight, Quantity) and weight.value != 1  # an epoch of the run is another one
        if [each.name for each in trainable(spec)] == [name] and not longer:
            found.warn("idle.mixture", "W401", "mixture", message, "leave it out, or give another dataset a weight")
    _check_temperature(spec, found)


def _check_temperature(spec: Spec, found: Findings) -> None:
    """Warn of a temperature that makes no weights more alike than they are."""
    origin, temperature = spec.origins.get("mixture.temperature"), spec.mixture.temperature
    stretches = [weights(spec), *(weights(spec, phase) for phase in spec.phases.values())]
    if temperature == 1 or origin is None or origin.kind == "default" or any(map(in_epochs, stretches)):
        return
    numbers = [{name: amount(weight) for name, weight in each.items()} for each in stretches]
    if all(shares(each, temperature) == shares(each, 1.0) for each in numbers):
        message = "temperature changes nothing, because all datasets of a mixture have the same weight"
        found.warn("idle.mixture.temperature", "W401", "mixture.temperature", message, "remove it")


def _check_training(spec: Spec, written: bool, found: Findings) -> None:
    training = trainable(spec)
    names = [dataset.name for dataset in training]
    if written and not spec.mixture.weights:
        example = ", ".join(f"{name} = 1" for name in filter(is_plain, names)) or "web = 1"
        hint = f"write `mixture {{ {example} }}`, or remove it"
        found.fail("data.training", "X502", "mixture", "nothing to train on: the mixture has no dataset", hint)
    elif not training:
        message = "every dataset has `holdout = 100%`" if spec.datasets else "there is no dataset"
        path = f"dataset.{next(iter(spec.datasets))}.holdout" if spec.datasets else "dataset"
        hint = "lower its holdout" if spec.datasets else "add one, such as `dataset web { source = python_stdlib() }`"
        found.fail("data.training", "X502", path, f"nothing to train on: {message}", hint)
    elif len(training) > 1 and not spec.mixture.weights:
        example = ", ".join(f"{name} = 1" for name in names)
        hint = f"give a weight to each:  `mixture {{ {example} }}`, or set `holdout = 100%` on what is only evaluated"
        if quoted := [name for name in names if not is_plain(name)]:
            hint = f"call `{quoted[0]}` by a name of letters, digits and `_`, and give each a weight in `mixture`"
        path, shown = f"dataset.{names[1]}", ", ".join(names)
        found.fail("data.training", "X503", path, f"several datasets to train on: {shown}", hint)
    elif spec.mixture.weights:
        found.passed("data.training", "`mixture` says what is trained on")
    else:
        found.passed("data.training", f"`{names[0]}` is trained on")


def _check_names(spec: Spec, rule: str, path: str, given: dict[str, Weight], found: Findings) -> None:
    """Every weight is that of a dataset which is not held out whole."""
    settings = tuple(settings_of(type(spec.mixture))) if path == "mixture" else ()
    good = True
    for name, weight in given.items():
        place = f"{path}.{name}.name"
        dataset = spec.datasets.get(name)
        if dataset is None:
            known = (*spec.datasets, *settings)
            hint = did_you_mean(name, known) or f"datasets of this spec: {', '.join(spec.datasets) or 'none'}"
            fix_at = partial(renamed, word=name, candidates=known, taken=given)
            found.fail(rule, "X513", place, f"a weight of unknown dataset `{name}`", hint, fix_at)
        elif amount(weight) > 0 and not trains(dataset):
            message = f"`{name}` has a weight of {weight_text(weight)}, and `holdout = 100%`"
            hint = f"lower the holdout of `dataset {name}`, or set its weight to 0"
            found.fail(rule, "X515", place, message, hint)
        good = good and dataset is not None and (not amount(weight) or trains(dataset))
    if given and good:
        found.passed(rule, ", ".join(f"{name} {weight_text(weight)}" for name, weight in given.items()))


def _check_weights(spec: Spec, found: Findings) -> None:
    """In every phase some dataset has a share, and the weights can be compared."""
    begins = any(not phase.from_.value for phase in spec.phases.values())
    stretches: list[Phase | None] = [*([] if begins else [None]), *spec.phases.values()]
    for phase in stretches:
        rule = f"data.weights.{phase.name}" if phase is not None else "data.weights"
        path = f"phase.{phase.name}.mix" if phase is not None else "mixture"
        given, mixed = weights(spec, phase), amounts(spec, phase)
        if any(mixed.values()):
            shown = given if in_epochs(given) else {name: f"{share:.1%}" for name, share in mixed.items()}
            texts = {name: each if isinstance(each, str) else weight_text(each) for name, each in shown.items()}
            found.passed(rule, ", ".join(f"{name} {texts[name]}" for name, share in mixed.items() if share))
        elif phase is not None or spec.mixture.weights:
            where = f"in phase {phase.name} every weight is 0" if phase is not None else "every weight is 0"
            hint = "give one of them a weight above 0"
            found.fail(rule, "X514", path, f"nothing to train on: {where}", hint)


def _check_epochs(spec: Spec, found: Findings) -> None:
    """Weights of one mixture are all epochs, or all shares."""
    given, rule, temperature = spec.mixture.weights, "data.epochs", spec.mixture.temperature
    if not any(in_epochs(each) for each in (given, *(phase.mix for phase in spec.phases.values()))):
        return
    if (pair := _unlike(given, given)) is not None:
        name, other = pair
        message = f"weights of two kinds: {_named_weight(name, given)}, {_named_weight(other, given)}"
        hint = f"give all of them in epochs, as `{name} = {amount_in_epochs(amount(given[name]))}`, or none"
        if isinstance(given[name], Quantity):
            hint = f"give all of them as shares, as `{name} = {amount(given[name]):g}`, or in epochs"
        found.fail(rule, "X518", f"mixture.{name}", message, hint)
        return
    if given and in_epochs(given) and temperature != 1:
        message = f"a temperature of {temperature:g} needs weights as shares, and these are in epochs"
        found.fail(rule, "X519", "mixture.temperature", message, "leave it out, or give weights without `epochs`")
    elif given:
        found.passed(rule, "all weights are epochs" if in_epochs(given) else "all weights are shares of rows")
    for phase in spec.phases.values():
        rule, whole = f"data.epochs.{phase.name}", weights(spec, phase)
        if (pair := _unlike(phase.mix, whole)) is not None:
            name, other = pair
            source = "" if other in phase.mix else " of `mixture`"
            pair_text = f"{_named_weight(name, whole)}, {_named_weight(other, whole)}{source}"
            message = f"weights of two kinds in phase {phase.name}: {pair_text}"
            kind = "in epochs" if isinstance(whole[name], Quantity) else "as a share of rows"
            every = ", ".join(f"{each}: …" for each, weight in whole.items() if amount(weight))
            hint = f"give every dataset a weight {kind}, `mix = {{ {every} }}`, or all as in `mixture`"
            found.fail(rule, "X518", f"phase.{phase.name}.mix.{name}", message, hint)
        elif phase.mix:
            found.passed(rule, "its weights are of one kind")


def _unlike(named: dict[str, Weight], whole: dict[str, Weight]) -> tuple[str, str] | None:
    """One of the named datasets whose weight is of another kind than that of another one, and that one."""
    kinds = {name: isinstance(weight, Quantity) for name, weight in whole.items() if amount(weight)}
    if len({*kinds.values()}) < 2:
        return None
    all_kinds = list(kinds.values())
    # The rarer kind is the odd one; of two that are as rare that which comes later.
    odd = [name for name in named if name in kinds]
    name = min(odd, key=lambda name: (all_kinds.count(kinds[name]), kinds[name] == all_kinds[0]), default=None)
    return None if name is None else (name, next(other for other in kinds if kinds[other] != kinds[name]))


def _named_weight(name: str, given: dict[str, Weight]) -> str:
    kind = "" if isinstance(given[name], Quantity) else ", a share of rows"
    return f"`{name}` is {weight_text(given[name])}{kind}"
