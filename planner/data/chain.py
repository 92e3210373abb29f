"""The links of `collate`: what each takes and gives, whether they fit together, and what stands in the plan."""

from collections.abc import Mapping
from typing import Any, Final

from ...dsl.schema.data import Flatten, Link, Pack, Shard, ShiftTokens, ToTensor, UserCall
from ...dsl.spec import Spec
from ...dsl.user_parts.links import (
    KINDS,
    LABELLED_SAMPLES,
    LOCAL_MICROBATCH,
    MICROBATCH,
    RAW_ROWS,
    TENSOR_ROWS,
    TOKEN_SAMPLES,
)
from ..findings import Findings
from ..plan import Plan

# What a link takes and gives; the first takes what the reader yields, the last gives what a model takes.
LINKS: Final[dict[type[Link], tuple[str, str, str]]] = {
    ToTensor: ("to_tensor", RAW_ROWS, TENSOR_ROWS),
    Flatten: ("flatten", TENSOR_ROWS, TOKEN_SAMPLES),
    ShiftTokens: ("shift_tokens", TOKEN_SAMPLES, LABELLED_SAMPLES),
    Pack: ("pack", LABELLED_SAMPLES, MICROBATCH),
    Shard: ("shard", MICROBATCH, LOCAL_MICROBATCH),
}
CHAIN: Final = "to_tensor -> flatten -> shift_tokens -> pack"


def typed(link: Link) -> tuple[str, str, str]:
    """The name of a link, the kind of value it takes and the kind it gives."""
    return (link.function, link.takes, link.gives) if isinstance(link, UserCall) else LINKS[type(link)]


def resolve_chain(spec: Spec, ring: int, ulysses: int) -> tuple[Link, ...]:
    """The links of `collate`, with `shard` exactly where there is context parallelism, or a collator behind it."""
    if ring * ulysses > 1:
        return spec.collate if Shard() in spec.collate else (*spec.collate, Shard())
    behind = any(not isinstance(link, Shard) and typed(link)[1] == LOCAL_MICROBATCH for link in spec.collate)
    return tuple(link for link in spec.collate if behind or not isinstance(link, Shard))


def own_modules(plan: Plan) -> dict[str, str]:
    """Module of the user's, as the plan names it → its digest."""
    calls = (node.args.get("options") or node.args.get("user") or node.args for node in plan.nodes)
    return {call["module"]: call["digest"] for call in calls if "module" in call and "digest" in call}


def call_text(call: Mapping[str, Any]) -> str:
    """What is called of the user's own, by the arguments of a node: `warm of parts.py (1a2b3c4d), up = 0.5`."""
    given = "".join(f", {name} = {value}" for name, value in call["arguments"].items())
    return f"{call['function']} of {call['module']} ({call['digest'][:8]}){given}"


def node_ids(links: tuple[Link, ...]) -> list[str]:
    """The id of each link's node; links of one name are numbered from the second on."""
    found: list[str] = []
    names = [typed(link)[0] for link in links]
    for place, name in enumerate(names):
        number = names[: place + 1].count(name)
        found.append(f"collate.{name}" if number == 1 else f"collate.{name}.{number}")
    return found


def check_chain(spec: Spec, found: Findings) -> None:
    """Each link must take what the one before it gives, from the rows of the reader to what a model takes."""
    given, before = RAW_ROWS, "the reader"
    for link in spec.collate:
        name, takes, gives = typed(link)
        if takes != given:
            message = f"collate: `{name}` takes {takes}, but {before} gives {given}"
            found.fail("data.collate", "X508", "collate", message, _hint(spec, link, given))
            return
        given, before = gives, f"`{name}`"
    if given not in (MICROBATCH, LOCAL_MICROBATCH):
        message = f"collate: a model takes a {MICROBATCH}, but {before} gives {given}"
        found.fail("data.collate", "X508", "collate", message, _hint(spec, None, given))
        return
    found.passed("data.collate", " -> ".join(typed(link)[0] for link in spec.collate))


def _hint(spec: Spec, link: Link | None, given: str) -> str:
    """The chain as it is usually written; with collators of the user's own, what this place or the other is for."""
    if not any(isinstance(each, UserCall) for each in spec.collate):
        return f"write `collate = {CHAIN}`"
    if isinstance(link, UserCall):
        giver = next((name for name, _, gives in LINKS.values() if gives == link.takes), None)
        return f"put `{link.function}` behind `{giver}`" if giver else f"put `{link.function}` first"
    if link is not None and KINDS.index(typed(link)[1]) < KINDS.index(given):
        return f"leave `{typed(link)[0]}` out: that is done already"
    needed = next(name for name, takes, _ in LINKS.values() if takes == given)
    return f"`{needed}` takes {given}: write it next"
