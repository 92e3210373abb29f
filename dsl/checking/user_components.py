"""Functions of the user's own as components: a class for each, with its parameters as settings."""

from typing import Any

import attrs

from .. import blocks
from ..schema.component import UserComponent, parameter, registry_of
from ..user_parts.kinds import PART_KINDS
from ..user_parts.reader import REQUIRED, Declared

# (kind of block, module, name, digest) → its class: the same text makes equal objects.
_MADE: dict[tuple[str, str, str, str], type[UserComponent]] = {}


def component_of(declared: Declared, module: str, digest: str) -> type[UserComponent]:
    """The class of blocks that choose a function."""
    block = PART_KINDS[declared.kind].block
    key = (block, module, declared.name, digest)
    if key not in _MADE:
        base, registry = blocks.KINDS[block], registry_of(blocks.KINDS[block])
        attributes: dict[str, Any] = {}
        if registry is not None:
            base, attributes["kind"] = registry.of_users, attrs.field(default=declared.name, type=str)
        for each in declared.parameters:
            default = attrs.NOTHING if each.default is REQUIRED else each.default
            attributes[f"{each.name}_"] = parameter(each.name, each.type, default)
        made = attrs.make_class(declared.name, attributes, bases=(base,), frozen=True, slots=True)
        made.__doc__ = f"`{block} {declared.name} {{ … }}`: {declared.does or 'of your own'}"
        made.module, made.function, made.digest = module, declared.name, digest
        made.options, made.filled, made.purpose = declared.options, declared.filled, declared.does
        _MADE[key] = made
    return _MADE[key]


def names_taken(block: str) -> tuple[str, ...]:
    """The names of xtrain's own components of a kind of block, and of those that installed packages offer."""
    registry = registry_of(blocks.KINDS[block])
    return () if registry is None else tuple(registry)
