"""Compiled code: kept under everything it is made of, shared by processes, and never in the way of a run."""

import os
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from xtrain.runtime.base import jit
from xtrain.runtime.base.jit import kernel

INNER = """
from xtrain.runtime.base.jit import kernel

{constant}

@kernel
def inner(value):
    return value {operation} STEP
"""
OUTER = """
from xtrain.runtime.base.jit import kernel

@kernel
def outer(value):
    return later(value)

@kernel
def later(value):
    return inner(value) * 2
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jit.config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(folder: Path, name: str, text: str, **more: object) -> ModuleType:
    """The module of this text. Its file always has the same time, so that time says nothing about it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    os.utime(path, (10**9, 10**9))
    module = ModuleType(name)
    module.__dict__.update(more)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def outer(folder: Path, constant: str = "STEP = 1", operation: str = "+") -> tuple[int, int]:
    """outer(10) of a process that begins anew, and how much compiled code it found."""
    inner = load(folder, "inner", INNER.format(constant=constant, operation=operation)).inner
    compiled = load(folder, "outer", OUTER, inner=inner).outer
    return compiled(10), sum(compiled.stats.cache_hits.values())


def test_code_is_compiled_once(tmp_path: Path, cache: Path):
    assert outer(tmp_path / "a") == (22, 0)
    assert outer(tmp_path / "a") == (22, 1)


@pytest.mark.parametrize("changed", [{"operation": "-"}, {"constant": "STEP = 3"}])
def test_what_a_called_kernel_of_another_file_is_made_of_counts(tmp_path: Path, cache: Path, changed: dict[str, str]):
    """Also where the file's time and size stay as they were."""
    assert outer(tmp_path / "a") == (22, 0)
    expected = 2 * eval("10 {operation} STEP".format(**{"operation": "+", **changed}), {}, _constant(changed))
    assert outer(tmp_path / "a", **changed) == (expected, 0)
    assert outer(tmp_path / "a") == (22, 1)


def _constant(changed: dict[str, str]) -> dict[str, float]:
    return {"STEP": float(changed.get("constant", "STEP = 1").split("=")[1])}


@pytest.mark.parametrize("damage", [b"", None])
def test_damaged_code_is_compiled_again(tmp_path: Path, cache: Path, damage: bytes | None):
    outer(tmp_path / "a")
    files = [path for path in cache.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert len(files) >= 2
    for path in files:
        path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    assert outer(tmp_path / "a") == (22, 0)
    assert outer(tmp_path / "a") == (22, 1)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(jit.config, "CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert outer(tmp_path / "a") == (22, 0)
    assert outer(tmp_path / "a") == (22, 0)


def test_a_disk_that_is_full_is_done_without(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert outer(tmp_path / "a") == (22, 0)


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(jit.config, "CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert outer(tmp_path / "a") == (22, 0)


def test_the_folder_is_the_users_and_the_projects_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jit.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    outer(tmp_path / "a")
    assert list((tmp_path / "home" / "xtrain" / "numba").iterdir())
    assert jit.config.CACHE_DIR == ""


def test_processes_that_compile_for_other_types_at_once_keep_to_their_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both see an empty index; one writes the last index, the other the last code."""
    text = INNER.format(constant="STEP = 1", operation="+")
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_load_index", lambda _: {})
        patch.setattr(IndexDataCacheFile, "_save_data", lambda *call: written.append(call))
        for value in (np.int64(3), np.float32(0.5)):
            load(tmp_path / "a", "inner", text).inner(value)
    for file, name, code in reversed(written):
        file._save_data(name, code)
    inner = load(tmp_path / "a", "inner", text).inner
    assert [inner(np.float32(0.5)), inner(np.int64(3))] == [1.5, 4]
    assert sum(inner.stats.cache_hits.values()) == 1


def test_a_kernel_lets_other_threads_run():
    @kernel
    def work(rounds):
        value = np.uint64(1)
        for _ in range(rounds):
            value ^= value << np.uint64(13)
            value ^= value >> np.uint64(7)
        return value

    work(1)
    lasted = []

    def timed() -> None:
        begin = time.perf_counter()
        work(200_000_000)
        lasted.append(time.perf_counter() - begin)

    thread = threading.Thread(target=timed)
    before, longest = time.perf_counter(), 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        before, longest = now, max(longest, now - before)
    longest = max(longest, time.perf_counter() - before)
    assert longest < lasted[0] / 2  # else we stood still while it ran
