"""Episodes on a server of OpenEnv, in the process of an environment: with the library where it is installed, by default
with a stand-in that has its documented interface."""

import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xtrain.api.environments import OpenEnvEpisode
from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.runtime.sampling.environments import ENVIRONMENTS, open_environment

LIBRARY = '''
class GenericEnvClient:
    """Asynchronous client; `sync` gives the one that blocks."""
    def __init__(self, base_url):
        self.url = base_url
    def sync(self):
        return Client(self.url)

class Result:
    def __init__(self, observation, reward=None, done=False):
        self.observation, self.reward, self.done = observation, reward, done

class Client:
    def __init__(self, url):
        assert url == "http://host:8000"
    def reset(self, seed=None):
        self.number = seed % 10
        return Result({"hint": "0 to 9"})
    def step(self, action):
        number = action["number"]
        if number == self.number:
            return Result({"hint": "right"}, 1.0, True)
        return Result({"hint": "more" if number < self.number else "less"}, -0.125)
    def close(self):
        pass
'''
SERVER = """
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Hint(Observation):
    hint: str = ""

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **settings):
        self.number = seed % 10
        return Hint(hint="0 to 9")
    def step(self, action, timeout_s=None, **settings):
        if action.number == self.number:
            return Hint(hint="right", done=True, reward=1.0)
        return Hint(hint="more" if action.number < self.number else "less", reward=-0.125)
    @property
    def state(self):
        return State()

app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
"""
PART = """
import openenv.core
from xtrain import OpenEnvEpisode, environment

@environment
class guessing:
    def reset(self, task, random, url: str = ""):
        self.episode = OpenEnvEpisode(url, lambda text: {"number": int(text)}, lambda seen: seen["hint"])
        return self.episode.reset(seed=int(task["answer"]))

    def step(self, text):
        return self.episode.step(text)
"""


def play(folder: Path, url: str, **limits: Any) -> list[tuple[str | None, float]]:
    """What two episodes at once answer, one after the other."""
    (folder / "parts.py").write_text(PART)
    digest = module_digest(find_module("parts.py", folder))
    user = {"module": "parts.py", "function": "guessing", "digest": digest, "arguments": {"url": url}}
    resources: dict[str, Any] = {}
    plan: Any = SimpleNamespace(spec=str(folder / "spec.xtrain"))
    open_environment(plan, resources, "guessing", user, **{"seconds": 10, "wait": 30, "memory": 1 << 29, **limits})
    processes = [resources[ENVIRONMENTS]["guessing"].episode() for _ in range(2)]
    for process, answer in zip(processes, ("17", "4"), strict=True):
        process.reset("key", "begin", {"prompt": "?", "answer": answer})
    assert [process.opening()[0]["content"] for process in processes] == ["0 to 9"] * 2
    said: list[tuple[str | None, float]] = []
    for text in ("3", "8", "7"):
        for process in processes:
            process.step("key", text)
        for process in processes:
            reply = process.reply()
            said.append((None if reply.messages is None else reply.messages[0]["content"], reply.reward))
    for process in processes:
        process.close()
    return said


EXPECTED = [("more", -0.125), ("more", -0.125), ("less", -0.125), ("less", -0.125), (None, 1.0), ("less", -0.125)]


@pytest.mark.skipif(find_spec("openenv") is not None, reason="the library is played with instead")
def test_an_episode_goes_through_the_client_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "openenv").mkdir()
    (tmp_path / "openenv/__init__.py").write_text("")
    (tmp_path / "openenv/core.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [each for each in sys.modules if each.partition(".")[0] == "openenv"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert play(tmp_path, "http://host:8000") == EXPECTED
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "openenv"]:
            del sys.modules[name]


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ImportError, match=r"openenv-core: install it with `pip install 'xtrain\[openenv\]'`"):
        OpenEnvEpisode("http://host:8000")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openenv") is None, reason="needs openenv-core")
@pytest.mark.timeout(300)
def test_a_server_of_the_library_plays_the_same_episodes(tmp_path: Path):
    (tmp_path / "served.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "served:app", "--port", str(port), "--log-level", "error"]
    server = subprocess.Popen(command, cwd=tmp_path)
    try:
        for _ in range(600):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        assert play(tmp_path, f"http://127.0.0.1:{port}") == EXPECTED
    finally:
        server.terminate()
        server.wait()
