"""Rules about what a loss reads of the data: documents of its kind, with the numbers that it names."""

from collections.abc import Iterator

from ...dsl.schema.collators import LABELLED_SAMPLES
from ...dsl.schema.component import UserComponent
from ...dsl.schema.data import Dataset
from ...dsl.schema.training import Loss
from ...dsl.spec import Spec
from ..findings import Findings

CODE = "X527"
Problem = tuple[str, str, str]


def check_reads(spec: Spec, trained: set[str], evaluated: set[str], found: Findings) -> None:
    """Every dataset that is used must give what the loss reads. Evaluations take the cross-entropy, of any documents
    that rows for the loss can be made of.

    What a collator of the user's own makes of documents before they are packed, only the run sees.
    """
    behind = next((place for place, link in enumerate(spec.collate) if link.takes == LABELLED_SAMPLES and link.usual),
                  len(spec.collate))  # fmt: skip
    if any(isinstance(link, UserComponent) for link in spec.collate[:behind]):
        return
    for name in (each for each in spec.datasets if each in trained | evaluated and spec.datasets[each].choices is None):
        for setting, message, hint in _missing(spec.loss, spec.datasets[name], name in trained):
            whole = f"the loss {spec.loss.kind} {message}"
            found.fail(f"data.loss.{name}", CODE, f"dataset.{name}.{setting}", f"dataset {name}: {whole}", hint)


def _missing(loss: Loss, dataset: Dataset, trained: bool) -> Iterator[Problem]:
    """(setting, what is wrong, what to write)."""
    if loss.unit == "pair" and not dataset.has_pairs:
        yield "source", "compares pairs of answers, and it has none", 'write `chosen = "…", rejected = "…"`, its fields'
    elif loss.unit == "sequence" and dataset.has_pairs:
        yield "chosen", "is of single answers, and it has pairs", "choose a loss of pairs, such as dpo"
    elif loss.unit == "token" and dataset.has_pairs and trained:
        hint = "choose a loss of pairs, such as dpo"
        yield "chosen", "is of tokens, and would learn rejected answers like chosen ones", hint
    elif loss.unit == "sequence" and dataset.long_documents == "split":
        hint = "write `oversized = skip` or `oversized = truncate`"
        yield "oversized", "is of whole documents, and those longer than a row are split", hint
    for name in loss.columns:
        if name not in dataset.gives_columns:
            hint = f'name the field that has them: `columns = {{ {name}: "{name}" }}`'
            yield "source", f"reads `{name}`, numbers along the tokens, and it has none", hint
    for name in loss.values:
        if name not in dataset.gives_values:
            hint = f'name the field that has it: `values = {{ {name}: "{name}" }}`'
            hint = f'write `{name} = "{name}"`, its field' if hasattr(dataset, name) else hint
            yield "source", f"reads `{name}`, a number of each document, and it has none", hint
