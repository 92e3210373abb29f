"""Sampling sessions: weights that never change, seeds, stops, log-probabilities, and how long they are kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_engine import NumpyEngine
from server_client import MODEL, Sampling, Served, datum, row, unnamed_of

from xtrain.server.access import ServerLimits
from xtrain.server.engine_interface import SampleQueue


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, limits=ServerLimits(poll=0.5, samplers=2)) as one:
        yield one


def base_of(served: Served) -> Sampling:
    session = served.session()
    found = served.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    return Sampling(served, found["sampling_session_id"])


def test_a_sampler_does_not_move_with_its_model(served: Served) -> None:
    """vLLM#47724: a name whose weights change is served with another's."""
    client = served.model()
    client.train([row(1, weights=np.ones(9, "<f4"))], 3)
    sampler = unnamed_of(client, 0)
    before = sampler.draw([5], seed=1)
    client.train([row(2)], 3)
    assert sampler.draw([5], seed=1)["samples"][0]["tokens"] == before["samples"][0]["tokens"]
    chances = [one.draw([5], temperature=0)["samples"][0]["logprobs"] for one in (sampler, unnamed_of(client, 1))]
    assert not np.array_equal(*chances)


def test_training_and_sampling_agree(served: Served) -> None:
    client = served.model()
    client.train([row(1)], 2)
    drawn = unnamed_of(client, 0).draw([9, 2], seed=4)["samples"][0]
    tokens = np.array([9, 2, *drawn["tokens"]])
    scored = client.logprobs([datum(tokens[:-1], {"target_tokens": tokens[1:]})])
    np.testing.assert_allclose(scored[1:], drawn["logprobs"], atol=1e-6)


def test_seeds_repeat_and_samples_differ(served: Served) -> None:
    base = base_of(served)
    one, two = (base.draw([3], {"num_samples": 3}, seed=17)["samples"] for _ in range(2))
    assert [sample["tokens"] for sample in one] == [sample["tokens"] for sample in two]
    assert len({tuple(sample["tokens"]) for sample in one}) > 1
    free = {tuple(base.draw([3])["samples"][0]["tokens"]) for _ in range(3)}
    assert len(free) > 1


def test_a_repeated_request_gives_the_samples_that_it_gave(served: Served) -> None:
    base = base_of(served)
    first = base.ask([3])
    base.seq -= 1
    assert base.ask([3]) == first and len(first["sample_sequence_ids"]) == 1
    drawn = served.result(first)
    assert drawn and served.result(first) == drawn
    assert [call for call in served.engine.calls if call.startswith("sample")] == [f"sample {first['request_id']}"]


def test_stops_prompts_and_candidates(served: Served) -> None:
    base = base_of(served)
    whole = base.draw([3, 4], seed=2)["samples"][0]
    cut = base.draw([3, 4], seed=2, stop=[whole["tokens"][1]])["samples"][0]
    assert cut["tokens"] == whole["tokens"][: whole["tokens"].index(cut["tokens"][-1]) + 1]
    assert (cut["stop"], whole["stop"]) == (0, 1)
    scored = base.draw([3, 4, 5], {"prompt_logprobs": True, "topk_prompt_logprobs": 4, "topk_sample_logprobs": 2})
    assert np.isnan(scored["prompt"][0]) and (scored["prompt"][1:] < 0).all()
    assert (scored["prompt_top"].k, scored["prompt_top"].n) == (4, 3)
    assert scored["samples"][0]["top"].k == 2


@pytest.mark.parametrize(("tokens", "more", "params", "words"), [
    ([], {}, {}, "0 tokens"),
    ([64], {}, {}, "0..63"),
    ([1], {}, {"max_tokens": 256}, "context is 256"),
    ([1], {}, {"stop": "END"}, "no tokenizer"),
    ([1], {}, {"stop": ["END", ""]}, "an empty text"),
    ([1], {}, {"top_k": 0}, "top_k"),
    ([1], {"num_samples": 10_000}, {}, "num_samples"),
    ([1], {"topk_prompt_logprobs": 50}, {}, "there may be 20"),
    ([1], {"record_stability_info": True}, {}, "record_stability_info is not offered"),
    ([1], {"prompt_alt_tokens_k": 2}, {}, "prompt_alt_tokens_k is not offered"),
    ([1], {"prompt_logprobs_last_n": 1}, {}, "prompt_logprobs_last_n is not offered"),
    ([1], {"target_prompt_logprobs": {"data": [1]}}, {}, "target_prompt_logprobs is not offered"),
    ([1], {"prompt": {"chunks": [{"type": "image"}]}}, {}, "not text"),
])  # fmt: skip
def test_mistakes_are_named(
    served: Served, tokens: list[int], more: dict[str, Any], params: dict[str, Any], words: str
) -> None:
    assert words in base_of(served).error(tokens, more, **params)


def test_of_unnamed_weights_the_newest_are_kept(served: Served) -> None:
    client = served.model()
    sessions = [unnamed_of(client, number) for number in range(4)]
    served.later(6)
    served.result(sessions[3].ask([1]))
    for _ in range(50):
        served.later(6)
        if len(list((served.server.store.folder / "weights").iterdir())) == 2:
            break
        served.result(sessions[3].ask([1]))
    gone = [served.call("GET", f"samplers/{one.id}").status_code for one in sessions]
    assert gone == [404, 404, 200, 200]


def test_samples_that_arrive_join_those_that_are_drawn(tmp_path: Path) -> None:
    """An engine can take requests into its batch while others are drawn, as long as no model waits."""
    joined = []

    class Joining(NumpyEngine):
        def sample(self, queue: SampleQueue) -> None:
            if not joined and len(queue.requests) == 1:
                second.append(base.ask([2]))
                joined.extend(queue.arrived())
                queue = SampleQueue(requests=[*queue.requests, *joined], arrived=queue.arrived, finished=queue.finished)
            super().sample(queue)

    second: list[dict[str, Any]] = []
    with Served(tmp_path, Joining()) as served:
        base = base_of(served)
        served.result(base.ask([1]))
        served.result(second[0])
    assert [request.id for request in joined] == [second[0]["request_id"]]


def test_an_inflight_sampler_is_refused_by_name(served: Served) -> None:
    client = served.model()
    found = client.result(client.send("save_weights_for_sampler", kind="inflight"))
    assert "inflight" in found["error"]
