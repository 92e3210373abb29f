"""The page of all types of transformers' models (docs/model_types.md), from lines that `code_models.py` prints."""

import json
import re
from pathlib import Path
from typing import Any

ROUNDING = 1e-4  # largest difference of gradients in fp32
EXACT, NARROW = 1e-10, 1e-5  # largest differences of two ranks from one in fp64, and where the code casts to fp32
MARKS = ("packs", "tensor", "stages", "spread", "spread_experts")  # columns of the page
PAGE = Path(__file__).parents[2] / "docs" / "model_types.md"
# Why a small model of a type has no mark: letter, reason.
WHY = {
    "dense": ("a", "the model has no experts"),
    "other experts": ("b", "its experts are no stacks that xtrain can compute: transformers' code computes them, whole "
        "on every rank"),
    "other on ranks": ("c", "two ranks compute other hidden states or gradients than one"),
    "not linear": ("d", "its matrices are of other classes than `nn.Linear`, as `Conv1D` of GPT-2, and none is cut"),
    "own attention": ("e", "layers mix positions otherwise than by transformers' attention interface, or by "
        "attention with terms that xtrain's kernels have not"),
    "mixers": ("f", "layers without attention (recurrences, convolutions) mix positions"),
    "order": ("g", "more than attention depends on the order of positions"),
    "restart": ("h", "documents change each other although their positions begin at 0 again"),
    "around": ("i", "modules with parameters run between or around layers"),
    "results": ("j", "layers return different numbers of values"),
    "cut": ("k", "two parts of its layers compute other hidden states than the whole, or the model has one layer"),
    "forwards": ("l", "the texts are those of whole forwards of transformers; its own cache has none or gives others"),
    "texts": ("m", "the texts differ"),
    "warned": ("n", "`from_pretrained` warns of an export as it does not of the folder"),
    "narrow": ("o", "two ranks are equal to one to 1e-5: transformers' code casts to fp32, as in routers or norms, "
        "whatever the format of parameters (xglm runs in fp32 alone)"),
    "rounded": ("p", "as o, but over two steps roundings to fp32 add up to more than 1e-5"),
}  # fmt: skip
HEAD = """# Types of models that transformers computes

Every type of causal language model that transformers {version} has, as a small random model; written by `python
tests/support/code_models.py --write`. The config is the type's default with smaller sizes, for encoders with
`is_decoder = true`, and with the keys that a few defaults lack. Every row has `code = transformers`, also that of
a type with a native family. [families.md](families.md#any-other-model) describes such models. The columns:

- **trains**: loss and gradients are those of transformers (loss to 1e-5 and gradients to 1e-4 of the largest in fp32,
  or both to 1e-6 in fp64), and an export without training has the same bytes;
- **texts**: `from_pretrained` reads the export without a warning, and 32 tokens that xtrain continues a prompt by are
  those of transformers' `generate` with its cache;
- **fsdp**: over two steps of two ranks in fp64, losses, gradient norms and all parameters equal those of one process,
  which takes the four rows of a step together, to 1e-10;
- **packs**: documents of a row are kept apart; without it each document has a row of its own;
- **tp**, **pp**, **cp**, **ep**: the layout computes the same, as a plan measures it before it allows the layout. cp
  stands for ring and Ulysses attention alike: positions are on any rank, and xtrain's kernels attend. Some types are
  run on two ranks as well (`tests/distributed/test_model_folders.py`).

{count} of {all} types train, and texts of {texts} are the same; {fsdp} of them equal one process with fsdp to 1e-10 and
{narrow} more to 1e-5, {packs} pack, {tensor} take tp, {stages} pp, {spread} cp and {spread_experts} ep. `·` stands for
what was not tried, an empty cell for no, without the reason, and a letter for the reason:

{why}

| type | trains | texts | fsdp | packs | tp | pp | cp | ep |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def passes(row: dict[str, Any]) -> bool:
    """True if a type trains as transformers does."""
    narrow = row.get("loss", 1) < 1e-5 and row["gradients"] < ROUNDING
    wide = row.get("loss in fp64", 1) < 1e-6 and row["gradients in fp64"] < 1e-6
    return (narrow or wide) and not row["changed"]


def cells_of(row: dict[str, Any], sharded: str) -> list[str]:
    """The cells of a type in the page. sharded: the cell of fsdp."""
    if passes(row):
        texts = "warned" if row["warned"] else {"generate": "", "": "texts"}.get(row["texts"], row["texts"])
        why = [texts, *("" if row[name] else row["reasons"][name] for name in MARKS)]
        first, *others = (WHY[each][0] if each else "●" for each in why)
        return ["●", first, sharded, *others]
    apart = f"gradients differ by {row['gradients']:.1e}" if "gradients" in row else "an export changes tensors"
    found = re.findall(r"error\[(?!X203)X\d+\]: (.*)", row.get("refused", ""))  # settings of models that are refused
    reason = row.get("error") or (found[0] if found else row.get("refused")) or apart
    reason = re.sub(r"/tmp/\S+?/config\.json: |/tmp/\S+/", "", reason.replace("|", "/"))
    return [reason, *[""] * (2 + len(MARKS))]


def sharded_cell(row: dict[str, Any]) -> str:
    """The cell of fsdp in the page, of a line of `--fsdp`."""
    if row["fsdp"] is None:
        return ""
    if row["fsdp"] < EXACT:
        return "●"
    return WHY["narrow" if row["fsdp"] < NARROW else "rounded"][0] if row["narrowed"] else ""


def page(rows: list[dict[str, Any]], version: str, before: str = "") -> str:
    """The page of all types. before: the page with the cells of types that have no row."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in before.splitlines() if line.startswith("| ")]
    cells = {kind: own for kind, *own in lines if kind not in ("type", "---")}
    for row in rows:
        own = cells.get(row["type"], ["", "", "·"])
        if "fsdp" not in row:
            cells[row["type"]] = cells_of(row, own[2] or "·")
        elif own[0] == "●":
            cells[row["type"]] = [*own[:2], sharded_cell(row), *own[3:]]
    good = [each for each in cells.values() if each[0] == "●"]
    names = ("texts", "fsdp", *MARKS)
    counts = {name: sum(each[1 + place] == "●" for each in good) for place, name in enumerate(names)}
    counts["narrow"] = sum(each[2] == WHY["narrow"][0] for each in good)
    why = ";\n".join(f"- {letter}: {reason}" for letter, reason in WHY.values()) + "."
    head = HEAD.format(version=version, count=len(good), all=len(cells), why=why, **counts)
    return head + "".join(f"| {' | '.join((kind, *cells[kind]))} |\n" for kind in sorted(cells))


def printed(path: str) -> list[dict[str, Any]]:
    """The rows that a file has of an earlier run."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"type"')]
