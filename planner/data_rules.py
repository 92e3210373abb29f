"""Rules about data: which dataset is trained on, whether evaluations can be made, the order of the collate chain."""

import os
from functools import partial
from glob import iglob

from ..dsl.fixes import renamed
from ..dsl.schema.actions import EvalAction
from ..dsl.schema.data import Dataset, Flatten, Link, Pack, PythonStdlib, Shard, ShiftTokens, ToTensor
from ..dsl.schema.setting import AUTO, Auto
from ..dsl.spec import Spec
from ..dsl.suggest import did_you_mean
from .findings import Findings

# What a link takes and gives; the first takes what the reader yields, the last gives what a model takes.
LINKS: dict[type[Link], tuple[str, str, str]] = {
    ToTensor: ("to_tensor", "rows of token arrays", "rows of token tensors"),
    Flatten: ("flatten", "rows of token tensors", "token samples"),
    ShiftTokens: ("shift_tokens", "token samples", "labelled samples"),
    Pack: ("pack", "labelled samples", "rows of equal length"),
    Shard: ("shard", "rows of equal length", "a rank's part of rows"),
}
# What larger groups still gain is below 0.01 % of the positions, for documents of usual lengths.
GROUP = 100_000
CHAIN = "to_tensor -> flatten -> shift_tokens -> pack"


def check_data(spec: Spec, found: Findings) -> Dataset | None:
    """Check everything about data; the dataset that is trained on, None if there is not exactly one."""
    training = _training_dataset(spec, found)
    _check_files(spec, found)
    _check_evaluations(spec, found)
    _check_chain(spec, found)
    _check_group(spec, found)
    return training


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


def trains(dataset: Dataset) -> bool:
    return dataset.holdout.fraction < 1


def portable(path: str) -> str:
    """One spelling for one path: `./data//x` is `data/x`."""
    return os.path.normpath(path).replace(os.sep, "/")


def _training_dataset(spec: Spec, found: Findings) -> Dataset | None:
    training = [dataset for dataset in spec.datasets.values() if trains(dataset)]
    if len(training) == 1:
        found.passed("data.training", f"`{training[0].name}` is trained on")
        return training[0]
    if not training:
        message = "every dataset is held out whole" if spec.datasets else "there is no dataset"
        path = f"dataset.{next(iter(spec.datasets))}.holdout" if spec.datasets else "dataset"
        hint = "lower its holdout" if spec.datasets else "add one, such as `dataset web { source = python_stdlib() }`"
        found.fail("data.training", "X502", path, f"nothing to train on: {message}", hint)
    else:
        names = ", ".join(dataset.name for dataset in training)
        hint = "set `holdout = 100%` on those that are only evaluated; training on several needs `mixture`"
        path = f"dataset.{training[1].name}"
        found.fail("data.training", "X503", path, f"several datasets to train on: {names}", hint)
    return None


def _check_files(spec: Spec, found: Findings) -> None:
    for dataset in spec.datasets.values():
        if isinstance(dataset.source, PythonStdlib):
            continue
        rule, path = f"data.files.{dataset.name}", f"dataset.{dataset.name}.source"
        missing = [pattern for pattern in dataset.source.patterns if not _matches(pattern)]
        if missing:
            shown = ", ".join(f'"{pattern}"' for pattern in missing)
            hint = "patterns start at the working folder; the run will look for them again"
            found.warn(rule, "W501", path, f"dataset {dataset.name}: no file matches {shown}", hint)
        else:
            found.passed(rule, f"files match {', '.join(dataset.source.patterns)}")


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


def _check_chain(spec: Spec, found: Findings) -> None:
    """Each link must take what the one before it gives."""
    given = next(iter(LINKS.values()))[1]
    before = "the reader"
    for link in spec.collate:
        name, takes, gives = LINKS[type(link)]
        if takes != given:
            message = f"collate: `{name}` takes {takes}, but {before} gives {given}"
            found.fail("data.collate", "X508", "collate", message, f"write `collate = {CHAIN}`")
            return
        given, before = gives, f"`{name}`"
    if given not in (LINKS[Pack][2], LINKS[Shard][2]):
        message = f"collate: a model takes {LINKS[Pack][2]}, but {before} gives {given}"
        found.fail("data.collate", "X508", "collate", message, f"write `collate = {CHAIN}`")
        return
    found.passed("data.collate", " -> ".join(LINKS[type(link)][0] for link in spec.collate))


def _check_group(spec: Spec, found: Findings) -> None:
    """Only documents that are taken out of their order are packed in groups."""
    link = packing(spec)
    if link.method == "sequential" and not isinstance(link.group, Auto):
        message = f"pack(sequential) takes one document after the other, and has no group of {link.group:,}"
        hint = f"write `pack(multipack, group = {link.group})`, or leave the group out"
        found.fail("data.group", "X509", "collate", message, hint)
