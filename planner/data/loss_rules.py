"""Rules about what a loss reads of the data: documents of its kind, with the numbers that it names, and no others."""

from collections.abc import Iterator

from attrs import NOTHING, fields

from xtrain.dsl.schema.collators import LABELLED_SAMPLES, row_link
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.losses import LOSSES, WEIGHTS, Loss
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings

CODE = "X527"
IDLE = "W401"
Problem = tuple[str, str, str]


def check_reads(spec: Spec, trained: set[str], evaluated: set[str], found: Findings) -> None:
    """Every dataset that is trained on must give what the loss reads; evaluations of others take the cross-entropy
    alone, which there is none of where the model gives rewards. Numbers that the loss does not read are idle."""
    rewards = spec.loss.head == "reward"
    if rewards:
        _check_rewards(spec, evaluated, found)
    if spec.loss.mismatched:
        _check_mismatched(spec, found)
    if _is_remade(spec):
        return
    for name in (each for each in spec.datasets if each in trained | evaluated and spec.datasets[each].choices is None):
        for setting, message, hint in _missing(spec.loss, spec.datasets[name]) if name in trained or rewards else ():
            whole = f"the loss {spec.loss.kind} {message}"
            found.fail(f"data.loss.{name}", CODE, f"dataset.{name}.{setting}", f"dataset {name}: {whole}", hint)
        for setting, number in _unread(spec.loss, spec.datasets[name]):
            path = f"dataset.{name}.{setting}"
            message = f"dataset {name}: the loss {spec.loss.kind} does not read `{number}`"
            hint = _readers(spec.loss, number)
            if number in spec.loss.computed:
                message = f"dataset {name}: `{number}` changes nothing, as the run computes it (loss.reference)"
                hint = "remove it, or write `reference = precomputed` in `loss`"
            found.warn(f"idle.{path}", IDLE, path, message, hint)


def _check_rewards(spec: Spec, evaluated: set[str], found: Findings) -> None:
    """What asks for probabilities of tokens, of a model that gives rewards."""
    for name in (each for each in spec.datasets if each in evaluated and spec.datasets[each].choices is not None):
        message = f"dataset {name}: its questions ask for the likeliest choice, and with the loss {spec.loss.kind} "
        message += "the model gives rewards in place of probabilities"
        hint = "remove the evaluation, or choose a loss of tokens"
        found.fail(f"data.loss.{name}", "X442", f"dataset.{name}.choices", message, hint)
    if spec.evaluation_step is not None:
        message = f"an evaluation of your own adds up losses of tokens, and with the loss {spec.loss.kind} the model "
        hint = "remove it: evaluations measure what is minimised"
        found.fail("data.rewards", "X442", "evaluation_step", f"{message}gives rewards", hint)


def _check_mismatched(spec: Spec, found: Findings) -> None:
    """Answers are exchanged between the documents of a row, and compared over all rows of a step."""
    hint = "write a number for `reference_point`"
    message = f"the loss {spec.loss.kind} compares with answers to other prompts of a row, and "
    if row_link(spec.collate).packing.single:
        found.fail("loss.mismatched", CODE, "collate", f"{message}with pack(single) it holds one", f"{hint}, or pack")
    elif spec.tasks:
        path = f"task.{next(iter(spec.tasks))}"
        found.fail("loss.mismatched", CODE, path, f"{message}the rows of a step are of several tasks", hint)


def is_measured(spec: Spec, name: str) -> bool:
    """Whether evaluations of a dataset measure what is minimised, beside the cross-entropy: if it is another thing, and
    the dataset gives what it reads, which no dataset does where a rollout makes it. A function of the user's own in
    place of the forward gives one loss alone."""
    dataset = spec.datasets[name]
    if not spec.loss.recorded or spec.evaluation_step is not None or dataset.choices is not None:
        return False
    if spec.rollout is not None:
        return False
    return _is_remade(spec) or not any(_missing(spec.loss, dataset))


def _is_remade(spec: Spec) -> bool:
    """Whether a collator of the user's own is shown documents before they are packed: what it makes of them, only the
    run sees."""
    behind = next((place for place, link in enumerate(spec.collate) if link.takes == LABELLED_SAMPLES and link.usual),
                  len(spec.collate))  # fmt: skip
    return any(isinstance(link, UserComponent) for link in spec.collate[:behind])


def _unread(loss: Loss, dataset: Dataset) -> Iterator[tuple[str, str]]:
    """(setting that gives it, number of tokens or documents that nothing reads)."""
    for setting, named, gives, reads in (
        ("columns", dataset.columns, dataset.gives_columns, loss.columns),
        ("values", dataset.values, dataset.gives_values, loss.values),
    ):
        for name in (each for each in gives if each not in reads or each in loss.computed):
            own = {WEIGHTS: "message_weight", "label": "label"}
            yield (f"{setting}.{name}" if name in named else own[name]), name


def _readers(loss: Loss, name: str) -> str:
    """What to write instead, of a number that the loss does not read."""
    if name in loss.may_read:
        return f"write `loss {loss.kind} {{ {loss.may_read[name]} }}`, or remove it"
    usual = [each() for each in LOSSES.values() if all(field.default is not NOTHING for field in fields(each))]
    known = [each.kind for each in usual if name in (*each.columns, *each.values)]
    return f"remove it, or choose a loss that reads it: {', '.join(known)}" if known else "remove it"


def _missing(loss: Loss, dataset: Dataset) -> Iterator[Problem]:
    """(setting, what is wrong, what to write)."""
    if loss.unit == "pair" and not dataset.has_pairs:
        yield "source", "compares pairs of answers, and it has none", 'write `chosen = "…", rejected = "…"`, its fields'
    elif loss.unit == "sequence" and dataset.has_pairs:
        yield "chosen", "is of single answers, and it has pairs", "choose a loss of pairs, such as dpo"
    elif loss.unit == "token" and dataset.has_pairs:
        hint = "choose a loss of pairs, such as dpo"
        yield "chosen", "is of tokens, and would learn rejected answers like chosen ones", hint
    elif loss.unit == "sequence" and dataset.long_documents == "split":
        hint = "write `oversized = skip` or `oversized = truncate`"
        yield "oversized", "is of whole documents, and those longer than a row are split", hint
    for name in (each for each in loss.columns if each not in loss.computed):
        if name not in dataset.gives_columns:
            hint = f'name the field that has them: `columns = {{ {name}: "{name}" }}`'
            yield "source", f"reads `{name}`, numbers along the tokens, and it has none", hint
    for name in loss.values:
        if name not in dataset.gives_values:
            hint = f'name the field that has it: `values = {{ {name}: "{name}" }}`'
            hint = f'write `{name} = "{name}"`, its field' if hasattr(dataset, name) else hint
            yield "source", f"reads `{name}`, a number of each document, and it has none", hint
