"""The tables of docs/metrics.md and docs/health.md: every key that a run writes, as the classes of `records` say.

python tests/support/record_tables.py            # what is not as it is said now
python tests/support/record_tables.py --write    # write the tables anew
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.schema.policy import METRICS as ROLLOUT
from xtrain.records.events import EVENT_TYPES
from xtrain.records.metrics import FREE_NAMES, RankMetrics, StepMetrics
from xtrain.records.status import Heartbeat, ServedModel, ServerStatus

DOCS: Final = Path(__file__).parents[2] / "docs"
WORDS: Final = {int: "integer", float: "number", str: "text", bool: "true, false", list: "list", dict: "map"}
BLOCK: Final = re.compile(r"(?P<begin><!-- table of (?P<name>\w+), [^>]*-->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def type_of(hint: Any) -> str:
    """`integer`, `number or null`."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    word = WORDS.get(get_origin(kinds[0]) or kinds[0], "any")
    return word if kinds[0] is hint else f"{word} or null"


def rows(kind: type[msgspec.Struct], *, left_out: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, unit and meaning of every field. A field with a default is written only if it has another value."""
    hints, documented = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    fields = [each for each in msgspec.structs.fields(kind) if each.name not in ("rest", *left_out)]
    for field in sorted(fields, key=lambda each: each.name not in ("step", "time")):
        (meta,) = documented[field.name].__metadata__
        word = type_of(hints[field.name])
        if field.name in ("step", "time"):
            word = word.removesuffix(" or null")  # to a reader alone a line may lack them
        elif not field.required:
            word = f"{word.removesuffix(' or null')}, if any"
        yield f"`{field.encode_name}`", word, meta.extra["unit"], meta.description


def table(head: tuple[str, ...], found: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *found]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def of_metrics() -> Iterator[tuple[str, ...]]:
    yield from rows(StepMetrics)
    for name, meta in FREE_NAMES.items():
        word = "list" if "LAYER" in name else "number"
        yield f"`{name}`", f"{word}, if any", meta.extra["unit"], meta.description
    for kind in ACTIONS.values():
        for name, (meaning, unit) in kind.metrics.items():
            yield f"`{name}`", "number, if any", unit, meaning
    for name, (meaning, unit) in ROLLOUT.items():
        yield f"`{name}`", "number, if any", unit, meaning
    seen: set[str] = set()
    for kind in LOSSES.values():
        for name, (meaning, unit) in kind.metrics.items():
            if name not in seen:
                yield f"`{name}`", "number, if any", unit, meaning
            seen.add(name)


def of_events() -> Iterator[tuple[str, ...]]:
    for name, kind in EVENT_TYPES.items():
        yield f"`{name}`", "", "", "", " ".join((kind.__doc__ or "").split())
        for row in rows(kind, left_out=("step", "time")):
            yield "", *row


KEYS: Final = ("key", "type", "unit", "meaning")
TABLES: Final[Mapping[str, Any]] = {
    "metrics": lambda: table(KEYS, of_metrics()),
    "events": lambda: table(("event", *KEYS), of_events()),
    "ranks": lambda: table(KEYS, rows(RankMetrics)),
    "server": lambda: table(KEYS, rows(ServerStatus)),
    "served": lambda: table(KEYS, rows(ServedModel)),
    "heartbeat": lambda: table(KEYS, rows(Heartbeat)),
}


def written_anew(text: str) -> str:
    """A page with its tables as they are to be."""
    return BLOCK.sub(lambda found: f"{found['begin']}\n{TABLES[found['name']]()}\n{found['end']}", text)


def pages() -> dict[Path, str]:
    """Every page that has such a table, as it is to be."""
    found = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    return {path: written_anew(text) for path, text in found.items() if BLOCK.search(text)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables by what is said now")
    write = parser.parse_args().write
    differ = [path for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    for path in differ:
        print(f"{path.name} {'written anew' if write else 'differs'}")
        if write:
            path.write_text(pages()[path], encoding="utf-8")
    return 0 if write or not differ else 1


if __name__ == "__main__":
    sys.exit(main())
