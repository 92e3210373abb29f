"""Whether a run that goes on would read the rows it would have read: datasets, tokenizer, how rows are dealt to ranks.

Rows of a step, their length, alignment and order stand in `kept`: a checkpoint has them. Here is what it does not have,
because the loader compares the content of rows instead.
"""

from collections.abc import Iterator
from typing import Any

from .plan import Plan
from .resumable_rules import Reason
from .units import plural


def data_reasons(a: Plan, b: Plan) -> Iterator[Reason]:
    """Everything about data but what `kept` has."""
    yield from _tokenizer(a, b)
    yield from _training(a, b)
    yield from _evaluated(a, b)
    yield from _dealing(a, b)


def _tokenizer(a: Plan, b: Plan) -> Iterator[Reason]:
    before, after = (plan.node("setup.tokenizer").args["source"] for plan in (a, b))
    if before != after:
        text = f"{before} → {after}: the text would become other tokens"
        certain = "bytes" in (before, after)
        text += "" if certain else ", unless both hold the same tokenizer.json"
        yield Reason(kind="incompatible", path="tokenizer", text=text, certain=certain)


def _training(a: Plan, b: Plan) -> Iterator[Reason]:
    (name_a, before), (name_b, after) = trained_on(a), trained_on(b)
    path = f"dataset.{name_b}"
    if name_a != name_b:
        text = f"{name_a} → {name_b}: a dataset may be called otherwise, its content counts"
        yield Reason(kind="safe", path="dataset", text=text)

    def other(setting: str, text: str, certain: bool) -> Reason:
        return Reason(kind="incompatible", path=f"{path}.{setting}", text=text, certain=certain)

    if before["kind"] != after["kind"]:
        text = f"{_source(before)} → {_source(after)}: rows would hold other text"
        yield other("source", text, True)
    elif before["patterns"] != after["patterns"]:
        text = f"{_source(before)} → {_source(after)}: rows would hold other text, unless these are the very same files"
        yield other("source", text, False)
    elif before["kind"] == "jsonl" and before["text_field"] != after["text_field"]:
        text = f"{before['text_field']} → {after['text_field']}: rows would hold the text of another field"
        yield other("text", text, True)
    if before["holdout"] != after["holdout"]:
        none = 0 in (before["holdout"], after["holdout"])
        text = f"{before['holdout']:.4g} → {after['holdout']:.4g}: other documents would be trained on"
        text += "" if none else ", unless the difference is too small for one"
        yield other("holdout", text, none)
    if before["oversized"] != after["oversized"]:
        text = f"{before['oversized']} → {after['oversized']}: long documents would lie otherwise in rows, "
        yield other("oversized", text + "unless there is none", False)
    yield from _packing(a, b)
    if before["bad_records"] != after["bad_records"]:
        text = f"{before['bad_records']} → {after['bad_records']}: it decides whether a run fails, not what it reads"
        yield Reason(kind="safe", path=f"{path}.bad_records", text=text)


def _packing(a: Plan, b: Plan) -> Iterator[Reason]:
    """`best_fit` packs the rows of `multipack`, and deals them otherwise to the ranks of a step."""
    (method_a, group_a), (method_b, group_b) = (
        (plan.node("collate.pack").args["method"], plan.node("collate.pack").args.get("group")) for plan in (a, b)
    )
    if method_a != method_b and "sequential" in (method_a, method_b):
        text = f"{method_a} → {method_b}: documents lie otherwise in rows"
        yield Reason(kind="incompatible", path="collate", text=text)
    elif group_a != group_b:
        text = f"{group_a} → {group_b}: documents lie otherwise in rows, unless there are fewer"
        yield Reason(kind="incompatible", path="collate.pack.group", text=text, certain=False)
    elif method_a != method_b:
        text = f"{method_a} → {method_b}: the rows of a step are dealt otherwise to its ranks and microbatches"
        yield Reason(kind="safe", path="collate", text=text, effect="rounding")


def trained_on(plan: Plan) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the dataset that is trained on."""
    name = plan.node("setup.loader").args["dataset"]
    return name, plan.node(f"setup.data.{name}").args


def _source(args: dict[str, Any]) -> str:
    return f"{args['kind']}({', '.join(args['patterns'])})"


def _evaluated(a: Plan, b: Plan) -> Iterator[Reason]:
    """Datasets that are evaluated only."""
    (name_a, _), (name_b, _) = trained_on(a), trained_on(b)
    before, after = (
        {node.args["dataset"]: node.args for node in plan.nodes if node.op == "setup.data"} for plan in (a, b)
    )
    shared = ("seed", "sequence", "align", "method", "group")
    for name in {**before, **after}:
        if name in (name_a, name_b):
            continue
        one, other = (
            {key: value for key, value in each.get(name, {}).items() if key not in shared} for each in (before, after)
        )
        if one != other:
            what = "is new" if not one else "is gone" if not other else "is another"
            yield Reason(kind="safe", path=f"dataset.{name}", text=f"{what}: it is evaluated, never trained on")


def _dealing(a: Plan, b: Plan) -> Iterator[Reason]:
    """How the rows of a step are dealt to ranks and microbatches, where they are the same rows."""
    before, after = a.node("setup.loader").args, b.node("setup.loader").args
    if before["rows"] != after["rows"]:
        return
    ranks_a, ranks_b = a.mesh.data_ranks, b.mesh.data_ranks
    rows = after["rows"]
    if ranks_a != ranks_b:
        shares = f"{plural(rows // ranks_b, 'row')}, not {rows // ranks_a}"
        text = f"dealt anew: of the {rows:,} rows of a step each of {plural(ranks_b, 'data rank')} takes {shares}"
        yield Reason(kind="resharded", path="batch", text=text, effect="rounding")
        return
    portions = [(args["micro"], args["accumulate"]) for args in (before, after)]
    if portions[0] != portions[1]:
        (micro_a, count_a), (micro_b, count_b) = portions
        text = f"{count_a} · {micro_a} → {count_b} · {micro_b}: the same rows in every step, added up in other portions"
        yield Reason(kind="safe", path="batch.accumulate · micro", text=text, effect="rounding")
