"""Engines of other programs: their protocols, answers that do not fit, losses, and weights of another version."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_stub import CHANGED, END, EngineStub, running
from safetensors.numpy import save_file

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.nn.texts import TextEnds
from xtrain.runtime.sampling.engines import (
    EngineClient,
    EngineFailed,
    EngineNeeds,
    HeldWeights,
    SampleAsked,
    SampledText,
    connect,
)

KINDS = ("vllm", "sglang")
ASKED = SampleAsked(
    prompt=(256, 97, 98), keys=("1 0 0", "1 0 1"), most=12, ends=TextEnds.of(ByteTokenizer(), ["zz"]), temperature=1.0
)


@pytest.fixture
def stub() -> Iterator[EngineStub]:
    with running() as one:
        yield one


def weights_of(folder: Path, step: int) -> HeldWeights:
    (folder / f"step-{step}").mkdir(exist_ok=True)
    save_file({"a": np.full(3, step, np.float32)}, folder / f"step-{step}" / "adapter_model.safetensors")
    return HeldWeights(step=step, folder=folder / f"step-{step}", name=f"xtrain-{step}")


def engine_of(stub: EngineStub, kind: str, rank: int, patience: float = 5.0, key: str | None = None) -> EngineClient:
    engine = EngineClient(connect(kind, stub.url, key, patience), f"{kind} at {stub.url}", patience, ByteTokenizer())
    engine.check(EngineNeeds(vocabulary=258, context=40, rank=rank))
    return engine


def texts_of(engine: EngineClient, weights: HeldWeights, asked: SampleAsked = ASKED) -> list[SampledText]:
    return engine.submit(weights, asked).result(20)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_of_the_weights_that_they_were_asked_of(stub: EngineStub, tmp_path: Path, kind: str, rank: int):
    engine, first, second = engine_of(stub, kind, rank), weights_of(tmp_path, 0), weights_of(tmp_path, 1)
    engine.put(first)
    before = texts_of(engine, first)
    assert before == texts_of(engine, first) and before[0] != before[1]
    for text in before:
        assert len(text.tokens) == 12 or text.tokens[-1] == END or bytes(text.tokens).endswith(b"zz")
    engine.put(second)
    assert texts_of(engine, second) != before
    if rank:  # both are there, until one is dropped
        assert texts_of(engine, first) == before
        engine.drop(first)
        assert [*stub.adapters] == ["xtrain-1"]
    stub.restart()
    assert texts_of(engine, second) == texts_of(engine, second) != before
    assert [each.count("did not have the weights of step 1") for each in engine.remarks] == [1]


def test_what_ends_a_text_is_the_end_of_the_run_s_texts(stub: EngineStub, tmp_path: Path):
    engine, weights = engine_of(stub, "vllm", 4), weights_of(tmp_path, 0)
    engine.put(weights)
    whole = texts_of(engine, weights)[0]
    letters = bytes(whole.tokens[2:4]).decode()
    ends = TextEnds.of(ByteTokenizer(), [letters])
    cut = texts_of(engine, weights, SampleAsked(**{**_fields(ASKED), "ends": ends}))[0]
    assert cut == SampledText(whole.tokens[:4], whole.logprobs[:4])


def _fields(asked: SampleAsked) -> dict[str, object]:
    return {name: getattr(asked, name) for name in ("prompt", "keys", "most", "ends", "temperature")}


@pytest.mark.parametrize("fault", ["lost", "unanswered", "restarted", "cut off", "busy", "late", *CHANGED])
def test_a_request_is_repeated_and_gives_the_same_texts(stub: EngineStub, tmp_path: Path, fault: str):
    engine, weights = engine_of(stub, "vllm", 4), weights_of(tmp_path, 0)
    engine.put(weights)
    texts = texts_of(engine, weights)
    stub.faults += [fault, fault]
    assert texts_of(engine, weights) == texts and not stub.faults[1:]
    assert bool(engine.remarks) == (fault in CHANGED or fault == "restarted")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_version_are_refused(stub: EngineStub, tmp_path: Path, kind: str):
    """Somebody else has given the engine others, before and while it samples."""
    engine, weights = engine_of(stub, kind, 0), weights_of(tmp_path, 0)
    engine.put(weights)
    texts = texts_of(engine, weights)
    stub.version, stub.weights = "another", "others"
    assert texts_of(engine, weights) == texts and stub.version == "xtrain-0"
    stub.faults.append("other weights")
    assert texts_of(engine, weights) == texts
    assert any("it has version another" in each for each in engine.remarks)


def test_a_lost_answer_to_weights_changes_nothing(stub: EngineStub, tmp_path: Path):
    engine, weights = engine_of(stub, "vllm", 4), weights_of(tmp_path, 0)
    engine.put(weights)
    engine.put(weights)  # as after an answer that did not come
    assert texts_of(engine, weights) and stub.seen["/v1/load_lora_adapter"] == 2


REASONS = {
    "busy": r"gave no answer for 1 s: come again \(status 503\)",
    "no JSON": "gave 3 wrong answers, the last: the answer to /?v1/completions is no JSON: '<html>busy</html>'",
    "one less": "the last: it has 1 continuations where 2 were asked for; asked for 2 continuations of 3 tokens",
    "cut text": "the last: it ends after .* of 12 tokens without an end",
    "no such token": "the last: it has the token 999 of a vocabulary of 258",
    "refused": r"refuses: the prompt is too long \(status 400\)",
    "restarted": "has lost the weights of step 0 10 times",
}


@pytest.mark.parametrize("fault", REASONS)
def test_an_engine_that_stays_wrong_ends_the_run_in_words(stub: EngineStub, tmp_path: Path, fault: str):
    engine, weights = engine_of(stub, "vllm", 4, patience=1.0), weights_of(tmp_path, 0)
    engine.put(weights)
    stub.faults += [fault] * 40
    with pytest.raises(EngineFailed, match=REASONS[fault]) as failed:
        texts_of(engine, weights)
    assert failed.value.code == "X743"


def test_engines_that_cannot_sample_for_a_run_are_refused_before_it(stub: EngineStub, tmp_path: Path):
    stub.context = 30
    with pytest.raises(EngineFailed, match=r"room for 30 tokens .* needs 40: start it with `--max-model-len 40`"):
        engine_of(stub, "vllm", 4)
    stub.context, stub.missing = 100, {"/weight_info", "/v1/load_lora_adapter"}
    with pytest.raises(EngineFailed, match="VLLM_SERVER_DEV_MODE=1"):
        engine_of(stub, "vllm", 0)
    with pytest.raises(EngineFailed, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        engine_of(stub, "vllm", 4).put(weights_of(tmp_path, 0))
    stub.url = "http://127.0.0.1:9"
    for kind in (*KINDS, "server"):
        with pytest.raises(EngineFailed, match=r"gave no answer for 0 s: 127.0.0.1:9: ConnectionRefusedError"):
            engine_of(stub, kind, 4, patience=0.2)
