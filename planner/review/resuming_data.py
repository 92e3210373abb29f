"""Effects of changed data on a resumed run: datasets, tokenizer, and the distribution of rows to ranks.

Length, alignment and order of rows are stored in a checkpoint. This module covers the rest, because the loader compares
the content of rows instead.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from xtrain.dsl.schema.data_components import LINKS, SOURCES, TOKENIZERS, packing_of, tokenizer_kind
from xtrain.lazy_attrs import frozen
from xtrain.plan.data import BESIDE, DROPPED, changes_documents
from xtrain.plan.graph import Effect
from xtrain.plan.plan import Node, Plan
from xtrain.text.units import plural

Kind = Literal["same", "safe", "resharded", "incompatible"]


@frozen(kw_only=True)
class Reason:
    """Difference of two plans and its meaning for a checkpoint of the first.

    path: the setting that it depends on. certain: False if it depends on files read when the run starts, which `text`
    names.
    """

    kind: Kind
    path: str
    text: str
    effect: Effect = "none"
    certain: bool = True


def safe(path: str, text: str, effect: Effect = "none") -> Reason:
    """Return a difference that a checkpoint allows."""
    return Reason(kind="safe", path=path, text=text, effect=effect)


def resharded(path: str, text: str) -> Reason:
    """Return a difference that puts other pieces of the state, or other rows, on the ranks."""
    return Reason(kind="resharded", path=path, text=text, effect="rounding")


def refused(path: str, text: str, *, certain: bool = True) -> Reason:
    """Return a difference because of which a checkpoint is refused."""
    return Reason(kind="incompatible", path=path, text=text, certain=certain)


def data_reasons(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for all changes of data, apart from data settings that a checkpoint stores."""
    yield from _tokenizer(a, b)
    yield from _training(a, b)
    yield from _evaluated(a, b)
    yield from _collators(a, b)
    yield from _dealing(a, b)


def _tokenizer(a: Plan, b: Plan) -> Iterator[Reason]:
    before, after = (plan.node("setup.tokenizer").args["source"] for plan in (a, b))
    if before != after:
        text = f"{before} → {after}: the text would give other tokens"
        certain = not all(issubclass(tokenizer_kind(each), TOKENIZERS.default) for each in (before, after))
        text += "" if certain else ", unless both hold the same tokenizer.json"
        yield refused("tokenizer", text, certain=certain)


def _training(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for changed training datasets: a dataset with the same name must be the same; others may come and
    go."""
    before, after = trained_on(a), trained_on(b)
    names = renamed(a, b)
    before = {names.get(name, name): args for name, args in before.items()}
    for old, name in names.items():
        yield safe("dataset", f"{old} → {name}: renamed; only its content counts")
    for name, args in after.items():
        if name in before:
            yield from _content(name, before[name], args)
        else:
            text = "is new: training starts with its first row, unless it was renamed"
            yield safe(f"dataset.{name}", text, "learning")
    common = [[name for name in names if name in before and name in after] for names in (before, after)]
    if common[0] != common[1]:
        text = f"{', '.join(common[0])} → {', '.join(common[1])}: rows are drawn from them in another order"
        yield safe("dataset", text, "learning")
    for name in (name for name in before if name not in after):
        yield safe(f"dataset.{name}", "is gone: it is no longer trained on, and its position is kept", "learning")
    yield from _packing(a, b)


def renamed(a: Plan, b: Plan) -> dict[str, str]:
    """Return old name → new name of the training datasets that were renamed."""
    before, after = trained_on(a), trained_on(b)
    gone, new = ([name for name in one if name not in other] for one, other in ((before, after), (after, before)))
    found: dict[str, str] = {}
    for name in new:
        old = next((old for old in gone if old not in found and _unnamed(before[old]) == _unnamed(after[name])), None)
        if old is not None:
            found[old] = name
    return found


def _unnamed(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if key not in ("dataset", "bad_records")}


def _content(name: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Reason]:
    """Yield reasons for a dataset of one name in both plans: its rows must hold the same text and train the same
    tokens."""
    path = f"dataset.{name}"

    def other(setting: str, text: str, certain: bool) -> Reason:
        return refused(f"{path}.{setting}", text, certain=certain)

    if before["kind"] != after["kind"]:
        text = f"{_source(before)} → {_source(after)}: rows would have other text"
        yield other("source", text, True)
    elif before["patterns"] != after["patterns"]:
        text = f"{_source(before)} → {_source(after)}: rows would have other text, unless the files are the same"
        yield other("source", text, False)
    elif before["options"] != after["options"]:
        names = [
            key for key in {**before["options"], **after["options"]} if _option(before, key) != _option(after, key)
        ]
        changes = ", ".join(f"{key} {_option(before, key)} → {_option(after, key)}" for key in names)
        # Different code may give the same result, and a separator may be the tokenizer's.
        source = SOURCES.of_kind(after["kind"])
        certain = source is None or not {*names} & {*source.may_agree}
        unless = "" if certain else ", unless both give the same"
        yield other("source", f"{changes}: rows would have other text{unless}", certain)
    yield from _reads(before["reads"], after["reads"], other)
    if before["holdout"] != after["holdout"]:
        none = 0 in (before["holdout"], after["holdout"])
        text = f"{before['holdout']:.4g} → {after['holdout']:.4g}: other documents would be trained on"
        text += "" if none else ", unless the difference is too small for one"
        yield other("holdout", text, none)
    if before["oversized"] != after["oversized"]:
        text = f"{before['oversized']} → {after['oversized']}: long documents would be packed differently, "
        yield other("oversized", text + "unless there are none", False)
    for setting in ("deduplicate", "decontaminate", "min_tokens"):
        if before.get(setting) != after.get(setting):
            one, other_one = (_list_text(args.get(setting)) for args in (before, after))
            text = f"{one} → {other_one}: other documents would be trained on, unless the same ones are left out"
            yield other(setting, text, False)
    if before.get("without") != after.get("without"):
        counts = [len(args.get("without", ())) for args in (before, after)]
        text = f"{counts[0]} → {plural(counts[1], 'document')} removed from the packed rows from here on"
        yield safe(f"{path}.without", text, "learning")
    if before["bad_records"] != after["bad_records"]:
        text = f"{before['bad_records']} → {after['bad_records']}: it decides whether a run fails, not what it reads"
        yield safe(f"{path}.bad_records", text)


def _list_text(value: list[str] | str | float | None) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value or "none")


def _option(args: dict[str, Any], name: str) -> str:
    value = args["options"].get(name)
    return "auto" if value is None else str(value)


def _reads(
    before: dict[str, Any], after: dict[str, Any], other: Callable[[str, str, bool], Reason]
) -> Iterator[Reason]:
    """Yield reasons for changes of the form of records, their fields, and the part that is trained on."""
    if before["form"] != after["form"]:
        names = {"chat": "messages", "instruction": "prompt", "preference": "chosen"}
        setting = names.get(after["form"]) or str(after["form"])
        yield other(setting, f"{before['form']} → {after['form']}: records would be read in another format", True)
        return
    for name in dict.fromkeys((*after, *before)):
        if name == "form" or before.get(name) == after.get(name):
            continue
        change = f"{_field(before.get(name))} → {_field(after.get(name))}"
        if name == "train_on":
            yield other(name, f"{change}: other tokens would be predicted", False)
        elif name == "template":
            yield other(name, f"{change}: rows would have other text, unless both templates write the same", False)
        elif name == "template_arguments":
            yield other(name, f"{change}: rows would have other text, unless the template writes the same", False)
        elif name == DROPPED:
            yield other(name, f"{change}: rows would have other text, unless no system messages are there", False)
        elif name == "lost":
            yield other(name, f"{change}: other records would be left out, unless nothing is lost", False)
        elif name in BESIDE and BESIDE[name].numbers:
            yield other(name, f"{change}: losses would read other numbers", True)
        else:
            yield other(name, f"{change}: rows would have the text of another field", True)


def _field(value: Any) -> str:
    return ", ".join(f"{name}: {field}" for name, field in value.items()) if isinstance(value, dict) else str(value)


def _packing(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for a changed packing: two packings may form the same rows and deal them differently to the ranks
    of a step."""
    before, after = trained_on(a), trained_on(b)
    both = ((before[name], after[name]) for name in before if name in after)
    found = (
        (packing_of(x.get("method")), x.get("group"), packing_of(y.get("method")), y.get("group")) for x, y in both
    )
    for one, group_a, other, group_b in dict.fromkeys(found):
        if one.rows() != other.rows():
            yield refused("collate", f"{one.kind} → {other.kind}: documents are packed into other rows")
        elif group_a != group_b:
            text = f"{group_a} → {group_b}: documents are packed into other rows, unless there are fewer documents"
            yield refused("collate.pack.group", text, certain=False)
        elif one.kind != other.kind:
            text = (
                f"{one.kind} → {other.kind}: the rows of a step are distributed differently over ranks and microbatches"
            )
            yield safe("collate", text, "rounding")


def trained_on(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return name → arguments of every training dataset."""
    return {name: plan.node(f"setup.data.{name}").args for name in plan.node("setup.loader").args["datasets"]}


def _source(args: dict[str, Any]) -> str:
    return f"{args['kind']}({', '.join(args['patterns'])})"


def _evaluated(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for datasets that are only evaluated."""
    training = {**trained_on(a), **trained_on(b)}
    before, after = (
        {node.args["dataset"]: node.args for node in plan.nodes if node.op == "setup.data"} for plan in (a, b)
    )
    shared = ("seed", "sequence", "align", "method", "group")
    for name in {**before, **after}:
        if name in training:
            continue
        one, other = (
            {key: value for key, value in each.get(name, {}).items() if key not in shared} for each in (before, after)
        )
        if one != other:
            what = "is new" if not one else "is gone" if not other else "is another"
            yield safe(f"dataset.{name}", f"{what}: it is evaluated, never trained on")


def _collators(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for the user's own collators: the rows of the run stay, and what collators make of them changes
    from here on."""
    # Links that follow from the layout, whether written or not.
    by_layout = ("collate.microbatches", *(f"collate.{name}" for name, link in LINKS.items() if link.by_layout))
    links = [[node for node in plan.of_kind("collate") if node.op not in by_layout] for plan in (a, b)]
    before, after = ([(node.op, _called(node)) for node in chain] for chain in links)
    if before == after:
        return
    own = [
        [node.args.get("function", node.op.partition(".")[2]) for node in chain if _called(node) is not None]
        for chain in links
    ]
    if own[0] == own[1] and own[1]:
        what = f"{', '.join(own[1])}: other code, arguments or positions"
    else:
        what = " → ".join(", ".join(names) or "no collators of your own" for names in own)
    yield safe("collate", f"{what}: rows are processed differently from here on", "learning")


def _called(node: Node) -> dict[str, Any] | None:
    """Return the arguments of a link that changes documents; None for other links."""
    return node.args if changes_documents(node) else None


def _ramp_text(args: dict[str, Any]) -> str:
    ramp = args.get("ramp")
    return "" if ramp is None else f" from {ramp['rows']:,} over {plural(ramp['steps'], 'step')}"


def _dealing(a: Plan, b: Plan) -> Iterator[Reason]:
    """Yield reasons for rows of a step dealt differently to ranks and microbatches."""
    before, after = a.node("setup.loader").args, b.node("setup.loader").args
    ramps = [_ramp_text(args) for args in (before, after)]
    if before["rows"] != after["rows"] or ramps[0] != ramps[1]:
        change = f"{before['rows']:,}{ramps[0]} → {after['rows']:,}{ramps[1]}"
        text = f"{change}: a step takes a different number of rows; no row is lost or repeated, as each dataset "
        text += "continues at its own position"
        yield safe("batch.rows", text, "learning")
        return
    ranks_a, ranks_b = a.mesh.data_ranks, b.mesh.data_ranks
    rows = after["rows"]
    if ranks_a != ranks_b:
        shares = f"{plural(rows // ranks_b, 'row')}, not {rows // ranks_a}"
        text = (
            f"distributed again: of the {rows:,} rows of a step each of {plural(ranks_b, 'data rank')} takes {shares}"
        )
        yield resharded("batch", text)
        return
    portions = [(args["micro"], args["accumulate"]) for args in (before, after)]
    if portions[0] != portions[1]:
        (micro_a, count_a), (micro_b, count_b) = portions
        text = f"{count_a} · {micro_a} → {count_b} · {micro_b}: the same rows in every step, summed in another order"
        yield safe("batch.accumulate · micro", text, "rounding")
