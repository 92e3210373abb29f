"""What a server writes has the probabilities that it trains with; what it keeps goes on exactly."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from code_models import make as make_code
from served import served, server_plan

from xtrain.plan.plan import Plan
from xtrain.plan.serialise import plan_id
from xtrain.server.engine.keeping import read_kept
from xtrain.server.engine_interface import Adam, AdapterSettings, Datum, Pass, SampleQueue, SampleRequest, UserError

pytestmark = pytest.mark.distributed

ADAM = Adam(rate=3e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.0, clip=0.0)
TOKENS = np.random.default_rng(0).integers(0, 256, 20).astype(np.int32)
REQUEST = SampleRequest(
    id="", weights=None, prompt=TOKENS[:7], count=2, most=9, temperature=1.0, top_k=None, top_p=1.0, seed=5,
    stop_tokens=frozenset(), stop_texts=(), stop_at_end=False, prompt_logprobs=True, prompt_top=3, sample_top=2,
)  # fmt: skip


def scored(engine: Any, model: str, tokens: np.ndarray) -> np.ndarray:
    """What the trainer says of all tokens but the first."""
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    data = [Datum(tokens=tokens[:-1], inputs=inputs)]
    (found,) = engine.forward_backward(
        [Pass(model=model, data=data, loss="cross_entropy", settings={}, forward_only=True)]
    )
    return found.outputs[0]["logprobs"]


def learn(engine: Any, model: str, steps: int) -> None:
    inputs = {"target_tokens": TOKENS[1:].astype(np.int64), "weights": np.ones(len(TOKENS) - 1, np.float32)}
    each = Pass(
        model=model,
        data=[Datum(tokens=TOKENS[:-1], inputs=inputs)],
        loss="cross_entropy",
        settings={},
        forward_only=False,
    )
    for _ in range(steps):
        engine.forward_backward([each])
        engine.optim_step(model, ADAM)


def draw(engine: Any, *requests: SampleRequest) -> list[Any]:
    found: dict[str, Any] = {}
    queue = SampleQueue(
        requests=[evolve(each, id=str(number)) for number, each in enumerate(requests)],
        arrived=list,
        finished=lambda request, result: found.__setitem__(request.id, result),
    )
    engine.sample(queue)
    return [found[str(number)] for number in range(len(requests))]


def sampled(engine: Any, folder: Path) -> dict[str, Any]:
    engine.create_model("a", AdapterSettings(rank=4, seed=3))
    engine.create_model("b", AdapterSettings(rank=8, seed=4))
    learn(engine, "a", 4)
    learn(engine, "b", 2)
    engine.export("b", folder / "b")
    of_b = evolve(REQUEST, weights=folder / "b")
    before = scored(engine, "a", TOKENS)
    found: dict[str, Any] = {"first": draw(engine, of_b, REQUEST)}
    found["trained"] = [scored(engine, "b", np.concatenate([TOKENS[:7], s.tokens])) for s in found["first"][0].samples]
    assert np.array_equal(before, scored(engine, "a", TOKENS)), "sampling leaves adapters as they are"
    learn(engine, "b", 1)
    found["later"] = draw(engine, of_b, REQUEST)
    stops = found["first"][0].samples[0].tokens
    found["stopped"] = draw(
        engine,
        evolve(of_b, stop_tokens=frozenset([int(stops[3])])),
        evolve(of_b, temperature=0.0, count=1),
        evolve(of_b, top_k=1, count=1),
    )
    return found


PP, RING = ("parallel.pp=2",), ("parallel.cp=2", "parallel.cp.ring=2")
ULYSSES = pytest.param(("parallel.cp=2", "parallel.cp.ulysses=2"), marks=pytest.mark.matrix)


@pytest.mark.parametrize(
    "sets",
    [pytest.param((), marks=pytest.mark.matrix), pytest.param(("parallel.fsdp=2",), marks=pytest.mark.matrix),
        ("parallel.tp=2",), PP, *(pytest.param(each, marks=pytest.mark.matrix) for each in (RING, ULYSSES))],
    ids=["one", "fsdp", "tp", "pp", "ring", "ulysses"],
)  # fmt: skip
def test_samples_have_the_probabilities_of_training(sets: tuple[str, ...], tmp_path: Path):
    check_samples(server_plan(tmp_path, *sets), tmp_path)


DELTA = """qwen3_5 {
  dim = 32, layers = 3, heads = 4, kv_heads = 2, head_dim = 8, ffn = 48, init_std = 0.2, attention_layers = [1],
  delta_key_dim = 6, delta_value_dim = 10
}"""
HYBRID = """nemotron_h {
  dim = 32, layers = 4, heads = 4, kv_heads = 2, head_dim = 8, pattern = "ME*M", experts = 4, experts_per_token = 2,
  expert_ffn = 24, mamba_state = 6, mamba_heads = 4, mamba_groups = 2, init_std = 0.2, router { aux_loss = 0 }
}"""
PARALLEL = """falcon_h1 {
  dim = 32, layers = 2, heads = 4, kv_heads = 2, head_dim = 8, ffn = 48, init_std = 0.2, mamba_state = 6,
  mamba_heads = 4, mamba_groups = 2, mamba_norm = gated, key_scale = 0.7, mamba_scales = [0.9, 1.2, 0.7, 1.5, 1.1]
}"""
SPARSE = """glm_moe_dsa {
  dim = 32, layers = 4, heads = 4, ffn = 48, init_std = 0.2, q_rank = 12, kv_rank = 10, nope_dim = 6, rope_dim = 4,
  value_dim = 8, index_heads = 2, index_dim = 8, index_topk = 5, index_shared = [1, 3], experts = 4, expert_ffn = 24,
  experts_per_token = 2, first_dense = 1, router { aux_loss = 0 }
}"""
SHARED = """gemma4 {
  dim = 32, layers = 4, heads = 4, kv_heads = 2, head_dim = 8, ffn = 48, init_std = 0.2, window = 7,
  full_layers = [1, 3], full_head_dim = 12, layer_input = 6, layer_vocab = 264, shared_kv = 2
}"""


@pytest.mark.parametrize(("model", "sets"), [
    pytest.param(HYBRID, (), marks=pytest.mark.matrix),
    *(pytest.param(DELTA, sets, marks=pytest.mark.matrix) for sets in ((), ("parallel.tp=2",), PP, RING)),
    pytest.param(HYBRID, ("parallel.tp=2", "parallel.ep=2"), marks=pytest.mark.matrix),
    *(pytest.param(PARALLEL, sets, marks=pytest.mark.matrix) for sets in ((), ("parallel.tp=2",), PP, RING)),
    *(pytest.param(SPARSE, sets, marks=pytest.mark.matrix) for sets in ((), ("parallel.tp=2",), PP)),
    *(pytest.param(SHARED, sets, marks=pytest.mark.matrix) for sets in ((), ("parallel.tp=2",))),
])  # fmt: skip
def test_samples_of_models_with_states_or_shared_keys_too(model: str, sets: tuple[str, ...], tmp_path: Path):
    check_samples(server_plan(tmp_path, *sets, model=model), tmp_path)


@pytest.mark.usefixtures("inspected_here")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo3", "gpt_oss"])
def test_samples_of_code_of_transformers_too(kind: str, tmp_path: Path):
    make_code(kind, tmp_path / "model", vocab_size=264)
    routed = ", router_aux_loss = 0" * (kind == "gpt_oss")
    model = f'"{tmp_path / "model"}" {{ code = transformers{routed} }}'
    check_samples(server_plan(tmp_path, model=model), tmp_path, foreseen=kind != "gpt_oss")


def check_samples(plan: Plan, folder: Path, *, foreseen: bool = True) -> None:
    """Run `sampled` on a server, and compare what it has found. foreseen: the model finds a token of the prompt one of
    the three likeliest."""
    found = served(plan, sampled, folder / "run")
    adapted, base = found["first"]
    for sample, trained in zip(adapted.samples, found["trained"], strict=True):
        assert len(sample.tokens) == 9 and not sample.stopped
        np.testing.assert_allclose(sample.logprobs, trained[6:], rtol=1e-5)
        np.testing.assert_allclose(adapted.prompt_logprobs[1:], trained[:6], rtol=1e-5)
        assert sample.top.tokens.shape == (9, 2)
    assert np.isnan(adapted.prompt_logprobs[0])
    assert adapted.prompt_top.tokens.shape == (6, 3)
    hits = [adapted.prompt_top.tokens[at].tolist().index(t) if t in adapted.prompt_top.tokens[at] else None
            for at, t in enumerate(TOKENS[1:7])]  # fmt: skip
    for at, place in enumerate(hits):
        if place is not None:
            assert adapted.prompt_top.logprobs[at, place] == pytest.approx(adapted.prompt_logprobs[at + 1], rel=1e-5)
    assert any(place is not None for place in hits) == foreseen
    # Two draws differ, the base has other probabilities, and later training changes nothing of what was exported.
    assert not np.array_equal(adapted.samples[0].tokens, adapted.samples[1].tokens)
    assert not np.array_equal(adapted.prompt_logprobs[1:], base.prompt_logprobs[1:])
    for one, other in zip(found["first"], found["later"], strict=True):
        assert [s.tokens.tolist() for s in one.samples] == [s.tokens.tolist() for s in other.samples]
    stopped, greedy, narrow = found["stopped"]
    tokens = adapted.samples[0].tokens.tolist()
    assert stopped.samples[0].stopped and stopped.samples[0].tokens.tolist() == tokens[: tokens.index(tokens[3]) + 1]
    assert greedy.samples[0].tokens.tolist() == narrow.samples[0].tokens.tolist()
    assert greedy.samples[0].tokens[0] == greedy.samples[0].top.tokens[0, 0]


WINDOWED = """qwen3 {
  dim = 32, layers = 3, heads = 4, kv_heads = 2, head_dim = 8, ffn = 48, init_std = 0.2, window = 7, full_layers = [1]
}"""


def joined(engine: Any, folder: Path) -> dict[str, Any]:
    """Each request alone, and all of them joining one another: before, while and after others are written."""
    for number, name in enumerate("ab"):
        engine.create_model(name, AdapterSettings(rank=4, seed=number))
        learn(engine, name, 2)
        engine.export(name, folder / name)
    rng = np.random.default_rng(1)
    asked = [
        evolve(
            REQUEST, id=str(number), weights=None if place is None else folder / place, seed=number, count=count,
            prompt=rng.integers(0, 256, size).astype(np.int32), most=most, prompt_top=0, sample_top=number % 3,
        )
        for number, (place, size, most, count) in enumerate(
            [
                ("a", 3, 40, 1), ("a", 9, 5, 3), ("b", 4, 20, 2), (None, 6, 9, 1), ("a", 25, 17, 2), ("a", 1, 1, 2),
                ("b", 12, 33, 1), ("a", 8, 9, 40), ("a", 2, 11, 35), (None, 30, 3, 1),
            ]
        )
    ]  # fmt: skip
    asked.append(evolve(asked[0], id="missing", weights=folder / "nothing"))
    alone: dict[str, Any] = {}
    for each in asked:
        engine.sample(
            SampleQueue(requests=[each], arrived=list, finished=lambda r, result: alone.update({r.id: result}))
        )
    messages, call = [], engine.call

    def counted(message: Any) -> Any:
        messages.append([each["id"] for each in message.values["requests"]])
        return call(message)

    engine.call = counted
    found: dict[str, Any] = {}
    order: list[str] = []
    waiting = asked[2:]

    def finished(request: SampleRequest, result: Any) -> None:
        found[request.id] = result
        order.append(request.id)

    queue = SampleQueue(
        requests=asked[:2], arrived=lambda: [waiting.pop(0)] if waiting else [], finished=finished
    )  # fmt: skip
    engine.sample(queue)
    return {"alone": alone, "found": found, "order": order, "messages": messages}


@pytest.mark.parametrize(("model", "sets"), [
    pytest.param("", (), marks=pytest.mark.matrix),  # one block of the other is without a window
    (WINDOWED, ()),
    *(pytest.param(model, (), marks=pytest.mark.matrix) for model in (DELTA, HYBRID)),
    *(pytest.param("", sets, marks=pytest.mark.slow) for sets in (("parallel.tp=2",), PP, RING)),
], ids=["llama", "window", "delta net", "Mamba-2", "tp", "pp", "ring"])  # fmt: skip
def test_samples_that_join_others_are_those_that_they_are_alone(model: str, sets: tuple[str, ...], tmp_path: Path):
    plan = server_plan(tmp_path, *sets, **({"model": model} if model else {}))
    found = served(plan, joined, tmp_path / "run")
    assert found["found"].keys() == found["alone"].keys() and len(found["order"]) == 11
    for id, result in found["found"].items():
        if id == "missing":
            assert isinstance(result, UserError) and "cannot be read" in str(result)
            continue
        alone = found["alone"][id]
        np.testing.assert_allclose(result.prompt_logprobs, alone.prompt_logprobs, rtol=1e-6)
        for one, other in zip(result.samples, alone.samples, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.stopped == other.stopped
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-6)
            assert (one.top is None) == (int(id) % 3 == 0)
    # The first one is long: others come and go meanwhile.
    assert found["order"].index("1") < found["order"].index("3") < found["order"].index("0")
    assert found["messages"][:3] == [["0", "1"], ["2"], ["3"]]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "sets", "few_pages"),
    [
        ("", (), [[None, 4]]),
        ("", PP, [[None, 4]]),
        (DELTA, (), [[None, 4], [0, 3]]),
        (DELTA, (), [[None, 256], [0, 3]]),
    ],
    ids=["one", "pp", "delta net", "states"],
)
def test_samples_that_wait_for_pages_are_those_that_they_are_alone(
    model: str, sets: tuple[str, ...], few_pages: list[Any], tmp_path: Path
):
    """There are as many pages as one sample of the longest text may have: others begin again when some are free."""
    plan = server_plan(tmp_path, *sets, **({"model": model} if model else {}))
    usual, *states = plan.node("request.sample").args["pages"]
    assert usual[0] is None and usual[1] > 4, "one of 64 positions has four"
    assert states == ([[0, 64]] if model else [])
    few = [
        evolve(node, args={**node.args, "pages": few_pages}) if node.id == "request.sample" else node
        for node in plan.nodes
    ]
    plan = evolve(plan, nodes=tuple(few))
    found = served(evolve(plan, id=plan_id(plan)), joined, tmp_path / "run")
    assert any(getattr(result, "samples", ()) for result in found["found"].values())
    for id, result in found["found"].items():
        for one, other in zip(*(getattr(each, "samples", ()) for each in (result, found["alone"][id])), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.stopped == other.stopped
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-6)


def of_many_weights(engine: Any, folder: Path) -> dict[str, Any]:
    """Six weights, two more than there are slots: each alone, and all of them together. forwards: of each."""
    from xtrain.runtime.sampling.text_generator import TextGenerator

    engine.create_model("a", AdapterSettings(rank=4, seed=3))
    engine.create_model("b", AdapterSettings(rank=7, seed=4))
    asked = [evolve(REQUEST, seed=9, count=1, most=16, prompt_top=2, sample_top=1)]
    for number in range(5):
        model = "ab"[number % 2]
        learn(engine, model, 1)
        engine.export(model, folder / str(number))
        asked.append(evolve(asked[0], weights=folder / str(number), seed=number, prompt=TOKENS[: number + 2]))
    before, forwards, logits = [scored(engine, each, TOKENS) for each in "ab"], [0], TextGenerator.logits

    def counted(self: TextGenerator, batch: Any) -> Any:
        forwards[0] += 1
        return logits(self, batch)

    TextGenerator.logits = counted
    alone = []
    for each in asked:
        forwards[0] = 0
        alone += draw(engine, evolve(each, prompt_top=0))
    one, forwards[0] = forwards[0], 0
    found = draw(engine, *(evolve(each, prompt_top=0) for each in asked[:4]))
    four, forwards[0] = forwards[0], 0
    found += draw(engine, *asked)[4:]
    assert all(map(np.array_equal, before, [scored(engine, each, TOKENS) for each in "ab"]))
    return {"alone": alone, "found": found, "forwards": (one, four)}


MIXTURE = """qwen3_moe {
  dim = 32, layers = 2, heads = 4, kv_heads = 2, head_dim = 8, experts = 4, experts_per_token = 2, expert_ffn = 24
  init_std = 0.2
  router { aux_loss = 0 }
}"""
EXPERTS = 'adapter.targets=["self_attn", "experts"]'


@pytest.mark.parametrize(
    ("model", "sets"),
    [("", ()), pytest.param("", PP, marks=pytest.mark.slow),
        pytest.param("", ("parallel.fsdp=2",), marks=pytest.mark.slow),
        pytest.param(MIXTURE, (EXPERTS,), marks=pytest.mark.slow),
        pytest.param(MIXTURE, (EXPERTS, "parallel.fsdp=2", "parallel.ep=2"), marks=pytest.mark.slow)],
    ids=["one", "pp", "fsdp", "experts", "spread experts"],
)  # fmt: skip
def test_samples_of_several_adapters_are_written_in_one_forward(model: str, sets: tuple[str, ...], tmp_path: Path):
    plan = server_plan(tmp_path, *sets, **({"model": model} if model else {}))
    found = served(plan, of_many_weights, tmp_path / "run")
    one, four = found["forwards"]
    assert one == four == 16
    for result, alone in zip(found["found"], found["alone"], strict=True):
        np.testing.assert_allclose(result.prompt_logprobs, alone.prompt_logprobs, rtol=1e-6)
        for ours, theirs in zip(result.samples, alone.samples, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-6)
    assert len({tuple(each.samples[0].tokens.tolist()) for each in found["alone"]}) > 3


def kept(engine: Any, folder: Path) -> dict[str, Any]:
    engine.create_model("a", AdapterSettings(rank=4, seed=3))
    learn(engine, "a", 3)
    engine.save("a", folder / "three")
    learn(engine, "a", 3)
    engine.save("a", folder / "six")
    engine.remove_model("a")
    engine.create_model("b", AdapterSettings(rank=4, seed=9))
    learn(engine, "b", 1)
    engine.load("b", folder / "three", optimizer=True)
    learn(engine, "b", 3)
    engine.save("b", folder / "again")
    engine.load("b", folder / "three", optimizer=False)
    learn(engine, "b", 1)
    engine.save("b", folder / "fresh")
    refused = {}
    engine.create_model("c", AdapterSettings(rank=5, seed=9))
    (folder / "broken").mkdir()
    (folder / "broken" / "trained.json").write_text("{")
    for name, call in {
        "other rank": lambda: engine.load("c", folder / "three", optimizer=True),
        "broken": lambda: engine.load("c", folder / "broken", optimizer=True),
        "missing": lambda: engine.load("c", folder / "nothing", optimizer=True),
        "taken": lambda: engine.save("c", folder / "three"),
        "full": lambda: [engine.create_model(f"more{n}", AdapterSettings(rank=1, seed=0)) for n in range(4)],
    }.items():
        try:
            call()
        except UserError as error:
            refused[name] = str(error)
    ones = np.ones(2, np.float32)
    far = {"target_tokens": np.array([1, 2]), "advantages": ones, "logprobs": -1e30 * ones}  # a ratio without end
    data = [Datum(tokens=TOKENS[:2], inputs=far)]
    each = Pass(model="c", data=data, loss="importance_sampling", settings={}, forward_only=False)
    before = scored(engine, "c", TOKENS)
    engine.forward_backward([each])
    try:
        engine.optim_step("c", ADAM)
    except UserError as error:
        refused["not finite"] = str(error)
    engine.export("c", folder / "peft")
    assert np.array_equal(before, scored(engine, "c", TOKENS))
    learn(engine, "c", 1)
    assert np.isfinite(scored(engine, "c", TOKENS)).all()
    return refused


@pytest.mark.parametrize(
    "sets",
    [("parallel.fsdp=2",), *(pytest.param(each, marks=pytest.mark.matrix) for each in ((), PP))],
    ids=["fsdp", "one", "pp"],
)
def test_what_is_kept_goes_on_exactly(sets: tuple[str, ...], tmp_path: Path):
    refused = served(server_plan(tmp_path, *sets), kept, tmp_path / "run")
    six, again, fresh = (read_kept(tmp_path / "run" / name) for name in ("six", "again", "fresh"))
    assert six.step == again.step == 6 and fresh.step == 1
    assert six.tensors.keys() == again.tensors.keys()
    assert all(np.array_equal(value.numpy(), again.tensors[name].numpy()) for name, value in six.tensors.items())
    assert refused.keys() == {"other rank", "broken", "missing", "taken", "full", "not finite"}
    assert "rank 4, but the model has 5" in refused["other rank"]
    config = json.loads((tmp_path / "run" / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (5, 16)


def foreign(engine: Any, folder: Path) -> list[str]:
    """What is said of weights that clients could send, each with a fault."""
    engine.create_model("a", AdapterSettings(rank=4, seed=3))
    engine.export("a", folder / "good")
    faults: dict[str, tuple[str, Any]] = {
        "rank": ("adapter_config.json", lambda text: text.replace(b'"r": 4', b'"r": 99')),
        "alpha": ("adapter_config.json", lambda text: text.replace(b'"lora_alpha": 16', b'"lora_alpha": 17')),
        "shape": ("adapter_config.json", lambda text: text.replace(b'"r": 4', b'"r": 2')),
        "cut": ("adapter_model.safetensors", lambda content: content[:-40]),
        "none": ("adapter_model.safetensors", lambda content: b""),
    }
    said = []
    for name, (file, change) in faults.items():
        shutil.copytree(folder / "good", folder / name)
        content = (folder / name / file).read_bytes()
        (folder / name / file).write_bytes(change(content))
        assert (folder / name / file).read_bytes() != content
        (found,) = draw(engine, evolve(REQUEST, weights=folder / name))
        said.append(str(found))
    assert draw(engine, evolve(REQUEST, weights=folder / "good"))[0].samples
    return said


def test_weights_that_do_not_fit_are_refused_and_spoil_nothing(tmp_path: Path):
    said = served(server_plan(tmp_path, world=1), foreign, tmp_path / "served")
    for found, words in zip(said, ("rank 99", "lora_alpha 17", "of shape", "", ""), strict=True):
        assert found.startswith("the weights to sample from cannot be read: ") and words in found


def test_an_exported_adapter_is_read_by_peft(tmp_path: Path):
    from safetensors.torch import load_file

    served(server_plan(tmp_path), kept, tmp_path / "run")
    tensors = load_file(tmp_path / "run" / "peft" / "adapter_model.safetensors")
    assert {name.rpartition("lora_")[0].rpartition(".")[0].split(".")[-2] for name in tensors} >= {"self_attn", "mlp"}
    assert all(5 in tensor.shape for tensor in tensors.values())


FROZEN = 'model.frozen=["embed_tokens"]'


def exported(engine: Any, folder: Path) -> dict[str, Any]:
    engine.create_model("a", None)
    learn(engine, "a", 2)
    engine.export("a", folder / "a")
    found = {"logprobs": scored(engine, "a", TOKENS), "before": draw(engine, evolve(REQUEST, weights=folder / "a"))}
    learn(engine, "a", 1)
    found["after"] = draw(engine, evolve(REQUEST, weights=folder / "a"))
    found["later"] = scored(engine, "a", TOKENS)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    "sets",
    [(FROZEN,), (FROZEN, "parallel.pp=2"), ("parallel.fsdp=2",)],
    ids=["one", "pp", "fsdp"],
)
def test_transformers_reads_what_a_client_has_trained(sets: tuple[str, ...], tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = served(server_plan(tmp_path, *sets, rank=0), exported, tmp_path / "run")
    folder = tmp_path / "run" / "a"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits_SV = model(torch.from_numpy(TOKENS[None, :-1].astype(np.int64))).logits[0]
    theirs = logits_SV.log_softmax(-1).gather(1, torch.from_numpy(TOKENS[1:, None].astype(np.int64)))[:, 0]
    np.testing.assert_allclose(found["logprobs"], theirs.numpy(), rtol=1e-6)
    assert np.abs(found["later"] - found["logprobs"]).max() > 1e-3
    (before,), (after,) = found["before"], found["after"]
    np.testing.assert_array_equal(before.prompt_logprobs, after.prompt_logprobs)
    np.testing.assert_allclose(before.prompt_logprobs[1:], found["logprobs"][:6], rtol=1e-6)
    assert AutoTokenizer.from_pretrained(folder).decode(list(b"text")) == "text"
