"""`xtrain fetch` against a hub on this machine, and specs that name what it downloaded."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from xtrain.cli.main import main
from xtrain.dsl.load import load_spec
from xtrain.planner.compile import Compiled, compile_plan

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 40, "rms_norm_eps": 1e-6,
}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
    "pre_tokenizer": {"type": "Whitespace"}, "decoder": None,
    "added_tokens": [{"id": 0, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2}, "unk_token": "a"},
}  # fmt: skip
FILES = {
    "config.json": json.dumps(CONFIG),
    "tokenizer.json": json.dumps(TOKENIZER),
    "model.safetensors": "weights",
    "pytorch_model.bin": "weights in another format",
}


class _Hub(BaseHTTPRequestHandler):
    """The requests of `snapshot_download` for one repository."""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].removeprefix("/datasets").replace("/api/datasets/", "/api/models/")
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/name/tree/"):
            content = json.dumps([{"type": "file", "path": n, "size": len(t), "oid": n} for n, t in FILES.items()])
        elif path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            siblings = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/org/name/resolve/") and name in FILES:
            content = FILES[name]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("X-Error-Message", "there is no such repository")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content.encode())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", place)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "cache"
    server.shutdown()


HEAD = "experiment a { budget = 1 step }\ndataset d { source = synthetic() }\nbatch { sequence = 8, rows = 1 }\n"


def _plan(text: str, head: str = f"{HEAD}optimizer sgd {{ lr = 1e-3 }}\n") -> Compiled:
    loaded = load_spec("a.xtrain", texts={"a.xtrain": f"{head}{text}\n"})
    return compile_plan(loaded.require(), spec_text=loaded.resolved_text())


@pytest.mark.parametrize(("words", "fetched"), [
    (["org/name"], {"config.json", "tokenizer.json", "model.safetensors"}),
    (['hub("org/name", revision = "main")', "--tokenizer"], {"config.json", "tokenizer.json"}),
])  # fmt: skip
def test_a_repository(cache: Path, capsys: pytest.CaptureFixture[str], words: list[str], fetched: set[str]):
    assert main(["fetch", *words]) == 0
    folder = cache / "models--org--name" / "snapshots" / COMMIT
    assert {path.name for path in folder.iterdir()} == fetched
    written = capsys.readouterr().out.strip().splitlines()[-1].strip()
    named = f'hub("org/name", revision = "{COMMIT}")'
    assert written == (f"tokenizer {named}" if "--tokenizer" in words else f"model {named} {{}}")


def test_a_dataset(cache: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fetch", "org/name", "--dataset"]) == 0
    folder = cache / "datasets--org--name" / "snapshots" / COMMIT
    assert {path.name for path in folder.iterdir()} == FILES.keys()
    assert f"--data {folder}" in capsys.readouterr().out


def test_the_tokenizer_of_a_model(cache: Path):
    assert main(["fetch", "org/name"]) == 0
    named = f'hub("org/name", revision = "{COMMIT}")'
    plans = [
        _plan(text).plan
        for text in (
            'model hub("org/name") { weights = none }',
            f'model {named} {{ weights = none }}\ntokenizer hub("org/name")',
        )
    ]
    assert all(plan is not None and plan.node("setup.tokenizer").args["source"] == named for plan in plans)
    assert plans[0].config_id == plans[1].config_id and f"\ntokenizer {named}\n" in plans[0].spec_text
    again = _plan(plans[0].spec_text, "").plan
    assert again is not None and again.config_id == plans[0].config_id


@pytest.mark.parametrize(("words", "code", "said"), [
    (["org/other"], 3, "org/other was not downloaded"),
    (["../other"], 2, "is not a repository"),
    (['hub("org/name", revision = "v1")', "--revision", "v2"], 2, "both v1 and v2"),
])  # fmt: skip
def test_refusals(cache: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str):
    assert main(["fetch", *words]) == code
    assert said in capsys.readouterr().err
