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

from xtrain.lazy_attrs import frozen

_SCALARS: Final[dict[str, Any]] = {"int": int, "float": float, "str": str, "bool": bool, "None": NoneType}
_LISTS: Final = ("list", "tuple", "Sequence", "Iterable", "Collection", "List", "Tuple")
_DEEPEST_ANNOTATION: Final = 100  # far below the limit of Python's stack
_MAPS: Final = ("dict", "Mapping", "Dict")


def parameter_type(annotation: ast.expr | None) -> Any:
    """Return the type of an annotation; Any without one, or if a spec has no such type."""
    kind = type_of(annotation)
    return Any if kind is NoneType else kind


def type_of(node: ast.expr | None) -> Any:
    """Return the type of an annotation or of a part of one."""
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
    """Parse a text as a Python expression; return None if it is invalid."""
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
    """Return the metadata of an `Annotated`."""
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Annotated":
        return _parts(annotation.slice)[1:]
    return []


def optional(kind: Any) -> Any:
    """Return the type with None, which a parameter with default None accepts whatever its annotation is."""
    return _union([kind, NoneType])


def fits(kind: Any, value: Any) -> bool:
    """Return True if a plain value (lists as tuples) is of a type."""
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
    """Return a single type with or without None; for several types only representability in a spec is checked."""
    found = set(parts) - {NoneType}
    if found == {int, float}:
        found = {float}
    if len(found) != 1 or Any in found:
        return Any
    return Union[found.pop(), None] if NoneType in parts else found.pop()  # noqa: UP007


def _name(node: ast.expr | None) -> str:
    """Return the last part of a name: `typing.Sequence` as `Sequence`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


_MOST: Final = 1000  # modules reachable from one
_DEEPEST_FILE: Final = 2000  # levels of a file that every version of Python reads; 3.11 reads about 3,000, 3.13 more


class ModuleMissing(Exception):
    """A missing file or module; the message names it, as the end of a sentence."""


@frozen
class PartModule:
    """A user module. name: dotted, empty for a file that `use` names by its path.

    root: the folder in which its imports are searched. within: the package that they must belong to; empty: any.
    """

    path: Path
    name: str
    root: Path
    within: str = ""

    @property
    def package(self) -> str:
        """Package for its relative imports; empty if there is none."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def is_file(module: str) -> bool:
    """Return True if a plan names the module by the path of its file, not by a dotted name."""
    return module.endswith(".py")


def find_module(module: str, base: Path) -> PartModule:
    """Return the module that a plan names: a file relative to `base`, or a dotted name, found without importing
    anything.

    A dotted name is searched in the working folder and on sys.path. Raises ModuleMissing.
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
    """Return 32 hex digits over the module and all user modules that it imports. Raises OSError."""
    digest = blake2b(digest_size=16)
    for path in module_files(module):
        name = path.name if path == module.path else Path(os.path.relpath(path, module.root)).as_posix()
        for part in (name.encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def module_files(module: PartModule) -> list[Path]:
    """Return the files of the module and of the user modules that it imports, itself first, then by path."""
    seen = {module.path}
    waiting = [module]
    while waiting and len(seen) < _MOST:
        for other in _imported(waiting.pop()):
            if other.path not in seen:
                seen.add(other.path)
                waiting.append(other)
    return [module.path, *sorted(seen - {module.path})]


def _imported(module: PartModule) -> Iterator[PartModule]:
    """Yield the user modules that a module imports anywhere; nothing for an unreadable module."""
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
    """Return the syntax tree without Python's warnings, which appear when the code is run.

    Raises SyntaxError, also for text nested too deeply for Python; ValueError for a null character.
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
    """Return the line of the simple statement, or head of a compound one, with the most words."""
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
    except (tokenize.TokenError, SyntaxError):  # later text does not matter
        pass
    return found


def _named(node: ast.ImportFrom, package: str) -> list[str]:
    """Return the modules that `from x import y` may load: `x` and `x.y`; leading dots of x stand for enclosing
    packages."""
    around = package.split(".") if package else []
    if node.level > len(around):
        return []  # beyond the outermost package: Python reports it
    start = around[: len(around) - node.level + 1] if node.level else []
    base = ".".join([*start, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _modules(name: str, importer: PartModule) -> Iterator[PartModule]:
    """Yield the files of a module and of its enclosing packages below the importer's root."""
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
