"""What the schema says of a place: which block it is in, which setting is given a value there, and what may stand."""

from collections.abc import Mapping
from typing import Any, get_args

import attrs
from attrs import frozen

from xtrain.dsl import blocks
from xtrain.dsl.checking.user_parts import DeclaredParts
from xtrain.dsl.schema.collators import LINKS
from xtrain.dsl.schema.component import Registry, is_call, members_of, registry_of, variant
from xtrain.dsl.schema.data import Weight
from xtrain.dsl.schema.setting import Setting, open_setting, settings_of
from xtrain.dsl.syntax.tokens import Token
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.lsp.place import Bracket, Place

WORDS = ("NAME", "HUB")
OPERATORS = ("PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW")


@frozen
class Scope:
    """The block, action, source or link around a place. path: its page in the reference, empty for the whole text.
    block: its class, None if unknown. label: its label as written."""

    path: str
    block: type | None
    label: str = ""

    @property
    def settings(self) -> Mapping[str, tuple[attrs.Attribute, Setting]]:
        """Its settings, with the bounds and defaults of its label."""
        if self.block is None:
            return {}
        everything = settings_of(self.block)
        chosen = variant(self.block, self.label) if self.label else self.block
        of_label = settings_of(chosen) if chosen is not self.block else {}
        known = {
            name: of_label.get(name, found)
            for name, found in everything.items()
            if not found[1].only or not self.label or self.label in found[1].only
        }
        return known if self.label in (registry_of(self.block) or ()) or not self.label else {**known, **of_label}

    @property
    def has_weights(self) -> bool:
        """Return True if its free names are dataset names."""
        free = open_setting(self.block) if self.block is not None else None
        return free is not None and free[1].names == "dataset"


class Scopes:
    """Interprets places, including the user functions of a spec."""

    def __init__(self, parts: DeclaredParts) -> None:
        self.parts = parts

    def scope(self, place: Place) -> Scope:
        """Return the innermost block, or call with arguments, around a place."""
        scope = Scope("", None)
        for bracket in place.brackets[1:]:
            if bracket.kind == "block":
                scope = self._inside(scope, bracket)
            elif bracket.kind == "call" and (called := self.called(bracket)) is not None:
                scope = called
        return scope

    def setting(self, place: Place) -> tuple[Scope, str] | None:
        """Return the block and name of the setting whose value a place is in, or None."""
        scope = Scope("", None)
        found: tuple[Scope, str] | None = None
        for bracket, head in zip(place.brackets, (*(b.head for b in place.brackets[1:]), place.item), strict=True):
            if bracket.kind == "block":
                scope, found = (self._inside(scope, bracket) if bracket.opener else scope), None
            elif bracket.kind == "call" and (called := self.called(bracket)) is not None:
                scope, found = called, None
            if len(head) > 1 and head[0].type in WORDS and head[1].type == "_EQ" and bracket.kind in ("block", "call"):
                found = scope, head[0].text
        return found

    def attribute(self, scope: Scope, name: str) -> tuple[attrs.Attribute, Setting] | None:
        """Return a setting of a block, or the meaning of its free names."""
        if not scope.path and scope.block is None and name == "collate":
            return None
        found = scope.settings.get(name)
        if found is None and scope.block is not None:
            return open_setting(scope.block)
        return found

    def calls(self, setting: tuple[Scope, str] | None) -> list[Registry[Any]]:
        """Return the kinds of calls that are valid values of a setting."""
        if setting is None:
            return []
        if setting[0].block is None and setting[1] == "collate":
            return [LINKS]
        found = self.attribute(*setting)
        types = () if found is None else (found[0].type, *get_args(found[0].type))
        return [each.components for each in types if is_call(each)]

    def action(self, item: tuple[Token, ...]) -> int | None:
        """Return the index in the item at which the last action of an `every` or `on` begins; None before the first
        action."""
        behind = max((number for number, token in enumerate(item) if token.type == "THEN"), default=None)
        if behind is not None:
            return behind + 1 if behind + 1 < len(item) else None
        names = (number for number in range(2, len(item)) if item[number].type in WORDS)
        return next((number for number in names if item[number - 1].type not in OPERATORS), None)

    def block_of(self, scope: Scope, kind: str) -> type | None:
        """Return the class of the block that a word opens inside another, or at the top."""
        if scope.block is None:
            return blocks.KINDS.get(kind) if not scope.path else None
        inner = scope.settings.get(kind)
        if inner is None and members_of(scope.block) is not None:
            return next((part.component() for name, part in self.parts.items() if name == kind), None)
        return inner[0].type if inner is not None and blocks.is_block(inner[0].type) else None

    def called(self, bracket: Bracket) -> Scope | None:
        """Return the source, link, action or user function whose arguments a bracket holds."""
        before = bracket.head[-1] if bracket.head else None
        if before is None or before.type not in WORDS:
            return None
        name = before.text
        if bracket.head[0].type in ("EVERY", "ON") and name in blocks.ACTIONS:
            return Scope(name, blocks.ACTIONS[name])
        for registry in Registry.of_calls.values():
            if name in registry:
                return Scope(name, registry[name])
        return Scope(name, self.parts[name].component()) if name in self.parts else None

    def _inside(self, scope: Scope, bracket: Bracket) -> Scope:
        head = bracket.head
        if not head:
            return Scope("?", None)
        if head[0].type in ("EVERY", "ON"):
            at = self.action(head)
            kind = head[at].text if at is not None else ""
            return Scope(kind or "?", self.parts.actions().get(kind))
        # The block of a value: `compute = fp8 { recipe = rowwise }`.
        head = head[2:] if len(head) == 3 and head[1].type == "_EQ" else head
        kind = head[0].text
        block = self.block_of(scope, kind)
        path = f"{scope.path}.{kind}" if scope.path else kind
        label = head[1].text if len(head) > 1 and head[1].type in (*WORDS, "STRING") else ""
        if block is not None and label in self.parts and self._is_block_of(label, block):
            return Scope(path, self.parts[label].component())
        known = registry_of(block) if block is not None else None
        return Scope(path, block, label if known is not None and label in known else "")

    def _is_block_of(self, name: str, block: type) -> bool:
        return blocks.KINDS.get(PART_KINDS[self.parts[name].declared.kind].block) is block


def takes_datasets(setting: tuple[attrs.Attribute, Setting] | None) -> bool:
    """Return True if the keys of a map are dataset names and its values their weights."""
    kind: Any = setting[0].type if setting is not None else None
    return getattr(kind, "__args__", (None, None))[1:] == (Weight,)


def label_is_dataset(block: type | None) -> bool:
    """Return True if the label of an action is a dataset name."""
    label = blocks.label_of(block) if block is not None else None
    return label is not None and label.name == "dataset"
