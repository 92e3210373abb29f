"""Strict conversion of a value to the type of its setting: nothing is coerced, no text becomes a number.

Calls make objects of the schema: `text("*.txt")`, `pack(sequential)`. In a sweep, `2..4` makes a dimension.
"""

from collections.abc import Collection, Sequence
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs

from xtrain.dsl.checking.context import Context, Converter
from xtrain.dsl.checking.type_errors import (
    TypeMismatch,
    interval_mismatch,
    joined,
    list_mismatch,
    map_mismatch,
    mismatch,
    quantity_mismatch,
    report,
    word_mismatch,
)
from xtrain.dsl.diagnostics.diagnostic import Fix, Span
from xtrain.dsl.diagnostics.suggest import closest, renamed
from xtrain.dsl.evaluation.values import (
    FAILED,
    Bounds,
    Called,
    Items,
    Links,
    Mapping,
    Value,
    Word,
    describe,
    is_number,
    quantity_text,
)
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.blocks import choices_of
from xtrain.dsl.schema.component import Component, Registry, UserComponent, is_call
from xtrain.dsl.schema.data_components import LINKS, SOURCES, Source, source_of
from xtrain.dsl.schema.setting import AUTO, LARGEST, Auto, Setting, TextCheck, settings_of
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.values import (
    FORM,
    Between,
    Dimension,
    EnvText,
    Interval,
    Listed,
    MeasuredNumber,
    Metric,
    Quantity,
    hidden,
)

SCALES: Final = ("uniform", "log")
_FORMS: Final = "a list, `a..b`, `uniform(low, high)` or `log(low, high)`"
_MOST_POINTS: Final = 1000


def dimension(value: Value, context: Context) -> Dimension:
    """Convert a value to a dimension. Raises TypeMismatch."""
    match value.data:
        case Items(values=values):
            return _listed(values, value, context)
        case Bounds(low=low, high=high):
            return _between(False, (low, high), value, context, counted=True)
        case Called(name=name, positional=positional, keywords=keywords) if name in SCALES and not keywords:
            if len(positional) not in (2, 3):
                hint = f"write `{name}(low, high)`, or `{name}(low, high, points)` for a grid"
                raise TypeMismatch("X308", f"`{name}` takes two ends", value, hint=hint)
            return _between(name == "log", positional, value, context)
    hint = f"write `{context.name} in [{value.span.text}, …]`" if "\n" not in value.span.text else None
    raise TypeMismatch("X301", f"{context.subject} takes {_FORMS}, not {describe(value.data)}", value, hint=hint)


def _listed(values: Sequence[Value], value: Value, context: Context) -> Listed:
    texts = [_text(each, context) for each in values]
    if not texts:
        raise TypeMismatch("X304", f"{context.subject} has no values", value, hint="name two or more")
    twice = next((each for place, each in enumerate(values) if texts[place] in texts[:place]), None)
    if twice is not None:
        raise TypeMismatch("X304", f"{context.subject} has the same value twice", twice, hint="remove one")
    return Listed(tuple(texts))


def _text(value: Value, context: Context) -> str:
    """Return a value in the form that `--set` takes."""
    data = value.data
    if data is None or data is AUTO:
        return "auto" if data is AUTO else "none"
    match data:
        case bool():
            return str(data).lower()
        case int() | float():
            return repr(data)
        case Word(text=text):
            return text
        case EnvText():
            return value_text(hidden(data))  # each trial reads the variable
        case str() if data.isprintable() and not set(data) & {'"', "\\"}:
            return f'"{data}"'
        case Quantity():
            return quantity_text(data)
        case Items(values=values):
            return f"[{', '.join(_text(each, context) for each in values)}]"
    message = f"{describe(data)} is not a valid value of {context.subject}"
    raise TypeMismatch("X301", message, value, hint="write numbers, words, texts, or lists of them")


def _between(log: bool, values: Sequence[Value], value: Value, context: Context, *, counted: bool = False) -> Between:
    (low, unit), (high, other) = _number(values[0], context), _number(values[1], context)
    if unit != other:
        units = " and ".join(each or "plain numbers" for each in (unit, other))
        raise TypeMismatch("X303", f"the ends of {context.subject} have different units, {units}", value)
    whole = isinstance(low, int) and isinstance(high, int)
    if counted and not whole:
        raise TypeMismatch("X306", f"`a..b` of {context.subject} takes whole numbers", value,
                           hint=f"write `uniform({values[0].span.text}, {values[1].span.text})`")  # fmt: skip
    if low >= high:
        raise TypeMismatch("X304", f"{context.subject} is not increasing: {low:g} to {high:g}", value,
                           hint="write the lower end first")  # fmt: skip
    if log and low <= 0:
        raise TypeMismatch("X304", f"{context.subject} uses a logarithm, so it must be above 0", values[0],
                           hint="start above 0, or write `uniform`")  # fmt: skip
    points = _points(values[2], context) if len(values) == 3 else None
    return Between(low=low, high=high, log=log, whole=whole, unit=unit, points=points)


def _number(value: Value, context: Context) -> tuple[Any, str]:
    """Return a number and its unit, empty without one."""
    data = value.data
    if isinstance(data, Quantity):
        return data.value, data.unit
    if not is_number(data):
        raise TypeMismatch("X301", f"the ends of {context.subject} must be numbers, not {describe(data)}", value)
    return data, ""


def _points(value: Value, context: Context) -> int:
    data = value.data
    if not isinstance(data, int) or isinstance(data, bool) or not 2 <= data <= _MOST_POINTS:
        message = f"{context.subject} takes 2 to {_MOST_POINTS:,} points of a grid, not {describe(data)}"
        raise TypeMismatch("X304", message, value)
    return data


def convert_call(kind: type[Component], value: Value, context: Context, around: Converter) -> Any:
    """Convert a call to a component of a kind. Raises TypeMismatch; returns FAILED if an argument was invalid."""
    names, data = kind.components, value.data
    if isinstance(data, Called):
        name, span, call = data.name, data.name_span, data
    elif isinstance(data, Word):
        name, span, call = data.text, value.span, Called(data.text, value.span, (), {})
    else:
        forms = joined([f"`{form}`" for form in _forms(names)])
        message = f"{context.subject} must be {forms}, not {describe(data)}"
        meant = _call_meant(value, names)
        if meant is not None and isinstance(data, Items):
            raise TypeMismatch(
                "X301", message, value, hint=f"join links with `->`: `{meant}`", fix=Fix(value.span, meant)
            )
        hint, fix = (f"write `{meant}`", Fix(value.span, meant)) if meant else (None, None)
        raise TypeMismatch("X301", message, value, hint=hint, fix=fix)
    place = Value(data, span, value.via)
    if name in around.parts:
        return around.parts[name].convert(names, call, value, context, around)
    if name not in names:
        if around.parts.unread:
            return FAILED  # it may be in an unreadable module, which is reported
        own = around.parts.of_kind(names.word)
        known = (*names, *own)
        meant = closest(name, known)
        hint = f"did you mean `{meant}`?" if meant else None
        notes = ((f"{context.subject} is one of {', '.join((*_forms(names), *own))}", None),)
        raise TypeMismatch("X219", f"{context.subject} has no `{name}`", place, hint=hint, notes=notes,
                       fix=renamed(span, name, known))  # fmt: skip
    if isinstance(data, Word) and names.form(name) != name:
        form = _form(names, name)
        fix = Fix(span, form) if blocks.label_of(names[name]) is None else None
        raise TypeMismatch("X220", f"`{name}` needs parentheses", place, hint=f"write `{form}`", fix=fix)
    return _build(names[name], call, value, around)


def _call_meant(value: Value, names: Registry) -> str | None:
    """Return what to write instead of a bare path or a list of links."""
    data = value.data
    if isinstance(data, str) and names is SOURCES:
        return f"{source_of(data)}({value.span.text})"
    if isinstance(data, Items) and data.values and names is LINKS:
        return " -> ".join(each.span.text for each in data.values)
    return None


def _forms(names: Registry) -> list[str]:
    return [_form(names, name) for name in names]


def _form(names: Registry, name: str) -> str:
    """Return how a component is written: `python_stdlib()`, `text("…")`, `flatten`."""
    return names.form(name) if blocks.label_of(names[name]) is None else f'{name}("…")'


def _build(kind: type, call: Called, value: Value, around: Converter) -> Any:
    errors = _ArgumentErrors(around)
    known, variadic = settings_of(kind), blocks.label_of(kind)
    arguments: dict[str, Any] = {}
    given: dict[str, tuple[Span, Value]] = {}
    if variadic is not None:
        arguments[variadic.name] = _patterns(variadic, call, value, around)
    else:
        for name, each in zip(known, call.positional, strict=False):
            given[name] = (each.span, each)
        for extra in call.positional[len(known) :]:
            errors.too_many(call.name, len(known), extra)
            arguments[""] = FAILED
    for name, (span, each) in call.keywords.items():
        if name not in known:
            errors.unknown(kind, call.name, name, span, (*given, *call.keywords))
            arguments[""] = FAILED
        elif name in given:
            errors.twice(call.name, name, span)
            arguments[""] = FAILED
        else:
            given[name] = (span, each)
    for name, (_, each) in given.items():
        attribute, meta = known[name]
        arguments[name] = around.convert(attribute.type, each, Context(name, call.name, kind, meta))
    if any(argument is FAILED for argument in arguments.values()):
        return FAILED
    return kind(**arguments)


def _patterns(attribute: attrs.Attribute, call: Called, value: Value, around: Converter) -> Any:
    """Convert the positional arguments of `text` and similar sources (at least one string), or of `huggingface`
    (exactly one)."""
    single = get_origin(attribute.type) is not tuple
    if not call.positional:
        needed = "the name of a dataset, or a folder" if single else "the path of a file, or a pattern"
        hint = f'write `{call.name}("{SOURCES[call.name].sample}")`'
        raise TypeMismatch("X220", f"`{call.name}` needs {needed}", value, hint=hint)
    if single and len(call.positional) > 1:
        _ArgumentErrors(around).too_many(call.name, 1, call.positional[1])
        return FAILED
    good = True
    for each in call.positional:
        if each.data is FAILED:
            good = False
        elif not isinstance(each.data, str):
            good = False
            text = each.span.text
            hint, fix = "pass each path as a separate argument", None
            if isinstance(each.data, Word):
                hint, fix = f'write `"{text}"`', Fix(each.span, f'"{text}"') if not each.via else None
            message = f"`{call.name}` takes strings, not {describe(each.data)}"
            around.diagnostics.error("X301", message, each.span, hint=hint, notes=each.notes, fix=fix)
        elif not each.data:
            good = False
            around.diagnostics.error("X304", "a path cannot be empty", each.span, notes=each.notes)
        elif problem := attribute.metadata["check"](each.data):
            good = False
            around.diagnostics.error("X304", f"a path of `{call.name}` {problem}", each.span, notes=each.notes)
    if not good:
        return FAILED
    found = tuple(each.data for each in call.positional)
    return found[0] if single else found


class _ArgumentErrors:
    def __init__(self, around: Converter) -> None:
        self.diagnostics = around.diagnostics

    def too_many(self, name: str, limit: int, extra: Value) -> None:
        takes = "no arguments" if limit == 0 else f"{limit} argument" + ("s" if limit > 1 else "")
        hint = f"write `{name}()`" if limit == 0 else "remove it"
        self.diagnostics.error("X220", f"`{name}` takes {takes}", extra.span, hint=hint)

    def twice(self, name: str, argument: str, span: Span) -> None:
        self.diagnostics.error("X220", f"`{argument}` of `{name}` is given twice", span, hint="keep one")

    def unknown(self, kind: type, name: str, argument: str, span: Span, given: Collection[str]) -> None:
        known = settings_of(kind)
        meant = closest(argument, known)
        of_dataset = issubclass(kind, Source) and argument in settings_of(blocks.KINDS["dataset"])
        owner = "this is a setting of the dataset: write it next to `source`" if of_dataset else None
        fields = f"arguments of `{name}`: {', '.join(known)}" if known else f"`{name}` has no named arguments"
        self.diagnostics.error(
            "X203", f"unknown argument `{argument}` of `{name}`", span,
            hint=f"did you mean `{meant}`?" if meant else owner, notes=[(fields, None)],
            fix=renamed(span, argument, known, taken=given),
        )  # fmt: skip


WHOLE_UNITS = ("steps", "tokens", "samples", "bytes")


def convert(annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    """Convert a value to the annotated type and check it against the setting's metadata; return FAILED after reporting
    a mistake."""
    if value.data is FAILED:
        return FAILED
    try:
        found = _convert(annotation, value, context, around)
    except TypeMismatch as wrong:
        return report(wrong, around)
    if found is FAILED:
        return FAILED
    check, env = context.meta.check, found if isinstance(found, EnvText) else ""
    # The ends of a range are checked already; a word among numbers has no range.
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
    """Return a text as the setting stores it: with `env(NAME)` for the values of variables if it is passed on."""
    if not isinstance(found, EnvText):
        return found
    block = context.block
    named = context.is_label and issubclass(block, UserComponent)  # the label is the name of a function
    return hidden(found) if issubclass(block, Component) and block.hands_on and not named else str(found)


def _too_large(found: Any, check: Any) -> str | None:
    """Return what is wrong with a whole number outside int64, unless its range has a bound."""
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
    # Besides its words the setting may take any quoted text.
    other_text = isinstance(data, str) and str in parts and data not in choices_of(words)
    # Besides its words it may take a number, which an unknown name may stand for.
    choices = choices_of(words)
    known = isinstance(data, Word) and (data.text in choices or closest(data.text, choices) is not None)
    named = isinstance(data, Word) and bool({int, float} & {*parts}) and not known
    worded = (isinstance(data, Word | str) and not other_text and not named) or (data is None and "none" in choices)
    if words is not None and (len(parts) == 1 or worded):
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


def _word(kind: Any, value: Value, context: Context) -> str:
    """Return one of the fixed words of a `Literal`, written as a name, a string or a constant."""
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
        found = [around.convert(item, value, context) for value in links]
        return FAILED if any(link is FAILED for link in found) else tuple(found)
    if not isinstance(data, Items):
        raise list_mismatch(item, annotation, value, context)
    meta = Setting(doc=context.meta.doc)  # without the check, which is for the list as a whole
    element = Context(context.name, context.kind, context.block, meta, is_element=True)
    found = [convert(item, each, element, around) for each in data.values]
    return FAILED if any(each is FAILED for each in found) else tuple(found)


def _entries(kind: Any, annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    """Convert a map of names to values of one type, each checked separately."""
    data, (_, item) = value.data, get_args(kind)
    if not isinstance(data, Mapping):
        raise map_mismatch(annotation, value, context)
    meta = Setting(doc=context.meta.doc, check=context.meta.check, units=context.meta.units)
    found = {
        name: convert(item, each, Context(name, context.name, context.block, meta), around)
        for name, each in data.entries.items()
    }
    return FAILED if any(each is FAILED for each in found.values()) else found


def _quantity(value: Value, context: Context) -> Quantity:
    data = value.data
    if not isinstance(data, Quantity) or data.unit not in context.meta.units:
        raise quantity_mismatch(value, context)
    if isinstance(data.value, float) and data.value.is_integer():
        return Quantity(int(data.value), data.unit)
    if isinstance(data.value, float) and data.unit in WHOLE_UNITS:
        shown = f"{data.value:g} {data.unit}"
        raise TypeMismatch(
            "X306", f"{context.subject} must be a whole number of {data.unit}, not {shown}", value,
            hint="round it with `round`, `ceil` or `floor`",
        )  # fmt: skip
    return data


def _interval(annotation: Any, value: Value, context: Context, around: Converter) -> Any:
    """Convert `a..b` of whole numbers: each end is checked separately, then their order."""
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
            "X304", f"{context.subject} is decreasing: {low} to {high}", value, hint=f"write `{turned}`",
            fix=Fix(value.span, turned),
        )  # fmt: skip
    return Interval(low, high)


def _metric(kind: type[Metric | MeasuredNumber], data: Any, value: Value, context: Context) -> Metric | MeasuredNumber:
    """Convert a dotted name, or the same in quotes, to a metric."""
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
    if kind is str and (context.is_label or context.meta.block) and isinstance(data, Word):
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
        came_to = f", not {shown}"
        hint, fix = "round it with `round`, `ceil`, `floor`, or divide by `//`", None
        if not computed:
            hint = f"write `{whole}`" if exact else f"write a whole number, such as `{max(whole, 1)}`"
            fix = Fix(value.span, str(whole)) if exact else None
        raise TypeMismatch("X306", f"{context.subject} must be a whole number{came_to}", value, hint=hint, fix=fix)
    raise mismatch(kind, annotation, value, context, around.constants)
