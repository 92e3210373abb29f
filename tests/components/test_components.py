"""Components: registered by one file each, named nowhere else, and each says all that is asked of it."""

import re
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from xtrain.dsl.schema import component
from xtrain.dsl.schema.component import Component, Registry, named, variants
from xtrain.dsl.schema.training import LOSSES, OPTIMIZERS, SCHEDULERS, Optimizer, learning_rate

ROOT = Path(__file__).parents[2]
REGISTRIES: tuple[Registry, ...] = (LOSSES, OPTIMIZERS, SCHEDULERS)
ALL = [pytest.param(registry, name, id=f"{registry.word} {name}") for registry in REGISTRIES for name in registry]


def test_each_is_one_file_with_the_name_of_the_component():
    for registry in REGISTRIES:
        folder = ROOT / "components" / registry.folder
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        own = {"user_part"}  # what functions of the user's own inherit from
        assert {name for name in files - own if not name.endswith("_torch")} == set(registry)
        assert all(registry[name].__module__.endswith(f".{registry.folder}.{name}") for name in registry)
        assert {registry.origin(name) for name in registry} == {"xtrain"}


@pytest.mark.parametrize(("registry", "name"), ALL)
def test_no_other_file_names_it(registry: Registry, name: str):
    """A name in quotes, in any file of the rooms that use components; examples of the language's pages aside."""
    if name in ("constant", "cosine", "linear"):  # words of other things too: forms of a curve, of other settings
        return
    found = []
    for room in ("dsl", "planner", "runtime", "tui", "cli"):
        for path in (ROOT / room).rglob("*.py"):
            if path.name.startswith("pages_") or path.name in ("vocabulary.py", "blocks.py"):
                continue  # texts for people, with examples
            code = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
            if re.search(rf"""["']{name}["']""", code):
                found.append(str(path.relative_to(ROOT)))
    assert not found


@pytest.mark.parametrize(("registry", "name"), ALL)
def test_it_says_how_it_is_written(registry: Registry, name: str):
    chosen = registry[name]
    assert issubclass(chosen, Component) and attrs.has(chosen)
    assert (chosen.__doc__ or "").startswith(f"`{registry.word} {name} {{ … }}`: ")
    assert chosen in variants(registry.default.__mro__[1])


def test_an_installed_package_offers_components(monkeypatch):
    registry = Registry[Optimizer]("optimizer", "optimizers")

    def load() -> None:
        @registry.register()
        @attrs.frozen
        class Mine(Optimizer):
            kind: str = named("mine")
            lr: float = learning_rate()

    offered = SimpleNamespace(load=load, dist=SimpleNamespace(name="theirs"))
    monkeypatch.setattr(component, "entry_points", lambda group: [offered] if group == "xtrain.components" else [])
    assert list(registry) == ["mine"] and registry.origin("mine") == "theirs"
    assert registry["mine"](lr=0.5).lr == 0.5 and registry.label().type.__args__ == ("mine",)


def test_losses_and_optimizers_have_a_torch_side():
    for registry in (LOSSES, OPTIMIZERS):
        for name in registry:
            assert (ROOT / "components" / registry.folder / f"{name}_torch.py").is_file()
