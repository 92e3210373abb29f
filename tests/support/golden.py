"""Golden plans: what `xtrain plan` says of every spec in specs/, as text and as JSON, kept under tests/planner/golden.

    python tests/support/golden.py            # which differ, and how
    python tests/support/golden.py --write    # take what is said now

They are the same on any machine: plans are made in an empty folder that holds copies of the specs alone, so that no
tokenizer or data file is found, and the version of xtrain is left out. In the JSON long lists that are alike entry by
entry (ranks, tensors) are kept as their number, their ends and a hash, so that 16,384 ranks take no megabytes.
"""

import argparse
import shutil
import sys
import tempfile
from contextlib import chdir
from difflib import unified_diff
from hashlib import blake2b
from itertools import groupby
from json import dumps, loads
from pathlib import Path
from typing import Any

from xtrain import __version__
from xtrain.plan.serialise import to_json
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/planner/golden"
SPECS = sorted((ROOT / "specs").glob("*.xtrain"))
SHOWN = 80  # lines of a difference
DEPTH = {dict: 2, list: 3}  # to which values are broken into lines: the plan, its fields, lists of those


def texts(spec: Path) -> dict[str, str]:
    """File name under GOLDEN → what should stand there."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copytree(ROOT / "specs", "specs")
        compiled = plan_from_spec(f"specs/{spec.name}")
    assert compiled.plan is not None, compiled.diagnostics.render()
    page = render(compiled.plan).replace(f"xtrain {__version__}", "xtrain VERSION")
    return {f"{spec.stem}.txt": page, f"{spec.stem}.json": json_text(to_json(compiled.plan))}


def json_text(content: dict[str, Any]) -> str:
    """Return the JSON of a plan with one node, check or tensor a line, and long lists shortened."""
    content["memory"]["per_rank"] = shortened(content["memory"]["per_rank"])
    content["ranks"] = shortened(content["ranks"])
    content["parameters"]["tensors"] = shortened(content["parameters"]["tensors"])
    content["spec_text"] = content["spec_text"].split("\n\n")
    return "\n".join(lines(content)) + "\n"


def shortened(entries: list[Any]) -> Any:
    if len(entries) <= 64:
        return entries
    digest = blake2b(dumps(entries, sort_keys=True).encode(), digest_size=8).hexdigest()
    return {"entries": len(entries), "first": entries[0], "last": entries[-1], "hash": digest}


def lines(value: Any, indent: str = "", before: str = "", after: str = "") -> list[str]:
    """Return the lines of a value: a field a line, and an entry a line for fields that hold more than fits on one.

    Edges of one node and settings of one block share a line.
    """
    flat = dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) == DEPTH[type(value)] or len(indent + before + flat) <= 120:
        return [f"{indent}{before}{flat}{after}"]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    inner = []
    if isinstance(value, dict):
        for number, (key, item) in enumerate(value.items(), 1):
            inner += lines(item, f"{indent} ", f"{dumps(key, ensure_ascii=False)}: ", "," * (number < len(value)))
    else:
        groups = [", ".join(dumps(item, ensure_ascii=False) for item in group) for _, group in groupby(value, group_of)]
        inner = [f"{indent} {text}{',' * (number < len(groups))}" for number, text in enumerate(groups, 1)]
    return [f"{indent}{before}{opened}", *inner, f"{indent}{closed}{after}"]


def group_of(entry: Any) -> Any:
    """Return what neighbors on one line have in common: where edges start, the block of settings; unique otherwise."""
    if isinstance(entry, dict) and "path" in entry:
        return entry["path"].partition(".")[0]
    return entry.get("before", id(entry)) if isinstance(entry, dict) else id(entry)


def difference(name: str, text: str) -> str:
    """What has changed against the golden file of that name, with what to type if it is meant; empty if nothing."""
    path = GOLDEN / name
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    if stored == text:
        return ""
    if stored and name.endswith(".json"):
        changed = changes("", loads(stored), loads(text)) or ["the same content in other lines"]
        found = [f"kept and now, {name}", *changed]
    else:
        found = [*unified_diff(stored.splitlines(), text.splitlines(), f"kept {name}", f"now {name}", lineterm="", n=1)]
    rest = [f"… and {len(found) - SHOWN} lines more"] if len(found) > SHOWN else []
    return "\n".join([*found[:SHOWN], *rest, "", "If this is meant: python tests/support/golden.py --write"])


def changes(path: str, kept: Any, now: Any) -> list[str]:
    """Return a line for each value that differs, under the names of its nodes and fields."""
    if kept == now and dumps(kept) == dumps(now):  # 1 is not 1.0, and fields are in order
        return []
    if isinstance(kept, str) and "\n" in kept and isinstance(now, str):
        kept, now = kept.splitlines(), now.splitlines()
    if type(kept) is not type(now) or not isinstance(kept, dict | list):
        return [f"{path}: {dumps(kept, ensure_ascii=False)} → {dumps(now, ensure_ascii=False)}"]
    old, new = named(kept), named(now)
    found = [f"- {path}{key}: {dumps(old[key], ensure_ascii=False)}" for key in old if key not in new]
    found += [f"+ {path}{key}: {dumps(new[key], ensure_ascii=False)}" for key in new if key not in old]
    both = [key for key in old if key in new]
    for key in both:
        found += changes(f"{path}{key}", old[key], new[key])
    if both != [key for key in new if key in old]:
        found.append(f"{path}: the same entries in another order")
    return found


def named(value: dict[str, Any] | list[Any]) -> dict[str, Any]:
    """Return entries under their names: `.field`, `[node]`, `[from → to]`, `[first line]`, `[number]`."""
    if isinstance(value, dict):
        return {f".{key}": item for key, item in value.items()}
    found: dict[str, Any] = {}
    for number, item in enumerate(value):
        names = item if isinstance(item, dict) else {"name": item.partition("\n")[0]} if isinstance(item, str) else {}
        edge = f"{names['before']} → {names['after']}" if "before" in names else number
        key = names.get("id", names.get("path", names.get("name", edge)))
        found[f"[{key}]" if f"[{key}]" not in found else f"[{key} {number}]"] = item
    return found


def stale() -> list[str]:
    """Golden files of specs that are no more."""
    wanted = {f"{spec.stem}{ending}" for spec in SPECS for ending in (".txt", ".json")}
    return sorted(path.name for path in GOLDEN.iterdir() if path.name not in wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the golden files by what is said now")
    write = parser.parse_args().write
    GOLDEN.mkdir(exist_ok=True)
    differ = 0
    for spec in SPECS:
        for name, text in texts(spec).items():
            found = difference(name, text)
            differ += bool(found)
            if write:
                (GOLDEN / name).write_text(text, encoding="utf-8")
            elif found:
                print(found, end="\n\n")
    for name in stale():
        differ += 1
        print(f"{name}: there is no such spec any more")
        if write:
            (GOLDEN / name).unlink()
    print(f"{differ} golden files {'written anew' if write else 'differ'}")
    return 0 if write or not differ else 1


if __name__ == "__main__":
    sys.exit(main())
