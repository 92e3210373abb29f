"""Reader of datasets of the Hugging Face library: a folder, or a name on the hub. Needs `datasets`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xtrain.lazy_attrs import frozen
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.digests import file_digest
from xtrain.runtime.feed.records import BadRecord, Reads, SourceRecord, SourceUnit
from xtrain.runtime.feed.sources.files import matched, needs
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest
from xtrain.runtime.feed.sources.tables import NO_ROWS, check_columns, packed, pyarrow, records_of, top_columns

ROWS = 1000
DEFAULT_SPLIT = "train"


def open_source(request: SourceRequest) -> OpenedSource:
    """Find the folder, if there is one; a hub name is looked up when it is read."""
    options = request.options
    folder = request.base / options["name"]
    if not folder.is_dir():
        reader = HubDataset(folder=None, **options, reads=request.reads)
        return OpenedSource(reader=reader, fetched=reader.content)
    files = matched(("**/*",), folder)
    # The folder's location is not part of the data's identity.
    decisive = {name: value for name, value in options.items() if not (name == "name" and files)}
    return OpenedSource(
        reader=HubDataset(folder=folder, **options, reads=request.reads), files=files, base=folder, options=decisive
    )


@frozen(kw_only=True)
class HubDataset:
    """One split of a dataset, a record per row.

    A folder written by `save_to_disk` is read directly. A folder of data files, and data of the hub, first go into the
    cache of `datasets`. The hub is asked only for data missing from that cache.
    """

    name: str
    folder: Path | None
    """Path on this machine, if the name is a folder."""
    config: str | None
    split: str
    reads: Reads

    def units(self) -> Iterator[SourceUnit]:
        """Yield groups of rows. Raises DataError if the dataset, split or column is missing or unreadable."""
        pa = pyarrow("huggingface")
        data = self._load()
        check_columns(data.features.arrow_schema, self.reads, self._place)
        data = data.select_columns(top_columns(data.features.arrow_schema, self.reads)).with_format("arrow")
        row = 1
        for start in range(0, len(data), ROWS):
            try:
                table = data[start : start + ROWS].combine_chunks()
                for batch in table.to_batches():
                    for part, rows in packed(batch, self.reads):
                        yield SourceUnit(size=len(part), part=part, path=self.folder, line=row)
                        row += rows
            except (pa.ArrowException, OSError) as error:
                message = f"damaged after row {row - 1}: {_first_line(error)}"
                raise DataError(message, path=self._place, remedy="Download or write it again.") from error
        if row == 1:
            yield SourceUnit(size=0, part=NO_ROWS, path=self.folder, line=1)

    def read(self, unit: SourceUnit) -> Iterator[SourceRecord | BadRecord]:
        """Yield a good or bad record per row."""
        return records_of(unit, self.reads, self._place)

    def num_bytes(self) -> None:
        """Return None: the size is unknown before loading."""
        return

    def content(self) -> list[str]:
        """Return digests of the files read, if they are not files of a folder. Downloads the data if needed."""
        if self.folder is not None:
            return []
        files = self._load().cache_files
        if not files:
            raise DataError("the library has no files for it", path=self._place, remedy="Save it with save_to_disk.")
        return [file_digest(Path(each["filename"])) for each in files]

    @property
    def _place(self) -> str:
        name = str(self.folder) if self.folder is not None else self.name
        return f"{name}, split {self.split}" if self.config is None else f"{name}, {self.config}, split {self.split}"

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise needs("datasets", "source `huggingface`") from error
        with _quiet(datasets):
            if self.folder is not None:
                with _offline(datasets):
                    return self._from_folder(datasets, self.folder)
            return self._from_hub(datasets)

    def _from_folder(self, datasets: Any, folder: Path) -> Any:
        saved = (folder / "state.json").is_file()
        try:
            if not saved and not (folder / "dataset_dict.json").is_file():
                return datasets.load_dataset(str(folder), self.config, split=self.split)
            data = datasets.load_from_disk(str(folder))
        except Exception as error:  # the library raises arbitrary errors of its readers
            raise self._failed(error, "Check the folder, the configuration and the split.") from error
        if self.config is not None:
            raise DataError("a saved dataset has no configurations", path=folder, remedy="Leave `config` out.")
        if saved:
            # A dataset without a split name is complete, which is the default split.
            has = str(data.split) if data.split is not None else DEFAULT_SPLIT
            splits = {has: data}
        else:
            splits = dict(data)
        if self.split not in splits:
            remedy = f"Its splits are {', '.join(f'`{name}`' for name in splits)}."
            raise DataError(f"no split `{self.split}`", path=folder, remedy=remedy)
        return splits[self.split]

    def _from_hub(self, datasets: Any) -> Any:
        if self.name.count("/") > 1 or self.name.startswith((".", "/")):
            remedy = "Give a folder, or `organisation/name` of the hub."
            raise DataError("no such folder", path=self.name, remedy=remedy)
        try:
            with _offline(datasets):
                return datasets.load_dataset(self.name, self.config, split=self.split)
        except Exception as error:
            if datasets.config.HF_HUB_OFFLINE:
                remedy = "It is not in the cache, and HF_HUB_OFFLINE prevents downloading it."
                raise self._failed(error, remedy) from error
        try:
            return datasets.load_dataset(self.name, self.config, split=self.split)
        except Exception as error:
            remedy = "Check the name, configuration and split, and the network; or give a folder of this machine."
            raise self._failed(error, remedy) from error

    def _failed(self, error: Exception, remedy: str) -> DataError:
        return DataError(f"cannot be loaded: {_first_line(error)}", path=self._place, remedy=remedy)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Suppress the library's progress bars: xtrain shows its own."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
