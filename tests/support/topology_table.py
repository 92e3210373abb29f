"""Run the table of topologies, print every row as it comes, and write docs/topologies.md.

    python tests/support/topology_table.py [--only TEXT …] [--ordinary] [--write]

`--only` takes rows whose name contains the text. Exits with 1 if a row does not hold.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from attrs import frozen
from forked_ranks import ForkedRanks, RanksFailed
from rank_counts import stray_counts
from topologies import CASES, TOPOLOGIES, Topology
from trials import TOLERANCE, Gaps, Laboratory, NoPlan, gaps, stray_shapes

from xtrain.runtime.inspect.gaps import NotComparable

PAGE = Path(__file__).parents[2] / "docs" / "topologies.md"
HEAD = """\
# Tested topologies

Each row is a layout that is compared with one process on the same rows: three optimizer steps and an evaluation, on
gloo ranks of one machine, with documents of different lengths, held-out data, and AdamW with clipping. The tests fail
if a gap exceeds 1e-10 in fp64 or 1e-5 in fp32. The shapes and bytes of each rank must equal those of the plan.

| column | the largest difference, relative to |
| --- | --- |
| loss, norm, eval | the value |
| routing (loads of experts, balance loss) | the largest element |
| worst tensor | the largest element of the tensor; over every parameter and both moments, on every rank that holds it |

`ordinary` rows run with `pytest tests/distributed`, all rows with `pytest -m matrix`. `s` is seconds on two cores,
set-up included. `tests/support/topologies.py` is the table as data, and `python tests/support/topology_table.py
--write` writes this page.

| layout | model | ranks | format | ordinary | loss | norm | eval | routing | worst tensor | s |
| --- | --- | --: | --- | --- | --: | --: | --: | --: | --: | --: |
"""


@frozen
class Row:
    """One case and what came of it: gaps, or why there are none."""

    topology: Topology
    params: str
    gaps: Gaps | None
    problem: str = ""

    @property
    def holds(self) -> bool:
        return self.gaps is not None and self.gaps.worst < TOLERANCE[self.params] and not self.problem

    def markdown(self) -> str:
        name = self.topology.name.rsplit(" (", 1)[0]
        ordinary = "yes" if self.topology.is_ordinary(self.params) else ""
        cells = [name, self.topology.model, str(self.topology.world), self.params, ordinary, *self._figures()]
        return "| " + " | ".join(cells) + " |"

    def line(self) -> str:
        verdict = "" if self.holds else f"  FAILS {self.problem}"
        figures = "  ".join(f"{figure:>7}" for figure in self._figures())
        return f"{self.topology.name:<66} {self.topology.world} {self.params}  {figures}{verdict}"

    def _figures(self) -> list[str]:
        if self.gaps is None:
            return ["–"] * 6
        g = self.gaps
        return [*(f"{gap:.0e}" for gap in (g.loss, g.norm, g.eval, g.routing, g.worst_tensor)), f"{g.seconds:.1f}"]


def run(lab: Laboratory, topology: Topology, params: str) -> Row:
    trial = topology.trial(params)
    try:
        plan = lab.plan(trial, topology.layout)
        outcome = lab.run(trial, topology.layout)
        found = gaps(outcome, lab.alone(trial))
    except (NoPlan, RanksFailed, NotComparable) as problem:
        return Row(topology, params, None, _brief(str(problem) or type(problem).__name__))
    stray = [*stray_shapes(plan, outcome), *stray_counts(plan, outcome.directory)]
    return Row(topology, params, found, "; ".join(stray[:3]))


def _brief(problem: str) -> str:
    """Of every rank's report the first line, which names it, and the last, which says what happened."""
    blocks = [block.strip().splitlines() for block in problem.split("\n--- ")]
    return "".join(f"\n    {block[0]}: {block[-1]}" if len(block) > 1 else f"\n    {block[0]}" for block in blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose name contains one of these")
    parser.add_argument("--ordinary", action="store_true", help="only rows that run with the ordinary tests")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[1])}")
    arguments = parser.parse_args()
    chosen = [
        (topology, params)
        for topology, params in CASES
        if any(text in topology.name for text in arguments.only)
        and (topology.is_ordinary(params) or not arguments.ordinary)
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ForkedRanks() as ranks:
        lab = Laboratory.open(Path(folder), ranks)
        for topology, params in chosen:
            rows.append(run(lab, topology, params))
            print(rows[-1].line(), flush=True)
    bad = sum(not row.holds for row in rows)
    print(f"{len(rows)} rows, {bad} of them wrong; {len(TOPOLOGIES)} layouts in the table")
    if arguments.write and (bad or len(chosen) < len(CASES)):
        print("not written: only the whole table is, when it holds")
        return 1
    if arguments.write:
        PAGE.write_text(HEAD + "".join(row.markdown() + "\n" for row in rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
