"""Rules about data: which dataset is trained on, whether evaluations can be made, the order of the collate chain."""

from functools import partial

from ...dsl.diagnostics.fixes import renamed
from ...dsl.diagnostics.suggest import did_you_mean
from ...dsl.schema.collators import row_link
from ...dsl.spec import Spec
from ...dsl.spec_text import is_plain
from ..findings import Findings
from ..schedule.mixing import amount, amounts
from .chain import check_chain
from .file_rules import check_files
from .form_rules import check_forms
from .mixture_rules import check_training


def check_data(spec: Spec, found: Findings) -> None:
    """Check everything about data but the phases."""
    check_training(spec, found)
    check_forms(spec, found)
    check_files(spec, found)
    _check_evaluations(spec, found)
    _check_used(spec, found)
    check_chain(spec, found)
    _check_group(spec, found)


def evaluated(spec: Spec) -> dict[str, str]:
    """Dataset name → path of the first action that evaluates on it."""
    found: dict[str, str] = {}
    for kind, triggers in (("every", spec.ticks), ("on", spec.events)):
        for number, trigger in enumerate(triggers):
            for place, action in enumerate(trigger.actions):
                if (dataset := action.held_out()) is not None:
                    found.setdefault(dataset, f"{kind}.{number}.actions.{place}.dataset")
    return found


def _check_used(spec: Spec, found: Findings) -> None:
    """Every dataset is trained on or evaluated."""
    phases = (None, *spec.phases.values())
    mixes = [amounts(spec, phase) for phase in phases]
    training = {name for mixed in mixes for name, taken in mixed.items() if taken > 0}
    for name in spec.datasets:
        switched_off = name in spec.mixture.weights and not amount(spec.mixture.weights[name])
        if name not in training and name not in evaluated(spec) and not switched_off and not found.failed:
            hint = "give it a weight in `mixture`, evaluate it, or remove it"
            if spec.mixture.weights.get(name):
                hint = (
                    f"at temperature {spec.mixture.temperature:g} its share is 0: raise its weight or the temperature"
                )
            elif not is_plain(name):
                hint = "rename it to letters, digits and `_`, and give it a weight"
            found.warn(f"data.used.{name}", "W506", f"dataset.{name}", f"nothing uses the dataset `{name}`", hint)


def _check_evaluations(spec: Spec, found: Findings) -> None:
    for name, path in evaluated(spec).items():
        rule = f"data.eval.{name}"
        dataset = spec.datasets.get(name)
        if dataset is None:
            known = ", ".join(spec.datasets) or "none"
            hint = did_you_mean(name, spec.datasets) or f"datasets of this spec: {known}"
            fix_at = partial(renamed, word=name, candidates=spec.datasets)
            found.fail(rule, "X501", path, f"`eval` of the unknown dataset `{name}`", hint, fix_at)
        elif dataset.holdout.fraction == 0:
            hint = f"set `holdout = 1%` in `dataset {name}`"
            found.fail(rule, "X504", path, f"`eval` of `{name}`, which has no held-out part", hint)
        else:
            found.passed(rule, f"`{name}` holds out {dataset.holdout}")


def _check_group(spec: Spec, found: Findings) -> None:
    """Only documents that are taken out of their order are packed in groups."""
    problem = row_link(spec.collate).useless()
    if problem is not None:
        found.fail("data.group", "X509", "collate", *problem)
