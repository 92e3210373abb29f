"""The plan of a server: its nodes, its memory, its identity, and what is said of specs that do not fit."""

from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.cluster import Serve
from xtrain.dsl.schema.setting import settings_of
from xtrain.plan.graph import PAGE, window_pages
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import from_json, to_json
from xtrain.planner.compile import Compiled
from xtrain.planner.graph.server import MOST_ROWS, pages_of, slots_that_fit
from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.page import render

SPEC = Path(__file__).parents[2] / "specs" / "serve_cpu.xtrain"


def plan(*sets: str) -> Plan:
    compiled = plan_from_spec(SPEC, ("precision.params=fp32", *sets), None)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def codes(*sets: str) -> list[str]:
    return [each.code for each in plan_from_spec(SPEC, ("precision.params=fp32", *sets), None).diagnostics]


def test_a_server_has_requests_and_no_steps():
    found = plan()
    assert found.serves and not found.of_kind("step") and not found.of_kind("tick")
    names = [node.id.removeprefix("request.") for node in found.of_kind("request")]
    assert names == ["open", "forward_backward", "optim_step", "keep", "load", "export", "sample", "forget", "close"]
    assert from_json(to_json(found)) == found


def test_memory_grows_with_slots_texts_and_rank():
    def total(*sets: str) -> int:
        return max(each.memory.total_bytes for each in plan(*sets).estimates.classes)

    usual, double = plan().estimates.classes[0].memory, plan("serve.adapters=16").estimates.classes[0].memory
    assert double.gradients == 2 * usual.gradients and double.optimizer == 2 * usual.optimizer
    assert total() < total("serve.rows=8") < total("serve.rows=8", "serve.max_tokens=2048")
    assert total() < total("adapter.rank=64")


def test_what_follows_of_the_adapter_is_that_of_each_slot(tmp_path: Path):
    path = tmp_path / "spec.xtrain"
    path.write_text(SPEC.read_text().replace("lora { rank = 32, alpha = 0.1,", "lora { rank = 24,"))
    found = plan_from_spec(path, (), None).plan
    assert found is not None
    assert [(each.value, each.how) for each in found.provenance if each.path == "adapter.alpha"] == [("24", "rank 24")]


def test_pages_take_what_a_pass_leaves_and_one_sample_fits_in_any_case(tmp_path: Path):
    def pages(*sets: str) -> dict[int | None, int]:
        return dict(plan(*sets).node("request.sample").args["pages"])

    wide = plan()
    (usual,) = (each.memory for each in wide.estimates.classes)
    (count,) = dict(wide.node("request.sample").args["pages"]).values()
    each = 2 * 2 * 32 * 3 * PAGE * 4  # keys and values of 2 heads of 32, in 3 layers of 16 positions, fp32
    read = MOST_ROWS * pages_of(1024) * each // 3
    assert 0 <= usual.activations + usual.loss - read - each * (count + 1) < each
    assert f"{count:,} pages of 16 positions" in wide.node("request.sample").does
    assert pages("serve.rows=1")[None] < count, "a pass leaves less"
    assert pages("serve.rows=1", "serve.max_tokens=256")[None] == pages_of(256) + MOST_ROWS
    path = tmp_path / "spec.xtrain"
    path.write_text(SPEC.read_text().replace("model llama {", "model qwen3 { window = 40, full_layers = [1]"))
    windowed = plan_from_spec(path, ("serve.rows=16",), None).plan
    assert windowed is not None
    windows = dict(windowed.node("request.sample").args["pages"])
    assert windows.keys() == {None, 40} and windows[40] == MOST_ROWS * window_pages(40) < windows[None]


def test_how_many_adapters_fit_is_said():
    machine = ("cluster=other", "cluster.devices=1", "cluster.memory=200 MiB")
    found = plan(*machine)
    room = slots_that_fit(found)
    assert room is not None and room > 8
    assert f"there is room for {room}" in render(found)
    assert slots_that_fit(plan(*machine, f"serve.adapters={room}")) in (room - 1, room, room + 1)
    assert "W423" in codes(*machine, f"serve.adapters={room + 20}")
    assert "W423" not in codes(*machine)


def test_what_is_listened_on_is_no_other_experiment():
    usual = plan()
    other = plan("serve.port=8001", "serve.adapters=4", "serve.rows=1", 'serve.model="other"', "serve.queue=7")
    assert usual.config_id == other.config_id and usual.id != other.id
    for changed in ("adapter.rank=16", "adapter.alpha=8", "experiment.seed=8", "model.layers=2"):
        assert plan(changed).config_id != usual.config_id


@pytest.mark.parametrize(("setting", "value"), [
    ("model", '"other"'),
    ("adapters", "3"),
    ("max_tokens", "99"),
    ("rows", "2"),
    ("host", "localhost"),
    ("port", "99"),
    ("key", '"KEY"'),
    ("certificate", '"a.pem"'),
    ("private_key", '"a.key"'),
    ("hosts", '["gpu1"]'),
    ("origins", '["https://lab"]'),
    ("queue", "9"),
    ("idle", "9 s"),
])  # fmt: skip
def test_every_setting_is_in_the_plan(setting: str, value: str):
    assert set(settings_of(Serve)) == {*SETTINGS, "mode"}
    tls = ('serve.certificate="tls.pem"', 'serve.private_key="tls.key"')
    usual, changed = (plan(*tls, *sets).node("setup.serve").args for sets in ((), (f"serve.{setting}={value}",)))
    found = [name for name in changed if usual.get(name) != changed[name]]
    assert found == (["key", "key_needed"] if setting == "key" else [SETTINGS[setting]])


SETTINGS = {
    **{
        name: name
        for name in ("adapters", "max_tokens", "rows", "host", "port", "key", "certificate", "private_key", "queue")
    },
    "hosts": "hosts",
    "origins": "origins",
    "model": "model_name",
    "idle": "idle_seconds",
}


WHOLE = """
experiment whole { seed = 7 }
model llama { dim = 128, layers = 3, heads = 4, kv_heads = 2, ffn = 384 }
tokenizer bytes
serve { mode = full, max_tokens = 1024, rows = 4 }
launch { device = cpu }
"""


def whole(folder: Path, *sets: str) -> Compiled:
    path = folder / "whole.xtrain"
    path.write_text(WHOLE)
    return plan_from_spec(path, sets, None)


@pytest.mark.parametrize(("width", "rows", "counts"), [(32, 1, (428, 44)), (160, 2, (4096, 41))])
def test_states_of_texts_take_half_of_what_a_pass_leaves(
    tmp_path: Path, width: int, rows: int, counts: tuple[int, int]
):
    own = f"delta_key_heads = 4, delta_value_heads = 8, delta_key_dim = {width}, delta_value_dim = {width}"
    path = tmp_path / "states.xtrain"
    text = WHOLE.replace("llama {", f"qwen3_5 {{ {own}, attention_layers = [1], head_dim = 32,")
    path.write_text(text.replace("rows = 4", f"rows = {rows}") + "precision { params = fp32 }")
    found = plan_from_spec(path, (), None).plan
    assert found is not None
    pages, texts = (count for _, count in found.node("request.sample").args["pages"])
    page = 2 * 2 * 32 * PAGE * 4  # keys and values of 2 heads, in fp32
    state = 2 * 4 * (8 * width**2 + 3 * (2 * 4 + 8) * width)  # of 2 layers, with the last 3 positions
    memory = found.estimates.classes[0].memory
    room = memory.activations + memory.loss - MOST_ROWS * max(pages_of(1024) * page, state // 2)
    most = min(MOST_ROWS * pages_of(1024), (room - state * (texts + 1)) // page - 1)
    assert (pages, texts) == counts == (most, room // 2 // state - 1)


def test_a_server_of_the_model_itself_has_its_gradients_and_moments_in_memory(tmp_path: Path):
    found = whole(tmp_path).plan
    assert found is not None
    args, memory = found.node("setup.serve").args, found.estimates.classes[0].memory
    assert (args["max_rank"], args["adapters"]) == (0, 1)
    assert all(tensor.trained for tensor in found.parameters.tensors)
    assert memory.gradients == memory.parameters and memory.optimizer == 2 * memory.parameters
    assert "one client trains the model" in render(found) and slots_that_fit(found) is None
    assert from_json(to_json(found)) == found
    machine = ("cluster=other", "cluster.devices=1")
    for size, expected in (("20 MiB", ["W423"]), ("2 GiB", [])):
        assert [each.code for each in whole(tmp_path, *machine, f"cluster.memory={size}").diagnostics] == expected


def test_adapters_have_no_place_where_the_model_itself_is_trained(tmp_path: Path):
    assert "X447" in codes("serve.mode=full")
    assert [each.code for each in whole(tmp_path, "serve.adapters=4").diagnostics] == ["W401"]
    assert [each.code for each in whole(tmp_path, "serve.mode=adapters").diagnostics] == ["X447"]
    error = next(each for each in whole(tmp_path, "serve.mode=zzz").diagnostics if each.code == "X305")
    assert "adapters" in error.hint and "full" in error.hint


def test_the_resolved_text_is_the_same_server(tmp_path: Path):
    loaded = load_spec(SPEC)
    text = loaded.resolved_text()
    path = tmp_path / "again.xtrain"
    path.write_text(text)
    assert load_spec(path).require() == loaded.require()
    assert "optimizer" not in text and "dataset" not in text and "budget" not in text


@pytest.mark.parametrize("sets", [
    ("serve.host=0.0.0.0",),
    ("parallel.cp=2", "parallel.cp.fold=none"),
    ("parallel.pp=2", "serve.mode=full", "model.tie_embeddings=true"),
    ("parallel.stack=ddp",),
    ('serve.certificate="tls.pem"',),
    ('serve.private_key="tls.key"',),
    ("adapter.dora=true",),
])  # fmt: skip
def test_what_a_server_cannot_be(sets: tuple[str, ...]):
    assert "X447" in codes(*sets)


@pytest.mark.parametrize(("sets", "code"), [
    (("parallel.tp=3",), "X402"),
    (("parallel.pp=9",), "X404"),
    (("precision.base=nf4", "precision.base.block=48"), "X438"),
    (("precision.compute=fp8",), "X443"),
    (("precision.compute=fp16",), "X443"),
    (("parallel.stack=torchft",), "X415"),
    (("parallel.tp=2", "parallel.tp.overlap=true"), "X446"),
    (("model.mtp=1",), "X445"),
    (("activation.every=99",), "W401"),
])  # fmt: skip
def test_the_rules_of_training_hold_for_a_server(sets: tuple[str, ...], code: str):
    assert code in codes(*sets)


def test_a_pipeline_computes_forwards_before_backwards():
    found = plan("parallel.pp=3")
    assert found.node("setup.parallel.pp").args["schedule"] == "gpipe"
    assert found.node("setup.serve").args["microbatches"] == 6
    assert "forwards of 6 microbatches before their backwards" in found.node("request.forward_backward").does
    sets = ("parallel.pp=3", "parallel.pp.schedule=zbv")
    assert [each.code for each in plan_from_spec(SPEC, sets, None).diagnostics] == ["W401"]
    ring = plan("parallel.cp=2", "parallel.cp.ring=2")
    assert "each text over ring=2" in ring.node("request.forward_backward").does


def test_another_address_needs_a_key():
    found = plan("serve.host=0.0.0.0", 'serve.key="SUPPORT_KEY"')
    assert "key in SUPPORT_KEY\n" in render(found) and found.node("setup.serve").args["key_needed"]


def test_a_key_itself_has_no_place_in_a_spec():
    error = next(each for each in plan_from_spec(SPEC, ('serve.key="tml-4f1"',), None).diagnostics)
    assert error.code == "X304" and "name of an environment variable" in error.message
    assert "XTRAIN_KEY" in error.hint and "tml-4f1" not in error.message + error.hint


def test_without_one_it_is_that_of_an_environment_variable_or_made():
    found = plan()
    assert found.node("setup.serve").args["key"] == "XTRAIN_KEY" and not found.node("setup.serve").args["key_needed"]
    assert "key in XTRAIN_KEY, or a generated one that it prints" in render(found)
    assert "the key in XTRAIN_KEY, or a key that the server generates" in found.node("setup.serve").does


def test_further_names_and_web_pages_are_listed():
    assert not {"hosts", "origins"} & plan().node("setup.serve").args.keys()
    found = plan('serve.hosts=["gpu1.lab", "fe80::1"]', 'serve.origins=["https://lab.example:8443"]')
    args = found.node("setup.serve").args
    assert args["hosts"] == ["gpu1.lab", "fe80::1"] and args["origins"] == ["https://lab.example:8443"]
    wrong = ("hosts", "gpu1:8000"), ("hosts", "http://gpu1"), ("origins", "*"), ("origins", "null"), ("origins", "lab")
    for name, value in (*wrong, ("origins", "https://Lab.example"), ("origins", "https://lab.example/")):
        (error,) = plan_from_spec(SPEC, (f'serve.{name}=["{value}"]',), None).diagnostics
        assert error.code == "X304" and "such as" in error.hint


def test_a_server_with_tls_is_asked_by_https():
    found = render(plan('serve.certificate="tls.pem"', 'serve.private_key="tls.key"', "serve.port=9"))
    assert "https://127.0.0.1:9" in found and "with TLS" in found
    assert "http://127.0.0.1:8000" in render(plan())


def test_routers_add_nothing_to_the_losses_of_clients(tmp_path: Path):
    """What their losses are in training would be a gradient that no client has asked for."""
    text = SPEC.read_text().replace("model llama {", "model qwen3_moe {\n  experts = 4, experts_per_token = 2")
    path = tmp_path / "moe.xtrain"
    path.write_text(text.replace("ffn = 384", "expert_ffn = 32, head_dim = 32"))

    def found(*sets: str) -> list[str]:
        return [each.code for each in plan_from_spec(path, sets, None).diagnostics if each.code == "X447"]

    assert found("model.router.aux_loss=0") == []
    assert found() == ["X447"]
    assert found("model.router.z_loss=0.001") == ["X447", "X447"]
