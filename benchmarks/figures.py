"""Compare the figures in the tables of docs/performance.md with new measurements.

    python benchmarks/figures.py [--only HEADING …] [--within 20%]

Runs the benchmarks that take seconds, and compares ratios, counts and sizes, which depend little on the machine, with
the tables. Prints every figure that is further away than `--within`, and exits with 1 if there is one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
# (row, column) → figures. A row is named by its cells up to the first column with figures, joined by ` · `.
Figures = Mapping[tuple[str, str], Sequence[float]]


@frozen
class Table:
    """A table of the page. labels: how many of its first columns name a row. read: the lines of the command → figures,
    by the names that the page gives rows and columns."""

    heading: str
    command: str
    labels: int
    read: Callable[[list[str]], Figures]


def ratios(lines: list[str]) -> Figures:
    """Return the last number of each line of a printed table; of a name that comes twice, the first."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        if (row := re.fullmatch(r"(.*?)(?:\s+[\d.]+){2}\s+([\d.]+)", line)) is not None:
            found.setdefault((row[1].strip(), "ratio"), [float(row[2])])
    return found


def dealt(lines: list[str]) -> Figures:
    found = {}
    for line in map(json.loads, lines):
        row = f"{line['lengths']} · {line['ranks']} · {line['micro']} · {line['accumulate']}"
        found |= {(row, name): [line[name]] for name in ("multipack", "best_fit")}
    return found


def tiled(lines: list[str]) -> Figures:
    pages = {"whole": "whole", "tiled": "`tile_mlp = auto`", "checkpoint": "torch's checkpoint of each piece"}
    found = {}
    for line in map(json.loads, lines):
        row = pages[line["how"]]
        found |= {(row, "peak"): [line["peak_mib"]], (row, "error"): [line["error"]]}
    return found


def started(lines: list[str]) -> Figures:
    """Return the seconds of commands over those of `import torch`."""
    pages = {
        "xtrain check, quickstart": "`xtrain check specs/quickstart.xtrain`",
        "xtrain plan, quickstart": "`xtrain plan specs/quickstart.xtrain`",
        "xtrain plan, 16,384 ranks": "`xtrain plan specs/llama_405b_16k.xtrain`",
        "xtrain plan, 16,384 ranks, all axes": "`xtrain plan specs/moe_16k.xtrain`, 16,384 ranks on every axis",
    }
    by_name = {line["command"]: line["of_import_torch"] for line in map(json.loads, lines)}
    return {(row, "of `import torch`"): [by_name[name]] for name, row in pages.items()}


def packed(lines: list[str]) -> Figures:
    found: dict[tuple[str, str], list[float]] = {}
    for line in map(json.loads, lines):
        row = f"{line['documents'] // 10**6} M · {line['capacity']:,} · {line['lengths']}"
        ways = ("multipack", "multipack_100k")
        found[row, "rows: all · 100k · first fit"] = [line["rows"][name] for name in (*ways, "first_fit")]
        found[row, "times first fit"] = [line["times_first_fit"][name] for name in ways]
    return found


def loaded(lines: list[str]) -> Figures:
    found = {}
    for line in map(json.loads, lines):
        if "over_share" in line:
            by, _, layout = line["case"].partition(" ")
            row = f"{by} · {layout}"
            found |= {(row, "read / share"): [line["over_share"]], (row, "/ piece"): [line["over_piece"]]}
    return found


TABLES = (
    Table("Overhead over a hand-written training loop", "pointwise_kernels.py", 1, ratios),
    Table("Overhead over a hand-written training loop", "attention_blocks.py", 1, ratios),
    Table("Feed-forward layers in pieces", "tiled_mlp.py --positions 4096 --dim 256 --ffn 1024", 1, tiled),
    Table("From a command to a plan", "plan_start.py --turns 5", 1, started),
    Table("Packing documents into rows", "packing.py", 1, packed),
    Table("Distributing rows over data ranks", "dealing.py", 3, dealt),
    Table("Loading weights", "loading.py --only 'xtrain fsdp 8' 'xtrain tp 2 · fsdp 4'", 2, loaded),
)


def tables_of(page: str, heading: str) -> Iterator[list[dict[str, str]]]:
    """The tables of a section of a page, each as its rows: column → cell."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        names, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines())
        yield [dict(zip(names, row, strict=False)) for row in rows]


def numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


def on_page(page: str, table: Table) -> Figures:
    """Return what the page says, in the order of its cells."""
    found = {}
    for rows in tables_of(page, table.heading):
        for cells in rows:
            row = " · ".join(list(cells.values())[: table.labels])
            found |= {(row, column): numbers(cell) for column, cell in list(cells.items())[table.labels :]}
    return found


def compare(said: Figures, measured: Figures, within: float) -> Iterator[str]:
    """Yield every figure of the page that is further from the measured one than a share of it, or was not measured."""
    for place, old in said.items():
        new = measured.get(place)
        if new is None:
            continue
        if any(abs(now - was) > within * abs(was) for was, now in zip(old, new, strict=True)):
            yield f"{place[0]}, {place[1]}: {_text(old)} on the page, {_text(new)} measured"


def _text(figures: Sequence[float]) -> str:
    return " · ".join(f"{figure:,g}" for figure in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    headings = sorted({table.heading for table in TABLES})
    parser.add_argument("--only", nargs="*", default=headings, choices=headings, metavar="HEADING")
    parser.add_argument("--within", type=lambda text: float(text.rstrip("%")) / 100, default=0.2)
    given = parser.parse_args()
    page, failed = PAGE.read_text(encoding="utf-8"), False
    for table in TABLES:
        if table.heading not in given.only:
            continue
        command = f"{sys.executable} {ROOT}/benchmarks/{table.command}"
        done = subprocess.run(
            command, shell=True, text=True, capture_output=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        measured = table.read(done.stdout.splitlines()) if done.returncode == 0 else {}
        said = on_page(page, table)
        known = said.keys() & measured.keys()
        far = list(compare(said, measured, given.within))
        failed |= bool(far) or not known
        print(f"{table.command}: {len(known)} of {len(measured)} figures on the page, {len(far)} too far off")
        if not known:
            print(f"  nothing to compare: {done.stderr[-300:] or 'no row of the page was measured'}")
        for line in far:
            print(f"  {line}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
