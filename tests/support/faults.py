"""Small faults of product code, one at a time: where a file can have them, and its text with one of them.

Kinds: a boundary (`<` for `<=`), a condition negated, dropped, or one of two ignored (among them checks of rank 0), an
operator or a number off, a flag turned, two arguments swapped, a call removed (fsync, a check, a reduction), a key or
code with another letter, one of two bounds ignored. Texts for people, annotations, assertions and `__all__` stay as
they are.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

BOUNDARIES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
NEGATED = {ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
# Arguments that people read, and those that guard or hurry without a result of their own.
TEXTS = {"doc", "help", "hint", "why", "description", "metavar", "message", "strict", "flush", "eq"}
TEXTS |= {"repr", "init", "kw_only", "slots", "maxsize", "stacklevel"}
UNWRAPPED = {"min", "max", "sorted", "abs", "round", "sum", "any", "all", "set", "reversed", "dedent", "deepcopy"}


class Fault(NamedTuple):
    line: int
    kind: str
    start: int  # bytes of the file
    end: int
    new: str

    def planted(self, text: bytes) -> bytes:
        return text[: self.start] + self.new.encode() + text[self.end :]

    def shown(self, text: bytes) -> str:
        """Return the changed part before and after, with the rest of its line."""
        start, end = text.rfind(b"\n", 0, self.start) + 1, text.find(b"\n", self.end)
        old = text[start:end].decode().strip()
        return f"{old}\n  → {(text[start : self.start] + self.new.encode() + text[self.end : end]).decode().strip()}"


def faults(text: bytes) -> list[Fault]:
    """Return the faults that a file can have, in order of their lines. Raises SyntaxError."""
    offsets = [0]
    for line in text.split(b"\n"):
        offsets.append(offsets[-1] + len(line) + 1)

    def place(node: ast.AST) -> tuple[int, int]:
        at: ast.expr = node  # type: ignore[assignment]
        assert at.end_lineno is not None and at.end_col_offset is not None
        return offsets[at.lineno - 1] + at.col_offset, offsets[at.end_lineno - 1] + at.end_col_offset

    def source(node: ast.AST) -> str:
        start, end = place(node)
        return text[start:end].decode()

    found: list[Fault] = []
    for node in _code(ast.parse(text)):
        for kind, what, new in _of_node(node, source):
            start, end = place(what[0])[0], place(what[-1])[1]
            if len(what) == 2 and kind in ("boundary", "negated", "operator"):  # the sign between two operands
                start, end = place(what[0])[1], place(what[1])[0]
                old = text[start:end].decode()
                sign = re.search(r"[^\s()]+( (?=in|not)[^\s()]+)?", re.sub(r"#.*", "", old))
                if sign is None or "\n" in old:
                    continue
                start, end = start + sign.start(), start + sign.end()
            if text[start:end].decode() != new:
                found.append(Fault(text.count(b"\n", 0, start) + 1, kind, start, end, new))
    return sorted(found)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs: no annotation, no docstring, no f-string, no import, no assertion, no text for people."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params") or (name == "body" and _only_types(node)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Assert) or (isinstance(child, ast.Subscript) and _named(child.value, "Literal")):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.keyword) and child.arg in TEXTS:
                continue
            if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in ("__all__", "__slots__"):
                continue
            if isinstance(child, ast.Call) and _named(child.func, "TypeVar", "cast"):
                continue
            yield child
            yield from _code(child)


def _named(node: ast.AST, *names: str) -> bool:
    return ast.unparse(node).rpartition(".")[2] in names


def _only_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _of_node(node: ast.AST, source) -> Iterator[tuple[str, list[ast.AST], str]]:
    """Kind, the nodes that the change spans, the new text."""
    match node:
        case ast.Compare():
            operands = [node.left, *node.comparators]
            for sign, pair in zip(node.ops, pairwise(operands), strict=True):
                if type(sign) in BOUNDARIES:
                    yield "boundary", list(pair), BOUNDARIES[type(sign)]
                else:
                    yield "negated", list(pair), NEGATED[type(sign)]
        case ast.BoolOp():
            for number in range(len(node.values)):
                rest = [other for at, other in enumerate(node.values) if at != number]
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield "one of two ignored", [node], f"({word.join(f'({source(other)})' for other in rest)})"
        case ast.If() | ast.IfExp() if not _only_types(node):
            yield "negated", [node.test], f"not ({source(node.test)})"
            yield "dropped", [node.test], "True"
            yield "dropped", [node.test], "False"
        case ast.comprehension(ifs=[condition, *_]):
            yield "dropped", [condition], "True"
        case ast.BinOp() if type(node.op) in OPERATORS and not _text(node.left) and not _text(node.right):
            yield "operator", [node.left, node.right], OPERATORS[type(node.op)]
        case ast.Constant(value=bool(value)):
            yield "flag", [node], str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", [node], str(value + 1)
        case ast.Constant(value=float(value)) if value:
            yield "number", [node], repr(value * 2)
        case ast.Constant(value=str(value)) if KEY.fullmatch(value) and source(node)[0] in "'\"":
            yield "key", [node], repr(f"{value[:-1]}{'x' if value[-1] != 'x' else 'y'}")
        case ast.Expr(value=ast.Call() | ast.Await() | ast.YieldFrom()):
            yield "removed", [node], "None"
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred) and not isinstance(
            second, ast.Starred
        ):
            if source(node.func) not in ("min", "max"):
                yield "swapped", [first, second], f"{source(second)}, {source(first)}"
            else:
                yield "one of two ignored", [node], source(first)
                yield "one of two ignored", [node], source(second)
        case ast.Call(args=[only], keywords=[]) if source(node.func) in UNWRAPPED and not isinstance(
            only, ast.Starred | ast.GeneratorExp
        ):
            yield "removed", [node], f"({source(only)})"
        case ast.Call(func=ast.Attribute(value=value, attr="sum" | "mean" | "detach" | "float" | "clone" | "strip")):
            yield "removed", [node], source(value)


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
