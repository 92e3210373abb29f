"""Modules of `use`: their files and digests, and annotations as types. Nothing is imported or run."""

import ast
import importlib.util
import io
import os
import sys
import tokenize
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from importlib.machinery import PathFinder
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, Union, get_args, get_origin

from attrs import frozen

_SCALARS: Final[dict[str, Any]] = {"int": int, "float": float, "str": str, "bool": bool, "None": NoneType}
_LISTS: Final = ("list", "tuple", "Sequence", "Iterable", "Collection", "List", "Tuple")
_DEEPEST_ANNOTATION: Final = 100  # far below what Python's stack takes
_MAPS: Final = ("dict", "Mapping", "Dict")


def parameter_type(annotation: ast.expr | None) -> Any:
    """The type an annotation stands for; Any where there is none, or where it means nothing to a spec."""
    kind = type_of(annotation)
    return Any if kind is NoneType else kind


def type_of(node: ast.expr | None) -> Any:
    """The type that an annotation, or a part of one, stands for."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return type_of(expression(node.value))
        return NoneType if node.value is None else Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([type_of(node.left), type_of(node.right)])
    if isinstance(node, ast.Subscript):
        return _generic(_name(node.value), _parts(node.slice))
    name = _name(node)
    if name in _LISTS:
        return tuple[Any, ...]
    if name in _MAPS:
        return dict[str, Any]
    return _SCALARS.get(name, Any)


def expression(text: str) -> ast.expr | None:
    """What a text is as an expression of Python; None if it is none."""
    try:
        found = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found if nested_too_deeply(found) is None else None


def nested_too_deeply(node: ast.AST, most: int = _DEEPEST_ANNOTATION) -> ast.AST | None:
    """Return the outermost expression, or the statement, below `node` that has more than `most` levels."""
    waiting = [(node, node, 0)]
    while waiting:
        each, outermost, depth = waiting.pop()
        if depth > most:
            return outermost
        inside = isinstance(each, ast.expr)
        waiting += [(child, outermost if inside else child, depth + 1) for child in ast.iter_child_nodes(each)]
    return None


def annotated(annotation: ast.expr | None) -> list[ast.expr]:
    """What `Annotated` says beside the type."""
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Annotated":
        return _parts(annotation.slice)[1:]
    return []


def optional(kind: Any) -> Any:
    """The type with None, which a parameter with that default takes whatever its annotation says."""
    return _union([kind, NoneType])


def fits(kind: Any, value: Any) -> bool:
    """Whether a plain value (lists as tuples) is of a type."""
    if kind is Any or get_origin(kind) is Literal:
        return kind is Any or value in get_args(kind)
    if get_origin(kind) is Union:
        return any(fits(part, value) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(fits(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(fits(get_args(kind)[1], each) for each in value.values())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _generic(name: str, parts: list[ast.expr]) -> Any:
    if name == "Literal":
        words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        return Literal[tuple(words)] if len(words) == len(parts) else Any
    if name == "Optional":
        return _union([*map(type_of, parts), NoneType])
    if name == "Union":
        return _union([type_of(part) for part in parts])
    if name in _LISTS:
        items = {type_of(part) for part in parts if not (isinstance(part, ast.Constant) and part.value is ...)}
        return tuple[items.pop(), ...] if len(items) == 1 else tuple[Any, ...]
    if name in _MAPS:
        return dict[str, type_of(parts[-1])]
    if name in ("Annotated", "Final"):
        return type_of(parts[0])
    return Any


def _union(parts: list[Any]) -> Any:
    """One type with or without None; of several nothing is checked but that a spec can write the value."""
    found = set(parts) - {NoneType}
    if found == {int, float}:
        found = {float}
    if len(found) != 1 or Any in found:
        return Any
    return Union[found.pop(), None] if NoneType in parts else found.pop()  # noqa: UP007


def _name(node: ast.expr | None) -> str:
    """The last part of a name, `typing.Sequence` as `Sequence`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


_MOST: Final = 1000  # modules that one may lead to
_DEEPEST_FILE: Final = 2000  # levels of a file that every version of Python reads; 3.11 reads about 3,000, 3.13 more


class ModuleMissing(Exception):
    """There is no such file or module; the message says which, as the end of a sentence."""


@frozen
class PartModule:
    """A module of the user's. name: dotted, empty for a file that `use` names by its path.

    root: the folder that its imports are looked for in. within: the package that they must belong to; empty: any.
    """

    path: Path
    name: str
    root: Path
    within: str = ""

    @property
    def package(self) -> str:
        """The package whose modules it may import relatively; empty if there is none."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def is_file(module: str) -> bool:
    """Whether a module of the plan is named by the path of its file; the others have dotted names."""
    return module.endswith(".py")


def find_module(module: str, base: Path) -> PartModule:
    """The module that a plan names: a file relative to `base`, or a dotted name, found without importing anything.

    A dotted name is looked for in the working folder and on sys.path. Raises ModuleMissing.
    """
    if not is_file(module):
        return _find_name(module)
    path = base / module
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else "there is no such file"
        raise ModuleMissing(f"cannot read `{path.as_posix()}`: {reason}")
    return PartModule(path, "", path.parent)


def _find_name(name: str) -> PartModule:
    top, *rest = name.split(".")
    try:
        spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or importlib.util.find_spec(top)  # noqa: PTH109
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ModuleMissing(f"there is no module `{top}` in the working folder or on Python's path")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = Path(spec.origin) if spec.has_location and spec.origin else None
    root = folders[0].parent if folders else found.parent if found else Path()
    for depth, part in enumerate(rest, 2):
        inside = [folder / part for folder in folders]
        packages = [folder / "__init__.py" for folder in inside if (folder / "__init__.py").is_file()]
        modules = [path for folder in inside if (path := folder.with_name(f"{part}.py")).is_file()]
        folders = [packages[0].parent] if packages else [folder for folder in inside if folder.is_dir()]
        found = next(iter((*packages, *modules)), None)
        if found is None and not folders:
            known = ".".join([top, *rest[: depth - 2]])
            raise ModuleMissing(f"there is no module `{part}` in `{known}`")
        folders = [] if found in modules else folders
    if found is None or found.suffix != ".py":
        raise ModuleMissing(f"`{name}` is not a module written in Python")
    return PartModule(found, name, root, within=top)


def module_digest(module: PartModule) -> str:
    """32 hex digits over the module and all of the user's own modules that it imports. Raises OSError."""
    digest = blake2b(digest_size=16)
    for path in module_files(module):
        name = path.name if path == module.path else Path(os.path.relpath(path, module.root)).as_posix()
        for part in (name.encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def module_files(module: PartModule) -> list[Path]:
    """The files of the module and of the user's own modules that it imports, itself first, then by path."""
    seen = {module.path}
    waiting = [module]
    while waiting and len(seen) < _MOST:
        for other in _imported(waiting.pop()):
            if other.path not in seen:
                seen.add(other.path)
                waiting.append(other)
    return [module.path, *sorted(seen - {module.path})]


def _imported(module: PartModule) -> Iterator[PartModule]:
    """What a module imports of the user's own, wherever in it; nothing of one that cannot be read."""
    try:
        tree = parse_quietly(module.path.read_bytes())
    except (SyntaxError, ValueError):
        return
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            names.update(dict.fromkeys(_named(node, module.package)))
    for name in names:
        if module.within in ("", name.partition(".")[0]):
            yield from _modules(name, module)


def parse_quietly(text: str | bytes) -> ast.Module:
    """The syntax tree; what Python only warns of is said when it is run.

    Raises SyntaxError, also for what Python cannot read as it is nested too deeply; ValueError for a null character.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (RecursionError, MemoryError):
            line = _longest_statement(text) if isinstance(text, str) else 1
            message = "something is nested too deeply, most likely in this statement, the longest of the file"
            raise SyntaxError(message, ("", line, 1, None)) from None
    if (deep := nested_too_deeply(tree, _DEEPEST_FILE)) is not None:
        raise SyntaxError("this is nested too deeply", ("", getattr(deep, "lineno", 1), 1, None))
    return tree


def _longest_statement(text: str) -> int:
    """The line where the simple statement, or head of a compound one, begins that has the most words."""
    line, longest, words, found = 0, 0, 0, 1
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                if words > longest:
                    longest, found = words, line
                words = 0
            elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
                line = line if words else token.start[0]
                words += 1
    except (tokenize.TokenError, SyntaxError):  # what comes behind does not matter
        pass
    return found


def _named(node: ast.ImportFrom, package: str) -> list[str]:
    """The modules that `from x import y` may load: `x` and `x.y`; dots in front of x stand for packages around."""
    around = package.split(".") if package else []
    if node.level > len(around):
        return []  # beyond the outermost package: Python will say so
    start = around[: len(around) - node.level + 1] if node.level else []
    base = ".".join([*start, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _modules(name: str, importer: PartModule) -> Iterator[PartModule]:
    """The files of a module and of the packages around it that lie below the importer's root."""
    folder, passed = importer.root, []
    for part in name.split("."):
        passed.append(part)
        package, module = folder / part / "__init__.py", folder / f"{part}.py"
        found = package if package.is_file() else module if module.is_file() else None
        if found is not None:
            yield PartModule(found, ".".join(passed), importer.root, importer.within)
        if found is module:
            return
        folder = folder / part
