"""Which branches of a package run: its modules are compiled anew, with a mark at the head of every block.

Cheaper than tracing: a mark is one store into a byte array. It has to be installed before the package is imported.
"""

import ast
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

_HITS = "__hits__"


class Marks:
    """One byte for each marked block; places[n] says where block n is."""

    def __init__(self) -> None:
        self.hits = bytearray()
        self.places: list[tuple[str, int]] = []

    def add(self, file: str, line: int) -> int:
        self.hits.append(0)
        self.places.append((file, line))
        return len(self.places) - 1


class _Marker(ast.NodeTransformer):
    """Puts a mark before the first statement of every block, and into every branch of an expression."""

    def __init__(self, marks: Marks, file: str) -> None:
        self.marks, self.file = marks, file
        self.inside = 0  # functions around the current node

    def _mark(self, node: ast.stmt) -> ast.stmt:
        text = f"{_HITS}[{self.marks.add(self.file, node.lineno)}] = 1"
        return ast.copy_location(ast.parse(text).body[0], node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self.inside += is_function
        super().generic_visit(node)
        self.inside -= is_function
        if self.inside or is_function:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    doc = int(is_function and ast.get_docstring(node) is not None)
                    setattr(node, name, [*block[:doc], self._mark(block[0]), *block[doc:]])
        return ast.fix_missing_locations(node)

    def _branch(self, node: ast.expr) -> ast.expr:
        call = ast.parse(f"{_HITS}.__setitem__({self.marks.add(self.file, node.lineno)}, 1) or None", mode="eval").body
        assert isinstance(call, ast.BoolOp)
        return ast.copy_location(ast.BoolOp(ast.Or(), [call.values[0], node]), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if self.inside:
            node.body, node.orelse = self._branch(node.body), self._branch(node.orelse)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self.inside:
            node.values = [node.values[0], *(self._branch(value) for value in node.values[1:])]
        return node


class _Loader(SourceFileLoader):
    marks: Marks

    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        tree = _Marker(self.marks, path).visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module) -> None:
        setattr(module, _HITS, self.marks.hits)
        super().exec_module(module)


class _Finder:
    def __init__(
        self, root: Path, package: str, rooms: tuple[str, ...], marks: Marks, without: tuple[str, ...]
    ) -> None:
        self.root, self.package, self.rooms, self.marks, self.without = root, package, rooms, marks, without

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != self.package or rest.split(".")[0] not in self.rooms or rest.startswith(self.without):
            return None
        place = self.root.joinpath(*rest.split("."))
        is_package = (place / "__init__.py").is_file()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        loader = _Loader(name, str(file))
        loader.marks = self.marks
        inside = [str(place)] if is_package else None
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inside)


def install(root: Path, package: str, rooms: tuple[str, ...], without: tuple[str, ...] = ()) -> Marks:
    """Mark the modules of some rooms of a package from now on, but for those whose names begin so."""
    assert not any(name.startswith(tuple(f"{package}.{room}" for room in rooms)) for name in sys.modules)
    marks = Marks()
    sys.meta_path.insert(0, _Finder(root, package, rooms, marks, without))  # type: ignore[arg-type]
    return marks
