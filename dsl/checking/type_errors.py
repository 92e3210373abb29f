"""Errors of values that do not fit their setting: what is wanted, what is there, what to write instead."""

from collections.abc import Mapping as MappingOf
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from xtrain.dsl.checking.context import Context, Converter
from xtrain.dsl.diagnostics.diagnostic import Fix, Note, SourceText
from xtrain.dsl.diagnostics.suggest import certain, closest, renamed
from xtrain.dsl.evaluation.evaluate import Definition
from xtrain.dsl.evaluation.values import FAILED, Failed, Items, Value, Word, describe, is_number, show_number
from xtrain.dsl.schema.blocks import RESERVED, choices_of
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.syntax.lexer import read_number
from xtrain.dsl.values import Interval, Quantity

_WANTED: dict[Any, tuple[str, ...]] = {
    int: ("a whole number",), float: ("a number",), str: ("a string",), bool: ("`true`", "`false`"),
}  # fmt: skip
_MEASURES = {"%": "a percentage", "seconds": "a time", "bytes": "a size in bytes"}
_UNIT_EXAMPLES = {
    "%": "10%", "steps": "100 steps", "tokens": "20B tokens", "epochs": "3 epochs", "samples": "1k samples",
    "seconds": "30 min", "bytes": "1 GiB",
}  # fmt: skip

_TRUTH = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


class TypeMismatch(Exception):
    """A value that does not fit; `convert` reports it."""

    def __init__(
        self, code: str, message: str, value: Value, *, hint: str | None = None, notes: tuple[Note, ...] = (),
        fix: Fix | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.code, self.message, self.value, self.hint, self.notes, self.fix = code, message, value, hint, notes, fix


def wanted(annotation: Any) -> str:
    """Return the type in words: "a whole number or `auto`"."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    words: list[str] = []
    for part in parts:
        if part in _WANTED:
            words += _WANTED[part]
        elif part is Interval:
            words.append("a range")
        elif get_origin(part) is tuple:
            words.append(f"a list of {_elements(get_args(part)[0])}")
        elif get_origin(part) is dict:
            words.append(f"a map of names to {_elements(get_args(part)[1])}")
        elif get_origin(part) is Literal:
            words += [f"`{choice}`" for choice in get_args(part)]
    words += ["`auto`"] if Auto in parts else []
    words += ["`none`"] if NoneType in parts else []
    return joined(words)


def _elements(kind: Any) -> str:
    """Return what a list contains, in words: "numbers", "`matmul`, `attention`"."""
    if choices := choices_of(kind):
        return joined([f"`{choice}`" for choice in choices], "and")
    return {str: "strings", int: "whole numbers"}.get(kind, "numbers")


def _units_wanted(units: tuple[str, ...]) -> str:
    """Return the units in words: "a number of steps or tokens, or a percentage"."""
    counted = [unit for unit in units if unit not in _MEASURES]
    measures = [_MEASURES[unit] for unit in units if unit in _MEASURES]
    if not counted:
        return joined(measures)
    count = f"a number of {joined(counted)}"
    return f"{count}, or {joined(measures)}" if measures and len(counted) > 1 else joined([count, *measures])


def joined(words: list[str], word: str = "or") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {word} {words[-1]}"


def mismatch(
    kind: type, annotation: Any, value: Value, context: Context, constants: MappingOf[str, Definition]
) -> TypeMismatch:
    """Return the error of a setting that wants a number, a string or a truth value."""
    data, text = value.data, value.span.text
    must = f"{context.subject} must be {wanted(annotation)}"
    if isinstance(data, Word) and kind is not str:
        return _unknown_name(data, must, value, annotation, constants)
    if isinstance(data, Word):
        fix = Fix(value.span, f'"{text}"')
        return TypeMismatch("X301", f"{must}, not a name", value, hint=f'write `"{text}"`', fix=fix)
    if isinstance(data, Quantity) and kind in (int, float):
        return _unit_where_none_belongs(data, annotation, value, context)
    message = f"{must}, not {describe(data)}"
    hint: str | None = None
    if isinstance(data, str) and kind in (int, float) and _is_numeral(data):
        return TypeMismatch("X301", message, value, hint=f"write `{data.strip()}` without quotes",
                        fix=Fix(value.span, data.strip()))  # fmt: skip
    fix: Fix | None = None
    if kind is bool and (is_number(data) and data in (0, 1)):
        fix = Fix(value.span, "true" if data else "false")
    elif kind is bool and isinstance(data, str) and data.lower() in _TRUTH:
        fix = Fix(value.span, _TRUTH[data.lower()])
    elif isinstance(data, Items) and len(data.values) == 1:
        hint, fix = "write the value itself, not a list", Fix(value.span, data.values[0].span.text)
    elif context.meta.example:
        hint = f"for instance `{context.name} = {context.meta.example}`"
    return TypeMismatch("X301", message, value, hint=hint or (f"write `{fix.text}`" if fix else None), fix=fix)


def _unknown_name(
    word: Word, must: str, value: Value, annotation: Any, constants: MappingOf[str, Definition]
) -> TypeMismatch:
    notes: tuple[Note, ...] = ()
    fix: Fix | None = None
    lower = word.text.lower()
    truth = bool in (annotation, *get_args(annotation))
    if truth and lower in _TRUTH:
        fix = Fix(value.span, _TRUTH[lower])
        return TypeMismatch("X301", f"{must}, not the name `{word.text}`", value, hint=f"write `{fix.text}`", fix=fix)
    if lower in ("null", "nil") and NoneType in get_args(annotation):
        hint = "write `none`"
        fix = Fix(value.span, "none")
        return TypeMismatch("X301", f"{must}, not the name `{word.text}`", value, hint=hint, fix=fix)
    definition = constants.get(word.text)
    if definition is not None:
        notes = ((f"this `{word.text}` is a `let`, which exists only in its own file", definition.name.span),)
        hint = "make it a `param` to use it in other files"
    elif meant := closest(word.text, (*constants, "true", "false", "none", "auto")):
        hint = f"did you mean `{meant}`?"
        fix = renamed(value.span, word.text, (*constants, "true", "false", "none", "auto"))
    else:
        hint = f"write {wanted(annotation)}, or the name of a `let` or `param`"
    return TypeMismatch("X202", f"`{word.text}` is not defined", value, hint=hint, notes=notes, fix=fix)


def _unit_where_none_belongs(data: Quantity, annotation: Any, value: Value, context: Context) -> TypeMismatch:
    plain = "is a plain number"
    if Quantity in get_args(annotation):
        plain += f" or {_units_wanted(context.meta.units)}"
    message = f"{context.subject} {plain}, and this is {describe(data)}"
    amount: str | None = show_number(data.value)
    if data.unit == "%":
        whole = annotation is int or int in get_args(annotation)
        amount = None if whole else f"{data.fraction:g}"
    # A count is the same number without its unit; bytes or seconds may have been meant for another setting.
    counted = amount is not None and data.unit not in ("bytes", "seconds")
    return TypeMismatch(
        "X302", message, value, hint=f"write `{amount}`" if amount else "write a whole number",
        fix=Fix(value.span, amount) if counted and amount else None,
    )  # fmt: skip


def _is_numeral(text: str) -> bool:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics

    stripped = text.strip()
    if not (stripped.isascii() and stripped[:1].isdigit()):
        return False
    token = read_number(SourceText("", stripped), 0, len(stripped), Diagnostics())
    return token.type == "NUMBER" and token.end == len(stripped)


def list_mismatch(item: Any, annotation: Any, value: Value, context: Context) -> TypeMismatch:
    """Return the error of a setting that wants a list."""
    message = f"{context.subject} must be {wanted(annotation)}, not {describe(value.data)}"
    data = value.data
    word = data.text if isinstance(data, Word) else data
    fits = (item is str and isinstance(data, str)) or (item in (int, float) and is_number(data))
    fits = fits or word in choices_of(item)
    fix = Fix(value.span, f"[{value.span.text}]") if fits else None
    return TypeMismatch("X301", message, value, hint=f"write `[{value.span.text}]`" if fits else None, fix=fix)


def interval_mismatch(annotation: Any, value: Value, context: Context) -> TypeMismatch:
    """Return the error of a setting that wants a range."""
    data = value.data
    message = f"{context.subject} must be {wanted(annotation)}, not {describe(data)}"
    ends = [each for each in data.values if is_number(each.data)] if isinstance(data, Items) else []
    if len(ends) == 2:  # `[2, 4]`
        written = "..".join(each.span.text for each in ends)
        return TypeMismatch("X301", message, value, hint=f"write `{written}`", fix=Fix(value.span, written))
    if isinstance(data, Word):
        return TypeMismatch("X202", f"`{data.text}` is not defined", value, hint=f"write {wanted(annotation)}, "
                        f"for instance `{context.meta.example}`")  # fmt: skip
    return TypeMismatch("X301", message, value, hint=f"for instance `{context.name} = {context.meta.example}`")


def map_mismatch(annotation: Any, value: Value, context: Context) -> TypeMismatch:
    """Return the error of a setting that wants a map."""
    message = f"{context.subject} must be {wanted(annotation)}, not {describe(value.data)}"
    hint = f"for instance `{context.name} = {context.meta.example}`" if context.meta.example else None
    return TypeMismatch("X301", message, value, hint=hint)


def quantity_mismatch(value: Value, context: Context) -> TypeMismatch:
    """Return the error of a setting that wants a quantity: a wrong unit, no unit, or no number."""
    data, units = value.data, context.meta.units
    must = f"{context.subject} must be {_units_wanted(units)}"
    if is_number(data):
        amount = value.span.text if _is_numeral(value.span.text) else show_number(data)
        forms = [f"`{text}`" for text in _amounts(amount, data, units)]
        small = units == ("%",) and 0 < data < 0.001  # as likely a rate as a share
        fix = Fix(value.span, forms[0].strip("`")) if len(forms) == 1 and not small else None
        forms = [f"{forms[0]} if this is a share"] if small else forms
        if amount.endswith("B") and units == ("bytes",):
            fix, forms = None, [f"`{amount[:-1]} B` or `{amount[:-1]} GiB`; `B` without a space is the multiplier 10^9"]
        return TypeMismatch("X302", f"{must}; this number has no unit", value, hint=f"write {joined(forms)}", fix=fix)
    examples = joined([f"`{_UNIT_EXAMPLES[unit]}`" for unit in units])
    if isinstance(data, Quantity):
        hint, fix = f"for instance {examples}", None
        if data.unit == "bytes" and "tokens" in units and value.span.text.endswith(" B"):
            meant = f"{value.span.text[:-1].strip()}B tokens"
            hint, fix = f"write `{meant}`; after a space, `B` means bytes", Fix(value.span, meant)
        return TypeMismatch("X302", f"{must}, not {describe(data)}", value, hint=hint, fix=fix)
    if isinstance(data, Word):
        return TypeMismatch("X202", f"`{data.text}` is not defined", value, hint=f"write {examples}")
    if isinstance(data, str):
        bare = data.strip()
        good = _is_numeral(bare)
        hint = f"write `{bare}` without quotes" if good else f"for instance {examples}"
        return TypeMismatch(
            "X301", f"{must}, not a string", value, hint=hint, fix=Fix(value.span, bare) if good else None
        )
    return TypeMismatch("X301", f"{must}, not {describe(data)}", value, hint=f"for instance {examples}")


def _amounts(amount: str, data: float, units: tuple[str, ...]) -> list[str]:
    """Return a number without a unit with each unit that fits it: 0.03 is not a number of steps, but 3%."""
    fraction = isinstance(data, float) and not data.is_integer()
    counted = [unit for unit in units if not (fraction and unit in ("steps", "tokens", "samples", "%"))]
    texts = [_with_unit(amount, unit) for unit in counted]
    if "%" in units and 0 < data <= 1 and (fraction or data == 1):
        texts.append(f"{data * 100:.10g}%")
    if len(units) == 1 and units[0] in ("seconds", "bytes"):
        texts.append(f"{amount} min" if units[0] == "seconds" else f"{amount} GiB")
    return texts or [_with_unit(amount, unit) for unit in units]


def _with_unit(amount: str, unit: str) -> str:
    if unit == "%":
        return f"{amount}%"
    return f"{amount} {({'seconds': 's', 'bytes': 'B'}).get(unit, unit)}"


def word_mismatch(kind: Any, text: str | None, value: Value, context: Context) -> TypeMismatch:
    """Return the error of a setting that wants one of some fixed words."""
    choices = choices_of(kind)
    if text is None:
        must = f"{context.subject} must be {joined([f'`{choice}`' for choice in choices])}"
        return TypeMismatch("X301", f"{must}, not {describe(value.data)}", value, hint="choose one of these words")
    if text in RESERVED.get((context.block, context.name), ()):
        return TypeMismatch("X209", f"`{text}` as {context.subject} is not supported yet", value,
                        hint=f"choose {joined([f'`{choice}`' for choice in choices])}")  # fmt: skip
    meant = closest(text, choices)
    message = f"{context.subject} cannot be `{text}`"
    if context.is_label:
        message = f"`{context.kind}` has no {context.name} `{text}`"
    one_of: tuple[Note, ...] = ((f"one of {', '.join(choices)}", None),) if len(choices) > 1 else ()
    if meant is None:
        hint = f"write `{choices[0]}`" if len(choices) == 1 else f"choose one of {', '.join(choices)}"
        return TypeMismatch("X305", message, value, hint=hint)
    sure = certain(text, choices)
    # A choice that begins with a digit needs quotes, except for the one the lexer knows.
    fix = Fix(value.span, sure if sure.isidentifier() or sure == "1f1b" else f'"{sure}"') if sure else None
    return TypeMismatch("X305", message, value, hint=f"did you mean `{meant}`?", notes=one_of, fix=fix)


def report(wrong: TypeMismatch, around: Converter) -> Failed:
    """Report a value that does not fit; return the stand-in for it."""
    place = wrong.value
    around.diagnostics.error(
        wrong.code, wrong.message, place.span, hint=wrong.hint, notes=(*wrong.notes, *place.notes),
        fix=wrong.fix if not place.via else None,  # the mistake is at the definition of the name
    )  # fmt: skip
    return FAILED
