"""What a client gets over the wire: sums, order, repeats, models apart from each other."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy_engine import NumpyEngine
from server_client import Client, Served, datum, outputs, row

from xtrain.server.engine_interface import IGNORED, Adam, Datum, Pass, PassResult, UserError


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as one:
        yield one


def test_training_lowers_the_loss(served: Served) -> None:
    client = served.model()
    rows = [row(seed, weights=np.ones(9, "<f4")) for seed in range(3)]
    losses = []
    for _ in range(8):
        promise, step = client.pass_(rows), client.step()
        losses.append(outputs(client.result(promise))[1]["loss:sum"])
        assert client.result(step)["metrics"]["step"] == len(losses)
    assert losses[-1] < 0.7 * losses[0]


def test_the_loss_is_a_sum_of_negative_and_fractional_weights(served: Served) -> None:
    client = served.model()
    logprobs, metrics = outputs(client.result(client.pass_([row(1), row(2, 5)], forward=True)))
    weights = np.concatenate([np.linspace(-0.5, 1.0, 9), np.linspace(-0.5, 1.0, 5)])
    assert metrics["loss:sum"] == pytest.approx(-(logprobs * weights).sum(), rel=1e-5)


def test_many_calls_are_one(served: Served) -> None:
    """SkyRL#2008, and the gradient synchronisation of xorl's server: k calls ≡ one."""
    rows = [row(seed, 4 + seed) for seed in range(7)]
    found = []
    for number, cuts in enumerate(([7], [2, 5, 7], list(range(1, 8)))):
        client = served.model(number=number)
        for _ in range(3):
            for begin, end in zip([0, *cuts[:-1]], cuts, strict=True):
                client.pass_(rows[begin:end])
            client.step()
        found.append(client.logprobs(rows))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
    np.testing.assert_allclose(found[2], found[0], atol=1e-6)


def test_forward_leaves_no_gradient_and_a_step_uses_it_up(served: Served) -> None:
    client = served.model()
    client.train([row(1)])
    client.pass_([row(2)], forward=True)
    before = client.logprobs([row(1)])
    norm = client.result(client.step(0.0))["metrics"]["grad_norm"]
    assert norm == 0.0
    np.testing.assert_array_equal(client.logprobs([row(1)]), before)


def test_requests_are_executed_in_the_order_of_their_seq_ids(served: Served) -> None:
    """xorl's server and others execute in the order of arrival: here a gap is waited for."""
    apart, client = served.model(number=0), served.model(number=1)
    apart.train([row(1), row(2)])
    step = client.send("optim_step", seq=3, adam_params={"learning_rate": 0.05})
    second = client.pass_([row(2)], seq=2)
    time.sleep(0.2)
    assert [call for call in served.engine.calls if call.endswith(client.id)] == [f"create {client.id}"]
    client.pass_([row(1)], seq=1)
    client.result(step), client.result(second)
    own = [call.partition(" ")[0] for call in served.engine.calls if call.endswith(client.id)]
    assert own == ["create", "forward_backward", "forward_backward", "optim_step"]
    client.seq, apart.seq = 3, 2
    np.testing.assert_allclose(client.logprobs([row(3)]), apart.logprobs([row(3)]), atol=1e-6)


def test_checkpoints_are_of_the_requests_before_them_whatever_comes_first(served: Served) -> None:
    """xorl's server saves and loads when that arrives: its scheduler orders passes and steps alone."""
    client = served.model(number=0)
    saved = client.send("save_weights", seq=3, path="two")
    exported = client.send("save_weights_for_sampler", seq=4, path="two")
    step = client.send("optim_step", seq=2, adam_params={"learning_rate": 0.05})
    passed = client.pass_([row(1)], seq=1)
    path = client.result(saved)["path"]
    for promise in (passed, step, exported):
        client.result(promise)
    own = [call.partition(" ")[0] for call in served.engine.calls]
    assert own == ["create", "forward_backward", "optim_step", "save", "export"]
    body = {"path": path, "optimizer": True, "session_id": client.session, "model_seq_id": 1}
    loaded = Client(served, served.result(served.post("load_weights", **body))["model_id"])
    client.seq = 4
    np.testing.assert_array_equal(client.logprobs([row(2)]), loaded.logprobs([row(2)]))


def test_tokens_without_an_advantage_are_part_of_a_mean() -> None:
    """xorl's server takes them out of the denominator, which makes the mean another one."""
    inputs = {"target_tokens": np.array([1, 2, 3, IGNORED]), "advantages": np.array([0.0, 1.0, 0.0, 0.0], "<f4")}
    assert Datum(tokens=np.arange(4, dtype="<i4"), inputs=inputs).num_targets == 3


def test_a_gap_that_is_not_filled_is_an_error(served: Served) -> None:
    client = served.model()
    late = client.send("optim_step", seq=2, adam_params={})
    served.later(served.server.limits.gap + 1)
    found = client.result(late)
    assert found["category"] == "user" and "request 1 of this model did not come" in found["error"]
    client.train([row(1)])  # what follows goes on behind it
    again = served.call("POST", "optim_step", json={"model_id": client.id, "seq_id": 1, "adam_params": {}})
    assert again.status_code == 400 and "is past" in again.text


def test_a_repeated_request_is_executed_once(served: Served) -> None:
    """SkyRL#2035: a resent forward_backward was added twice, a resent optim_step stepped twice."""
    client = served.model()
    first = client.pass_([row(1)])
    assert client.pass_([row(1)], seq=1) == first
    step = client.step()
    stepped = client.result(step)
    assert client.send("optim_step", seq=2, adam_params={"learning_rate": 0.05}) == step
    assert client.result(step) == stepped
    assert [call.partition(" ")[0] for call in served.engine.calls] == ["create", "forward_backward", "optim_step"]


def test_another_request_with_the_same_number_is_refused(served: Served) -> None:
    """xorl's server overwrites the first one; a 409 would be repeated for five minutes."""
    client = served.model()
    client.pass_([row(1)])
    other = served.call("POST", "optim_step", json={"model_id": client.id, "seq_id": 1, "adam_params": {}})
    assert other.status_code == 400 and "was used for another request" in other.text


def test_a_lost_create_model_makes_one_model(served: Served) -> None:
    """SkyRL ignores model_seq_id."""
    session = served.session()
    one, two = served.model(session, 0), served.model(session, 0)
    assert one.id == two.id == f"{session}:train:0"
    assert [call for call in served.engine.calls if call.startswith("create")] == [f"create {one.id}"]
    assert served.call("GET", f"sessions/{session}").json()["training_run_ids"] == [one.id]


def test_models_do_not_meet(served: Served) -> None:
    """SkyRL#1920: one tenant's forward held up the others. Requests of many models are one call of the engine."""
    clients = [served.model(seed=seed) for seed in range(3)]
    for client in clients:
        client.train([row(0)], 2)
    apart = [client.logprobs([row(9)]) for client in clients]
    with Served(served.server.store.folder / "other") as other:
        together = [other.model(seed=seed) for seed in range(3)]
        for _ in range(2):
            promises = [client.pass_([row(0)]) for client in together]
            promises += [client.step() for client in together]
            for promise in promises:
                other.result(promise)
        for client, numbers in zip(together, apart, strict=True):
            np.testing.assert_array_equal(client.logprobs([row(9)]), numbers)


def test_a_client_with_many_requests_holds_up_nobody(tmp_path: Path) -> None:
    """In each round every model has one request done, however many of another one came before."""
    engine = Held()
    with Served(tmp_path, engine) as served:
        busy, other = served.model(), served.model()
        promises = [busy.pass_([row(n)]) for n in range(20)] + [other.pass_([row(1)])]
        engine.goes_on.set()
        for promise in promises:
            served.result(promise)
    assert engine.calls.index(f"forward_backward {other.id}") - engine.calls.index(f"forward_backward {busy.id}") <= 2


class Held(NumpyEngine):
    """Its first pass does not end before all requests have come."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def forward_backward(self, passes: Sequence[Pass]) -> Sequence[PassResult | UserError]:
        assert self.goes_on.wait(60)
        return super().forward_backward(passes)


@pytest.mark.parametrize(("rows", "loss", "words"), [
    ([row(1), datum(np.arange(1, 5), {"target_tokens": np.arange(1, 3)})], "cross_entropy", ("data[1]", "2 rows")),
    ([row(1)], "no_such_loss", ("no_such_loss", "cross_entropy")),
    ([row(1, weights=None)], "importance_sampling", ("logprobs",)),
    ([row(1, mask=np.ones(9, "<f4"))], "cross_entropy", ("mask", "does not read")),
    ([row(1, weights=np.full(9, np.nan, "<f4"))], "cross_entropy", ("weights", "not finite")),
    ([row(1, target_tokens=np.full(9, 64))], "cross_entropy", ("target_tokens", "0..63")),
    ([row(1, target_tokens=np.full(9, -1))], "cross_entropy", ("target_tokens", "0..63")),
    ([row(1, target_tokens=np.ones(9, "<f4"))], "cross_entropy", ("int64",)),
    ([row(1), row(2, target_tokens=np.ones((9, 0), "<i8"))], "cross_entropy", ("data[1]", "target_tokens", "lacks a")),
    ([row(1, 300)], "cross_entropy", ("data[0]", "300 tokens", "256")),
    ([datum(np.array([99]), {"target_tokens": np.array([1])})], "cross_entropy", ("model_input", "0..63")),
    ([], "cross_entropy", ("empty",)),
])  # fmt: skip
def test_a_mistake_is_a_result_and_changes_nothing(
    served: Served, rows: list[bytes], loss: str, words: tuple[str, ...]
) -> None:
    """SkyRL answers 400, whose category is lost. Advantages of the wrong length are not taken (xorl)."""
    client, clean = served.model(), served.model()
    found = client.result(client.pass_(rows, loss))
    assert found["category"] == "user" and all(word in found["error"] for word in words), found
    for one in (client, clean):
        one.train([row(1)])
    np.testing.assert_array_equal(client.logprobs([row(1)]), clean.logprobs([row(1)]))


def test_targets_may_have_two_dims(served: Served) -> None:
    targets = np.stack([np.arange(1, 7), np.arange(2, 8)], 1)
    client = served.model()
    found, metrics = outputs(client.result(client.pass_([datum(np.arange(6), {"target_tokens": targets})])))
    assert found.size == 12 and metrics["loss:sum"] == pytest.approx(-found.sum(), rel=1e-5)


def test_metrics_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """xorl's server writes 0.0 in their place."""

    class Odd(NumpyEngine):
        def optim_step(self, model: str, adam: Adam) -> Mapping[str, float]:
            return {"grad_norm": float("nan"), "step": 1.0}

    with Served(tmp_path, Odd()) as served:
        client = served.model()
        found = client.result(client.step())
    assert found["metrics"] == {"step": 1.0, "nonfinite": 1.0} and found["nonfinite"] == ["grad_norm"]
