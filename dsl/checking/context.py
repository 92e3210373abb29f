"""Context of a conversion: the setting it is for, its block, and stand-ins for invalid settings."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Mapping as MappingOf
from types import UnionType
from typing import Any, Final, Literal, Protocol, Union, get_args, get_origin

import attrs
from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.diagnostics.synonyms import ours
from xtrain.dsl.evaluation.evaluate import Definition, Evaluator
from xtrain.dsl.evaluation.statements import Section, Tree
from xtrain.dsl.evaluation.values import Called, Value
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import Action
from xtrain.dsl.schema.component import Component, Registry, variant
from xtrain.dsl.schema.data_components import LINKS
from xtrain.dsl.schema.setting import Setting, attributes_of, open_setting, settings_of, spelled
from xtrain.dsl.spec import Origin
from xtrain.dsl.values import Dimension, MeasuredNumber, Metric, Quantity
from xtrain.lazy_attrs import frozen

_PLAIN: Final = {
    bool: False,
    int: 2,
    float: 1.0,
    str: "",
    Any: None,
    Dimension: Dimension(),
    Metric: Metric("eval.data.loss"),
    MeasuredNumber: MeasuredNumber("eval.data.loss"),
}


class UnknownSettings:
    """Paths of settings whose values are unknown, in the form of `Spec.origins`; `dataset` stands for the set of
    datasets, `*` for any name.

    misspelt: paths that a misspelt name was meant for. unread: a file or the end of one could not be read, so a missing
    setting may be there.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.misspelt: set[str] = set()
        self.unread = False

    def setting(self, path: str, attribute: attrs.Attribute) -> None:
        """Mark a setting unknown, with all its own settings if it is a block."""
        if blocks.is_block(attribute.type):
            self.paths.update(leaves(attribute.type, path))
        else:
            self.paths.add(path)

    def kind(self, kind: str) -> None:
        """Mark a top-level block unknown."""
        if kind in blocks.NAMED:
            self.paths |= {kind, f"{kind}.*"}
        elif kind in blocks.KINDS:
            self.paths.update(leaves(blocks.KINDS[kind], kind))
        else:
            self.paths.add(kind)

    def fields(self, block: type, own: Mapping[str, Any], section: Section, path: str) -> None:
        """Mark settings unknown that unknown names of the block may mean, or that were lost with unread text.

        own: settings of the chosen component, by name.
        """
        misplaced = section.labels and blocks.label_of(block) is None  # `launch 2`
        whole = not (section.broken or self.unread or section.lost or misplaced)
        if whole and own.keys() >= section.written:
            return
        known = settings_of(block)
        unwritten = [name for name in known if name not in section.entries and name not in section.blocks]
        unsettled = {name for name in section.lost if name in known}
        if section.broken or self.unread or misplaced:
            unsettled.update(unwritten)
        written = section.written
        label = blocks.label_of(block)
        if section.broken and label is not None and not section.labels:
            self.paths.add(f"{path}.{label.name}")  # `pp { {`: its place is taken by something else
        if open_setting(block) is not None:
            written = set()  # any name may be meant
        for name in written - known.keys():
            meant = closest(name, known)
            if meant is not None:
                unsettled.add(meant)
                self.misspelt.add(f"{path}.{meant}")
            elif label is not None and label.name == name:
                self.paths.add(f"{path}.{name}")
            elif not self._elsewhere(name):
                unsettled.update(unwritten)
        for name in unsettled:
            self.setting(f"{path}.{name}", known[name][0])

    def top_level(self, tree: Tree) -> None:
        """Mark blocks unknown that are misspelt, unreadable or not supported yet."""
        root = tree.root
        self.unread |= tree.unread
        for kind in (*root.lost, *root.blocks, *(kind for kind in tree.named if kind not in blocks.KINDS)):
            if kind not in blocks.KINDS or kind in blocks.NAMED or kind in root.lost:
                self._unknown_kind(kind, root.blocks.get(kind), tree)
        for name in root.entries:
            if name == "collate":
                continue
            if name in blocks.KINDS:
                self.kind(name)
            elif closest(name, ("collate",)) is not None:
                self.kind("collate")
            else:
                self._elsewhere(name)
        if self.unread:
            for kind in blocks.NAMED:
                self.kind(kind) if kind not in tree.named else self.paths.add(kind)
            if "collate" not in root.entries:
                self.kind("collate")

    def _unknown_kind(self, kind: str, section: Section | None, tree: Tree) -> None:
        """Mark what a block with a wrong name, or an unreadable one, may have been meant for."""
        if kind in (*blocks.KINDS, "collate"):
            self.kind(kind)
            return
        meant = closest(kind, (*blocks.KINDS, "collate"))
        if meant is not None:
            self.kind(meant)
            return
        self.paths.add("dataset")  # any labelled block may have been a dataset
        # Unreadable text may be a block, whatever its first word: `pack(1) { … }`.
        unread = section is None
        if kind in LINKS:
            self.kind("collate")
        elif kind not in blocks.ACTIONS:
            unread = not self._elsewhere(kind)
        if unread:
            for unwritten in blocks.KINDS.keys() - tree.root.blocks.keys() - tree.named.keys():
                self.kind(unwritten)
            for name in (*section.entries, *section.blocks) if section else ():
                self._elsewhere(name)

    def _elsewhere(self, name: str) -> bool:
        """Mark settings unknown that a misplaced name belongs to; return False if there are none."""
        if name in blocks.KINDS:
            self.kind(name)
            return True
        owners = list(_owners(name)) or list(_owners(ours(name, {name for name, _ in _all_settings()}) or ""))
        for path, attribute in owners:
            self.setting(path, attribute)
        return bool(owners)

    def forget(self, path: str) -> None:
        """Drop everything below a path that is left out of the spec."""
        self.paths = {each for each in self.paths if each != path and not each.startswith(f"{path}.")}


def leaves(block: type, path: str) -> Iterator[str]:
    """Yield the paths of the label and of every setting of a block, including nested blocks."""
    free = open_setting(block)
    for attribute in blocks.fields_of(block):
        where = f"{path}.*" if free is not None and attribute == free[0] else f"{path}.{spelled(attribute)}"
        if blocks.is_block(attribute.type):
            yield from leaves(attribute.type, where)
        else:
            yield where


def stand_in(attribute: attrs.Attribute, meta: Setting | None = None) -> Any:
    """Return a value of an attribute's type: its default, else any."""
    default = attribute.default
    if default is not attrs.NOTHING:
        return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    return stand_in_of(attribute.type, meta)


def stand_in_of(kind: Any, meta: Setting | None = None) -> Any:
    """Return any value of a type."""
    if get_origin(kind) in (Union, UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) in (tuple, dict):
        return get_origin(kind)()
    if kind is Quantity:
        return Quantity(1, meta.units[0] if meta else "steps")
    if blocks.is_block(kind) or (isinstance(kind, type) and issubclass(kind, Component)):
        return stand_in_block(kind)
    return _PLAIN[kind]


def stand_in_block(block: type) -> Any:
    """Return an object of a block class that contains only stand-ins."""
    kind = variant(block, None)
    return kind(**{a.name: stand_in(a, a.metadata.get("setting")) for a in attributes_of(kind) if a.init})


def _all_settings() -> Iterable[tuple[str, tuple[str, attrs.Attribute]]]:
    """Yield name → (path, attribute) of every setting, including axes and routers."""
    for kind, block in blocks.KINDS.items():
        path = f"{kind}.*" if kind in blocks.NAMED else kind
        for name, (attribute, _) in settings_of(block).items():
            yield name, (f"{path}.{name}", attribute)
            if blocks.is_block(attribute.type):
                for inner, (nested, _) in settings_of(attribute.type).items():
                    yield inner, (f"{path}.{name}.{inner}", nested)


def _owners(name: str) -> Iterable[tuple[str, attrs.Attribute]]:
    return [owner for each, owner in _all_settings() if each == name]


@frozen
class Context:
    """The setting a value is for: its name, the keyword of its block, the class and metadata."""

    name: str
    kind: str
    block: type
    meta: Setting = field(repr=False)
    is_label: bool = False
    is_element: bool = False
    is_end: bool = False

    @property
    def subject(self) -> str:
        if self.is_element:
            return f"each element of `{self.name}`"
        if self.is_end:
            return f"each end of `{self.name}`"
        return f"the {self.name} of `{self.kind}`" if self.is_label else f"`{self.name}`"


class OwnPart(Protocol):
    """A user function that a spec can name."""

    used: bool

    def convert(self, kinds: Registry, call: Called, value: Value, context: Context, around: "Converter") -> Any:
        """Convert a call, see `user_parts.DeclaredPart`."""
        ...


class OwnParts(Protocol):
    """User functions by name. unread: some could not be read."""

    unread: bool

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> OwnPart: ...

    def of_kind(self, kind: str) -> list[str]: ...

    def actions(self) -> MappingOf[str, type[Action]]: ...


class Converter(Protocol):
    """Interface of a converter of values."""

    @property
    def diagnostics(self) -> Diagnostics: ...

    @property
    def constants(self) -> MappingOf[str, Definition]: ...

    @property
    def parts(self) -> OwnParts: ...

    def convert(self, annotation: Any, value: Value, context: Context) -> Any:
        """Convert a value, see `convert.convert`."""
        ...


class BlockConverter(Converter, Protocol):
    """Interface of a converter of blocks."""

    evaluator: Evaluator
    origins: dict[str, Origin]
    unknown: UnknownSettings

    def block(self, block: type, section: Section, path: str) -> Any:
        """Build a block, see `structure.Structurer`."""
        ...

    def leave_out(self, path: str) -> list[Any]:
        """Forget an invalid trigger or action, see `structure.Structurer`."""
        ...
