"""Functions of the user's own as components: a class for each, with its parameters as settings."""

from typing import Any, Final, cast

import attrs

from xtrain.dsl import blocks
from xtrain.dsl.schema import later
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.collators import LINKS
from xtrain.dsl.schema.component import UserComponent, parameter, registry_of
from xtrain.dsl.schema.log import TRACKERS
from xtrain.dsl.schema.sources import SOURCES
from xtrain.dsl.syntax.numbers import UNIT_WORDS
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.dsl.user_parts.reader import Declared
from xtrain.dsl.user_parts.signatures import REQUIRED

# Kinds that no word opens a block of: they stand inside others, or are called.
_INSIDE: Final = {registry.word: registry for registry in (ACTIONS, TRACKERS, SOURCES, LINKS)}
# (kind of block, module, name, digest) → its class: the same text makes equal objects.
_COMPONENTS: dict[tuple[str, str, str, str], type[UserComponent]] = {}


def component_of(declared: Declared, module: str, digest: str) -> type[UserComponent]:
    """The class of blocks and calls that choose a function."""
    block = PART_KINDS[declared.kind].block or declared.kind
    place = (block, module, declared.name, digest)
    if place not in _COMPONENTS:
        registry = _INSIDE.get(block) or registry_of(blocks.KINDS[block])
        if registry is None:
            base: type = blocks.KINDS[block]
        else:
            base = cast(type[UserComponent], registry.of_users).base_of(declared)
        key = "kind" if registry is None else registry.key
        labelled = key in attrs.fields_dict(base)
        attributes: dict[str, Any] = {key: attrs.field(default=declared.name, type=str)} if labelled else {}
        for each in declared.parameters:
            default = attrs.NOTHING if each.default is REQUIRED else each.default
            attributes[f"{each.name}_"] = parameter(each.name, each.type, default, each.check, each.doc)
        component = attrs.make_class(declared.name, attributes, bases=(base,), frozen=True, slots=True)
        component.__doc__ = f"`{block} {declared.name} {{ … }}`: {declared.does or 'of your own'}"
        component.module, component.function, component.digest = module, declared.name, digest
        component.declared, component.filled, component.purpose = declared.options, declared.filled, declared.does
        component.declaration = declared
        if not labelled and PART_KINDS[declared.kind].block:  # else the kind is the same for all
            component.kind = declared.name
        _COMPONENTS[place] = component
    return _COMPONENTS[place]


def names_taken(block: str) -> tuple[str, ...]:
    """Names that a function cannot have where a kind of block is chosen: those of the components that there are, and
    after `every`, words that mean something else."""
    if block == ACTIONS.word:
        return (*ACTIONS, *later.ACTIONS, *UNIT_WORDS, "step", "then")
    registry = _INSIDE.get(block) or registry_of(blocks.KINDS[block])
    return () if registry is None else tuple(registry)
