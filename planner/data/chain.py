"""The links of `collate`: what each takes and gives, whether they fit together, and what stands in the plan."""

from collections.abc import Mapping
from typing import Any

from xtrain.dsl.schema.collators import KINDS, LINKS, LOCAL_MICROBATCH, MICROBATCH, RAW_ROWS, Link, usual_chain
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.plan import Node, Plan


def resolve_chain(spec: Spec, ring: int, ulysses: int) -> tuple[Link, ...]:
    """The links of `collate`, with the one that the layout decides on exactly where there is context parallelism, or a
    collator behind it."""
    (cut,) = (link for link in LINKS.values() if link.by_layout)
    if ring * ulysses > 1:
        return spec.collate if any(link.by_layout for link in spec.collate) else (*spec.collate, cut())
    behind = any(not link.by_layout and link.takes == LOCAL_MICROBATCH for link in spec.collate)
    return tuple(link for link in spec.collate if behind or not link.by_layout)


def own_modules(plan: Plan) -> dict[str, str]:
    """Module of the user's, as the plan names it → its digest."""
    calls = (node.args.get("options") or node.args.get("user") or node.args for node in plan.nodes)
    family = plan.architecture.own.get("user", {})
    return {call["module"]: call["digest"] for call in (family, *calls) if "module" in call and "digest" in call}


def code_of(plan: Plan) -> tuple[str, ...]:
    """What a plan runs of its author's: modules and shell commands, for people. Components of installed packages are
    not among them."""
    commands = (node.args["command"] for node in plan.nodes if isinstance(node.args.get("command"), str))
    return (*own_modules(plan), *(f"`{command}`" for command in dict.fromkeys(commands)))


def call_text(call: Mapping[str, Any]) -> str:
    """What is called of the user's own, by the arguments of a node: `warm of parts.py (1a2b3c4d), up = 0.5`."""
    given = "".join(f", {name} = {value}" for name, value in call["arguments"].items())
    given += "".join(f", env({name}) with digest {digest[:8]}" for name, digest in call.get("variables", {}).items())
    return f"{call['function']} of {call['module']} ({call['digest'][:8]}){given}"


def node_ids(links: tuple[Link, ...]) -> list[str]:
    """The id of each link's node; links of one name are numbered from the second on."""
    found: list[str] = []
    names = [link.name for link in links]
    for place, name in enumerate(names):
        number = names[: place + 1].count(name)
        found.append(f"collate.{name}" if number == 1 else f"collate.{name}.{number}")
    return found


def changes_documents(node: Node) -> bool:
    """Whether documents are others behind the link of a node."""
    link = LINKS.get(node.op.partition(".")[2])
    return node.op == "collate.user" or (link is not None and link.changes)


def check_chain(spec: Spec, found: Findings) -> None:
    """Each link must take what the one before it gives, from the rows of the reader to what a model takes."""
    given, before = RAW_ROWS, "the reader"
    for link in spec.collate:
        if link.takes != given:
            message = f"collate: `{link.name}` takes {link.takes}, but {before} gives {given}"
            found.fail("data.collate", "X508", "collate", message, _hint(spec, link, given))
            return
        given, before = link.gives, f"`{link.name}`"
    if given not in (MICROBATCH, LOCAL_MICROBATCH):
        message = f"collate: a model takes a {MICROBATCH}, but {before} gives {given}"
        found.fail("data.collate", "X508", "collate", message, _hint(spec, None, given))
        return
    found.passed("data.collate", " -> ".join(link.name for link in spec.collate))


def _hint(spec: Spec, link: Link | None, given: str) -> str:
    """The chain as it is usually written; with collators of the user's own, what this place or the other is for."""
    if not any(isinstance(each, UserComponent) for each in spec.collate):
        answers = any(each.has_answers for each in spec.datasets.values() if each.holdout.fraction < 1)
        return f"write `collate = {' -> '.join(each.written for each in usual_chain(answers))}`"
    if isinstance(link, UserComponent):
        giver = next((name for name, each in LINKS.items() if each.gives == link.takes and not each.changes), None)
        return f"put `{link.function}` behind `{giver}`" if giver else f"put `{link.function}` first"
    if link is not None and KINDS.index(link.takes) < KINDS.index(given):
        return f"leave `{link.name}` out: that is done already"
    needed = next(name for name, each in LINKS.items() if each.takes == given and not each.changes)
    return f"`{needed}` takes {given}: write it next"
