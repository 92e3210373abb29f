"""Rules about what datasets name on this machine: files, folders, templates.

What is not there may come, or lie on the machines that run: a warning. What is there and is something else is an error.
"""

from glob import iglob
from pathlib import Path

from ...dsl.diagnostics.suggest import did_you_mean
from ...dsl.schema.data import TEMPLATES, WITH_PATTERNS, Dataset, HuggingFace, Tokens
from ...dsl.spec import Spec
from ..canonical import portable
from ..findings import Findings
from .form_rules import has_turns
from .tokenizer_folder import TokenizerUnreadable, find_chat_template
from .vocabulary import tokenizer_size


def check_files(spec: Spec, found: Findings) -> None:
    """The files, folder and template of every dataset."""
    for dataset in spec.datasets.values():
        if isinstance(dataset.source, HuggingFace):
            _check_folder(dataset, dataset.source.name, found)
        elif isinstance(dataset.source, WITH_PATTERNS):
            _check_patterns(dataset, dataset.source.patterns, found)
        if isinstance(dataset.source, Tokens):
            _check_separator(dataset, dataset.source, spec.tokenizer.source, found)
        if has_turns(dataset):
            _check_template(dataset, spec.tokenizer.source, found)


def _check_patterns(dataset: Dataset, patterns: tuple[str, ...], found: Findings) -> None:
    rule, path = f"data.files.{dataset.name}", f"dataset.{dataset.name}.source"
    missing = [pattern for pattern in patterns if not _matches(pattern)]
    # A folder can be a token store.
    folders = [p for p in patterns if p not in missing and not (isinstance(dataset.source, Tokens) or _has_file(p))]
    if folders:
        shown = ", ".join(f'"{pattern}"' for pattern in folders)
        hint = f'name the files in it: "{folders[0].rstrip("/")}/*"'
        found.fail(rule, "X507", path, f"dataset {dataset.name}: only folders match {shown}, no file", hint)
    elif missing:
        shown = ", ".join(f'"{pattern}"' for pattern in missing)
        hint = "patterns are relative to the working folder; the run looks again"
        found.warn(rule, "W501", path, f"dataset {dataset.name}: no file matches {shown}", hint)
    else:
        found.passed(rule, f"files match {', '.join(patterns)}")


def _check_folder(dataset: Dataset, name: str, found: Findings) -> None:
    """A dataset of the Hugging Face library lies in a folder, or on the hub, where names have no more than one `/`."""
    rule, path = f"data.files.{dataset.name}", f"dataset.{dataset.name}.source"
    if Path(name).is_dir():
        found.passed(rule, f"folder {name}")
    elif Path(name).exists():
        hint = 'give the folder that contains it, or use the source of its file type: `jsonl("…")`'
        found.fail(rule, "X507", path, f"dataset {dataset.name}: {name} is a file, not a folder", hint)
    elif name.startswith((".", "/", "~")) or portable(name).count("/") > 1:
        hint = "paths are relative to the working folder; the run looks again"
        found.warn(rule, "W501", path, f"{dataset.name}: there is no folder {name}", hint)
    else:
        found.unknown(rule, f"{name} is looked for when the run starts")


def _check_separator(dataset: Dataset, source: Tokens, tokenizer: str, found: Findings) -> None:
    """The id that ends a document is one of the tokenizer's."""
    rule, path = f"data.separator.{dataset.name}", f"dataset.{dataset.name}.source"
    if not isinstance(source.separator, int):
        return
    try:
        size = tokenizer_size(tokenizer)
    except TokenizerUnreadable:
        return
    if source.separator >= size:
        message = f"dataset {dataset.name}: separator {source.separator:,} is not one of the {size:,} token ids"
        found.fail(rule, "X507", path, message, "set `separator` to the id that ends documents in these files")
    else:
        found.passed(rule, f"separator {source.separator:,} is one of {size:,} tokens")


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
        if tokenizer != "bytes":
            folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
            tokenizer_size(tokenizer)
            if find_chat_template(folder) is not None:
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


def _matches(pattern: str) -> bool:
    try:
        # Path.glob refuses absolute patterns.
        return next(iglob(pattern, recursive=True), None) is not None  # noqa: PTH207
    except ValueError:  # a zero byte, which no path has
        return False


def _has_file(pattern: str) -> bool:
    return any(not Path(name).is_dir() for name in iglob(pattern, recursive=True))  # noqa: PTH207
