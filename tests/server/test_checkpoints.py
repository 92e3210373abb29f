"""Checkpoints by name, sessions and their models, and how a server begins and ends."""

import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from numpy_engine import NumpyEngine
from server_client import MODEL, Client, Served, row

from xtrain.server.access import ServerLimits
from xtrain.server.engine_interface import Capabilities


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, limits=ServerLimits(poll=0.5, checkpoints=3)) as one:
        yield one


def save(client: Client, name: str | None, kind: str = "save_weights", **more: object) -> dict[str, str]:
    return client.result(client.send(kind, path=name, **more))


def folders(served: Served) -> int:
    return len(list((served.server.store.folder / "weights").iterdir()))


@pytest.mark.parametrize(
    "name", ["../evil", "a/b", "..", ".", "", "x" * 129, "a\0b", "ä", "a\u2215b", "-a", "a b", "C:a"]
)
def test_names_that_are_no_names(served: Served, name: str) -> None:
    client = served.model()
    for kind in ("save_weights", "save_weights_for_sampler"):
        assert "is not a name for a checkpoint" in save(client, name, kind)["error"]
    assert folders(served) == 0


def test_a_name_is_used_once_unless_overwritten(served: Served) -> None:
    """xorl and SkyRL answer 409, which clients repeat for five minutes."""
    client = served.model()
    client.train([row(1)])
    path = save(client, "one")["path"]
    assert path == f"tinker://{client.id}/weights/one"
    assert "exists already" in save(client, "one")["error"]
    client.train([row(2)])
    assert save(client, "one", overwrite=True)["path"] == path
    created = served.post("load_weights", path=path, optimizer=False, session_id=client.session, model_seq_id=1)
    other = Client(served, served.result(created)["model_id"])
    np.testing.assert_array_equal(other.logprobs([row(3)]), client.logprobs([row(3)]))


def test_without_a_name_the_request_gives_one(served: Served) -> None:
    client = served.model()
    assert save(client, None)["path"].endswith("/weights/auto-1")


def test_checkpoints_are_listed_read_and_deleted(served: Served) -> None:
    client = served.model()
    path = save(client, "one", user_metadata={"a": "b"})["path"]
    save(client, "two", "save_weights_for_sampler", ttl_seconds=3600)
    (one, two) = served.call("GET", f"training_runs/{client.id}/checkpoints").json()["checkpoints"]
    assert (one["checkpoint_id"], one["checkpoint_type"], one["tinker_path"]) == ("weights/one", "training", path)
    assert one["user_metadata"] == {"a": "b"} and one["size_bytes"] > 0 and one["expires_at"] is None
    assert two["checkpoint_type"] == "sampler" and two["expires_at"] > two["time"]
    info = served.post("weights_info", tinker_path=path)
    assert (info["base_model"], info["is_lora"], info["lora_rank"], info["train_mlp"]) == (MODEL, True, 8, True)
    run = served.call("GET", f"training_runs/{client.id}").json()
    assert run["last_checkpoint"] == one and run["last_sampler_checkpoint"] == two
    newest = served.call("GET", "checkpoints?limit=1").json()["checkpoints"]
    assert [found["tinker_path"] for found in newest] == [two["tinker_path"]]
    later = served.model()
    (first,) = served.call("GET", "training_runs?limit=1").json()["training_runs"]
    assert first["training_run_id"] == later.id
    assert served.call("GET", "sessions?limit=1").json()["sessions"] == [later.session]
    archive = served.call("GET", f"training_runs/{client.id}/checkpoints/weights/one/archive")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert tar.getnames() == ["one/state.npz"]
    assert served.call(
        "PUT", f"training_runs/{client.id}/checkpoints/weights/one/ttl", json={"ttl_seconds": 5}
    ).is_success
    served.later(10)
    for _ in range(100):
        if served.call("POST", "weights_info", json={"tinker_path": path}).status_code == 404:
            break
    else:
        raise AssertionError("a checkpoint that has expired is still there")
    gone = f"training_runs/{client.id}/checkpoints/sampler_weights/two"
    assert [served.call("DELETE", gone).status_code for _ in range(2)] == [204, 404]
    served.later(10)


def test_a_deleted_checkpoint_stays_for_those_who_sample_from_it(served: Served) -> None:
    client = served.model()
    path = save(client, "one", "save_weights_for_sampler")["path"]
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = served.post("create_sampling_session", **body)["sampling_session_id"]
    assert served.post("create_sampling_session", **body)["sampling_session_id"] == sampler
    served.call("DELETE", f"training_runs/{client.id}/checkpoints/sampler_weights/one")
    served.later(10)
    ask = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 2}}
    for seq in range(3):
        assert isinstance(served.result(served.post("asample", sampling_session_id=sampler, seq_id=seq, **ask)), bytes)
        served.later(10)
    body["sampling_session_seq_id"] = 1
    assert served.call("POST", "create_sampling_session", json=body).status_code == 404


def test_there_are_so_many_checkpoints_and_no_more(served: Served) -> None:
    client = served.model()
    for name in "abc":
        assert "path" in save(client, name)
    assert "3 checkpoints already" in save(client, "d")["error"]


def test_weights_are_loaded_into_a_model_that_has_done_nothing(served: Served) -> None:
    client = served.model()
    client.train([row(1)], 2)
    path = save(client, "one")["path"]
    other = served.model(client.session, 1, seed=99)
    assert "error" not in other.result(other.send("load_weights", path=path, optimizer=True))
    for one in (client, other):
        one.train([row(2)])
    np.testing.assert_array_equal(other.logprobs([row(3)]), client.logprobs([row(3)]))
    assert "as its first request" in other.result(other.send("load_weights", path=path, optimizer=True))["error"]
    body = {"path": path, "optimizer": True, "session_id": client.session, "model_seq_id": 3}
    promise = served.post("load_weights", **body, weights_access_token="x")
    assert "weights_access_token is not offered" in served.result(promise)["error"]
    wrong = served.model(client.session, 2, rank=4)
    assert "another adapter" in wrong.result(wrong.send("load_weights", path=path, optimizer=True))["error"]


@pytest.mark.parametrize(("change", "words"), [
    ({"base_model": "no/such"}, "no/such"),
    ({"lora_config": {"rank": 0}}, "outside 1..32"),
    ({"lora_config": None}, "lora_config is missing"),
    ({"lora_config": {"rank": 4} | dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), False)}, "nothing"),
    ({"optimizer_config": {"type": "dimuon"}}, "dimuon"),
])  # fmt: skip
def test_models_that_cannot_be_made(served: Served, change: dict[str, object], words: str) -> None:
    body = {"session_id": served.session(), "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
    assert words in served.result(served.post("create_model", **(body | change)))["error"]


def test_layers_that_have_no_adapter_here_are_left_out(tmp_path: Path) -> None:
    """Clients ask for all unless they say otherwise; `get_info` says what they have."""

    class Narrow(NumpyEngine):
        def start(self) -> Capabilities:
            return evolve(super().start(), matrices=frozenset({"attn"}))

    with Served(tmp_path, Narrow()) as served:
        client = served.model()
        info = served.post("get_info", model_id=client.id)
        assert (info["train_attn"], info["train_mlp"], info["train_unembed"], info["lora_rank"]) == (
            True,
            False,
            False,
            8,
        )
        body = {"session_id": client.session, "model_seq_id": 1, "base_model": MODEL}
        found = served.result(served.post("create_model", **body, lora_config={"rank": 8, "train_attn": False}))
        assert "nothing to train; available here: train_attn" in found["error"]


def test_what_was_sent_for_a_model_that_was_not_made_is_an_error(served: Served) -> None:
    session = served.session()
    body = {"path": "tinker://x/weights/y", "optimizer": True, "session_id": session, "model_seq_id": 0}
    created = served.post("load_weights", **body)
    assert "no checkpoint" in served.result(created)["error"]
    found = served.call("POST", "optim_step", json={"model_id": f"{session}:train:0", "seq_id": 1, "adam_params": {}})
    assert found.status_code == 404


def test_a_session_that_ended_is_gone(served: Served) -> None:
    client = served.model()
    assert served.call("POST", f"sessions/{client.session}/finish", json={"reason": {"type": "success"}}).is_success
    assert served.call("POST", "session_heartbeat", json={"session_id": client.session}).status_code == 410
    body = {"model_id": client.id, "seq_id": 1, "adam_params": {}}
    assert served.call("POST", "optim_step", json=body).status_code == 410
    assert served.call("POST", f"sessions/{'0' * 32}/finish", json={}).status_code == 404


def test_results_are_kept_for_a_while(tmp_path: Path) -> None:
    with Served(tmp_path, limits=ServerLimits(poll=0.5)) as served:
        client = served.model()
        fetched, unfetched = client.pass_([row(1)], forward=True), client.pass_([row(2)], forward=True)
        client.result(fetched)
        served.later(served.server.limits.fetched + 1)
        client.logprobs([row(3)])
        for _ in range(100):
            ask = served.call("POST", "retrieve_future", json={"request_id": fetched["request_id"]})
            if ask.status_code == 404:
                break
        assert ask.status_code == 404
        assert isinstance(client.result(unfetched), bytes)
        assert (
            "is past"
            in served.call("POST", "optim_step", json={"model_id": client.id, "seq_id": 1, "adam_params": {}}).text
        )


def test_of_many_results_that_were_fetched_the_newest_are_kept(tmp_path: Path) -> None:
    with Served(tmp_path, limits=ServerLimits(poll=0.5, answered=2)) as served:
        client = served.model()
        passes = [client.pass_([row(number)], forward=True) for number in range(5)]
        for promise in passes[:4]:
            served.later(1)
            client.result(promise)
        served.later(10)

        def status(promise: dict[str, str]) -> int:
            return served.call("POST", "retrieve_future", json={"request_id": promise["request_id"]}).status_code

        while status(passes[1]) != 404:
            time.sleep(0.01)
        assert [status(promise) for promise in (passes[0], *passes[2:])] == [404, 200, 200, 200]


def test_the_engine_is_closed_with_the_server(tmp_path: Path) -> None:
    class Closing(NumpyEngine):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    with Served(tmp_path, Closing()) as served:
        engine = served.engine
    assert engine.closed == 1  # pyright: ignore[reportAttributeAccessIssue]
