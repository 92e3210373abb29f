"""The JSON Schema: a schema, one that specs fit, and one that what the language refuses does not fit either."""

import copy
import json
import re
from pathlib import Path

import attrs
import called_curves
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from xtrain.dsl.evaluation.values import quantity_text
from xtrain.dsl.load import load_spec
from xtrain.dsl.reference.json_schema import DIALECT, json_schema
from xtrain.dsl.reference.reference import every_page
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import settings_of, spelled
from xtrain.dsl.spec_text import spec_json, value_json
from xtrain.dsl.values import Quantity

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
SCHEMA = json.loads(json.dumps(json_schema()))
VALIDATOR = Draft202012Validator(SCHEMA)
SPECS = [*sorted((ROOT / "specs").glob("*.xtrain")), *sorted((ROOT / "dsl" / "starters").glob("*.xtrain"))]
SPECS += [DATA / "quickstart.xtrain", DATA / "every_form.xtrain"]


def as_json(path):
    return json.loads(json.dumps(spec_json(load_spec(path).require())))


PARTS = """
from xtrain import action, optimizer

@optimizer
def mine(groups, lr, beta: float = 0.9): ...

@action
def look(context, far: int): ...
"""
GOOD = as_json(DATA / "every_form.xtrain")
DENSE = as_json(DATA / "quickstart.xtrain")


def test_it_is_a_schema():
    assert SCHEMA["$schema"] == DIALECT
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_specs_fit(path):
    assert [error.message for error in VALIDATOR.iter_errors(as_json(path))] == []


def test_functions_of_the_users_own_fit_and_mistakes_in_built_in_ones_do_not(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    text = DATA.joinpath("quickstart.xtrain").read_text()
    own = re.sub(r"(?m)^optimizer .*$", "optimizer mine { lr = 0.1, beta = 0.5 }", text)
    assert own != text
    (tmp_path / "own.xtrain").write_text(f'use "parts.py"\n{own}\nevery 2 steps look {{ far = 2 }}\n')
    found = as_json(tmp_path / "own.xtrain")
    assert found["optimizer"] == {"kind": "mine", "lr": 0.1, "clip": 1.0, "beta": 0.5}
    assert [error.message for error in VALIDATOR.iter_errors(found)] == []
    found["optimizer"]["kind"] = "adamw"
    assert not VALIDATOR.is_valid(found), "adamw has no beta"


def test_models_of_folders_fit(tmp_path, monkeypatch):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264,
    }  # fmt: skip
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    quickstart = DATA.joinpath("quickstart.xtrain").read_text()
    hub = {"repo": "org/name", "revision": commit}
    for label, folder in ((f'"{snapshot}"', str(snapshot)), (f'hub("org/name", revision = "{commit}")', hub)):
        text = re.sub(r"(?m)^model .*$", f"model {label} {{ weights = none }}", quickstart)
        (tmp_path / "folder.xtrain").write_text(text)
        found = as_json(tmp_path / "folder.xtrain")
        assert found["model"]["folder"] == folder and found["model"]["dim"] == 32
        assert [error.message for error in VALIDATOR.iter_errors(found)] == []
    for wrong in ({"repo": "org/name"}, {**hub, "path": "here"}, 3):
        assert not VALIDATOR.is_valid(changed(found, "model/folder", wrong))


def walked(schema, path=()):
    """(path, schema) of every schema inside one."""
    yield path, schema
    for key, each in schema.get("properties", {}).items():
        if isinstance(each, dict):
            yield from walked(each, (*path, key))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walked(schema[key], (*path, key))
    for name, each in schema.get("$defs", {}).items():
        yield from walked(each, (*path, "$defs", name))


def test_every_setting_is_described():
    described = {schema.get("description") for _, schema in walked(SCHEMA)}
    for page in every_page():
        for _, meta in settings_of(page.block).values():
            assert meta.doc in described
    roles = {schema["x-role"] for _, schema in walked(SCHEMA) if "x-role" in schema}
    assert roles == {"experiment", "budget", "cadence", "path", "mesh", "execution"}


def test_every_default_fits_its_own_schema():
    found = [(path, schema) for path, schema in walked(SCHEMA) if "default" in schema]
    assert len(found) > 70
    for path, schema in found:
        whole = {**schema, "$defs": SCHEMA["$defs"]}
        assert not list(Draft202012Validator(whole).iter_errors(schema["default"])), path


def changed(spec, path, value):
    """A copy of a spec with one value changed; `...` removes it."""
    spec = copy.deepcopy(spec)
    *parents, last = path.split("/")
    place = spec
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return spec


@pytest.mark.parametrize(("weight", "fits"), [(0.5, True), ("1 epoch", True), ("0.5 epochs", True), ("2 steps", False)])
@pytest.mark.parametrize("path", ["mixture/web", "phase/early/mix/web"])
def test_a_weight_is_a_number_or_epochs(path, weight, fits):
    assert VALIDATOR.is_valid(changed(GOOD, path, weight)) == fits


@pytest.mark.parametrize(("path", "value"), [
    ("nonsense", {}),
    ("model", ...),
    ("dataset", {}),
    ("optimizer/nonsense", 1),
    ("optimizer/lr", ...),
    ("optimizer/lr", 0),
    ("optimizer/lr", "1e-3"),
    ("optimizer/betas", [0.9]),
    ("optimizer/betas", [0.9, 1]),
    ("optimizer/kind", "adagrad"),
    ("model/layers", 4.5),
    ("model/layers", 0),
    ("model/layers", True),
    ("model/kv_heads", "four"),
    ("model/kv_heads", None),
    ("model/family", "llama"),  # which has no experts
    ("model/experts", ...),  # which mixtral needs
    ("scheduler/kind", "cosine"),  # which has no decay
    ("scheduler/warmup", "10 s"),
    ("scheduler/warmup", 10),
    ("scheduler/warmup", "10"),
    ("experiment/budget", "20%"),
    ("loss/chunk", "1 GB"),
    ("parallel/tp", 2),
    ("parallel/tp/size", 0),
    ("parallel/pp/schedule", "dual_pipe"),
    ("dataset/web/source", "a.txt"),
    ("dataset/web/source", {"parquet": {"pattern": ["a"]}}),
    ("dataset/web/source", {"my_own": ["a"]}),
    ("mixture", {"web": -1}),
    ("mixture", {"web": "80%"}),
    ("mixture", {"temperature": 0}),
    ("phase", {"anneal": {}}),
    ("phase", {"anneal": {"from": "90%", "mix": {"web": -1}}}),
    ("dataset/web/source", {"text": {"patterns": ["a"]}, "jsonl": {"patterns": ["a"]}}),
    ("collate", ["flatten"]),
    ("every/0/every", "3 samples"),
    ("every/0/actions", []),
    ("every/0/actions", [{"export": {}}]),
    ("every/1/actions", [{"eval": {}}]),
    ("on/0/event", "sighup"),
    ("on/0/count", 3),  # which only nan has
    ("launch/nodes", "many"),
])  # fmt: skip
def test_what_the_language_refuses_does_not_fit(path, value):
    assert VALIDATOR.is_valid(GOOD)
    assert not VALIDATOR.is_valid(changed(GOOD, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [("model/kv_heads", "auto"), ("optimizer/clip", None), ("scheduler/warmup", "5%"),
     ("scheduler/warmup", "1_000 steps"), ("experiment/budget", "1.5B tokens"), ("loss/chunk", "512MiB"),
     ("every/0/every", "30 min"),
     ("workspace/run", "again"), ("launch", {"device": "cpu"}), ("scheduler", ...), ("collate", ...)],
)  # fmt: skip
def test_what_the_language_takes_fits(path, value):
    assert VALIDATOR.is_valid(changed(GOOD, path, value))


def test_labels_decide_what_a_block_has():
    assert VALIDATOR.is_valid(DENSE) and "experts" not in DENSE["model"]
    assert not VALIDATOR.is_valid(changed(DENSE, "model/experts", 8))
    sparse = changed(changed(DENSE, "model/family", "qwen3_moe"), "model/experts", 8)
    assert not VALIDATOR.is_valid(sparse), "the dense family alone has layers that see all positions"
    assert VALIDATOR.is_valid(changed(sparse, "model/full_layers", ...))


UNITS = sorted({unit for page in every_page() for _, meta in settings_of(page.block).values() for unit in meta.units})


@given(st.sampled_from(UNITS), st.one_of(st.integers(0, 10**12), st.floats(0, 1e12, allow_subnormal=False)))
def test_every_quantity_as_it_is_written_fits_its_unit_and_no_other(unit, value):
    text = quantity_text(Quantity(value, unit))
    for path, schema in walked(SCHEMA):
        if "pattern" in schema and path[-1] in NAMES_OF_QUANTITIES:
            assert bool(re.search(schema["pattern"], text)) == (unit in NAMES_OF_QUANTITIES[path[-1]]), (path, text)


NAMES_OF_QUANTITIES = {
    name: meta.units
    for page in every_page()
    for name, (attribute, meta) in settings_of(page.block).items()
    if meta.units and attribute.type is Quantity and name != "every"
}


def test_the_object_of_a_spec_says_all_of_it():
    spec = load_spec(DATA / "every_form.xtrain").require()
    for kind in blocks.KINDS:
        if kind not in (*blocks.NAMED, "mixture") and getattr(spec, kind) is not None:
            said = {spelled(a) for a in attrs.fields(type(getattr(spec, kind))) if blocks.FOLDER not in a.metadata}
            unsaid = {name for name, tracker in TRACKERS.items() if tracker.in_log()[1]._default is None}
            assert said - unsaid == set(GOOD[kind]), kind
    assert GOOD["dataset"]["c++"] == {
        "source": {"jsonl": {"patterns": ["c.jsonl"]}}, "text": "content", "messages": None, "prompt": None,
        "response": None, "choices": None, "question": "question", "answer": "answer", "train_on": "auto",
        "template": "auto", "holdout": "100%", "oversized": "truncate", "bad_records": 3, "columns": {}, "values": {},
        "deduplicate": "none", "decontaminate": [], "min_tokens": 0, "without": [],
        **dict.fromkeys(("chosen", "rejected", "label", "tokens", "mask", "input", "tools", "system")),
        "message_train": None, "message_weight": None, "drop_system": False, "template_arguments": {}, "lost": "warn",
    }  # fmt: skip
    assert GOOD["dataset"]["qa"]["source"] == {"huggingface": {"name": "org/name", "config": "en", "split": "train"}}
    assert GOOD["mixture"] == {**spec.mixture.weights, "temperature": 2.0, "exact": False}
    assert GOOD["mixture"]["stdlib"] == 0.2
    assert GOOD["phase"]["early"] == {
        "from": "100 steps",
        "mix": {"web": 0.8, "c++": 0.0, "chat": 0.5},
        "lr_scale": 1.0,
        "mtp_weight": None,
        **dict.fromkeys(("router_aux_loss", "router_z_loss", "router_bias_speed")),
    }
    assert "mixture" not in as_json(DATA / "quickstart.xtrain")  # whose only dataset needs no weight
    assert GOOD["parallel"]["pp"]["layers"] == [2, 2] and GOOD["parallel"]["pp"]["embedding_cost"] == "auto"
    assert GOOD["collate"][3]["pack"]["align"] == 4 and GOOD["collate"][0] == {"to_tensor": {}}
    assert GOOD["every"][1] == {
        "every": "100 steps",
        "actions": [
            {"eval": {"dataset": "web", "batches": "auto", "answers": "none", "environment": None}},
            {"checkpoint": {}},
        ],
    }
    assert GOOD["on"][1] == {"event": "sigterm", "actions": [{"checkpoint": {}}, {"stop": {}}]}
    assert GOOD["checkpoint"]["keep"] is None


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({"line": {"slope": 2.0}}, True), ("auto", True), ({"wave": {"by": {"wave": {"by": "auto"}}}}, True),
        ({"text": {"patterns": ["a.txt"]}}, False), ({"line": {"slope": -1}}, False), ({"mine": {}}, False),
        ({"wave": {"by": {"line": {"steep": 1}}}}, False), (None, False),
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_of_calls(monkeypatch, value, good):
    with called_curves.known(monkeypatch) as bend:
        schema = json_schema()
        assert sorted(schema["$defs"]) == ["action", "collator", "curve", "source"]
        validator = Draft202012Validator(schema)
        assert validator.is_valid({**GOOD, "bend": {"by": value}}) == good
        if good and value != "auto":
            assert validator.is_valid({**GOOD, "bend": {"several": [value, value]}})
        assert value_json(bend()) == {"by": "auto", "several": [{"line": {"slope": 1.0}}]}
