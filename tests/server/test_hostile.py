"""What a client may do wrong, by mistake or on purpose: it reads an error of the protocol, and nobody else notices."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import ELSEWHERE, Asked, by_hand, drawn, wrong_messages
from numpy_engine import NumpyEngine
from proto_writer import Writer
from server_client import MODEL, PROTOBUF, Served, row

from xtrain.server.access import ServerLimits

STATUSES = {200, 400, 404, 410, 413, 415, 422, 429}


class Victim:
    """A server with a model that is attacked, one that nobody touches, and a sampling session."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.attacked, self.clean = served.model(number=0), served.model(number=1)
        self.sampler: str = served.post(
            "create_sampling_session", session_id=self.attacked.session, sampling_session_seq_id=0, base_model=MODEL
        )["sampling_session_id"]
        for one in (self.attacked, self.clean):
            one.train([row(1)])

    def ask(self, asked: Asked) -> tuple[int, Any]:
        """The status, and what came of it: the body, or of an accepted request its result."""
        found = self.served.call("POST", asked.path, content=asked.content, headers=asked.headers)
        assert found.status_code in STATUSES, (asked, found.status_code, found.text)
        if found.status_code != 200:
            assert set(found.json()) == {"error"}
            return found.status_code, found.json()
        answer = found.json()
        if "request_id" not in answer:
            return 200, answer
        state = self.served.server.store.state
        work = state.works[answer["request_id"]]
        if work.entry.queue == self.attacked.id:
            if work.entry.seq != state.models[self.attacked.id].next and work.result is None:
                return 200, answer  # it waits for what was not sent
            self.attacked.seq = max(self.attacked.seq, work.entry.seq)
        return 200, self.served.result(answer)

    def unharmed(self, caplog: pytest.LogCaptureFixture) -> None:
        """The other model is as one that was trained the same way just now; no mistake is in the log."""
        fresh = self.served.model(number=2)
        fresh.train([row(1)])
        np.testing.assert_array_equal(fresh.logprobs([row(2)]), self.clean.logprobs([row(2)]))
        assert not [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info]
        assert not self.served.ended


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    limits = ServerLimits(poll=5.0, body=2**20, queue=100_000, checkpoints=10**6, sessions=10**6)
    with Served(tmp_path, NumpyEngine(models=10**6), limits) as served:
        yield Victim(served)


def test_requests_that_are_wrong_in_one_place_are_refused(victim: Victim, caplog: pytest.LogCaptureFixture) -> None:
    """Each by hand: none is done, none is a failure of the server, and each says what is wrong."""
    statuses: Counter[int] = Counter()
    taken: list[str] = []
    for source in (by_hand(victim.attacked, victim.sampler), wrong_messages(victim.attacked)):
        for asked in source:
            status, found = victim.ask(asked)
            statuses[status] += 1
            if not (isinstance(found, dict) and "error" in found and found.get("category", "user") == "user"):
                taken.append(f"{asked.path}: {asked.what}: {found}")
    for method, path, status in ELSEWHERE:
        assert victim.served.call(method, path).status_code == status, (method, path)
        statuses[status] += 1
    assert not taken, "\n".join(taken)
    assert statuses.total() >= 200 and statuses[200] > 50 and statuses[422] > 50
    victim.unharmed(caplog)


def test_sparse_tensors_are_counted_as_what_they_stand_for(victim: Victim) -> None:
    """Few bytes of them neither fill the memory nor give a token more targets than an engine has room for."""
    client, served = victim.attacked, victim.served
    starts = Writer().content(2, np.zeros(2, "<i8").tobytes())

    def one(width: int) -> bytes:
        text = Writer().content(1, Writer().content(1, Writer().content(1, np.ones(1, "<i4").tobytes())))
        tensors = {"target_tokens": 2, "weights": 1}
        for name, dtype in tensors.items():
            sparse = Writer().content(2, starts).integer(3, dtype).integers(4, [1, width])
            text.content(2, Writer().content(1, name).content(2, sparse))
        return bytes(text)

    def said(*rows: bytes) -> str:
        client.seq += 1
        asked = served.call(
            "POST",
            "forward_backward",
            content=client.body(rows, "cross_entropy"),
            headers={"content-type": PROTOBUF},
        )
        if asked.status_code != 200:
            client.seq -= 1
            return asked.json()["error"]
        return served.result(asked.json()).get("error", "")

    assert "more than 16777216 numbers in the tensors" in said(*[one(2**22)] * 3)
    assert "data[0] has 1048577 targets; a row may have 1048576" in said(one(2**20 + 1))
    assert "data has 1048578 targets; a request may have 1048576" in said(*[one(2**19 + 1)] * 2)


def test_bodies_of_any_depth_are_refused_and_not_gone_through(victim: Victim, caplog: pytest.LogCaptureFixture) -> None:
    """Also of a depth that the stack has just room for when they are read, and no longer when they are done."""
    for depth in (33, 200, *range(900, 1000, 7), 10**5):
        for begin, end in (("[", "]"), ('{"a":', "}")):
            nested = begin * depth + ("1" if begin != "[" else "") + end * depth
            for path, more in (
                ("create_session", '"display_name": "x"'),
                ("create_model", f'"session_id": "{victim.clean.session}", "model_seq_id": {depth}, "base_model": ""'),
                ("save_weights", f'"model_id": "{victim.clean.id}", "seq_id": 99'),
            ):
                content = f'{{{more}, "user_metadata": {{"a": {nested}}}}}'.encode()
                assert victim.ask(Asked(path=path, content=content, what=f"{depth} deep"))[0] == 422
    victim.unharmed(caplog)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_requests_with_changes_at_random_never_fail_the_server(
    victim: Victim, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    rng, statuses, categories = random.Random(count), Counter[int](), Counter[str]()
    for _ in range(count):
        status, found = victim.ask(drawn(rng, victim.attacked, victim.sampler))
        statuses[status] += 1
        if status == 200:
            category = found.get("category", "") if isinstance(found, dict) else ""
            categories[category] += 1
            assert category in ("", "user"), found
    assert statuses[200] and statuses[422] > count / 10 and categories[""] and categories["user"]
    victim.unharmed(caplog)
