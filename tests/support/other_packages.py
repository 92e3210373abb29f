"""The package `theirs` of `other_package`, as one that is installed in this process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from xtrain.dsl.schema.log import TRACKERS
from xtrain.dsl.schema.model import FAMILIES

OTHER_PACKAGE = Path(__file__).parent / "other_package"


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its components are registered inside."""
    monkeypatch.syspath_prepend(OTHER_PACKAGE)
    registries = (FAMILIES, TRACKERS)
    before = [dict(registry.items()) for registry in registries]
    import theirs  # noqa: F401  # pyright: ignore[reportMissingImports]

    yield
    for registry, own in zip(registries, before, strict=True):
        registry._own.clear()
        registry._own.update(own)
    for module in ("theirs", "theirs_torch", "theirs_run"):
        sys.modules.pop(module, None)
