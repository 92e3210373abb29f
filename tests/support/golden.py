"""Golden plans: what `xtrain plan` says of every spec in specs/, as text and as JSON, kept under tests/planner/golden.

    python tests/support/golden.py            # show differences
    python tests/support/golden.py --write    # replace the golden files

They are the same on any machine: plans are made in an empty folder that holds copies of the specs alone, so that no
tokenizer or data file is found, and the version of xtrain is left out. In the JSON, long lists of similar entries
(ranks, tensors) are kept as their number, their ends and a hash. Only the plan of quickstart is kept whole: in others
`=` stands for a field, `[name]` for an entry and `[name] … [name]` for all entries between two that are as in
quickstart. A change that all plans share shows once.
"""

import argparse
import shutil
import sys
import tempfile
from contextlib import chdir
from difflib import unified_diff
from functools import cache
from hashlib import blake2b
from json import dumps, loads
from pathlib import Path
from typing import Any

from dense import json_text

from xtrain import __version__
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import to_json
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/planner/golden"
SPECS = sorted((ROOT / "specs").glob("*.xtrain"))
SHOWN = 80  # lines of a difference
BASE = ROOT / "specs/quickstart.xtrain"
DEPTH = 3  # to which values are broken into lines: the plan, its fields, lists of nodes, checks and tensors


def texts(spec: Path) -> dict[str, str]:
    """File name under GOLDEN → what should stand there."""
    plan = plan_of(spec)
    page = render(plan).replace(f"xtrain {__version__}", "xtrain VERSION")
    content = brief(to_json(plan))
    if spec != BASE:
        content = like(base_plan(), content)
    return {f"{spec.stem}.txt": page, f"{spec.stem}.json": json_text(content, DEPTH)}


def plan_of(spec: Path) -> Plan:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copytree(ROOT / "specs", "specs")
        compiled = plan_from_spec(f"specs/{spec.name}")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


@cache
def base_plan() -> dict[str, Any]:
    return brief(to_json(plan_of(BASE)))


def brief(content: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a plan with long lists shortened and edges as text."""
    content["memory"]["per_rank"] = shortened(content["memory"]["per_rank"])
    content["ranks"] = shortened(content["ranks"])
    content["parameters"]["tensors"] = shortened(content["parameters"]["tensors"])
    content["spec_text"] = content["spec_text"].split("\n\n")
    edges = content["graph"]["edges"]
    assert all(set(edge) == {"before", "after", "data"} for edge in edges)
    content["graph"]["edges"] = [f"{edge['before']} → {edge['after']}: {edge['data']}" for edge in edges]
    return content


def shortened(entries: list[Any]) -> Any:
    if len(entries) <= 64:
        return entries
    digest = blake2b(dumps(entries, sort_keys=True).encode(), digest_size=8).hexdigest()
    return {"entries": len(entries), "first": entries[0], "last": entries[-1], "hash": digest}


def like(base: Any, value: Any) -> Any:
    """Return a value without what it has in common with `base`: "=" for a field, and for entries of lists their name.

    For entries that follow one another in both lists, the names of the first and the last.
    """
    if isinstance(value, dict) and isinstance(base, dict):
        same = {key for key in value if key in base and is_same(base[key], value[key])}
        return {key: "=" if key in same else like(base.get(key), item) for key, item in value.items()}
    if not isinstance(value, list) or not isinstance(base, list):
        return value
    old = named(base)
    places = {key: place for place, key in enumerate(old)}
    entries: list[Any] = []
    runs: list[list[str]] = []  # of each entry: the names it stands for
    for key, item in named(value).items():
        if key not in old or not is_same(old[key], item):
            entries.append(item)
            runs.append([])
        elif runs and runs[-1] and places[key] == places[runs[-1][-1]] + 1:
            runs[-1].append(key)
            entries[-1] = f"{runs[-1][0]} … {key}"
        else:
            entries.append(key)
            runs.append([key])
    return entries


def is_same(one: Any, other: Any) -> bool:
    return one == other and dumps(one) == dumps(other)  # 1 is not 1.0, and fields are in order


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
    if is_same(kept, now):
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
