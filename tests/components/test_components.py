"""Components: registered by one file each, named nowhere else, and each says all that is asked of it."""

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import attrs
import pytest
from other_packages import OTHER_STACKS
from rooms import ROOMS

from xtrain.contracts.actions import PlannedAction, PlannedTracker
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema import component
from xtrain.dsl.schema.actions import ACTIONS, action_of, by_default, saving, stopping
from xtrain.dsl.schema.adapters import ADAPTERS
from xtrain.dsl.schema.cluster import CLUSTERS, LAUNCHERS
from xtrain.dsl.schema.component import Component, Offer, Registry, named, variants
from xtrain.dsl.schema.data_components import LINKS, PACKINGS, SOURCES, TOKENIZERS
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.optimizers import OPTIMIZERS, SCHEDULERS, Optimizer, learning_rate
from xtrain.dsl.schema.parallel import STACKS, stack_of_node
from xtrain.dsl.schema.precision import BASES, RECIPES
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.schema.sweep import METHODS, Sweep
from xtrain.dsl.values import Metric
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import code_of
from xtrain.runtime.jobs.sweep import check_method

ROOT = Path(__file__).parents[2]
REGISTRIES: tuple[Registry, ...] = (
    ACTIONS, CLUSTERS, FAMILIES, LOSSES, OPTIMIZERS, SCHEDULERS, SOURCES, LINKS, PACKINGS, TOKENIZERS, TRACKERS, STACKS,
    BASES, RECIPES,
)  # fmt: skip
# Kinds whose components subclass a contract.
CONTRACTED = [kind for kind in (*REGISTRIES, ADAPTERS, LAUNCHERS) if kind.contract]
# Texts for people, with examples; and what drivers call devices.
TEXTS = ("vocabulary.py", "blocks.py", "synonyms.py", "device.py")
# What reads the checkpoints that DeepSpeed's own engine writes, whatever stack a run has.
OF_ENGINES = ("deepspeed_import.py", "checkpoint.py")
# Words of other things too: forms of a curve, of records, units, axes of a mesh, devices, the block of axes.
COMMON = (
    "constant", "cosine", "linear", "text", "tokens", "shard", "cpu", "other", "none", "bytes", "folder", "parallel",
    "here",
)  # fmt: skip
ALL = [pytest.param(registry, name, id=f"{registry.word} {name}") for registry in REGISTRIES for name in registry]

# Files of the rooms below in which the name of an action is that of another thing. In the dashboard and the
# command line they are words of `xtrain control`, verbs and kinds of events, which are named as what they are of.
BLOCKS = (
    "planner/graph/provenance.py",
    "planner/review/small_experiment.py",
    "planner/review/small_scope.py",
)  # `checkpoint { … }`, `log { … }`
COMMANDS = ("planner/graph/graph.py", "runtime/loop/commands.py", "runtime/jobs/launch.py")  # of `xtrain control`
WITH_OTHERS = (STACKS, BASES, OPTIMIZERS, LOSSES, RECIPES, FAMILIES)
OTHER_THINGS = {
    "fp8": (  # a format of products, and of files
        *("plan/hardware.py", "dsl/schema/precision.py", "dsl/schema/model.py", "dsl/schema/model_config.py"),
        *("plan/coded_weights.py", "runtime/store/stored_weights.py", "planner/review/small_scope.py"),
        "cli/export.py",
    ),
    "int8": ("components/sources/tokens_run.py", "dsl/schema/precision.py"),  # a type of arrays, and of `qat`
    "qwen2": ("runtime/store/gguf_file.py",),  # llama.cpp's name of a tokenizer
    "ddp": ("dsl/starter.py",),  # a starter
    "cross_entropy": ("runtime/inspect/repeats.py",),  # a field of a step
    "rowwise": ("runtime/inspect/code_ranks.py",),  # a style of transformers
    "adamw": ("planner/derive/serving.py",),  # the update that clients of a server ask for
    "export": (  # a request to a server
        "planner/graph/server.py",
        "server/engine/started.py",
    ),
    "log": (*BLOCKS, "dsl/checking/convert.py", "runtime/nn/updates.py"),  # a logarithm
    "checkpoint": (
        *BLOCKS,
        "planner/review/training.py",  # of estimates: the bytes of one
        "planner/review/diff.py",
        "planner/identity.py",  # what a run begins with
        "runtime/store/other_runs.py",
        "runtime/store/beginning.py",
    ),
    "eval": (
        *COMMANDS,
        "dsl/user_parts/files.py",  # the mode of `ast.parse`
        "runtime/inspect/rank_jobs.py",  # a kind of events
        "runtime/inspect/gaps.py",  # a field of gaps
        "planner/graph/saving.py",  # `ema { eval = … }`
        "runtime/nn/averages.py",
        "runtime/store/base_weights.py",
    ),
    "notify": ("runtime/loop/alerts.py",),  # the name of a thread
    "profile": (
        *COMMANDS,
        "dsl/checking/name_errors.py",  # a block of other trainers
        "runtime/loop/memory_report.py",  # a folder of the run
        "components/actions/profile_torch.py",  # what is under way, one of each at a time
    ),
    "memory_snapshot": ("components/actions/memory_snapshot_torch.py",),
    "row_losses": ("runtime/inspect/repeats.py",),  # a field of a batch
    "digests": (  # of documents
        "runtime/feed/digests.py",
        "runtime/feed/token_store.py",
        "runtime/feed/tokenizing/store_writer.py",
    ),
    "skip": (  # `oversized`
        "dsl/schema/data.py",
        "planner/graph/data.py",
        "runtime/feed/packing/rows.py",
        "runtime/feed/packing/rows.py",
    ),
    "stop": (
        *COMMANDS,
        "planner/review/training.py",  # the field of a tick and a trigger
        "plan/views.py",
        "server/engine/ranks.py",  # a message between ranks of a server
    ),
}  # fmt: skip


def test_each_is_one_file_with_the_name_of_the_component():
    for registry in REGISTRIES:
        folder = ROOT / "components" / registry.folder
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        own = {"user_part"}  # what functions of the user's own inherit from
        # Beside it stand its torch code, what runs it, and a part that is long.
        more = (*(f"{each}_" for each in (*registry, registry.unlisted) if each), "user_part_", "_")
        shared = {name for name in files - own - set(registry) if name.endswith("_torch")}  # code of several
        assert (
            {name for name in files - own - shared if not name.startswith(more)}
            <= {*registry, registry.unlisted}
            <= {*files, ""}
        )
        assert all(registry[name].__module__.endswith(f".{registry.folder}.{name}") for name in registry)
        assert {registry.origin(name) for name in registry} == {"xtrain"}


@cache
def sources() -> dict[str, str]:
    """Path → text of every file of the rooms that use components."""
    return {str(
        path.relative_to(ROOT),
    ): path.read_text() for room in ROOMS if room != "components" for path in (ROOT / room).rglob("*.py")}  # fmt: skip


@cache
def quoted() -> dict[str, list[str]]:
    """What stands in quotes, as it is or behind one word and a dot → files; comments and texts for people aside."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, text in sources().items():
        if Path(path).name.startswith("pages_") or Path(path).name in TEXTS:
            continue
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        for name in {*re.findall(r"""(?=["']((?:\w+\.)?\w+)["'])""", code)}:
            found[name].append(path)
    return found


@pytest.mark.parametrize(("registry", "name"), ALL)
def test_no_other_file_names_it(registry: Registry, name: str):
    """A name in quotes, in any file of the rooms that use components; examples of the language's pages aside."""
    if name in COMMON:
        return
    action = registry is ACTIONS
    rooms = ("dsl/", "text/", "plan/", "blocks/", "contracts/", "planner/", "runtime/", "server/engine/")
    rooms += () if action else ("tui/", "cli/")
    others = OTHER_THINGS.get(name, ()) if action or registry in WITH_OTHERS else ()
    assert not [path for path in quoted().get(name, ()) if path.startswith(rooms) and path not in others]


@pytest.mark.parametrize("name", ACTIONS)
def test_no_file_tests_for_the_op_of_an_action(name: str):
    """The class of the action says what a file has to know of it: `action_of(node.op).saves`."""
    assert not [path for place in ("tick", "event") for path in quoted().get(f"{place}.{name}", ())]
    assert action_of(f"tick.{name}") is ACTIONS[name] and action_of(f"step.{name}") is None


def test_no_text_of_another_file_names_a_family_or_stack():
    """Not as part of a longer text either, as the id of a node; docstrings and examples of the language's pages
    aside."""
    stacks = [name for name in STACKS if name not in COMMON]
    others = ("vocabulary.py", "blocks.py", "starter.py", "gguf_file.py", *OF_ENGINES)
    words = re.compile(rf"\b({'|'.join((*FAMILIES, *stacks))})\b(?!\.cpp)")
    found = []
    for path, code in sources().items():
        name = Path(path).name
        if name.startswith("pages_") or name in others or not words.search(code):
            continue
        tree = ast.parse(code)
        docstrings = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        texts = (each for each in ast.walk(tree) if isinstance(each, ast.Constant) and id(each) not in docstrings)
        found += [f"{name}: {each.value}" for each in texts if words.search(str(each.value))]
    assert not found


@pytest.mark.parametrize(("registry", "name"), ALL)
def test_it_says_how_it_is_written(registry: Registry, name: str):
    chosen = registry[name]
    assert issubclass(chosen, Component) and attrs.has(chosen)
    if registry in (ACTIONS, TRACKERS):  # where no word opens a block
        base = PlannedAction if registry is ACTIONS else PlannedTracker
        assert re.match(rf"`{name}\b[^`]*`: ", chosen.__doc__ or "")
        assert issubclass(chosen, base)
        assert not set(settings_of(chosen)) & set(dir(base)), "a setting of that name hides what the class says"
        return
    written = f"{registry.word} {name} {{ … }}`: " if not registry.call else f"pack({name})`: "
    written = name if registry in (SOURCES, LINKS) else "tokenizer " if registry is TOKENIZERS else written
    written = f"{registry.word} = {name}`: " if registry in (STACKS, RECIPES) else written
    assert (chosen.__doc__ or "").startswith(f"`{written}")
    base = next(each for each in chosen.__mro__ if "components" in each.__dict__)
    assert base.components is registry and chosen in variants(base)


def empty(word: str) -> Registry[Optimizer]:
    """A registry of optimizers without a file."""
    registry = Registry[Optimizer](word, "optimizers")
    registry._files = frozenset()
    return registry


def offered_by(folder, monkeypatch, load):
    """Make `folder` the place of an installed package, which calls `load` when its components are imported."""
    folder.mkdir(exist_ok=True)
    (folder / "theirs-1.dist-info").mkdir()
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text("[xtrain.components]\nours = theirs_components\n")
    (folder / "theirs_components.py").write_text("import theirs_loads\ntheirs_loads.load()\n")
    monkeypatch.setitem(sys.modules, "theirs_loads", SimpleNamespace(load=load))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(component, "offered_modules", component.offered_modules.__wrapped__)


def test_default_actions_are_found_without_loading_others():
    ticked = {name for name, kind in ACTIONS.items() if kind.default_ticks}
    assert {kind.kind for kind in by_default()} == ticked
    assert [name for name, kind in ACTIONS.items() if kind.saves] == [saving().kind]
    assert [name for name, kind in ACTIONS.items() if kind.stops] == [stopping().kind]


def test_an_installed_package_offers_components(monkeypatch, tmp_path):
    registry = empty("optimizer")
    monkeypatch.setattr(Registry, "asked", False)

    def load() -> None:
        @registry.register()
        @attrs.frozen
        class Mine(Optimizer):
            kind: str = named("mine")
            lr: float = learning_rate()

    offered_by(tmp_path, monkeypatch, load)
    assert list(registry) == ["mine"] and registry.origin("mine") == "theirs"
    assert registry["mine"](lr=0.5).lr == 0.5 and registry.label().type.__args__ == ("mine",)


@pytest.mark.parametrize(("place", "asked"), [
    ("theirs-1.dist-info/entry_points.txt", True),
    ("theirs.egg-info/entry_points.txt", True),
    ("theirs-1.egg/EGG-INFO/entry_points.txt", True),
    ("theirs-1.dist-info/notes.txt", False),
    ("theirs/entry_points.txt", False),
])  # fmt: skip
@pytest.mark.parametrize("text", ["[xtrain.components]\nours = theirs\n", "[console_scripts]\nours = theirs\n"])
def test_metadata_is_only_imported_for_a_package_that_may_offer_components(monkeypatch, tmp_path, place, asked, text):
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    assert component._may_be_offered() == (asked and ("xtrain" in text or ".egg/" in place))


def test_metadata_is_imported_for_archives_and_other_finders(monkeypatch, tmp_path):
    (tmp_path / "packages.zip").write_bytes(b"")
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages.zip")])
    assert component._may_be_offered()
    monkeypatch.setattr(sys, "path", [])
    assert not component._may_be_offered()
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_distributions=lambda context: [])])
    assert component._may_be_offered()


def test_a_package_that_cannot_be_loaded_is_a_warning_and_no_more(monkeypatch, tmp_path):
    monkeypatch.setattr(Registry, "faults", {})
    registry = empty("optimizer")
    monkeypatch.setattr(Registry, "asked", False)

    def load() -> None:
        raise ImportError("no module named nothing")

    offered = SimpleNamespace(load=load, dist=SimpleNamespace(name="theirs"))
    monkeypatch.setattr(component, "offered_modules", lambda: [offered])
    assert not list(registry)
    (tmp_path / "empty.xtrain").write_text("")
    warned = [each for each in load_spec(tmp_path / "empty.xtrain").diagnostics if each.code == "W206"]
    assert [each.message for each in warned] == [
        "the components of the package theirs cannot be loaded: ImportError: no module named nothing"
    ]


def test_a_package_that_is_loaded_within_an_import_is_loaded_again(monkeypatch):
    """It may import what is being imported; after that it has what it needs."""
    monkeypatch.setattr(Registry, "faults", {})
    registry = empty("optimizer")
    monkeypatch.setattr(Registry, "asked", False)
    under_way = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True))
    monkeypatch.setitem(sys.modules, "xtrain.under_way", under_way)

    def load() -> None:
        if under_way.__spec__._initializing:
            raise ImportError("cannot import name `Spec` from partially initialized module")

        @registry.register()
        @attrs.frozen
        class Mine(Optimizer):
            kind: str = named("mine")
            lr: float = learning_rate()

    offered = SimpleNamespace(load=load, dist=SimpleNamespace(name="theirs"))
    monkeypatch.setattr(component, "offered_modules", lambda: [offered])
    assert not list(registry) and not Registry.faults
    under_way.__spec__._initializing = False
    assert list(registry) == ["mine"] and registry.origin("mine") == "theirs" and not Registry.faults


@pytest.mark.parametrize(
    "first", ["dsl.load", "dsl.spec", "plan.resolved", "planner.costs.traffic", "components.collators.pack"]
)
def test_an_installed_package_with_stacks_is_loaded_whatever_is_imported_first(first):
    code = f"import xtrain.{first}\nfrom xtrain.dsl.schema.parallel import STACKS\n"
    code += "from xtrain.dsl.schema.component import Registry\nprint(sorted(STACKS), Registry.faults)"
    environment = {**os.environ, "PYTHONPATH": str(OTHER_STACKS)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    assert "'sharding', 'summing'" in done.stdout and done.stdout.endswith("{}\n"), done.stdout + done.stderr


def test_a_package_with_components_of_several_kinds_offers_all_of_them(monkeypatch):
    """Whichever kind is asked for first: its module is loaded once."""
    monkeypatch.setattr(Registry, "asked", False)
    first, second = empty("optimizer"), empty("other")
    loaded = []

    def load() -> None:
        if loaded:
            return
        loaded.append(True)
        for registry in (first, second):

            @registry.register()
            @attrs.frozen
            class Mine(Optimizer):
                kind: str = named("mine")
                lr: float = learning_rate()

    offered = SimpleNamespace(load=load, dist=SimpleNamespace(name="theirs"))
    monkeypatch.setattr(component, "offered_modules", lambda: [offered])
    assert first.origin("mine") == second.origin("mine") == "theirs"


def test_every_contract_is_that_of_a_kind():
    files = ((path, ast.parse(path.read_text())) for path in (ROOT / "contracts").glob("*.py"))
    classes = ((path, each.name) for path, tree in files for each in tree.body if isinstance(each, ast.ClassDef))
    named = {f"xtrain.contracts.{path.stem}.{name}" for path, name in classes if name.startswith("Planned")}
    assert named == {kind.contract for kind in CONTRACTED}


@pytest.mark.parametrize("registry", CONTRACTED, ids=lambda kind: kind.word)
def test_components_subclass_their_contract(registry: Registry):
    contract = resolve_name(registry.contract)
    users = [registry.of_users] if registry.takes_functions else []
    for chosen in (*registry.values(), *users):
        assert issubclass(chosen, contract)

    class Old(contract.__mro__[1]):
        """A component of a package that knows only the class of the language."""

    fields = {registry.key: attrs.field(default="old", type=str)}
    made = attrs.make_class("Old", fields, bases=(Old,), frozen=True)
    module = contract.__module__
    with pytest.raises(TypeError, match=f"Old does not subclass {contract.__name__}; import it from {module}"):
        registry.register()(made)
    assert "old" not in registry


def test_each_has_the_module_that_runs_it():
    ends = (
        (LOSSES, "torch"),
        (OPTIMIZERS, "torch"),
        (LINKS, "torch"),
        (SOURCES, "run"),
        (PACKINGS, "run"),
        (TOKENIZERS, "run"),
        (TRACKERS, "run"),
        (BASES, "torch"),
    )
    for registry, end in ends:
        stored = (name for name in registry if name != "none")  # which stores nothing
        names = (*stored, *(("user_part",) if registry in (SOURCES, LINKS) else ()))
        assert all((ROOT / "components" / registry.folder / f"{name}_{end}.py").is_file() for name in names)


def test_stacks_that_wrap_the_model_have_a_torch_side():
    for name, stack in STACKS.items():
        assert (ROOT / "components" / "stacks" / f"{name}_torch.py").is_file() == stack.wraps()
        assert stack_of_node(stack.node()) is (stack if stack.wraps() else None)


def test_actions_with_a_node_have_a_torch_side():
    for name, kind in ACTIONS.items():
        assert (ROOT / "components" / "actions" / f"{name}_torch.py").is_file() != (kind.stops or kind.skips)


@pytest.mark.parametrize("registry", [ACTIONS, OPTIMIZERS], ids=lambda registry: registry.word)
def test_a_torch_side_of_a_package_that_cannot_be_imported_is_an_error_with_its_reason(monkeypatch, registry):
    name = next(iter(registry))
    monkeypatch.setattr(registry[name], "offer", Offer(registry.word, name, "a-package"))
    with pytest.raises(
        EnvironmentFault, match=f"the {registry.word} {name} of the package a-package cannot run"
    ) as one:
        code_of(registry[name], "no_such_module")
    assert one.value.code == "X715" and "ModuleNotFoundError: No module named 'no_such_module'" in str(one.value)


def test_a_method_of_a_package_that_cannot_suggest_is_an_error_before_any_trial(monkeypatch):
    method = METHODS["tpe"]
    monkeypatch.setattr(method, "offer", Offer("method", "tpe", "a-package"))
    monkeypatch.setattr(method, "packages", ())
    monkeypatch.setattr(method, "run_module", classmethod(lambda cls: "no_such_module"))
    sweep = Sweep(over={}, objective=Metric("eval.code.loss"), method=method())
    with pytest.raises(EnvironmentFault, match="the method tpe of the package a-package cannot run") as one:
        check_method(sweep)
    assert one.value.code == "X715"


def test_one_action_is_what_a_run_does_by_itself():
    """A run saves, and ends, by itself: the planner finds the actions by what they say they do."""
    assert [name for name, kind in ACTIONS.items() if kind.saves] == ["checkpoint"]
    assert [name for name, kind in ACTIONS.items() if kind.stops] == ["stop"]
