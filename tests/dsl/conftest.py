"""Specs on disk for the tests of the language."""

from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec

DATA = Path(__file__).parent / "data"
BASE = (DATA / "quickstart.xtrain").read_text(encoding="utf-8")


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load texts: the first is the spec, keywords are further files. `base`: it overrides a good spec."""
    monkeypatch.chdir(tmp_path)

    def run(text, *sets, base=True, **files):
        Path("good.xtrain").write_text(BASE, encoding="utf-8")
        Path("spec.xtrain").write_text(('include "good.xtrain"\n' if base else "") + text, encoding="utf-8")
        for stem, content in files.items():
            Path(f"{stem}.xtrain").write_text(content, encoding="utf-8")
        return load_spec("spec.xtrain", sets)

    return run


@pytest.fixture
def good(load):
    """Like `load`, for what must load without a diagnostic; gives the spec."""

    def run(text, *sets, **files):
        loaded = load(text, *sets, **files)
        assert loaded.spec is not None, loaded.diagnostics.render()
        assert not loaded.diagnostics, loaded.diagnostics.render()
        return loaded.spec

    return run


@pytest.fixture
def codes(load):
    """Like `load`; gives the codes of the diagnostics in order."""

    def run(text, *sets, **files):
        return [d.code for d in load(text, *sets, **files).diagnostics]

    return run
