"""A server as a process: how it ends, connections without requests, certificates."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import ServerProcess
from server_client import MODEL, PROTOBUF, body_of, row

from xtrain.server.serving import Address, CannotServe, check_serving

HEADERS = {"x-api-key": "tml-test"}


class Remote:
    """A client of a server over HTTP, with one model."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers=HEADERS, timeout=30, **settings)
        session = self.http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        self.created = self.http.post("create_model", json=body).json()
        self.id: str = self.result(self.created).json()["model_id"]
        self.seq = 0

    def result(self, promise: dict[str, Any]) -> httpx.Response:
        return self.http.post("retrieve_future", json={"request_id": promise["request_id"]})

    def train(self) -> dict[str, Any]:
        """A pass and a step; what came of the step."""
        content = body_of(self.id, self.seq + 1, [row(self.seq)])
        passed = self.http.post("forward_backward", content=content, headers={"content-type": PROTOBUF}).json()
        step = {"model_id": self.id, "seq_id": self.seq + 2, "adam_params": {"learning_rate": 0.1}}
        stepped = self.http.post("optim_step", json=step).json()
        self.seq += 2
        assert self.result(passed).headers["content-type"] == PROTOBUF
        return self.result(stepped).json()


def test_a_server_is_stopped_by_a_signal_at_once_and_goes_on(tmp_path: Path) -> None:
    """Clients that wait for a result, and connections that never ask anything, do not hold it up."""
    with ServerProcess(tmp_path / "server") as server, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(closing(socket.create_connection(server.address)))
        client = Remote(server.url)
        assert server.stop() == 75
    with ServerProcess(tmp_path / "server") as server:
        http = httpx.Client(base_url=f"{server.url}/api/v1/", headers=HEADERS)
        found = http.post("retrieve_future", json={"request_id": client.created["request_id"]}).json()
        assert found["model_id"] == client.id
        assert server.stop() == 75


SCAN = (
    b"",
    b"P",
    b"POST /api/v1/asample HTTP/1.1\r\nhost: x\r\n",
    b"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: tml-test\r\ncontent-length: 9\r\n\r\n{",
    b"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /api",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"SSH-2.0-scan\r\n",
    b"x" * 100_000,
)


def test_half_open_connections_stop_nothing_and_are_closed(tmp_path: Path) -> None:
    """More than there may be, in all states that a port scan leaves: training goes on at once, and in the end they are
    gone but for those that are sending a body."""
    with ServerProcess(tmp_path / "server", silence=1.0, connections=300) as server, ExitStack() as stack:
        client = Remote(server.url)
        found = []
        for number in range(480):
            one = stack.enter_context(closing(socket.create_connection(server.address, timeout=30)))
            content = SCAN[number % len(SCAN)]
            one.sendall(content)
            if b"content-length" not in content:
                found.append(one)
        for step in range(3):
            assert client.train()["metrics"]["step"] == step + 1
        for one in found:
            assert not list(rest(one))
        assert client.train()["metrics"]["step"] == 4
        assert server.stop() == 75
        assert "Traceback" not in server.log and "ERROR" not in server.log


def rest(one: socket.socket) -> Iterator[bytes]:
    """What is still to come before the other end is closed, without answers."""
    try:
        while content := one.recv(2**16):
            if not content.startswith(b"HTTP/1.1 "):
                yield content
    except ConnectionError:
        return


TLS = Path(__file__).parents[1] / "support" / "tls"  # of localhost, signed by itself


def test_a_server_with_a_certificate_takes_tls_alone(tmp_path: Path) -> None:
    files = {"certificate": TLS / "server.pem", "private_key": TLS / "server.key"}
    with ServerProcess(tmp_path / "server", files) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=TLS / "server.pem")
        client = Remote(server.url, verify=trusting)
        assert client.train()["metrics"]["step"] == 1
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            Remote(server.url)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):  # closed, or reset where some was not read
            Remote(server.url.replace("https", "http"))
        assert client.train()["metrics"]["step"] == 2
        assert server.stop() == 75
        assert "Traceback" not in server.log
        assert "graceful shutdown exceeded" not in server.log, "the server waits for the client's half of TLS"


@pytest.mark.parametrize("content", [None, "no certificate", "locked"])
def test_a_certificate_that_cannot_be_used_is_said_before_anything_starts(tmp_path: Path, content: str | None) -> None:
    key = tmp_path / "server.key"
    if content is not None:
        key.write_text((TLS / "locked.key").read_text() if content == "locked" else content)
    with pytest.raises(CannotServe, match=r"server.key cannot be used for TLS: \S"):
        check_serving(Address(certificate=TLS / "server.pem", private_key=key))


def test_a_server_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str | None:
        if name == "google.protobuf":
            raise ModuleNotFoundError("No module named 'google'")
        return None if name == "uvicorn" else name

    monkeypatch.setattr("xtrain.plan.hardware.find_spec", find)
    with pytest.raises(CannotServe, match=r"needs protobuf and uvicorn: pip install 'xtrain\[serve\]'"):
        check_serving(Address())
