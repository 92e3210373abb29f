"""Rules about what datasets name on this machine: files, folders, templates.

What is not there may come, or lie on the machines that run: a warning. What is there and is something else is an error.
"""

from pathlib import Path

from ...dsl.diagnostics.suggest import did_you_mean
from ...dsl.schema.data import TEMPLATES, Dataset
from ...dsl.schema.tokenizers import tokenizer_kind
from ...dsl.spec import Spec
from ..findings import Findings
from .form_rules import has_turns
from .tokenizer_folder import TokenizerUnreadable


def check_files(spec: Spec, found: Findings) -> None:
    """The files, folder and template of every dataset."""
    for dataset in spec.datasets.values():
        dataset.source.check(dataset.name, lambda: _vocabulary(spec.tokenizer.source), found)
        if has_turns(dataset):
            _check_template(dataset, spec.tokenizer.source, found)


def _vocabulary(tokenizer: str) -> int | None:
    """How many tokens it has; None if it cannot be read."""
    try:
        return tokenizer_kind(tokenizer).size(tokenizer)
    except TokenizerUnreadable:
        return None


def _check_template(dataset: Dataset, tokenizer: str, found: Findings) -> None:
    """A template of conversations and pairs is the tokenizer's, one that is built in, or a file."""
    rule, path = f"data.template.{dataset.name}", f"dataset.{dataset.name}.template"
    known = ", ".join(TEMPLATES)
    if not isinstance(dataset.template, str):
        _check_own_template(dataset, tokenizer, rule, found)
    elif dataset.template in TEMPLATES or Path(dataset.template).is_file():
        found.passed(rule, f"template {dataset.template}")
    elif Path(dataset.template).exists():
        hint = f"name a file; built in are {known}"
        found.fail(rule, "X507", path, f"dataset {dataset.name}: template {dataset.template} is not a file", hint)
    else:
        hint = did_you_mean(dataset.template, TEMPLATES) or f"built in are {known}; paths start at the working folder"
        found.warn(rule, "W501", path, f"dataset {dataset.name}: there is no template {dataset.template}", hint)


def _check_own_template(dataset: Dataset, tokenizer: str, rule: str, found: Findings) -> None:
    """Where a dataset says nothing of a template, the tokenizer has to have one."""
    setting = "messages" if dataset.messages is not None else "prompt"
    problem = "has no chat template"
    try:
        if tokenizer_kind(tokenizer).has_template(tokenizer):
            found.passed(rule, f"the template of tokenizer {tokenizer}")
            return
    except TokenizerUnreadable as error:
        if error.path is None:  # of the tokenizer itself, which another rule speaks of
            found.unknown(rule, f"the template of tokenizer {tokenizer} is looked for when the run starts")
            return
        problem = f"has none that can be read: {error}"
    message = f"dataset {dataset.name}: `{setting}` needs a template, and `tokenizer {tokenizer}` {problem}"
    hint = f'add `template = "{TEMPLATES[0]}"` ({", ".join(TEMPLATES)}), or the path of a Jinja template'
    found.fail(rule, "X507", f"dataset.{dataset.name}.{setting}", message, hint)
