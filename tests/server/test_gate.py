"""Who may use a server: its own names, no page of a browser, the key that was set or made."""

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from server_client import KEY, Served

from xtrain.server.access import OWNER, Keys, ServerLimits
from xtrain.server.app import unpacked
from xtrain.server.json_wire import CreateSession, OptimStep, Refusal, SampleBody, read_json, read_json_pass

PAGE = "https://lab.example"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, hosts=["gpu1.lab"], origins=[PAGE]) as one:
        yield one


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200),
    ({"host": "localhost:8000"}, 200),
    ({"host": "LOCALHOST"}, 200),
    ({"host": "[::1]:8000"}, 200),
    ({"host": "gpu1.lab:80"}, 200),
    ({"host": "evil.example"}, 421),
    ({"host": "evil.example:8000"}, 421),
    ({"host": "localhost.evil.example"}, 421),
    ({"host": "evil.example@127.0.0.1"}, 421),
    ({"host": "127.0.0.1, evil.example"}, 421),
    ({"host": "10.0.0.5"}, 421),
    ({"host": ""}, 421),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://127.0.0.1:9000"}, 403),
    ({"origin": PAGE}, 200),
    ({"origin": PAGE, "sec-fetch-site": "cross-site"}, 200),
    ({"origin": PAGE + ".evil.example"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "none"}, 200),
], ids=str)  # fmt: skip
def test_requests_that_a_page_makes_are_refused(served: Served, headers: dict[str, str], status: int) -> None:
    """Also without a key, and on the one path that needs none: a page learns nothing of a server."""
    found = [served.call("POST", "create_session", headers=headers, json={})]
    found += [served.http.get(f"/api/v1/{path}", headers={"x-api-key": KEY} | headers) for path in ("healthz", "no")]
    assert [each.status_code for each in found] == [status, status, 404 if status == 200 else status]
    sessions = served.call("GET", "sessions").json()["sessions"]
    assert len(sessions) == (status == 200)
    keyless = served.http.post("/api/v1/create_session", headers=headers, json={})
    assert keyless.status_code == (401 if status == 200 else status)


def test_a_listed_page_may_ask_and_read(served: Served) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key,content-type"}
    for origin, status in ((PAGE, 200), ("https://evil.example", 403)):
        found = served.http.options("/api/v1/create_session", headers={"origin": origin} | asks)
        assert found.status_code == status
        assert ("access-control-allow-origin" in found.headers) == (status == 200)
    found = served.call("POST", "create_session", headers={"origin": PAGE}, json={})
    assert found.headers["access-control-allow-origin"] == PAGE


def test_without_listed_pages_nothing_is_said_to_a_browser(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        found = served.http.options("/api/v1/create_session", headers={"access-control-request-method": "POST"})
        assert found.status_code == 401 and "access-control-allow-origin" not in found.headers


def test_a_key_that_is_made_stays(tmp_path: Path) -> None:
    path = tmp_path / "server" / "key"
    keys = Keys.kept(path)
    assert keys.of[OWNER].startswith("tml-") and len(keys.of[OWNER]) == 52
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keys.kept(path).of == keys.of and Keys.kept(tmp_path / "other" / "key").of != keys.of
    assert keys.owner(keys.of[OWNER].encode()) == OWNER and keys.owner(b"") is None and keys.owner(b"\xff") is None
    whole = path.read_bytes()
    for content in (b"", b"tml-\xff", b"ann=tml-a", whole[:20], *(flipped(whole, at) for at in range(52))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not as it was written"):
            Keys.kept(path)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_there_is_no_server_without_a_key() -> None:
    for of in ({}, {"me": ""}, {"me": "tml-ä"}, {"me": "tml a"}):
        with pytest.raises(ValueError, match="visible ASCII"):
            Keys(of)


# bodies that are larger than they look


def test_a_bomb_is_refused_before_it_is_large() -> None:
    bomb = zstandard.compress(b'{"user_metadata": {"a": [%s[]]}}' % (b"[]," * 2**24), 19)
    assert len(bomb) < 10_000
    with pytest.raises(Refusal, match="when it is unpacked"):
        unpacked(bomb, 2**26)
    assert unpacked(zstandard.compress(b"x" * 2**20), 2**26) == b"x" * 2**20
    (few,) = [zstandard.compress(bytes(range(256)) * 2**14)]
    with pytest.raises(Refusal, match="more than 1048576 bytes"):
        unpacked(few, 2**26)


@pytest.mark.parametrize(
    "body",
    [b'{"user_metadata": {"a": [%s[]]}}' % (b"[]," * 2**24), b'{"unknown": [%s[]]}' % (b"[]," * 2**18),
        b'{"user_metadata": {"a": %s}}' % (b"[" * 2**19 + b"]" * 2**19), b'{"display_name": [%s{}]}' % (b"{}," * 2**18),
        b'{"project_id": "x", "user_metadata": {"a": "%s"}}' % (b"x" * 2**17),
        b'{"project_id": "x", "user_metadata": {%s"b": 1}}' % (b'"a": 1,' * 2**18)],
    ids=["lists", "of no field", "deep", "objects", "long", "wide"],
)  # fmt: skip
def test_values_of_any_shape_are_counted_before_they_are_read(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(Refusal) as refused:
        read_json(body, OptimStep if b"unknown" in body else CreateSession)
    assert refused.value.status == 422 and time.process_time() - began < 2


def test_lists_and_objects_are_counted() -> None:
    for kind in (b"{}", b"[]"):
        with pytest.raises(Refusal, match="more than 2097152 values, or 262144 lists and objects"):
            read_json(b'{"prompt": {"chunks": [%s{}]}}' % ((kind + b",") * 2**18), SampleBody)
    with pytest.raises(Refusal, match="more than 8388608 values"):
        read_json_pass(b'{"rows": [%s1]}' % (b"1," * (2**23 + 1)))


# sessions


def test_sessions_of_before_a_restart_do_not_keep_others_out(tmp_path: Path) -> None:
    limits, clock = ServerLimits(sessions=3), [1e9]
    with Served(tmp_path, limits=limits, clock=clock) as served:
        old = [served.session() for _ in range(3)]
        assert served.call("POST", "create_session", json={}).status_code == 429
        served.later(1000)
        served.post("session_heartbeat", session_id=old[0])
    clock[0] += limits.idle - 900
    with Served(tmp_path, limits=limits, clock=clock) as served:  # the last word of one was within the limit
        assert served.server.live(old[0]) and not served.server.live(old[1])
        new = [served.session() for _ in range(2)]
        assert served.call("POST", "create_session", json={}).status_code == 429
        for session in (*old, *new):
            served.post("session_heartbeat", session_id=session)


def test_what_a_client_has_said_last_is_known_after_a_kill(tmp_path: Path) -> None:
    served = Served(tmp_path)
    session = served.session()
    served.later(100)
    served.post("session_heartbeat", session_id=session)
    served.later(0)
    for _ in range(500):
        if served.server.store.state.sessions[session].heard == served.clock[0]:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the last word was not stored")
    served.close()


def test_a_session_is_not_forgotten_while_its_server_is_away(tmp_path: Path) -> None:
    limits, clock = ServerLimits(poll=5.0), [1e9]
    with Served(tmp_path, limits=limits, clock=clock) as served:
        client = served.model()
    clock[0] += limits.forgotten + 1e5
    with Served(tmp_path, limits=limits, clock=clock) as served:
        served.later(limits.idle - 1)
        assert client.id in served.server.store.state.models
        served.later(limits.idle + 1)
        for _ in range(500):
            if client.id not in served.server.store.state.models:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("a session that is long gone is still there")
