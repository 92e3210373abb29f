"""Data of a run for `seen`, `replay` and `blame`: the steps that it trained, and the documents that a text names."""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from xtrain.cli.data_show import shown
from xtrain.cli.verb import Refused, say_own_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from xtrain.plan.plan import Plan
    from xtrain.records.metrics import StepMetrics
    from xtrain.runtime.feed.document_search import SearchedDataset
    from xtrain.runtime.feed.prepared import PreparedDataset
    from xtrain.runtime.store.history import TrainedSteps

DOCUMENT_HELP = (
    "a document: FILE:LINE of its record, or FILE for all its records; DATASET:DOCUMENT or DATASET#ROW, with numbers "
    "as in `xtrain data show`"
)


def enter(directory: Path) -> Path:
    """Change to the folder where a run was started, which the paths of its plan are relative to; return the run's
    absolute path."""
    from xtrain.dsl.diagnostics.diagnostic import printable
    from xtrain.runtime.observe.provenance import started_in

    absolute, folder = directory.absolute(), started_in(directory)
    if folder.is_dir() and folder.resolve() != Path.cwd().resolve():
        print(printable(f"note: paths are relative to {folder}, where the run was started"), file=sys.stderr)
        os.chdir(folder)
    return absolute


@define
class RunData:
    """Run, and the runs that its model began with, as far as their plans say."""

    directory: Path
    until: int | None = None
    _prepared: "dict[str, PreparedDataset]" = field(factory=dict, init=False)
    _runs: "list[TrainedSteps]" = field(factory=list, init=False)

    @property
    def runs(self) -> "list[TrainedSteps]":
        """Runs that the model was trained in, the first one first. Raises as `trained` does."""
        from xtrain.runtime.store.history import trained

        if not self._runs:
            self._runs = trained(self.directory, self._prepare, self.until)
        return self._runs

    def _prepare(self, plan: "Plan") -> "dict[str, PreparedDataset]":
        from xtrain.plan.canonical import DATA, digest
        from xtrain.runtime.feed.dataset_view import data_nodes, tokenizer_of
        from xtrain.runtime.feed.prepared import prepared_from

        say_own_code(plan, self.directory)
        tokenizer, nodes, found = tokenizer_of(plan), data_nodes(plan), {}
        for name in plan.node("setup.loader").args["datasets"]:
            key = digest([nodes[name].args, plan.node("setup.tokenizer").args, plan.workspace["root"]], DATA, size=16)
            if key not in self._prepared:
                with shown(name) as report:
                    self._prepared[key] = prepared_from(plan, nodes[name], tokenizer, progress=report)
            found[name] = self._prepared[key]
        return found

    def searched(self) -> "list[SearchedDataset]":
        """Return every dataset of these runs, each store once."""
        from xtrain.runtime.feed.dataset_view import tokenizer_of
        from xtrain.runtime.feed.document_search import SearchedDataset

        found: dict[tuple[str, str], SearchedDataset] = {}
        for run in self.runs:
            for stretch in run.stretches:
                for name, data in stretch.prepared.items():
                    found[name, data.store.key] = SearchedDataset(
                        name=name, plan=stretch.plan, data=data, tokenizer=tokenizer_of(stretch.plan)
                    )
        return [*found.values()]

    def named(self, texts: "Sequence[str]") -> "dict[str, np.ndarray]":
        """Return dataset → the documents that texts name, int64, and those that stand for them if they were left out as
        repeated. Raises Refused (2) for a number that does not exist, DataError for a record that does not exist."""
        import numpy as np

        from xtrain.runtime.feed.document_search import of_records

        datasets = self.searched()
        found: dict[str, list[int]] = defaultdict(list)
        for text in texts:
            numbered = re.fullmatch(r"(?s)(.+)([:#])(\d+)", text)
            named = [dataset for dataset in datasets if numbered and dataset.name == numbered[1]]
            if numbered is None or not (named or numbered[2] == "#"):
                for name, documents in of_records(datasets, text).items():
                    found[name] += documents
            elif not named:
                known = ", ".join(dict.fromkeys(dataset.name for dataset in datasets))
                raise Refused(2, f"xtrain: {text}: this run has no dataset `{numbered[1]}`; it trains on {known}")
            else:
                for dataset in named:
                    found[dataset.name] += _numbered(dataset, numbered[2], int(numbered[3]), text)
        for dataset in datasets:
            found[dataset.name] += _kept_copies(dataset, found[dataset.name])
        return {name: np.unique(np.array(documents, dtype=np.int64)) for name, documents in found.items() if documents}

    def rows(self, step: int) -> "Iterator[tuple[str, list[bytes]]]":
        """Yield the name and the tokens of each row of a step, counted from 1, sorted by name."""
        for stretch in self.runs[-1].stretches:
            if stretch.first < step <= stretch.end:
                found = []
                for number, cursor in zip(*(each.tolist() for each in stretch.curriculum.rows(step - 1)), strict=True):
                    dataset = stretch.datasets[number]
                    row = dataset.order.row(cursor)[1]
                    tokens = [part.tobytes() for part in dataset.reader.row(row).segments]
                    found.append((f"{dataset.name}#{row}", tokens))
                yield from sorted(found)

    def recorded(self, steps: "set[int]", directory: Path) -> "dict[int, StepMetrics]":
        """Return the records of some steps, counted from 1."""
        from xtrain.runtime.jobs.replay import recorded

        return {line.step: line for line in recorded(directory, steps) if line.step is not None}


def _kept_copies(dataset: "SearchedDataset", documents: list[int]) -> list[int]:
    """Return the documents that stand for those that `deduplicate` left out, and say so."""
    import numpy as np

    from xtrain.runtime.feed.cleaning import first_copies
    from xtrain.text.units import plural

    if dataset.data.left_out is None or dataset.store.choices is not None:
        return []
    repeated = np.intersect1d(dataset.data.left_out.repeated, np.array(documents, dtype=np.int64))
    firsts = first_copies(dataset.store, repeated.tolist())
    if dataset.data.left_out.similar and len(repeated):
        note = "were left out because they resemble earlier ones, which are searched only if they are equal"
        print(f"note: {plural(len(repeated), 'document')} of {dataset.name} {note}", file=sys.stderr)
    firsts = {document: first for document, first in firsts.items() if document != first}
    for document, first in firsts.items():
        note = f"note: {dataset.name}:{document} repeats {dataset.name}:{first}, which is searched as well"
        print(note, file=sys.stderr)
    return [*firsts.values()]


def _numbered(dataset: "SearchedDataset", mark: str, number: int, text: str) -> list[int]:
    rows, documents = dataset.data.train_rows, dataset.data.train_documents
    if mark == ":":
        if number >= dataset.store.num_documents:
            count = dataset.store.num_documents
            raise Refused(2, f"xtrain: {text}: dataset {dataset.name} has documents 0 to {count - 1:,}")
        return [number]
    if number >= rows.num_rows:
        raise Refused(2, f"xtrain: {text}: dataset {dataset.name} has training rows 0 to {rows.num_rows - 1:,}")
    return documents[rows.document[rows.row_offsets[number] : rows.row_offsets[number + 1]]].tolist()


def loss_texts(line: "StepMetrics | None", dataset: str) -> dict[str, Any]:
    """Return the recorded losses of a step: of all rows, and of a dataset's rows since the record before."""
    if line is None:
        return {}
    own = line.rest.get(f"loss/{dataset}")
    return {"loss": line.loss, **({} if own is None else {"dataset_loss": own})}
