"""Everything that publishes files: a power cut leaves what was there or what is new, and what has returned lasts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import made_records
import numpy as np
import pytest
import tokenising
from power_cut import PowerCut
from small_checkpoints import save

from xtrain.cli import rewrite
from xtrain.components.packings.sequential_run import pack
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.files import replace_file
from xtrain.runtime.base.json_lines import add_to_last, trim_after
from xtrain.runtime.feed.packing.stored_rows import FILES, cached_rows, cached_split, open_rows
from xtrain.runtime.feed.prepared import build_store
from xtrain.runtime.feed.records import BadRecordReport
from xtrain.runtime.feed.token_store import TokenStore
from xtrain.runtime.feed.tokenizing import tokenize as tokenise
from xtrain.runtime.feed.tokenizing.tokenize import CLAIM
from xtrain.runtime.sampling.reference_column import open_column, write_column
from xtrain.runtime.store.checkpoints import CheckpointFolder, Publisher
from xtrain.runtime.store.export_folder import new_folder
from xtrain.runtime.store.rollback import RollbackState, read_rollback

OPENED = Path("/proc/self/fd")


class Publication(NamedTuple):
    name: str
    before: Callable[[Path], object]
    change: Callable[[Path], object]
    read: Callable[[Path], Any]
    """What a reader takes from the folder: of a cut it is as `before` has left it, or as `change` has."""


def text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def checkpoint(root: Path) -> Any:
    """What a run resumes from, with its content; every checkpoint that has its name is whole."""
    folder = CheckpointFolder(root)
    assert all(entry.flaws(content=True) == [] for entry in folder.published())
    latest = folder.latest()
    if latest is None:
        return None
    shard = next(path for path in sorted(latest.path.iterdir()) if path.name in ("__0_0.distcp", "state.pt"))
    return latest.step, shard.read_bytes()


def saved(step: int, backend: Any, content: bytes = b"tensors") -> Callable[[Path], object]:
    return lambda root: save(CheckpointFolder(root), step, "best", backend=backend, content=content)


def exported(root: Path) -> None:
    with new_folder(root / "model") as folder:
        durable.write(folder / "config.json", "{}")
        (folder / "weights").write_bytes(b"weights")
        durable.sync(folder / "weights")


def model(root: Path) -> Any:
    return {path.name: path.read_bytes() for path in (root / "model").iterdir()} if (root / "model").exists() else None


def rolled_back(step: int) -> Callable[[Path], object]:
    undone = {"from_step": step, "loader": {}, "nonfinite": {}, "newer": {}}
    return lambda root: RollbackState(checkpoint=f"ckpt-s{step:012}", seal="", **undone).write(root)


def log_probabilities(root: Path) -> None:
    write_column(root / "column", 3, "fp32", {}, [(np.arange(3), np.full(3, -2.0))], replaces=False)


def column(root: Path) -> Any:
    found = open_column(root / "column", 3, "fp32")
    return None if found is None else found.numbers.tolist()


def hold_out(root: Path) -> None:
    offsets = np.array([0, 3, 12, 16, 46])
    store = TokenStore(key="", tokens=np.arange(46), offsets=offsets, num_files=1, bad_records=BadRecordReport())
    cached_split(store, root, 0.3, 7)


def held_out(root: Path) -> Any:
    folders = list(root.glob("split-*"))
    return [np.load(folders[0] / name).tolist() for name in FILES] if folders else None


def metrics(root: Path) -> Any:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_bytes().splitlines()]


def records(*steps: int) -> Callable[[Path], object]:
    lines = "".join(json.dumps({"step": step, "time": 1.0, "loss": 2.0}) + "\n" for step in steps)
    return lambda root: (root / "metrics.jsonl").write_text(lines)


def kept_steps(root: Path) -> int:
    """Dropped records are kept elsewhere before they are dropped."""
    steps = [found["step"] for found in metrics(root)]
    assert len(steps) == 3 or '"step": 3' in (text(root / "superseded/metrics.jsonl") or "")
    return len(steps)


PUBLICATIONS = (
    Publication("a file", lambda root: (root / "a").write_text("old"), lambda root: durable.write(root / "a", "new"),
        lambda root: text(root / "a")),
    Publication("a file of a cache", lambda root: (root / "a").write_text("old"),
        lambda root: replace_file(root / "a", b"new"), lambda root: text(root / "a")),
    Publication("a second name", lambda root: ((root / "one").write_text("one"), (root / "two").write_text("two")),
        lambda root: durable.name_also(root / "two", root / "one"), lambda root: text(root / "one")),
    Publication("a spec that is rewritten", lambda root: (root / "a.xtrain").write_text("old"),
        lambda root: rewrite.write(root / "a.xtrain", b"new"), lambda root: text(root / "a.xtrain")),
    Publication("the first checkpoint", lambda root: None, saved(1, "dcp"), checkpoint),
    Publication("a checkpoint of many files", saved(1, "dcp"), saved(2, "dcp"), checkpoint),
    Publication("a checkpoint of one file", saved(1, "file"), saved(2, "file"), checkpoint),
    Publication("a step that is saved again", lambda root: (saved(1, "dcp")(root), saved(2, "dcp")(root)),
        saved(2, "dcp", b"again"),
        lambda root: found if (found := checkpoint(root)) != (1, b"tensors") else (2, b"tensors")),
    Publication("what is too old", lambda root: [saved(step, "dcp")(root) for step in (1, 2, 3)],
        lambda root: Publisher(CheckpointFolder(root)).retain(1),
        lambda root: (checkpoint(root), len(CheckpointFolder(root).published()) < 3)),
    Publication("an export", lambda root: None, exported, model),
    Publication("what a run goes back to", rolled_back(1), rolled_back(2), read_rollback),
    Publication("log-probabilities", lambda root: None, log_probabilities, column),
    Publication("packed rows", lambda root: None,
        lambda root: cached_rows(root / "rows", lambda: pack(np.array([3, 9, 4]), 16, "split")),
        lambda root: None if (rows := open_rows(root / "rows")) is None else rows.fingerprint()),
    Publication("documents that are held out", lambda root: None, hold_out, held_out),
    Publication("records without later steps", records(1, 2, 3),
        lambda root: trim_after(root / "metrics.jsonl", 2, root / "superseded/metrics.jsonl"), kept_steps),
    Publication("a record with later metrics", records(1, 2),
        lambda root: add_to_last(root / "metrics.jsonl", made_records.metrics(2, loss=3.0)),
        lambda root: [found["loss"] for found in metrics(root)]),
)  # fmt: skip


@pytest.mark.parametrize("publication", PUBLICATIONS, ids=lambda publication: publication.name)
def test_a_power_cut_leaves_what_was_there_or_what_is_new(tmp_path, publication):
    root = tmp_path / "folder"
    root.mkdir()
    publication.before(root)
    old = publication.read(root)
    opened = len([*OPENED.iterdir()])
    with PowerCut(root) as cut:
        publication.change(root)
    assert len([*OPENED.iterdir()]) == opened
    new = publication.read(root)
    assert old != new
    for image in cut.images(tmp_path):
        assert publication.read(image) in (old, new), sorted(path.name for path in image.rglob("*"))
    for image in cut.images_after(tmp_path):
        assert publication.read(image) == new


def test_a_store_of_tokens_goes_on_after_a_power_cut_at_any_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "COMMIT_SECONDS", 0.0)  # a journal for each unit
    folder, cache = (
        tokenising.write_lines(tmp_path / "in", [["one", "two"], ["#", "three"], ["!bad x"]]),
        tmp_path / "c",
    )
    cache.mkdir()
    with PowerCut(cache) as cut:
        store = build_store(tokenising.lines_of(folder), tokenising.BytesEncoder(), cache, jobs=1)
    whole = tokenising.contents(cache / store.key)
    for image in (*cut.images(tmp_path), *cut.images_after(tmp_path)):
        for claim in image.glob(f"{CLAIM}*"):  # of a process that is gone
            claim.unlink()
        build_store(tokenising.lines_of(folder), tokenising.BytesEncoder(), image, jobs=1)
        assert tokenising.contents(image / store.key) == whole
