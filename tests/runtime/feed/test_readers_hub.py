"""Datasets of the Hugging Face library, from folders; the network is never asked."""

import json
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.records import BadRecord, SourceRecord
from xtrain.runtime.feed.sources.source import DataSource, open_source

datasets: Any = None  # the library
TEXTS = [f"text {index} é" for index in range(2500)]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Imported where these tests run, and not in every process that collects them: it takes half a second."""
    global datasets
    datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cache of its own, and no network: what is tried is listed."""
    tried: list[str] = []

    def refuse(self: socket.socket, address: Any) -> None:
        tried.append(str(address))
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: refuse(None, host))  # type: ignore[arg-type]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tried


def hub(name: str, base: Path, *, split: str = "train", config: str | None = None, **reads: str) -> DataSource:
    options = {"name": name, "config": config, "split": split}
    return open_source("huggingface", options=options, reads=reads, base=base)


def rows_of(source: DataSource) -> list[SourceRecord | BadRecord]:
    copy = pickle.loads(pickle.dumps(source))
    return [row for unit in source.units() for row in copy.read(pickle.loads(pickle.dumps(unit)))]


def test_a_saved_dataset_is_read_row_by_row(tmp_path: Path, alone: list[str]):
    datasets.Dataset.from_dict({"id": range(2500), "text": TEXTS}).save_to_disk(tmp_path / "saved")
    source = hub("saved", tmp_path)
    place = f"{tmp_path / 'saved'}, split train"
    assert rows_of(source) == [SourceRecord(text, f"{place}, row {row}") for row, text in enumerate(TEXTS, start=1)]
    assert len({unit.line for unit in source.units()}) >= 3
    assert not (tmp_path / "cache").exists()
    assert alone == []


def test_what_was_selected_before_it_was_saved_is_what_is_read(tmp_path: Path):
    whole = datasets.Dataset.from_dict({"text": TEXTS})
    whole.select([7, 3, 2000]).save_to_disk(tmp_path / "saved")
    assert [row.content for row in rows_of(hub("saved", tmp_path))] == [TEXTS[7], TEXTS[3], TEXTS[2000]]  # type: ignore[union-attr]


def test_the_split_of_a_saved_dataset_is_chosen_and_checked(tmp_path: Path):
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert [row.content for row in rows_of(hub("saved", tmp_path, split="test"))] == ["test"]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"saved: no split `dev`\n.*`train`, `test`"):
        rows_of(hub("saved", tmp_path, split="dev"))
    datasets.Dataset.from_dict({"text": ["a"]}, split="test").save_to_disk(tmp_path / "one")
    assert len(rows_of(hub("one", tmp_path, split="test"))) == 1
    with pytest.raises(DataError, match=r"one: no split `train`\n.*`test`"):
        rows_of(hub("one", tmp_path))
    with pytest.raises(DataError, match="has no configurations"):
        rows_of(hub("one", tmp_path, split="test", config="en"))


def test_a_folder_of_data_files_is_read_by_the_library_without_the_network(tmp_path: Path, alone: list[str]):
    folder = tmp_path / "files"
    folder.mkdir()
    for part in ("train", "test"):
        lines = [json.dumps({"meta": {"text": f"{part} {index}"}}) for index in range(3)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    source = hub("files", tmp_path, split="test", text="meta.text")
    assert [row.content for row in rows_of(source)] == ["test 0", "test 1", "test 2"]  # type: ignore[union-attr]
    assert [row.content for row in rows_of(hub("files", tmp_path, split="train[:1]", text="meta.text"))] == ["train 0"]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"cannot be loaded: .*dev"):
        rows_of(hub("files", tmp_path, split="dev"))
    assert alone == []


def test_conversations_and_missing_columns(tmp_path: Path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    datasets.Dataset.from_dict({"talk": [talk], "id": [1]}).save_to_disk(tmp_path / "saved")
    assert rows_of(hub("saved", tmp_path, form="chat", messages="talk"))[0].content == talk  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"no column `text`\n.*`talk`, `id`"):
        rows_of(hub("saved", tmp_path))


def test_a_folder_without_anything_in_it_is_an_error(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="matches no file"):
        hub("empty", tmp_path)


def test_the_fingerprint_follows_the_content_but_not_the_place(tmp_path: Path):
    def fingerprint(folder: str, text: str) -> str:
        datasets.Dataset.from_dict({"text": [text]}).save_to_disk(tmp_path / folder)
        return hub(folder, tmp_path).fingerprints()[0]

    # The library writes a fingerprint of its own into the folder: a copy has it too, another text has another.
    first = fingerprint("one", "a")
    assert fingerprint("two", "b") != first
    (tmp_path / "one").rename(tmp_path / "moved")
    assert hub("moved", tmp_path).fingerprints()[0] == first


@pytest.mark.parametrize("damage", ["data", "state"])
def test_a_damaged_folder_is_an_error(damage: str, tmp_path: Path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow" if damage == "data" else "state.json")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"saved, split train: (cannot be loaded|damaged)"):
        rows_of(hub("saved", tmp_path))


def test_the_hub_is_asked_only_for_what_is_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    there = ""

    def load(name: str, config: str | None, split: str) -> Any:
        asked.append(datasets.config.HF_HUB_OFFLINE)
        if there == "cache" or (there == "hub" and not datasets.config.HF_HUB_OFFLINE):
            return datasets.Dataset.from_dict({"text": [f"{name} {config} {split}"]})
        raise ConnectionError("cannot be reached\nat length")

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = hub("nobody/nothing", tmp_path, config="en", split="test")
    for place, attempts in (("cache", [True]), ("hub", [True, False])):
        there = place
        asked.clear()
        (row,) = rows_of(source)
        assert row == SourceRecord("nobody/nothing en test", "nobody/nothing, en, split test, row 1")
        assert asked == attempts
    there = "nowhere"
    with pytest.raises(
        DataError, match=r"nobody/nothing, en, split test: cannot be loaded: cannot be reached\n.*a folder"
    ):
        rows_of(source)
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_path_that_is_not_there_is_no_name_of_the_hub(tmp_path: Path, alone: list[str]):
    with pytest.raises(DataError, match="no such folder"):
        rows_of(hub("./nothing", tmp_path))
    assert alone == []


def test_offline_the_hub_is_not_asked(tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE"):
        rows_of(hub("nobody/nothing", tmp_path))
    assert alone == []


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"source `huggingface` needs the package datasets\n.*'xtrain\[data\]'"):
        rows_of(hub("nobody/nothing", tmp_path))


def test_a_saved_dataset_that_names_no_split_is_not_any_split(tmp_path: Path):
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "saved"))
    for split, found in (("train", 2), ("test", None)):
        options = {"name": "saved", "config": None, "split": split}
        source = open_source("huggingface", options=options, reads={"form": "text", "text": "text"}, base=tmp_path)
        if found is None:
            with pytest.raises(DataError, match="no split `test`"):
                list(source.units())
        else:
            assert sum(1 for unit in source.units() for _ in source.read(unit)) == found
