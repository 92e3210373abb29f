"""`DeclaredPart`: a function of the user's own, and what a spec gives for its parameters."""

from typing import Any, Union, get_args, get_origin

from attrs import define, field

from xtrain.dsl.checking.context import Context, Converter
from xtrain.dsl.checking.convert import settled
from xtrain.dsl.checking.type_errors import TypeMismatch, joined, list_mismatch, map_mismatch, report
from xtrain.dsl.checking.user_components import component_of
from xtrain.dsl.diagnostics.fixes import renamed
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.evaluation.values import FAILED, Called, Items, Mapping, Value, Word, describe, is_number, show_number
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.component import Registry, UserComponent, parameters_of
from xtrain.dsl.schema.setting import Setting
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.dsl.user_parts.reader import Declared
from xtrain.dsl.user_parts.signatures import REQUIRED


@define(eq=False)
class DeclaredPart:
    """module: as a plan names it. digest: of what it says. use: the statement that makes it known."""

    declared: Declared
    module: str
    digest: str
    use: Span = field(repr=False)
    used: bool = False

    def convert(self, kinds: Registry, call: Called, value: Value, context: Context, around: Converter) -> Any:
        """The call as a component of a kind; FAILED after reporting what is wrong. Raises TypeMismatch where it does
        not belong."""
        declared, name = self.declared, self.declared.name
        self.used = True
        place = Value(call, call.name_span, value.via)
        note = ((f"`{name}` is declared here", declared.span),)
        if declared.kind != kinds.word:
            own = PART_KINDS[declared.kind]
            other = next(kind for kind in PART_KINDS.values() if kind.name == kinds.word)
            message = f"`{name}` is {own.noun}, and {context.subject} takes {other.noun}"
            raise TypeMismatch("X219", message, place, hint=f"{own.noun} {own.chosen}", notes=note)
        if isinstance(value.data, Word) and declared.kind == "source":
            raise TypeMismatch("X220", f"`{name}` needs parentheses", place, hint=f"write `{self.form()}`", notes=note)
        given = self._given(call, around)
        if given is None:
            return FAILED
        missing = [p.name for p in declared.parameters if p.default is REQUIRED and p.name not in given]
        if missing:
            needed = joined([f"`{each}`" for each in missing], "and")
            raise TypeMismatch("X220", f"`{name}` needs {needed}", place, hint=f"write `{self.form()}`", notes=note)
        component, arguments = self.component(), {}
        for each, attribute in parameters_of(component).items():
            if each in given:
                context = Context(each, name, component, Setting(doc=f"argument of {name}"))
                arguments[attribute.alias] = convert_argument(attribute.type, given[each], context, around)
        return FAILED if any(each is FAILED for each in arguments.values()) else component(**arguments)

    def component(self) -> type[UserComponent]:
        """Its class."""
        return component_of(self.declared, self.module, self.digest)

    def form(self) -> str:
        """How it is written: its name with what must be given."""
        needed = [f"{p.name} = …" for p in self.declared.parameters if p.default is REQUIRED]
        brackets = bool(needed) or self.declared.kind == "source"
        return f"{self.declared.name}({', '.join(needed)})" if brackets else self.declared.name

    def _given(self, call: Called, around: Converter) -> dict[str, Value] | None:
        """What is written for each parameter; None after reporting what there is no parameter for."""
        name, parameters = call.name, self.declared.parameters
        placed = [parameter.name for parameter in parameters if not parameter.named]
        given = dict(zip(placed, call.positional, strict=False))
        good = True
        for extra in call.positional[len(placed) :]:
            many = f"{len(placed)} argument" + ("s" if len(placed) > 1 else "") if placed else "no arguments"
            named = [parameter.name for parameter in parameters if parameter.named]
            hint = f"give {joined(named)} by name" if named else "remove it"
            message = f"`{name}` takes {many}{' without a name' if named else ''}"
            around.diagnostics.error("X220", message, extra.span, hint=hint)
            good = False
        known = [parameter.name for parameter in parameters]
        for each, (span, value) in call.keywords.items():
            if each in given:
                around.diagnostics.error("X220", f"`{each}` of `{name}` is given twice", span, hint="keep one")
            elif each not in known:
                meant = closest(each, known)
                says = f"arguments of `{name}`: {', '.join(known)}" if known else f"`{name}` takes no arguments"
                around.diagnostics.error(
                    "X203", f"unknown argument `{each}` of `{name}`", span,
                    hint=f"did you mean `{meant}`?" if meant else None, notes=[(says, self.declared.span)],
                    fix=renamed(span, each, known, taken=(*given, *call.keywords)),
                )  # fmt: skip
            else:
                given[each] = value
                continue
            good = False
        return given if good else None


def convert_argument(kind: Any, value: Value, context: Context, around: Converter) -> Any:
    """A value for a parameter of a type that its annotation stands for; FAILED after reporting what is wrong."""
    if value.data is FAILED:
        return FAILED
    if Any not in _mentioned(kind):
        return around.convert(kind, value, context)
    try:
        return _unchecked(kind, value, context, around)
    except TypeMismatch as wrong:
        return report(wrong, around)


def _unchecked(kind: Any, value: Value, context: Context, around: Converter) -> Any:
    """For a type that says little: anything a spec can write that means something to Python. Raises TypeMismatch."""
    data = value.data
    if get_origin(kind) is Union:
        (kind,) = (part for part in get_args(kind) if part is not type(None))
        if data is None:
            return None
    if get_origin(kind) is tuple and not isinstance(data, Items):
        raise list_mismatch(Any, kind, value, context)
    if get_origin(kind) is dict and not isinstance(data, Mapping):
        raise map_mismatch(kind, value, context)
    match data:
        case Items(values=values):
            found = [convert_argument(Any, each, context, around) for each in values]
            return FAILED if any(each is FAILED for each in found) else tuple(found)
        case Mapping(entries=entries):
            items = {name: convert_argument(Any, each, context, around) for name, each in entries.items()}
            return FAILED if any(each is FAILED for each in items.values()) else items
        case Quantity():
            message = f"{context.subject} is a plain number, and this is {describe(data)}"
            raise TypeMismatch(
                "X302", message, value, hint=f"arguments of Python functions have no units: write `{_bare(data)}`"
            )
        case Word(text=text):
            raise TypeMismatch(
                "X202", f"`{text}` is not defined", value, hint=f'a string is written in quotes: `"{text}"`'
            )
    if data is None or isinstance(data, bool | str) or is_number(data):
        return settled(data, context)
    message = f"{context.subject} of `{context.kind}` cannot be {describe(data)}"
    raise TypeMismatch(
        "X301", message, value, hint="write a number, a string, `true`, `false`, `none`, a list or a map"
    )


def _bare(data: Quantity) -> str:
    return f"{data.fraction:g}" if data.unit == "%" else show_number(data.value)


def _mentioned(kind: Any) -> set[Any]:
    """The types that a type is made of, itself among them."""
    found = {kind}
    for part in get_args(kind) if get_origin(kind) in (Union, tuple, dict) else ():
        found |= _mentioned(part)
    return found
