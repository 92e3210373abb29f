"""`xtrain blame RUN --step N`: the documents that cause a spike, found by replays without them."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from xtrain.cli.replay import replayed, window_of, without_sets
from xtrain.cli.run_data import RunData, enter
from xtrain.cli.verb import RUN_HELP, Refused, colored, number_of, ranks, run_named
from xtrain.text.page import Page
from xtrain.text.units import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xtrain.runtime.jobs.blame import Measure, Spike, SuspectRow
    from xtrain.runtime.jobs.replay import ReplayWindow

    Document = tuple[str, int]
    "Dataset, and number in its store."

HELP = "find the documents that cause a spike of the loss"
DESCRIPTION = (
    "Find the documents that made the loss of a step spike: replay the steps since the last checkpoint with the losses "
    "of all rows, then leave out the documents of the most suspicious rows, and bisect until none can be put back."
)
EPILOG = """\
Each replay is a run below `…-replays`, which a second call uses again: the same command resumes an interrupted search.
What is usual is the median of up to 5 recorded steps before. A spike counts as gone if at most a quarter of its
height is left, or the value is within 3 robust standard deviations of the usual one.

examples:
  xtrain blame RUN --step 912
  xtrain blame RUN --alert 2                   the second alert that the run has raised
  xtrain blame RUN --step 912 --from 880       also documents of earlier steps
  xtrain blame RUN --step 912 --metric grad_norm --json

exit codes: 0 documents found, 1 the spike remains without suspicious documents, or does not appear again, 2 the command
line is wrong or the step is no spike, 3 no checkpoint, no records, or changed data; else the exit code of a replay
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_directory", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--step", type=number_of("steps"), metavar="N", help="step of the spike, as in logs")
    parser.add_argument(
        "--alert",
        type=number_of("alerts"),
        metavar="N",
        help="instead of --step: an alert, in the order they were raised",
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=number_of("steps"),
        metavar="STEP",
        help="first step whose documents are suspected (default: the first after the last checkpoint before the spike)",
    )
    parser.add_argument("--metric", choices=("loss", "grad_norm"), default="loss", help="what spikes (default: loss)")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as in the run)")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain blame`. The help lists the exit statuses."""
    from xtrain.runtime.base.files import write

    if (arguments.step is None) == (arguments.alert is None):
        raise Refused(2, "xtrain blame: give the step of the spike: --step N, or --alert N")
    directory = enter(run_named(arguments.run_directory, 3))
    step = arguments.step if arguments.alert is None else _alerted(directory, arguments.alert)
    if arguments.first is not None and arguments.first > step:
        raise Refused(2, f"xtrain blame: --from {arguments.first:,} is after the spike, step {step:,}")
    window = window_of(directory, step if arguments.first is None else arguments.first, None, step)
    spike = _spike(directory, step, arguments.metric)
    search = SpikeSearch(window, spike, arguments.world, RunData(directory))
    found = search.run()
    said = json.dumps(search.as_json(found))
    write(directory.parent.with_name(f"{directory.parent.name}-replays") / f"blame-{directory.name}-{step}.json", said)
    if arguments.json:
        print(said)
    else:
        search.show(found)
    return 0 if found else 1


def _alerted(directory: Path, number: int) -> int:
    """Return the step of a raised alert. Raises Refused (2)."""
    from xtrain.records.events import AlertEvent, events_since
    from xtrain.records.names import EVENTS_FILE

    alerts = [
        event
        for event in events_since(directory / EVENTS_FILE, 0)
        if isinstance(event, AlertEvent) and event.state == "raised"
    ]
    step = alerts[number - 1].step if number <= len(alerts) else None
    if step is None:
        listed = "".join(f"\n  {place} {one.kind}, step {one.step}" for place, one in enumerate(alerts, start=1))
        message = f"{directory} has raised {plural(len(alerts), 'alert')}, and none is number {number} with a step"
        raise Refused(2, f"xtrain blame: {message}; give --step N, or the number of one with a step{listed}")
    return step


def _spike(directory: Path, step: int, measure: "Measure") -> "Spike":
    """Return the spike of a step. Raises Refused (2) if it is none, (3) without records."""
    from xtrain.runtime.jobs.blame import LEAST_STEPS, Spike

    spike = Spike.of(directory, step, measure)
    if spike is None:
        message = f"{directory} has no record of step {step:,}, or of fewer than {LEAST_STEPS} steps before it"
        raise Refused(3, f"xtrain blame: {message}: the usual loss is unknown")
    if not spike.is_high:
        usual = f"the median of {plural(spike.steps, 'recorded step')} before is {spike.usual:.5g}"
        raise Refused(2, f"xtrain blame: step {step:,} is no spike: its {measure} is {spike.value:.5g}, and {usual}")
    return spike


@define
class SpikeSearch:
    """Search for the documents that cause a spike."""

    window: "ReplayWindow"
    spike: "Spike"
    world: int | None
    data: RunData
    suspects: "list[SuspectRow]" = field(factory=list, init=False)
    replays: "dict[frozenset[Document], Path]" = field(factory=dict, init=False)
    note: str = field(default="", init=False)

    def run(self) -> "list[Document]":
        """Return the documents; empty if there are none, with the reason in `note`."""
        from xtrain.runtime.jobs.blame import smallest, suspects

        spike, window = self.spike, self.window
        stretches = self.data.runs[-1].stretches
        first = window.begin + 1
        unchanged = self._replay([], "rows")
        if (value := self._value(unchanged)) <= spike.limit:
            self.note = f"the spike does not appear again: {spike.measure} is {value:.5g}, so it is not in the data"
            return []
        self.suspects = suspects(unchanged, stretches, first, window.last)
        count = 1
        while True:
            documents = self._documents(self.suspects[:count])
            if self._is_gone(documents):
                return smallest(documents, self._is_gone)
            if count >= len(self.suspects) // 2:
                break
            count = min(2 * count, len(self.suspects) // 2)
        shown = plural(len(documents), "document")
        self.note = (
            f"without the {shown} of the {plural(count, 'row')} of highest loss since step {first:,}, the spike "
        )
        self.note += "remains: its cause is not in these documents, or before the checkpoint (--from STEP goes back)"
        return []

    def _documents(self, rows: "Sequence[SuspectRow]") -> "list[Document]":
        return [*dict.fromkeys((row.dataset, document) for row in rows for document in row.documents)]

    def _is_gone(self, documents: "Sequence[Document]") -> bool:
        known = frozenset(documents) in self.replays
        value = self._value(self._replay(documents))
        gone = value <= self.spike.limit
        if not known:
            said = f"without {plural(len(documents), 'document')}: {self.spike.measure} {value:.5g} at step "
            said += f"{self.spike.step:,}, {'gone' if gone else 'the spike remains'}"
            print(f"replay {len(self.replays)}: {said}", file=sys.stderr, flush=True)
        return gone

    def _replay(self, documents: "Sequence[Document]", logs: Any = "steps") -> Path:
        import numpy as np

        key = frozenset(documents)
        if key not in self.replays:
            names = dict.fromkeys(name for name, _ in documents)
            removed = {name: np.array([each for own, each in documents if own == name]) for name in names}
            sets = without_sets(self.window.directory, removed)
            replay, code = replayed(self.window, sets, self.world, "none", logs)
            if replay is None:
                raise Refused(code or 1, "xtrain blame: a replay did not get to its end; the same command resumes it")
            self.replays[key] = replay
        return self.replays[key]

    def _value(self, replay: Path) -> float:
        """Return the value of a replay at the step of the spike; infinite if it is not finite or not recorded."""
        from xtrain.runtime.jobs.replay import recorded

        values = [getattr(line, self.spike.measure) for line in recorded(replay, {self.spike.step})]
        return float("inf") if not values or values[0] is None else values[0]

    def _found(self, found: "list[Document]") -> list[dict[str, Any]]:
        from xtrain.runtime.feed.document_search import origins_of

        datasets = {each.name: each for each in self.data.searched()}
        origins = {
            name: origins_of(datasets[name], {document for own, document in found if own == name})
            for name in dict.fromkeys(name for name, _ in found)
        }
        return [
            {
                "dataset": name,
                "document": document,
                "origin": origins[name].get(document),
                "rows": [
                    {"step": row.step, "row": row.row, "loss": row.loss, "usual": row.usual}
                    for row in self.suspects
                    if row.dataset == name and document in row.documents
                ],
            }
            for name, document in found
        ]

    def _curve(self, found: "list[Document]") -> list[dict[str, Any]]:
        from xtrain.runtime.jobs.replay import recorded

        steps, measure = range(self.window.begin + 1, self.window.last + 1), self.spike.measure
        curves = [
            {line.step: getattr(line, measure) for line in recorded(directory, steps)}
            for directory in (self._replay([], "rows"), self._replay(found))
        ]
        return [{"step": step, "replayed": curves[0].get(step), "without": curves[1].get(step)} for step in steps]

    def as_json(self, found: "list[Document]") -> dict[str, Any]:
        """Return the result as JSON values."""
        spike = self.spike
        value = None if spike.value == float("inf") else spike.value
        said = {"step": spike.step, "metric": spike.measure, "value": value, "usual": spike.usual, "limit": spike.limit}
        said |= {"replays": len(self.replays), "note": self.note, "documents": self._found(found)}
        return {**said, "without": self._value(self._replay(found)), "curve": self._curve(found)} if found else said

    def show(self, found: "list[Document]") -> None:
        """Print the result."""
        spike, page = self.spike, Page(color=colored())
        usual = f"usual {spike.usual:.5g}, the median of {plural(spike.steps, 'recorded step')} before"
        page.heading(f"step {spike.step:,}", f"{spike.measure} {spike.value:.5g}; {usual}")
        if not found:
            page.line(f"  {self.note}")
        for one in self._found(found):
            where = f" · {one['origin']}" if one["origin"] else ""
            page.line(f"  {one['dataset']}:{one['document']}{where}")
            page.table(
                [
                    (f"    step {row['step']:,}", f"row {row['row']:,}", f"loss of the row {row['loss']:.5g}",
                     f"median of the step {row['usual']:.5g}")
                    for row in one["rows"]
                ]
            )  # fmt: skip
        if found:
            value = self._value(self._replay(found))
            which = "this document" if len(found) == 1 else f"these {len(found)} documents"
            page.line(
                f"  without {which}: {spike.measure} {value:.5g} at step {spike.step:,}; with any of them put back the "
                f"spike remains ({plural(len(self.replays), 'replay')})"
            )
            rows = [
                (
                    f"  {one['step']:,}",
                    *("not finite" if each is None else f"{each:.5g}" for each in list(one.values())[1:]),
                )
                for one in self._curve(found)
            ]
            page.table([("  step", spike.measure, "without"), *rows], styles=("dim",))
        sys.stdout.write(str(page).lstrip("\n"))
