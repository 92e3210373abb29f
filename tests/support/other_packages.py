"""Packages that offer components, as installed in this process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from xtrain.dsl.schema.component import Registry
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.parallel import STACKS
from xtrain.dsl.schema.run import TRACKERS

OTHER_PACKAGE = Path(__file__).with_name("other_package")
OTHER_STACKS = Path(__file__).with_name("package_with_stacks")


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, package: Path = OTHER_PACKAGE) -> Iterator[None]:
    """The components of a package are registered inside."""
    registries = (FAMILIES, TRACKERS, STACKS)
    before = [dict(registry.items()) for registry in registries]  # looks for installed packages, without this one
    monkeypatch.syspath_prepend(package)
    (metadata,) = package.glob("*.dist-info")
    modules = [path.stem for path in package.glob("*.py")]
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_offers", metadata.name.partition("-")[0])
        for module in modules:
            if not module.endswith(("_torch", "_run")):
                import_module(module)
    try:
        yield
    finally:  # also where the test fails
        for registry, own in zip(registries, before, strict=True):
            ours = {name: each for name, each in registry._own.items() if each.offer and each.offer.package == "xtrain"}
            registry._own.clear()
            registry._own.update(own | ours)
        for module in modules:
            sys.modules.pop(module, None)
