"""`xtrain seen RUN|EXPORT`: what a model was trained on, computed from the plan of its run."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtrain.cli.run_data import DOCUMENT_HELP, RunData, enter, loss_texts
from xtrain.cli.verb import RUN_HELP, Refused, colored, number_of, run_named
from xtrain.text.page import Page
from xtrain.text.units import plural

if TYPE_CHECKING:
    import numpy as np

    from xtrain.runtime.feed.cleaning import Benchmark
    from xtrain.runtime.store.history import TrainedSteps

    Found = dict[str, np.ndarray]
    "Dataset → documents, int64."

HELP = "say whether, when and how often a model was trained on documents or texts"
DESCRIPTION = (
    "Say whether, at which steps and how often a model was trained on documents, computed from the plan of its run, "
    "the steps at which the run was resumed, and its packed rows. No log of rows is needed."
)
EPILOG = """\
Runs that the model began with (checkpoint.from, checkpoint.pretrained) are included. Learning rates follow the
schedule; losses are shown where the step was recorded.

examples:
  xtrain seen RUN                                        rows and epochs of each dataset
  xtrain seen RUN --document data/web/a.jsonl:1204       the steps that trained on this record
  xtrain seen RUN --text 'to be or not to be'            the documents with this text
  xtrain seen RUN --matching bench.jsonl --ngram 13      the records of a benchmark that share 13 words with a document
  xtrain seen RUN --between 900 1000                     the documents of these steps
  xtrain seen models/chat --text 'a sentence' --json

exit codes: 0 something was seen, 1 nothing was seen, 2 the command line is wrong, 3 the data or a run is missing or has
changed
"""
SHOWN = 12  # sightings of a document, and documents or records, unless all are requested


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_directory", metavar="RUN", help=f"{RUN_HELP}; or a folder of `xtrain export`")
    parser.add_argument("--document", action="append", default=[], metavar="DOCUMENT", help=DOCUMENT_HELP)
    parser.add_argument("--text", action="append", default=[], help="a part of the text of documents")
    parser.add_argument("--matching", metavar="FILE", type=Path, help="a benchmark: JSON lines, searched by n-grams")
    parser.add_argument(
        "--ngram", type=number_of("words"), metavar="N", help="words of an n-gram of --matching (default 13)"
    )
    parser.add_argument("--field", metavar="NAME", help="the field of --matching with the text (default: all texts)")
    parser.add_argument(
        "--between", nargs=2, type=number_of("steps"), metavar=("A", "B"), help="only the steps A to B, as in logs"
    )
    parser.add_argument("--all", action="store_true", help="print every document and step")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line, with every step")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain seen`. The help lists the exit statuses."""
    if arguments.matching is None and (arguments.ngram or arguments.field):
        raise Refused(2, "xtrain seen: --ngram and --field belong to --matching FILE")
    if any(not text for text in arguments.text):
        raise Refused(2, "xtrain seen: --text is empty")
    if arguments.between and arguments.between[0] > arguments.between[1]:
        raise Refused(2, f"xtrain seen: --between {arguments.between[0]} {arguments.between[1]}: A is after B")
    given: Path | None = arguments.matching
    matching = None if given is None else given.absolute()
    directory, until = _model(arguments.run_directory)
    data = RunData(enter(directory), until)
    end = data.runs[-1].end
    if arguments.between and arguments.between[1] > end:
        raise Refused(2, f"xtrain seen: --between: the model was trained for {plural(end, 'step')}")
    view = SeenPage(data, arguments)
    if not (arguments.document or arguments.text or matching):
        return view.steps() if arguments.between else view.summary()
    seen = False
    if arguments.document:
        seen = view.documents("named documents", data.named(arguments.document)) or seen
    for text in arguments.text:
        seen = view.documents(json.dumps(text, ensure_ascii=False), _with_text(data, text)) or seen
    if matching is not None:
        from xtrain.runtime.feed.cleaning import Benchmark

        benchmark = Benchmark.read(matching, arguments.ngram or 13, arguments.field)
        seen = view.benchmark(matching, benchmark) or seen
    view.write()
    return 0 if seen else 1


def _model(text: str) -> tuple[Path, int | None]:
    """Return the run of a model and its step; None for the run's last one. Raises Refused."""
    card = Path(text) / "README.md"
    if (Path(text) / "plan.json").is_file() or not card.is_file():
        return run_named(text, 3), None
    facts = dict(re.findall(r"^\| (plan|experiment|step) \| `?([^`|]*?)`? \|$", card.read_text("utf-8"), re.MULTILINE))
    if not {"experiment", "plan", "step"} <= facts.keys():
        raise Refused(3, f"xtrain seen: {text} is neither a run nor a folder that `xtrain export` wrote")
    from xtrain.runtime.observe.provenance import plan_in
    from xtrain.tui.model.find import ROOT, NoRun, runs_at

    try:
        runs = runs_at(ROOT)
    except NoRun:
        runs = []
    found = [each for each in runs if facts["experiment"] in each.name or plan_in(each).id == facts["plan"]]
    found = [each for each in found if plan_in(each).id == facts["plan"]] or found
    if not found:
        message = f"no run below {ROOT} has the plan {facts['plan']} of {text}; call this where the run was started"
        raise Refused(3, f"xtrain seen: {message}")
    print(f"run {found[0]}", file=sys.stderr)
    return found[0], int(facts["step"].split(" ")[0].replace(",", ""))


def _with_text(data: RunData, text: str) -> "Found":
    import numpy as np

    found = {each.name: np.array([*each.with_text(text)], dtype=np.int64) for each in data.searched()}
    return {name: documents for name, documents in found.items() if len(documents)}


class SeenPage:
    """Answers on a page, or as JSON."""

    def __init__(self, data: RunData, arguments: argparse.Namespace) -> None:
        self._data, self._json = data, arguments.json
        self._most = None if arguments.all or arguments.json else SHOWN
        self._between: list[int] = arguments.between or [1, 1 << 62]
        self._page = Page(color=colored())

    def write(self) -> None:
        """Print the page."""
        if not self._json:
            sys.stdout.write(str(self._page).lstrip("\n"))

    def summary(self) -> int:
        """Print rows and epochs of each dataset."""
        for run in self._data.runs:
            table = []
            for name, rows, count in _taken(run):
                found = {"run": str(run.directory), "dataset": name, "rows": rows, "epochs": round(rows / count, 4)}
                if self._json:
                    print(json.dumps(found))
                table.append((name, f"{plural(rows, 'row')}, {rows / count:,.4g} epochs of {count:,}"))
            self._page.heading(run.directory.name, plural(run.end, "step"))
            self._page.table(table, styles=("bold",))
        self.write()
        return 0

    def steps(self) -> int:
        """Print the documents of some steps."""
        import numpy as np

        run = self._data.runs[-1]
        first, last = self._between
        self._page.heading(run.directory.name, f"steps {first:,} to {last:,}")
        found: Found = {}
        for stretch in run.stretches:
            for step in range(max(first - 1, stretch.first), min(last, stretch.end)):
                numbers, cursors = stretch.curriculum.rows(step)
                for number, dataset in enumerate(stretch.datasets):
                    own = cursors[numbers == number]
                    rows = dataset.order.rows(int(own[0]), len(own)) if len(own) else own
                    packed = dataset.reader.rows
                    documents = [
                        dataset.reader.documents[packed.document[packed.row_offsets[row] : packed.row_offsets[row + 1]]]
                        for row in rows
                    ]
                    before = found.get(dataset.name, np.empty(0, dtype=np.int64))
                    found[dataset.name] = np.unique(np.concatenate([before, *documents]))
        self.documents("", found)
        self.write()
        return 0

    def documents(self, title: str, found: "Found") -> bool:
        """Add documents with the steps that trained on them. Return True if there are any such steps."""
        import numpy as np

        if title:
            count = sum(map(len, found.values()))
            self._page.heading(title, plural(count, "document") if count else "in no document of the datasets")
        any_step = False
        for name, documents in found.items():
            origins = self._origins(name, documents)
            held_out = {
                int(each)
                for run in self._data.runs
                for stretch in run.stretches
                if name in stretch.prepared
                for each in np.intersect1d(documents, stretch.prepared[name].heldout_documents)
            }
            sightings = self._sightings(name, documents)
            for number, document in enumerate(documents.tolist()):
                own = sightings.get(document, [])
                any_step = any_step or bool(own)
                known = {"dataset": name, "document": document, "origin": origins.get(document)}
                if self._json:
                    print(json.dumps({**known, "held_out": document in held_out, "seen": own}))
                elif self._most is None or number < self._most:
                    self._add(name, document, origins.get(document), own, held_out=document in held_out)
            if self._most is not None and len(documents) > self._most and not self._json:
                self._page.line(
                    f"  … {plural(len(documents) - self._most, 'more document')} of {name}; --all prints them"
                )
        return any_step

    def _add(self, name: str, document: int, origin: str | None, own: list[dict[str, Any]], *, held_out: bool) -> None:
        steps = len({(one["run"], one["step"]) for one in own})
        said = f"trained on in {plural(steps, 'step')}" if own else "held out" if held_out else "not trained on"
        where = f" · {origin}" if origin else ""
        self._page.line(f"  {name}:{document}{where} · {said}")
        shown = own if self._most is None else own[: self._most]
        several = len(self._data.runs) > 1
        table = [
            (
                f"    step {one['step']:,}",
                f"row {one['row']:,}",
                "" if one["lr"] is None else f"lr {one['lr']:.4g}",
                f"loss {one['loss']:.5g}" if one.get("loss") is not None else "",
                f"loss/{name} {one['dataset_loss']:.5g}" if one.get("dataset_loss") is not None else "",
                Path(one["run"]).name if several else "",
            )
            for one in shown
        ]
        if table:
            self._page.table(table)
        if len(own) > len(shown):
            self._page.line(f"    … {len(own) - len(shown):,} more; --all prints them")

    def _origins(self, name: str, documents: "np.ndarray") -> dict[int, str]:
        from xtrain.runtime.feed.document_search import origins_of

        wanted = set(documents.tolist() if self._most is None else documents[: self._most].tolist())
        dataset = next(each for each in reversed(self._data.searched()) if each.name == name)
        return origins_of(dataset, wanted) if wanted else {}

    def _sightings(self, name: str, documents: "np.ndarray") -> dict[int, list[dict[str, Any]]]:
        """Return document → its sightings in the order of training."""
        found: dict[int, list[dict[str, Any]]] = {}
        first, last = self._between
        for run in self._data.runs:
            parts = [
                (stretch, int(step), int(document), int(row))
                for stretch in run.stretches
                if name in stretch.prepared
                for part in stretch.sightings(name, documents)
                for step, document, row in zip(part.steps, part.documents, part.rows, strict=True)
                if first <= step <= last
            ]
            lines = self._data.recorded({step for _, step, *_ in parts}, run.directory)
            for stretch, step, document, row in sorted(parts, key=lambda part: part[1:]):
                said = loss_texts(lines.get(step), name)
                one = {"run": str(run.directory), "step": step, "row": row, "lr": stretch.rate(step - 1), **said}
                found.setdefault(document, []).append(one)
        return found

    def benchmark(self, path: Path, benchmark: "Benchmark") -> bool:
        """Add the records that share n-grams with documents that were trained on. Return True if there are any."""
        import numpy as np

        shared: dict[int, list[tuple[int, str, int]]] = {}
        for dataset in self._data.searched():
            own = [(document, benchmark.shared(text)) for document, text in dataset.texts()]
            own = [(document, counts) for document, counts in own if counts]
            seen = self._sightings(dataset.name, np.array([document for document, _ in own], dtype=np.int64))
            for document, counts in own:
                for line, count in counts.items() if document in seen else ():
                    shared.setdefault(line, []).append((count, dataset.name, document))
        records, size = len(benchmark.sizes), benchmark.size
        said = f"{len(shared):,} of {plural(records, 'record')} share {size} words with a document that was trained on"
        self._page.heading(str(path), said)
        if benchmark.too_short:
            short = plural(len(benchmark.too_short), "record")
            self._page.line(f"  {short} with fewer than {size} words cannot be compared; use a smaller --ngram")
        ranked = sorted(shared, key=lambda line: (-max(shared[line])[0] / benchmark.sizes[line], line))
        table = []
        for line in ranked:
            found = [
                {"dataset": name, "document": document, "ngrams": count}
                for count, name, document in sorted(shared[line], key=lambda one: (-one[0], one[1:]))
            ]
            if self._json:
                print(json.dumps({"record": line, "ngrams": benchmark.sizes[line], "documents": found}))
            share = found[0]["ngrams"] / benchmark.sizes[line]
            best = f"{found[0]['dataset']}:{found[0]['document']}"
            more = f" and {plural(len(found) - 1, 'more document')}" if len(found) > 1 else ""
            table.append((f"  {path.name}:{line}", f"{share:.0%} of its n-grams", f"in {best}{more}"))
        self._page.table(table if self._most is None else table[: self._most])
        if self._most is not None and len(table) > self._most:
            self._page.line(f"  … {plural(len(table) - self._most, 'more record')}; --all prints them")
        return bool(shared)


def _taken(run: "TrainedSteps") -> list[tuple[str, int, int]]:
    """Return (dataset, rows trained on, rows of the dataset)."""
    taken: dict[str, tuple[int, int]] = {}
    for stretch in run.stretches:
        before, after = (stretch.curriculum.uses(step) for step in (stretch.first, stretch.end))
        for dataset in stretch.datasets:
            rows = after.get(dataset.name, 0) - before.get(dataset.name, 0)
            taken[dataset.name] = (taken.get(dataset.name, (0, 0))[0] + rows, dataset.order.num_rows)
    return [(name, rows, count) for name, (rows, count) in taken.items()]
