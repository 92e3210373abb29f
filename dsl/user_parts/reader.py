"""Reader of the parts that user Python declares, from its syntax alone: nothing is imported or run."""

import ast
from collections.abc import Iterator
from typing import Any

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, Span
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.data_components import LOCAL_MICROBATCH, MICROBATCH, may_give
from xtrain.dsl.user_parts.bodies import Definition, FunctionBody, ModuleText
from xtrain.dsl.user_parts.files import nested_too_deeply, parse_quietly
from xtrain.dsl.user_parts.kinds import (
    GENERATOR,
    GOES_WITH,
    MAY_CHANGE,
    NOTHING,
    PART_KINDS,
    TOOL,
    Kind,
    Option,
    PartKind,
    may_change,
    names_of,
)
from xtrain.dsl.user_parts.signatures import Parameter, SignatureReader, Weight
from xtrain.lazy_attrs import frozen


@frozen
class Declared:
    """A function or class that a decorator declares as a part.

    parameters: set by a spec; filled: names of parameters that the run fills. options: arguments of the decorator.
    does: first line of its docstring, empty if there is none. weights, states: of a layer. body: of a composed
    function. goes_with: choice of a spec → the kinds that the part works with.
    """

    kind: Kind
    name: str
    parameters: tuple[Parameter, ...]
    filled: tuple[str, ...]
    options: dict[str, Any]
    does: str
    span: Span = field(repr=False)
    weights: tuple[Weight, ...] = ()
    states: tuple[Weight, ...] = ()
    body: FunctionBody | None = field(default=None, repr=False, eq=False)
    goes_with: dict[str, tuple[str, ...]] = field(factory=dict)

    @property
    def part(self) -> PartKind:
        """Kind of part."""
        return PART_KINDS[self.kind]


def read_parts(source: SourceText, diagnostics: Diagnostics) -> list[Declared] | None:
    """Return the parts that a Python file declares, in order; None if it cannot be parsed. Mistakes are reported."""
    try:
        tree = parse_quietly(source.text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        message = f"this is not valid Python: {getattr(error, 'msg', None) or error}"
        diagnostics.error("X222", message, _point(source, line, getattr(error, "offset", None) or 1))
        return None
    return _PartReader(source, diagnostics).run(tree)


class _PartReader:
    def __init__(self, source: SourceText, diagnostics: Diagnostics) -> None:
        self.source, self.diagnostics = source, diagnostics
        self.names: dict[str, Kind] = {}  # local names of the decorators
        self.packages: set[str] = set()  # local names of `xtrain`
        self.module = ModuleText(source)
        self.signatures = SignatureReader(self.module, diagnostics)

    def run(self, tree: ast.Module) -> list[Declared]:
        for node in ast.walk(tree):
            self._note_import(node)
        for node in tree.body:
            self._note_binding(node)
        found: dict[str, Declared] = {}
        unread_layer = False
        top = set(map(id, tree.body))
        for node in _definitions(tree):
            for decorator in node.decorator_list:
                kind = self._kind(decorator)
                if kind is None:
                    continue
                declared = self._declared(node, kind, decorator, top=id(node) in top)
                if declared is None:
                    unread_layer |= kind == "layer"
                    break
                if kind == "layer":
                    self.module.layers.setdefault(declared.name, declared)
                first = found.setdefault(declared.name, declared)
                if first is not declared:
                    notes = [("the first is here", first.span)]
                    self._wrong(f"`{node.name}` is declared twice", declared.span, "rename one of them", notes)
                break
        if unread_layer:  # families would be blamed for calling a layer that is reported already
            return [each for each in found.values() if each.kind != "family"]
        return list(found.values())

    def _note_binding(self, node: ast.stmt) -> None:
        """Record what a top-level statement binds a name to, replacing earlier bindings."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._note_import(node)
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.module.functions.pop(name, None)
                self.module.others.pop(name, None)
            return
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else ()
        )
        bound = {each.id for each in targets if isinstance(each, ast.Name)}
        if isinstance(node, Definition):
            bound.add(node.name)
        for name in bound:
            self.module.functions.pop(name, None)
            self.module.others[name] = node, self.module.imports.pop(name, "")
        if isinstance(node, ast.FunctionDef):
            del self.module.others[node.name]
            self.module.functions[node.name] = node
            if any(self._kind(each) is None for each in node.decorator_list):
                self.module.wrapped.add(node.name)

    def _note_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "xtrain":
                    self.packages.add(alias.asname or alias.name)
                name = alias.asname or alias.name.partition(".")[0]
                self.module.imports[name] = alias.name if alias.asname else name
            return
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            self.module.imports.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        if (
            isinstance(node, ast.ImportFrom)
            and node.module in ("xtrain", "xtrain.runtime.base.part_decorators")
            and not node.level
        ):
            for alias in node.names:
                kind = _decorator(alias.name)
                if kind is not None:
                    self.names[alias.asname or alias.name] = kind

    def _kind(self, decorator: ast.expr) -> Kind | None:
        """Return the kind that a decorator declares; None if it is not xtrain's."""
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Name):
            return self.names.get(target.id)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            return _decorator(target.attr) if target.value.id in self.packages else None
        return None

    def _declared(self, node: Definition, kind: Kind, decorator: ast.expr, *, top: bool):
        """Return the part, or None after reporting why a spec cannot use it."""
        name = self.module.name_span(node)
        if not top:
            self._wrong(
                f"`{node.name}` is declared inside something else", name, "move it to the top level of the file"
            )
            return None
        if isinstance(node, ast.AsyncFunctionDef):
            self._wrong(f"`{node.name}` is an async function", name, "write `def` without `async`")
            return None
        about = PART_KINDS[kind]
        if kind != "layer" and not node.name.isascii():
            self._wrong(f"a spec cannot contain the name `{node.name}`", name, "use the letters a-z, digits and `_`")
            return None
        if about.composes and len(node.decorator_list) > 1:
            message = f"`{node.name}` has another decorator, which may change its result"
            other = next(each for each in node.decorator_list if each is not decorator)
            self._wrong(message, self._span(other), "remove it")
            return None
        if isinstance(node, ast.ClassDef) != bool(about.methods):
            is_now, wanted = ("a class", "function") if isinstance(node, ast.ClassDef) else ("a function", "class")
            self._wrong(f"`{node.name}` is {is_now}", name, f"`@{kind}` must be above a {wanted}")
            return None
        options, goes_with = self._options(node.name, kind, decorator), self._goes_with(decorator)
        if options is None or goes_with is None:
            return None
        does = (ast.get_docstring(node) or "").strip().split("\n")[0].strip()
        function = self._opened(node, about) if isinstance(node, ast.ClassDef) else node
        if function is None:
            return None
        deep = nested_too_deeply(function if about.composes else function.args)
        if deep is not None:
            self._wrong("this is nested too deeply", self._span(deep), "split it into several statements")
            return None
        weights = self.signatures.weights(function) if kind == "layer" else ()
        states = self.signatures.states(function) if kind == "layer" else ()
        fills = about.filled_with(options)
        parameters = self.signatures.parameters(function, kind, fills)
        if weights is None or states is None or parameters is None or self._wrong_states(name, options, states):
            return None
        placed = [*function.args.posonlyargs, *function.args.args]
        first = len(about.inputs) + isinstance(node, ast.ClassDef)
        asked = {each.arg for each in (*placed[first:], *function.args.kwonlyargs)}
        filled = tuple(each for each in fills if each in asked)
        if isinstance(node, ast.ClassDef):
            if kind == "environment":
                tools = self._tools(node)
                if tools is None:
                    return None
                options = {**options, "tools": tools}
            return Declared(kind, node.name, parameters, filled, options, does, name, goes_with=goes_with)
        if self._random_part(node, options.get("takes", "")):
            return None
        body = FunctionBody(self.module, node) if about.composes else None
        return Declared(kind, node.name, parameters, filled, options, does, name, weights, states, body, goes_with)

    def _wrong_states(self, name: Span, options: dict[str, Any], states: tuple[Weight, ...]) -> bool:
        """Return True, with a report, if a layer has states without mixing positions, or the other way round."""
        mixes = bool(options.get("mixes"))
        if mixes == bool(states):
            return False
        if mixes:
            message, hint = "a layer that mixes positions has a state", 'give it a parameter, `memory=state("dim")`'
        else:
            message, hint = "only a layer that mixes positions has a state", 'write `@layer(mixes="causal")`'
        self._wrong(message, name if mixes else states[0].span, hint)
        return True

    def _opened(self, node: ast.ClassDef, about: PartKind) -> ast.FunctionDef | None:
        """Return the method that opens a class with valid methods of its kind; None after reporting a mistake."""
        methods, elsewhere = self._methods(node, set())
        opens = about.opens
        wanted = {opens: about.inputs, **about.methods}
        for name, inputs in wanted.items():
            method = methods.get(name)
            form = f"write `def {name}({', '.join(('self', *inputs))})`"
            if isinstance(method, ast.AsyncFunctionDef):
                self._wrong(f"`{name}` of `{node.name}` is an async function", self.module.name_span(method), form)
                return None
            if method is not None and name != opens and not _takes(method, 1 + len(inputs)):
                listed = " and ".join(f"`{each}`" for each in inputs or ("self",))
                message = f"`{name}` of `{node.name}` must take only {listed}"
                self._wrong(message, self.module.name_span(method), form)
                return None
        if "__init__" in methods and not _takes(methods["__init__"], 1):
            message = f"`{node.name}` is created without arguments"
            hint = f"move them to `{opens}`, after `{about.inputs[0]}`"
            self._wrong(message, self.module.name_span(methods["__init__"]), hint)
            return None
        found = methods.get(opens)
        for needed in about.needs:
            if needed not in methods and not elsewhere:
                hint = f"add `def {needed}({', '.join(('self', *about.methods[needed]))})`"
                self._wrong(f"`{node.name}` has no `{needed}`", self.module.name_span(node), hint)
                return None
        if not isinstance(found, ast.FunctionDef):
            hint = f"add `def {opens}(self, {', '.join(about.inputs)})`, followed by its settings"
            message = f"`{node.name}` has no `{opens}`"
            if elsewhere:
                message += f" in this file, and `{ast.unparse(elsewhere[0])}` is not read"
            self._wrong(message, self.module.name_span(node), hint)
            return None
        if not methods.keys() & about.methods.keys() and not elsewhere:
            listed = " or ".join(f"`{name}`" for name in about.methods)
            self._wrong(f"`{node.name}` would receive nothing", self.module.name_span(node), f"give it {listed}")
            return None
        return found

    def _tools(self, node: ast.ClassDef) -> tuple[dict[str, Any], ...] | None:
        """Return the definitions of the methods with `@tool`, in order; None after reporting a mistake."""
        methods, _ = self._methods(node, set())
        marks = f"xtrain.{TOOL}"
        marked = [each for each in methods.values() if marks in map(self.module.dotted, each.decorator_list)]
        tools = [self.signatures.tool(method) for method in marked]
        return None if None in tools else tuple(tool for tool in tools if tool is not None)

    def _methods(self, node: ast.ClassDef, seen: set[str]) -> tuple[dict[str, Any], list[ast.expr]]:
        """Return the methods of a class by name, including inherited ones, and its bases outside this file."""
        seen.add(node.name)
        found: dict[str, Any] = {}
        elsewhere: list[ast.expr] = []
        for base in reversed(node.bases):
            known, _ = self.module.others.get(base.id if isinstance(base, ast.Name) else "", (None, ""))
            if not isinstance(known, ast.ClassDef):
                elsewhere += [] if ast.unparse(base) == "object" else [base]
            elif known.name not in seen:
                inherited, others = self._methods(known, seen)
                found |= inherited
                elsewhere += others
        own = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
        return {**found, **{each.name: each for each in own}}, elsewhere

    # The decorator ----------------------------------------------------------------------------------------------------

    def _options(self, name: str, kind: Kind, decorator: ast.expr) -> dict[str, Any] | None:
        """Return the arguments of a decorator; None after reporting a mistake."""
        place, known = self._span(decorator), PART_KINDS[kind].options
        example = f"write `{PART_KINDS[kind].example}`"
        given: dict[str | None, ast.expr] = {}
        if isinstance(decorator, ast.Call):
            given = dict(zip(known, decorator.args, strict=False))
            keywords = [keyword for keyword in decorator.keywords if keyword.arg != "goes_with"]
            given.update({keyword.arg: keyword.value for keyword in keywords})
            strange = [keyword for keyword in keywords if keyword.arg not in known]
            if strange or len(decorator.args) > len(known):
                listed = " and ".join(f"`{each}`" for each in known)
                message = f"the arguments of `@{kind}` are {listed}" if known else f"`{kind}` takes no arguments"
                self._wrong(message, place, example)
                return None
        options: dict[str, Any] = {}
        for each, option in known.items():
            node = given.get(each)
            if node is None or (isinstance(node, ast.Constant) and node.value is None):
                if option.required:
                    self._wrong(f"`@{kind}` of `{name}` lacks `{each}`", place, example)
                    return None
                options[each] = None if option.words else ()
                continue
            options[each] = self._word(node, option, each) if option.words else self._names(node, each)
            if options[each] is None:
                return None
        if kind == "collator":
            return self._given_kind(options, given.get("gives"))
        return self._changes(options, place) if kind == "hook" else options

    def _goes_with(self, decorator: ast.expr) -> dict[str, tuple[str, ...]] | None:
        """Return the kinds that a part works with, by choice; None after reporting a mistake."""
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        node = next((keyword.value for keyword in keywords if keyword.arg == "goes_with"), None)
        if node is None:
            return {}
        try:
            found = {name: names_of(kinds) for name, kinds in ast.literal_eval(node).items()}
        except (ValueError, TypeError, SyntaxError, AttributeError, MemoryError, RecursionError):
            found = {"": None}
        if wrong := next((name for name in found if name not in GOES_WITH), None):
            hint = did_you_mean(str(wrong), GOES_WITH) or f"choices are {', '.join(GOES_WITH)}"
            self._wrong(f"there is no choice `{wrong}` that a part can go with", self._span(node), hint)
            return None
        if not all(found.values()):
            message = "`goes_with` is read without running the code, and must list kinds by choice"
            self._wrong(message, self._span(node), 'write names in quotes: `goes_with={"CHOICE": ["KIND", …]}`')
            return None
        return {name: kinds for name, kinds in found.items() if kinds}

    def _changes(self, options: dict[str, Any], span: Span) -> dict[str, Any] | None:
        """Check what a hook changes against its place; without `changes`, nothing."""
        changes = options["changes"] or NOTHING
        if not may_change(options["place"], changes):
            message = f"a hook cannot change {changes} {options['place']}"
            self._wrong(message, span, f"{changes} may be changed {' or '.join(MAY_CHANGE[changes])}")
            return None
        return {**options, "changes": changes}

    def _given_kind(self, options: dict[str, Any], node: ast.expr | None) -> dict[str, Any] | None:
        """Check what a collator takes and produces; the default of `gives` is `takes`."""
        takes, gives = options["takes"], options["gives"] or options["takes"]
        if gives not in may_give(takes):
            assert node is not None
            maker = {MICROBATCH: "`pack`", LOCAL_MICROBATCH: "`shard`"}.get(gives)
            last = f"only {maker} produces {gives}" if maker else f"{gives} come before {takes}"
            hint = f"it may produce {' or '.join(may_give(takes))}"
            self._wrong(f"a collator of {takes} cannot produce {gives}: {last}", self._span(node), hint)
            return None
        return {"takes": takes, "gives": gives}

    def _names(self, node: ast.expr, option: str) -> tuple[str, ...] | None:
        """Return names written as string literals."""
        try:
            found = names_of(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found = None
        if found is None:
            message = f"`{option}` is read without running the code, and must list names, each once"
            self._wrong(message, self._span(node), f'write them as plain strings: `{option}=("first", "second")`')
        return found

    def _word(self, node: ast.expr, option: Option, name: str) -> str | None:
        """Return one of some words, written as a string literal."""
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            self._wrong(f"`{name}` is read without running the code", self._span(node),
                        f"write the {option.what.split()[0]} here as a plain string")  # fmt: skip
            return None
        if node.value not in option.words:
            hint = did_you_mean(node.value, option.words) or f"write one of {', '.join(option.words)}"
            self._wrong(f"there is no {option.what} `{node.value}`", self._span(node), hint)
            return None
        return node.value

    def _random_part(self, node: ast.FunctionDef, takes: str) -> bool:
        """Return True, with a report, if a collator of a shard of a row asks for random numbers."""
        asks = next((a for a in (*node.args.args, *node.args.kwonlyargs) if a.arg == GENERATOR), None)
        if asks is None or takes != LOCAL_MICROBATCH:
            return False
        message = f"random numbers of `{node.name}` for {takes} would depend on the number of ranks"
        self._wrong(message, self._span(asks), f"use {MICROBATCH}, before `shard`")
        return True

    # Places -----------------------------------------------------------------------------------------------------------

    def _span(self, node: Any) -> Span:
        return self.module.span(node)

    def _wrong(self, message: str, span: Span, hint: str, notes: Any = ()) -> None:
        self.diagnostics.error("X223", message, span, hint=hint, notes=notes)


def _definitions(tree: ast.Module) -> Iterator[Definition]:
    """Yield all functions and classes, in text order."""
    found = [node for node in ast.walk(tree) if isinstance(node, Definition)]
    yield from sorted(found, key=lambda node: node.lineno)


def _takes(method: Definition, number: int) -> bool:
    """Return True if a method accepts this many positional arguments, including `self`."""
    if isinstance(method, ast.ClassDef):
        return False
    given = method.args
    placed = len(given.posonlyargs) + len(given.args)
    needs_named = any(default is None for default in given.kw_defaults)
    enough = placed - len(given.defaults) <= number <= placed or (given.vararg is not None and placed <= number)
    return enough and not needs_named


def _decorator(name: str) -> Kind | None:
    return next((kind for kind in PART_KINDS if kind == name), None)


def _point(source: SourceText, line: int, column: int) -> Span:
    """Return the span of Python's line and column, both from 1."""
    lines = source.text.count("\n") + 1
    start = min(source.line_start(min(line, lines)) + column - 1, len(source.text))
    return Span(source, start, start)
