"""What the data is does not depend on how the plan has come: one identity of every source, by every way in."""

import ast
import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from rooms import ROOMS

from xtrain.components.sources import huggingface_run
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, from_json, load_plan
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.user_parts import user_source
from xtrain.runtime.feed.dataset_view import data_nodes
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.prepared import StoreIdentity, identify, prepared_from, source_of
from xtrain.runtime.feed.tokenizing import tokenize as tokenise
from xtrain.runtime.observe.provenance import describe

SPEC = """
use "parts.py"
experiment same {{ seed = 3, budget = 4 steps }}
model llama {{ dim = 32, layers = 1, heads = 2 }}
tokenizer bytes
dataset it {{ source = {source} }}
batch {{ sequence = 16, rows = 2 }}
optimizer adamw {{ lr = 1e-3 }}
"""
PARTS = """
from xtrain import source

@source
def counted(word, first: int, scale: float = 1.0, kinds: dict[str, int] = {}, marks=("x", "y")):
    for number in range(4):
        yield f"{word} {first + number} {scale} {list(kinds)} {list(marks)} " * 3
"""
# A source of every kind, with options out of the order of the alphabet.
TABLE = {
    "python_stdlib": "python_stdlib()",
    "text": 'text("z/*.txt", "a.txt")',
    "jsonl": 'jsonl("b.jsonl")',
    "parquet": 'parquet("c.parquet")',
    "arrow": 'arrow("d.arrow")',
    "mds": 'mds("f.mds")',
    "webdataset": 'webdataset("g.tar")',
    "tokens": 'tokens("e.npy", separator = 0, dtype = uint16)',
    "huggingface": 'huggingface("some/name", split = "test", config = "en")',
    "huggingface, a folder": 'huggingface("./z", split = "test")',
    "synthetic": "synthetic(documents = 400, length = 40, spread = 1)",
    "python": 'counted("w", scale = 2, first = 1, kinds = { web: 2, code: 1 }, marks = ["b", "a"])',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_run.HubDataset, "content", lambda self: [] if self.folder else ["ab"])
    (tmp_path / "z").mkdir()
    for name in ("z/m.txt", "z/n.txt", "a.txt", "b.jsonl", "c.parquet", "d.arrow", "f.mds", "g.tar"):
        (tmp_path / name).write_text(name)
    np.save(tmp_path / "e.npy", np.arange(8, dtype=np.uint16))
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def planned(source: str) -> Plan:
    Path("same.xtrain").write_text(SPEC.format(source=source))
    compiled = plan_from_spec("same.xtrain")
    assert compiled.plan is not None, list(compiled.diagnostics)
    return compiled.plan


def in_run_directory(plan: Plan) -> Plan:
    """As ranks that `xtrain run` has started read it, and a run that goes on from its directory."""
    return from_json(json.loads(describe(plan, "", None, "first", None)["plan.json"]))


def saved(plan: Plan) -> Plan:
    Path("plan.json").write_text(dumps(plan))
    return load_plan("plan.json")


def backwards(plan: Plan) -> Plan:
    """As a program might write it that has its own idea of order."""

    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(each) for each in value] if isinstance(value, list) else value

    return from_json(turned(json.loads(dumps(plan))))


WAYS: dict[str, Callable[[Plan], Plan]] = {
    "in memory, as under torchrun and `data build`": lambda plan: plan,
    "xtrain run": in_run_directory,
    "a saved plan under torchrun": saved,
    "a saved plan by xtrain run": lambda plan: in_run_directory(saved(plan)),
    "the plan of a run directory, run again": lambda plan: in_run_directory(in_run_directory(plan)),
    "written by another program": backwards,
}


def identity(plan: Plan) -> StoreIdentity:
    (node,) = data_nodes(plan).values()
    tokenizer = ByteTokenizer()
    return identify(source_of(plan, node, tokenizer), DocumentEncoder(tokenizer, node.args["reads"]), Path("cache"))


def test_the_table_has_every_source():
    assert {name.split(",")[0] for name in TABLE} == {*SOURCES, "python"}


@pytest.mark.parametrize("source", TABLE.values(), ids=TABLE.keys())
def test_every_way_in_finds_the_same_data(folder: Path, source: str):
    plan = planned(source)
    found = {name: identity(way(plan)) for name, way in WAYS.items()}
    assert len({each.key for each in found.values()}) == 1, found
    # Each also knows what earlier versions have called it, whichever way they had it.
    old = {before(plan), before(in_run_directory(plan))}
    assert all(old <= {*each.names} for each in found.values())


def before(plan: Plan) -> str:
    """The key that earlier versions gave to the data of this plan, as its keys stand."""
    (node,) = data_nodes(plan).values()
    source = source_of(plan, node, ByteTokenizer())
    options = {name: value for name, value in source.options.items() if not (name == "name" and source.files)}
    text = json.dumps([source.kind, source.reads.form, source.reads.fields, options])
    whole = blake2b(text.encode(), digest_size=16)
    for path in source.files:
        name = path.relative_to(source.base).as_posix().encode()
        whole.update(len(name).to_bytes(8, "little") + name + blake2b(path.read_bytes(), digest_size=32).digest())
    if source.kind == "huggingface" and not source.files:
        whole.update(bytes.fromhex("ab"))
    covers = {**identity(plan).covers, "content": whole.hexdigest()}
    return blake2b(json.dumps(covers, sort_keys=True).encode(), digest_size=16).hexdigest()


def test_names_of_old_stores_stay_what_they_were(folder: Path):
    """Taken from stores that an earlier version has made: by `xtrain run`, and by torchrun or `data build`."""
    names = identity(planned("synthetic(documents = 400, length = 40, spread = 1.0)")).names
    assert names == ("af7279b81238bf7f71b46f09993c9144", "871bd59960d3154c6b1fb0b667013ff8")


def test_a_store_of_an_earlier_version_is_opened_and_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plan = planned(TABLE["python"])
    (node,) = data_nodes(plan).values()
    prepared = prepared_from(plan, node, ByteTokenizer(), jobs=1)
    for name in identity(plan).names[1:3]:
        tokens = Path("runs/cache/tokens")
        (tokens / prepared.store.folder).rename(tokens / name)
        monkeypatch.setattr(tokenise, "_build", None)  # nobody tokenizes
        for way in WAYS.values():
            found = prepared_from(way(plan), node, ByteTokenizer(), jobs=1)
            assert (found.store.key, found.store.folder) == (prepared.store.key, name)
        prepared = found


def test_files_have_one_name_wherever_the_command_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Patterns that are absolute mean the same from every folder, and their data has been known by relative ones."""
    relative, absolute = identity(planned('text("z/*.txt")')), identity(planned(f'text("{folder}/z/*.txt")'))
    assert relative.key in absolute.names and absolute.key in relative.names
    plan = planned(f'text("{folder}/z/*.txt")')
    for elsewhere in ("z", "/"):
        monkeypatch.chdir(folder / elsewhere)
        assert identity_at(plan, folder).key == absolute.key


def identity_at(plan: Plan, folder: Path) -> StoreIdentity:
    (node,) = data_nodes(plan).values()
    source = source_of(plan, node, ByteTokenizer())
    return identify(source, DocumentEncoder(ByteTokenizer(), node.args["reads"]), folder / "cache")


def test_a_function_of_the_users_gets_the_same_arguments(folder: Path):
    plan = planned(TABLE["python"])
    texts = []
    for way in WAYS.values():
        (node,) = data_nodes(way(plan)).values()
        texts.append([*user_source(node.args["options"], folder)])
    assert texts[0][0].startswith("w 1 2.0 ['code', 'web'] ['b', 'a'] ")
    assert all(each == texts[0] for each in texts)


def test_json_is_digested_in_one_place():
    """A digest of JSON that is taken anywhere else would depend on the order of its keys."""
    package = Path(__file__).parents[3]
    found = []
    for room in ROOMS:
        for path in (package / room).rglob("*.py"):
            if "dumps" not in (text := path.read_text()):
                continue
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            digests = [call for call in calls if ast.unparse(call.func).endswith(("blake2b", "sha256", "update"))]
            if any("dumps(" in ast.unparse(argument) for call in digests for argument in call.args):
                found.append(path.relative_to(package).as_posix())
    assert found == ["plan/canonical.py"]
