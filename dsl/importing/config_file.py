"""Configuration files of other trainers: YAML, JSON or TOML, as plain values with the place of every key.

Nothing in a file is executed: tags that name Python objects are refused, as are files that could take unbounded memory.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from attrs import field

from xtrain.dsl.checking.config_json import STRICT
from xtrain.dsl.diagnostics.diagnostic import SourceText, Span
from xtrain.lazy_attrs import frozen
from xtrain.regular_files import read_regular, reason_of

LARGEST: Final = 1 << 20
"""Largest size of a file, in bytes; configurations are a few kilobytes."""
DEEPEST: Final = 60
MOST_KEYS: Final = 20_000
"""Limit on keys and list items, counted after aliases are expanded."""
_NUMBER: Final = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_CORE: Final = "tag:yaml.org,2002:"
_KINDS: Final = {".json": "json", ".toml": "toml"}


class UnreadableConfig(Exception):
    """A file that cannot be read. The text says why; span: where, if a place is known; hint: what to do."""

    def __init__(self, message: str, span: Span | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.span, self.hint = span, hint


@frozen
class ConfigFile:
    """A configuration. root: its mapping. spans: place of every key and list item, by path as in `datasets.0.type`."""

    path: Path
    source: SourceText = field(repr=False)
    root: dict[str, Any]
    spans: dict[str, Span] = field(repr=False)


def read_config(path: str | Path) -> ConfigFile:
    """Read a configuration by the suffix of its name: JSON, TOML, or else YAML. Raises UnreadableConfig."""
    path = Path(path)
    try:
        source = SourceText.from_bytes(str(path), read_regular(path, LARGEST))
    except OSError as error:
        raise UnreadableConfig(f"{path} cannot be read: {reason_of(error)}") from None
    except UnicodeDecodeError as error:
        raise UnreadableConfig(f"{path} is not UTF-8 text, from byte {error.start} on") from None
    kind = _KINDS.get(path.suffix.lower(), "yaml")
    try:
        root, spans = {"json": _json, "toml": _toml, "yaml": _yaml}[kind](source)
    except RecursionError:
        raise UnreadableConfig(f"{path} is nested too deeply") from None
    if not isinstance(root, dict) or not root:
        raise UnreadableConfig(f"{path} has no keys", hint="a configuration is a mapping of keys to values")
    return ConfigFile(path, source, root, spans)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path → value of everything in a configuration, containers before their content."""
    if path:
        yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from flat(child, f"{path}.{name}" if path else str(name))


# YAML -----------------------------------------------------------------------------------------------------------------

_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _yaml(source: SourceText) -> tuple[Any, dict[str, Span]]:
    try:
        _check_depth(source)
        nodes = list(yaml.compose_all(source.text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        span = None if mark is None else _span(source, mark.index, mark.index + 1)
        tabs = span is not None and "\t" in source.line(span.line)
        hint = "YAML is indented by spaces, never by tabs" if tabs else None
        raise UnreadableConfig(f"invalid YAML: {error.problem or error.context}", span, hint) from None
    except yaml.YAMLError as error:
        raise UnreadableConfig(f"invalid YAML: {str(error).splitlines()[0]}") from None
    if len(nodes) > 1:
        hint = "keep one configuration in the file"
        raise UnreadableConfig("several YAML documents in one file", _of(source, nodes[1]), hint)
    reader = _YamlReader(source)
    return (reader.value(nodes[0], "", ()) if nodes and nodes[0] is not None else {}), reader.spans


def _check_depth(source: SourceText) -> None:
    """Raise UnreadableConfig for deep nesting: composing nodes recurses, reading events does not."""
    depth = 0
    for event in yaml.parse(source.text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            place = event.start_mark.index
            raise UnreadableConfig(f"nested more than {DEEPEST} levels deep", _span(source, place, place + 1))


def _span(source: SourceText, start: int, end: int) -> Span:
    last = len(source.text)
    return source.span(min(start, last), min(end, last))


def _of(source: SourceText, node: yaml.Node) -> Span:
    start = node.start_mark.index
    end = source.text.find("\n", start, node.end_mark.index)
    return _span(source, start, node.end_mark.index if end < 0 else end)


class _YamlReader:
    """Reader of composed nodes; a node that several aliases share is read for each of them."""

    def __init__(self, source: SourceText) -> None:
        self.source, self.spans = source, dict[str, Span]()
        self._count = 0
        self._scalars = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: str, above: tuple[int, ...]) -> Any:
        self._count += 1
        if self._count > MOST_KEYS:
            raise UnreadableConfig(f"more than {MOST_KEYS:,} keys and list items, aliases expanded")
        if id(node) in above:
            raise UnreadableConfig("an alias contains itself", _of(self.source, node))
        if not node.tag.startswith(_CORE) or node.tag.startswith(f"{_CORE}python"):
            tag = node.tag.removeprefix(_CORE)
            hint = "tags of programs are never executed; write the plain value"
            raise UnreadableConfig(f"the tag `{tag}` is not plain YAML", _of(self.source, node), hint)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, (*above, id(node)))
        if isinstance(node, yaml.SequenceNode):
            items = []
            for number, item in enumerate(node.value):
                inner = f"{path}.{number}" if path else str(number)
                self.spans[inner] = _of(self.source, item)
                items.append(self.value(item, inner, (*above, id(node))))
            return items
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: str, above: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, content in node.value:
            if key.tag == f"{_CORE}merge":
                contents = content.value if isinstance(content, yaml.SequenceNode) else [content]
                for each in contents:
                    given = self.value(each, path, above)
                    merged = {**(given if isinstance(given, dict) else {}), **merged}
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise UnreadableConfig("a key that is not a word", _of(self.source, key))
            name = str(key.value)
            if name in found:
                first = self.spans[f"{path}.{name}" if path else name]
                hint = f"remove one; it is first given in line {first.line}"
                raise UnreadableConfig(f"`{name}` is given twice", _of(self.source, key), hint)
            inner = f"{path}.{name}" if path else name
            self.spans[inner] = _of(self.source, key)
            found[name] = self.value(content, inner, above)
        return {**merged, **found}

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        # YAML 1.1 reads 2e-5 as text, because it has no point; trainers convert it.
        if node.tag == f"{_CORE}str" and not node.style and _NUMBER.fullmatch(node.value):
            return float(node.value.replace("_", ""))
        if node.tag in (f"{_CORE}timestamp", f"{_CORE}binary"):
            return node.value
        try:
            return self._scalars.construct_object(node)
        except (ValueError, yaml.YAMLError) as error:
            raise UnreadableConfig(f"invalid value: {str(error).splitlines()[0]}", _of(self.source, node)) from None


# JSON and TOML --------------------------------------------------------------------------------------------------------


def _json(source: SourceText) -> tuple[Any, dict[str, Span]]:
    try:
        root = STRICT.decode(source.text)
    except ValueError as error:
        place = getattr(error, "pos", None)
        span = None if place is None else _span(source, place, place + 1)
        raise UnreadableConfig(f"invalid JSON: {getattr(error, 'msg', error)}", span) from None
    if sum(1 for _ in flat(root)) > MOST_KEYS:
        raise UnreadableConfig(f"more than {MOST_KEYS:,} keys and list items")
    try:
        # JSON is YAML, but for tabs, which stand only between tokens.
        plain = SourceText(source.path, source.text.replace("\t", " "))
        spans = {name: Span(source, span.start, span.end) for name, span in _yaml(plain)[1].items()}
    except UnreadableConfig:
        spans = {}
    return root, spans


_TABLE: Final = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+\s*(#.*)?$")
_ENTRY: Final = re.compile(r"\s*([\w.\"'-]+)\s*=")


def _toml(source: SourceText) -> tuple[Any, dict[str, Span]]:
    try:
        root = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+), column (\d+)", str(error))
        line = min(int(place[1]), source.text.count("\n") + 1) if place else 0
        span = (
            _span(source, source.line_start(line), source.line_start(line) + len(source.line(line))) if line else None
        )
        raise UnreadableConfig(f"invalid TOML: {error}", span) from None
    spans: dict[str, Span] = {}
    table, place = "", 0
    for line in source.text.split("\n"):
        name = ""
        if head := _TABLE.match(line):
            table = name = head[1].replace('"', "")
        elif entry := _ENTRY.match(line):
            key = entry[1].replace('"', "")
            name = f"{table}.{key}" if table else key
        if name:
            start = place + len(line) - len(line.lstrip())
            spans.setdefault(name, _span(source, start, place + len(line.rstrip())))
        place += len(line) + 1
    return root, spans
