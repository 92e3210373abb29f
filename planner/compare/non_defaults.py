"""In what a spec departs from the defaults: what somebody has written and what is not there without being written."""

from typing import Final

from attrs import NOTHING, Factory

from xtrain.dsl import blocks
from xtrain.dsl.schema.setting import settings_of
from xtrain.planner.graph.provenance import spell
from xtrain.planner.plan import Plan, Provenance

WRITTEN: Final = ("text", "let", "param", "set", "config")


def non_defaults(plan: Plan) -> tuple[Provenance, ...]:
    """Every written value but those that only repeat a default, in the order of the schema."""
    return tuple(
        entry for entry in plan.provenance if entry.origin in WRITTEN and entry.value != default_text(entry.path)
    )


def default_text(path: str) -> str | None:
    """The default of a setting as a spec would write it; None where it has none, or where the planner derives it."""
    kind, _, rest = path.partition(".")
    # The collate chain and what recurs have none; that of `compile` holds where the block is written.
    if kind not in blocks.KINDS or path == "compile.mode":
        return None
    block: type = blocks.KINDS[kind]
    default: object = NOTHING
    for name in rest.split(".")[1:] if kind in blocks.NAMED else rest.split("."):
        if name not in settings_of(block):  # a label: the size of an axis, the kind of an optimizer
            return None
        attribute, _ = settings_of(block)[name]
        default = attribute.default
        if blocks.is_block(attribute.type):
            block = attribute.type
    # Of `auto` the meaning is derived.
    if default is NOTHING or default == "auto" or isinstance(default, Factory):  # type: ignore[arg-type]
        return None
    return spell(default)
