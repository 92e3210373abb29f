"""Rules about data: which dataset is trained on, whether evaluations can be made, the order of the collate chain."""

from functools import partial
from glob import iglob
from pathlib import Path

from ...dsl.fixes import renamed
from ...dsl.resolved import is_plain
from ...dsl.schema.actions import EvalAction
from ...dsl.schema.data import TEMPLATES, WITH_PATTERNS, Dataset, HuggingFace, Pack
from ...dsl.schema.setting import AUTO, Auto
from ...dsl.spec import Spec
from ...dsl.suggest import did_you_mean
from ..mixing import amount, amounts
from ..nodes.chain import check_chain
from ..paths import portable
from .findings import Findings
from .form_rules import check_forms
from .mixture_rules import check_training

# What larger groups still gain is below 0.01 % of the positions, for documents of usual lengths.
GROUP = 100_000


def check_data(spec: Spec, found: Findings) -> None:
    """Check everything about data but the phases."""
    check_training(spec, found)
    check_forms(spec, found)
    _check_files(spec, found)
    _check_evaluations(spec, found)
    _check_used(spec, found)
    check_chain(spec, found)
    _check_group(spec, found)


def evaluated(spec: Spec) -> dict[str, str]:
    """Dataset name → path of the first action that evaluates on it."""
    found: dict[str, str] = {}
    for kind, occasions in (("every", spec.ticks), ("on", spec.events)):
        for number, occasion in enumerate(occasions):
            for place, action in enumerate(occasion.actions):
                if isinstance(action, EvalAction):
                    found.setdefault(action.dataset, f"{kind}.{number}.actions.{place}.dataset")
    return found


def alignment(spec: Spec) -> int | Auto:
    """What the chain says of the alignment of documents."""
    return next((link.align for link in spec.collate if isinstance(link, Pack)), AUTO)


def packing(spec: Spec) -> Pack:
    """The link that lays samples into rows, as it is written or by default."""
    return next((link for link in spec.collate if isinstance(link, Pack)), Pack())


def packed_together(link: Pack) -> int | None:
    """Documents of a group, None where documents are packed in their order."""
    if link.method == "sequential":
        return None
    return GROUP if isinstance(link.group, Auto) else link.group


def _check_used(spec: Spec, found: Findings) -> None:
    """Every dataset is trained on or evaluated."""
    phases = (None, *spec.phases.values())
    mixes = [amounts(spec, phase) for phase in phases]
    training = {name for mixed in mixes for name, taken in mixed.items() if taken > 0}
    for name in spec.datasets:
        switched_off = name in spec.mixture.weights and not amount(spec.mixture.weights[name])
        if name not in training and name not in evaluated(spec) and not switched_off and not found.failed:
            hint = "give it a weight in `mixture`, evaluate it, or leave it out"
            if spec.mixture.weights.get(name):
                hint = (
                    f"at temperature {spec.mixture.temperature:g} its share is 0: raise its weight or the temperature"
                )
            elif not is_plain(name):
                hint = "call it by a name of letters, digits and `_`, and give it a weight"
            found.warn(f"data.used.{name}", "W506", f"dataset.{name}", f"nothing uses the dataset `{name}`", hint)


def _check_files(spec: Spec, found: Findings) -> None:
    for dataset in spec.datasets.values():
        rule, path = f"data.files.{dataset.name}", f"dataset.{dataset.name}.source"
        if isinstance(dataset.source, HuggingFace):
            _check_folder(dataset.source.name, rule, path, found)
        _check_template(dataset, found)
        if not isinstance(dataset.source, WITH_PATTERNS):
            continue
        missing = [pattern for pattern in dataset.source.patterns if not _matches(pattern)]
        if missing:
            shown = ", ".join(f'"{pattern}"' for pattern in missing)
            hint = "patterns start at the working folder; the run will look for them again"
            found.warn(rule, "W501", path, f"dataset {dataset.name}: no file matches {shown}", hint)
        else:
            found.passed(rule, f"files match {', '.join(dataset.source.patterns)}")


def _check_folder(name: str, rule: str, path: str, found: Findings) -> None:
    """A dataset of the Hugging Face library lies in a folder, or on the hub, where names have no more than one `/`."""
    if Path(name).exists():
        found.passed(rule, f"folder {name}")
    elif name.startswith((".", "/", "~")) or portable(name).count("/") > 1:
        hint = "paths start at the working folder; the run will look for it again"
        found.warn(rule, "W501", path, f"{path.split('.')[1]}: there is no folder {name}", hint)
    else:
        found.unknown(rule, f"{name} is looked for when the run starts")


def _check_template(dataset: Dataset, found: Findings) -> None:
    """A template of conversations is one that is built in, or a file."""
    template = dataset.template
    if (dataset.messages is None and dataset.prompt is None) or not isinstance(template, str):
        return
    rule, path = f"data.template.{dataset.name}", f"dataset.{dataset.name}.template"
    if template in TEMPLATES or Path(template).is_file():
        found.passed(rule, f"template {template}")
        return
    hint = (
        did_you_mean(template, TEMPLATES) or f"built in are {', '.join(TEMPLATES)}; paths start at the working folder"
    )
    found.warn(rule, "W501", path, f"dataset {dataset.name}: there is no template {template}", hint)


def _matches(pattern: str) -> bool:
    try:
        # Path.glob refuses absolute patterns.
        return next(iglob(pattern, recursive=True), None) is not None  # noqa: PTH207
    except ValueError:  # a zero byte, which no path has
        return False


def _check_evaluations(spec: Spec, found: Findings) -> None:
    for name, path in evaluated(spec).items():
        rule = f"data.eval.{name}"
        dataset = spec.datasets.get(name)
        if dataset is None:
            known = ", ".join(spec.datasets) or "none"
            hint = did_you_mean(name, spec.datasets) or f"datasets of this spec: {known}"
            mend = partial(renamed, word=name, candidates=spec.datasets)
            found.fail(rule, "X501", path, f"eval of unknown dataset `{name}`", hint, mend)
        elif dataset.holdout.fraction == 0:
            hint = f"write `holdout = 1%` in `dataset {name}`"
            found.fail(rule, "X504", path, f"eval of `{name}`, which holds nothing out", hint)
        else:
            found.passed(rule, f"`{name}` holds out {dataset.holdout}")


def _check_group(spec: Spec, found: Findings) -> None:
    """Only documents that are taken out of their order are packed in groups."""
    link = packing(spec)
    if link.method == "sequential" and not isinstance(link.group, Auto):
        message = f"pack(sequential) takes one document after the other, and has no group of {link.group:,}"
        hint = f"write `pack(multipack, group = {link.group})`, or leave the group out"
        found.fail("data.group", "X509", "collate", message, hint)
