"""The dashboard in a browser: who may open it, and that it is the dashboard."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import made_run

from xtrain.cli.main import main

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("textual_serve")

TOKEN = "t0ken"
REFUSED = ("/", "/ws", "/static/js/textual.js", "/download/1", "/?token=", "/?token=wrong", "/ws?token=t0ken")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return made_run(Path("runs/dense/aaaa"), logged=20).directory


def test_only_those_who_know_the_token_see_it(run: Path) -> None:
    from aiohttp.test_utils import TestClient, TestServer

    from xtrain.tui.board.web import BoardServer

    async def play() -> None:
        server = BoardServer("false", "127.0.0.1", 8765, TOKEN, "a <b> run")
        unsafe = aiohttp.CookieJar(unsafe=True)  # takes cookies of addresses without a name
        async with TestClient(TestServer(await server._make_app()), cookie_jar=unsafe) as client:
            for path in REFUSED:
                assert (await client.get(path)).status == 403, path
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nCookie: xtrain-8765=\xff\r\n\r\n")  # no UTF-8
            assert b" 403 " in await reader.readline()
            writer.close()
            answer = await client.get(f"/?token={TOKEN}", allow_redirects=False)
            assert answer.status == 302 and answer.headers["Location"] == "/"
            assert {"HttpOnly", "SameSite=Strict"} <= set(answer.headers["Set-Cookie"].split("; "))
            page = await client.get("/")
            text = await page.text()
            assert page.status == 200 and "a &lt;b&gt; run" in text and TOKEN not in text
            assert f"ws://{page.url.host}:{page.url.port}/ws" in text  # as the browser came here, also by a tunnel
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            assert (await client.get("/static/js/textual.js")).status == 200
            assert (await client.get("/ws", headers={"Origin": "http://elsewhere"})).status == 403
            behind = {"X-Forwarded-Proto": "https", "Cookie": f"xtrain-8765={TOKEN}"}  # a proxy that ends TLS
            page = await client.get("/", headers=behind)
            assert f"wss://{page.url.host}:{page.url.port}/ws" in await page.text()
            answer = await client.get(f"/?token={TOKEN}", headers=behind, allow_redirects=False)
            assert "Secure" in answer.headers["Set-Cookie"].split("; ")
            assert (await client.get("/ws", headers={**behind, "Origin": "https://elsewhere"})).status == 403
            async with client.ws_connect("/ws", headers={**behind, "Origin": f"https://{page.url.authority}"}):
                pass

    asyncio.run(play())


def test_a_browser_gets_the_dashboard(run: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-P", "-m", "xtrain", "watch", str(run), "--web", f"127.0.0.1:{port}"]
    served = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    async def play(address: str) -> None:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            assert (await session.get(address)).status == 200
            async with session.ws_connect(f"ws://127.0.0.1:{port}/ws?width=100&height=30") as browser:
                for key, word in ((None, b"Overview"), ("6", b"checkpoint")):
                    if key:
                        await browser.send_json(["stdin", key])
                    seen = b""
                    while word not in seen:
                        seen += (await browser.receive(timeout=60)).data

    try:
        assert served.stdout is not None
        word, address = served.stdout.readline().split()
        assert word == "dashboard" and address.startswith(f"http://127.0.0.1:{port}/?token=")
        asyncio.run(play(address))
    finally:
        served.send_signal(2)
        _, wrong = served.communicate(timeout=60)
    assert served.returncode == 0 and wrong == ""


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["--web", "8765"], 2, "`8765` is not an address; write HOST:PORT, such as 127.0.0.1:8765"),
    (["--web", "127.0.0.1:99999"], 2, "is not an address"),
    (["--web", "127.0.0.1:8765", "--ui", "plain"], 2, "--web serves the dashboard, and --ui plain writes lines"),
    (["--web", "203.0.113.1:8765"], 3, "203.0.113.1:8765 cannot be used"),
])  # fmt: skip
def test_what_is_refused(run: Path, capsys: pytest.CaptureFixture[str], arguments, code, words) -> None:
    try:
        found = main(["watch", str(run), *arguments])
    except SystemExit as ended:
        found = ended.code
    said = capsys.readouterr().err
    assert found == code and words in said
    assert ("may be reached by others" in said) == (code == 3)


def test_without_textual_serve_it_says_what_to_install(run: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "xtrain.tui.board.web", raising=False)
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    assert main(["watch", str(run), "--web"]) == 3
    assert "pip install 'xtrain[web]'" in capsys.readouterr().err
