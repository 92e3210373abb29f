"""A value into the type that a setting is annotated with, strictly: nothing is coerced, no text becomes a number.

The only widening is a whole number where a real one is wanted. What does not fit is reported with the place of the
value and of every name it came through, and `FAILED` stands in for it.
"""

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from xtrain.dsl.blocks import choices_of
from xtrain.dsl.checking.calls import convert_call, convert_links
from xtrain.dsl.checking.context import Context, Converter
from xtrain.dsl.checking.dimensions import dimension
from xtrain.dsl.checking.type_errors import (
    TypeMismatch,
    interval_mismatch,
    list_mismatch,
    map_mismatch,
    mismatch,
    quantity_mismatch,
    report,
    word_mismatch,
)
from xtrain.dsl.diagnostics.diagnostic import Fix
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.dimension import Dimension
from xtrain.dsl.env_text import EnvText, hidden
from xtrain.dsl.evaluation.values import FAILED, Bounds, Items, Links, Mapping, Value, Word, describe, is_number
from xtrain.dsl.interval import Interval
from xtrain.dsl.metric import FORM, MeasuredNumber, Metric
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.component import Component, UserComponent, is_call
from xtrain.dsl.schema.names import TextCheck
from xtrain.dsl.schema.setting import AUTO, LARGEST, Auto, Setting

WHOLE_UNITS = ("steps", "tokens", "samples", "bytes")


def convert(annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    """The value as the annotated type, checked against the setting's metadata; FAILED after reporting what is wrong."""
    if value.data is FAILED:
        return FAILED
    try:
        found = _convert(annotation, value, context, around)
    except TypeMismatch as wrong:
        return report(wrong, around)
    if found is FAILED:
        return FAILED
    check, env = context.meta.check, found if isinstance(found, EnvText) else ""
    # Of a range, the ends have been; and a word among numbers has none.
    checked = found is None or found is AUTO or isinstance(found, Interval)
    if isinstance(found, str):
        checked = not isinstance(check, TextCheck)
    problem = (check(found) if check and not checked else None) or _too_large(found, check)
    if problem is not None:
        problem = problem.replace(env, hidden(env)) if env else problem
        hint = check.hint if isinstance(check, TextCheck) else None
        around.diagnostics.error("X304", f"{context.subject} {problem}", value.span, hint=hint, notes=value.notes)
        return FAILED
    return settled(found, context)


def settled(found: Any, context: Context) -> Any:
    """A text as the setting keeps it: where it is handed on, with `env(NAME)` for the values of variables."""
    if not isinstance(found, EnvText):
        return found
    block = context.block
    named = context.is_label and issubclass(block, UserComponent)  # the label is the name of a function
    return hidden(found) if issubclass(block, Component) and block.hands_on and not named else str(found)


def _too_large(found: Any, check: Any) -> str | None:
    """What is wrong with a whole number that no int64 holds, unless its range has a bound."""
    amount = found.value if isinstance(found, Quantity) else found
    if not isinstance(amount, int) or abs(amount) <= LARGEST or getattr(check, "high", None) is not None:
        return None
    return f"must lie between -{LARGEST:,} and {LARGEST:,}" if amount < 0 else f"must be at most {LARGEST:,}"


def _convert(annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    data = value.data
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if data is AUTO and Auto in parts:
        return AUTO
    if data is None and NoneType in parts:
        return None
    parts = tuple(part for part in parts if part not in (Auto, NoneType))
    if is_call(parts[0]):
        return convert_call(parts[0], value, context, around)
    words = next((part for part in parts if get_origin(part) is Literal), None)
    # Beside its words a setting may take any text, which stands in quotes.
    other_text = isinstance(data, str) and str in parts and data not in choices_of(words)
    # Beside its words it may take a number, which an unknown name may stand for.
    named = isinstance(data, Word) and {int, float} & {*parts} and not _is_near(data.text, choices_of(words))
    if words is not None and (len(parts) == 1 or (isinstance(data, Word | str) and not other_text and not named)):
        return _word(words, value, context)
    plain = str if isinstance(data, EnvText) else type(data)
    if len(parts) > 1 and plain in parts and plain in (bool, int, float, str):
        return data
    kind, *others = (part for part in parts if part is not words)
    if Quantity in others and isinstance(data, Quantity) and data.unit in context.meta.units:
        kind = Quantity  # a plain number, or an amount
    if get_origin(kind) is dict:
        return _entries(kind, annotation, value, context, around)
    if get_origin(kind) is tuple:
        return _items(get_args(kind)[0], annotation, value, context, around)
    if kind is Quantity:
        return _quantity(value, context)
    if kind is Dimension:
        return dimension(value, context)
    if kind is Interval:
        return _interval(annotation, value, context, around)
    return _scalar(kind, annotation, value, context, around)


def _is_near(text: str, choices: tuple[str, ...]) -> bool:
    return text in choices or closest(text, choices) is not None


def _word(kind: Any, value: Value, context: Context) -> str:
    """One of the fixed words of a `Literal`, written as a name, a string, or as one of the constants."""
    data = value.data
    text = {True: None, False: None, None: "none", AUTO: "auto"}.get(data) if data is None or data is AUTO else None
    if isinstance(data, Word):
        text = data.text
    elif isinstance(data, str):
        text = data
    if text in choices_of(kind):
        return str(text)
    raise word_mismatch(kind, text, value, context)


def _items(item: Any, annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    data = value.data
    if is_call(item):
        links = data.values if isinstance(data, Links) else (value,)
        return convert_links(item, links, context, around)
    if not isinstance(data, Items):
        raise list_mismatch(item, annotation, value, context)
    found = [convert(item, each, _element(context), around) for each in data.values]
    return FAILED if any(each is FAILED for each in found) else tuple(found)


def _entries(kind: Any, annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    """A map of names to values of one type, each checked by itself."""
    data, (_, item) = value.data, get_args(kind)
    if not isinstance(data, Mapping):
        raise map_mismatch(annotation, value, context)
    meta = Setting(doc=context.meta.doc, check=context.meta.check, units=context.meta.units)
    found = {
        name: convert(item, each, Context(name, context.name, context.block, meta), around)
        for name, each in data.entries.items()
    }
    return FAILED if any(each is FAILED for each in found.values()) else found


def _element(context: Context) -> Context:
    """The context of one element of a list, without the check, which is for the list as a whole."""
    return Context(context.name, context.kind, context.block, Setting(doc=context.meta.doc), is_element=True)


def _quantity(value: Value, context: Context) -> Quantity:
    data = value.data
    if not isinstance(data, Quantity) or data.unit not in context.meta.units:
        raise quantity_mismatch(value, context)
    if isinstance(data.value, float) and data.value.is_integer():
        return Quantity(int(data.value), data.unit)
    if isinstance(data.value, float) and data.unit in WHOLE_UNITS:
        shown = f"{data.value:g} {data.unit}"
        raise TypeMismatch(
            "X306", f"{context.subject} must be a whole number of {data.unit}, and this is {shown}", value,
            hint="round it with `round`, `ceil` or `floor`",
        )  # fmt: skip
    return data


def _interval(annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    """`a..b` of whole numbers, each checked by itself, then their order."""
    data = value.data
    if not isinstance(data, Bounds):
        raise interval_mismatch(annotation, value, context)
    end = Context(context.name, context.kind, context.block, context.meta, is_end=True)
    low, high = (convert(int, each, end, around) for each in (data.low, data.high))
    if low is FAILED or high is FAILED:
        return FAILED
    if low > high:
        turned = f"{high}..{low}"
        raise TypeMismatch(
            "X304", f"{context.subject} goes down from {low} to {high}", value, hint=f"write `{turned}`",
            fix=Fix(value.span, turned),
        )  # fmt: skip
    return Interval(low, high)


def _metric(kind: type[Metric | MeasuredNumber], data: Any, value: Value, context: Context) -> Metric | MeasuredNumber:
    """A name with dots, or the same in quotes."""
    text = data.text if isinstance(data, Word) else data
    found = kind.read(text) if isinstance(text, str) else None
    if found is None:
        form = FORM if kind is Metric else MeasuredNumber.form
        message = f"{context.subject} must be {form}, not {describe(data)}"
        raise TypeMismatch("X301", message, value, hint=f"for instance `{context.name} = {context.meta.example}`")
    return found


def _scalar(kind: type, annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    data = value.data
    if kind is bool and isinstance(data, bool):
        return data
    if kind is Metric or kind is MeasuredNumber:
        return _metric(kind, data, value, context)
    if kind is str and isinstance(data, str):
        return data
    if kind is str and context.is_label and isinstance(data, Word):
        return data.text
    if kind is float and is_number(data):
        return float(data)
    if kind is int and is_number(data):
        if isinstance(data, int):
            return data
        whole = round(data)
        exact = whole == data
        computed = value.span.text.strip() != str(data)
        shown = repr(data) if exact else f"{data:g}"
        came_to = f", and this comes to {shown}" if computed else f", not {shown}"
        hint, fix = "round it with `round`, `ceil`, `floor`, or divide by `//`", None
        if not computed:
            hint = f"write `{whole}`" if exact else f"write a whole number, such as `{max(whole, 1)}`"
            fix = Fix(value.span, str(whole)) if exact else None
        raise TypeMismatch("X306", f"{context.subject} must be a whole number{came_to}", value, hint=hint, fix=fix)
    raise mismatch(kind, annotation, value, context, around.constants)
