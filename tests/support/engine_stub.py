"""A program that speaks the HTTP protocols of vLLM and SGLang, as their documentation has them, and makes mistakes.

Its texts follow from the weights (up to what layouts round), the prompt and the seed: other weights, other texts.
"""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field
from safetensors.numpy import load_file

END = 257  # eos of `tokenizer bytes`
LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789"
MODEL = "base"


def digest(folder: str) -> str:
    files = sorted(Path(folder).glob("*.safetensors"))
    assert files, f"{folder} has no weights"
    found = sha256()
    for file in files:
        for name, values in sorted(load_file(file).items()):
            found.update(name.encode() + (values.astype(np.float64).round(5) + 0.0).tobytes())
    return found.hexdigest()


@define
class EngineStub:
    """faults: of the next answers to requests for texts, by name. seen: how often each path was asked."""

    url: str = ""
    context: int = 10_000
    adapters: dict[str, str] = field(factory=dict)
    version: str = "default"
    weights: str = "initial"
    faults: list[str] = field(factory=list)
    seen: Counter[str] = field(factory=Counter)
    used: list[str] = field(factory=list)  # weights of every text
    missing: set[str] = field(factory=set)  # paths that it does not have
    lock: threading.Lock = field(factory=threading.Lock)

    def restart(self) -> None:
        """Forget everything, as a new process does."""
        self.adapters, self.version, self.weights = {}, "default", "initial"

    # What both have -------------------------------------------------------------------------------------------------

    def text(self, weights: str, prompt: list[int], seed: int, most: int) -> tuple[list[int], list[float], bool]:
        self.used.append(weights)
        tokens: list[int] = []
        while len(tokens) < most:
            key = f"{weights} {prompt} {seed} {len(tokens)}"
            drawn = int.from_bytes(sha256(key.encode()).digest()[:4]) % (len(LETTERS) + 1)
            tokens.append(LETTERS[drawn] if drawn < len(LETTERS) else END)
            if tokens[-1] == END:
                return tokens, [-math.log(37)] * len(tokens), True
        return tokens, [-math.log(37)] * len(tokens), False

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        self.seen[path] += 1
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        name = f"{method} {path}"
        match name:
            case "GET /v1/models":
                listed = [{"id": MODEL, "parent": None, "max_model_len": self.context}]
                return 200, {"data": listed + [{"id": each, "parent": MODEL} for each in self.adapters]}
            case "POST /v1/load_lora_adapter":
                if body["lora_name"] in self.adapters:
                    said = f"The lora adapter '{body['lora_name']}' has already been loaded."
                    return 400, {"error": {"message": said, "type": "InvalidUserInput", "code": 400}}
                self.adapters[body["lora_name"]] = digest(body["lora_path"])
                return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."
            case "POST /v1/unload_lora_adapter":
                return (
                    (200, "Success")
                    if self.adapters.pop(body["lora_name"], "")
                    else (404, {"error": {"message": "no"}})
                )
            case "POST /v1/completions":
                return self.completions(body)
            case "POST /pause" | "POST /resume" | "POST /reset_prefix_cache":
                assert path != "/pause" or query == "mode=wait"
                return 200, {"status": path}
            case "POST /collective_rpc":
                assert body["method"] == "reload_weights"
                self.weights = digest(body["kwargs"]["weights_path"])
                return 200, {"results": [None]}
            case "GET /weight_info":
                return 200, {"weight_version": self.version}
            case "POST /update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True, "new_version": self.version}
            case "GET /model_info":
                return 200, {"model_path": MODEL, "weight_version": self.version}
            case "POST /update_weights_from_disk":
                self.weights, self.version = digest(body["model_path"]), body["weight_version"]
                return 200, {"success": True, "message": "Succeeded to update model weights."}
            case "POST /load_lora_adapter":
                self.adapters[body["lora_name"]] = digest(body["lora_path"])
                return 200, {"success": True, "loaded_adapters": {}}
            case "POST /unload_lora_adapter":
                return 200, {"success": self.adapters.pop(body["lora_name"], None) is not None}
            case "POST /generate":
                return self.generate(body)
        return 404, {"detail": "Not Found"}

    # vLLM -----------------------------------------------------------------------------------------------------------

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["top_p"] == 1 and body["top_k"] == 0 and body["return_token_ids"] and body["logprobs"] == 1
        assert END in body["stop_token_ids"] and not body["skip_special_tokens"]
        weights = self.weights if body["model"] == MODEL else self.adapters.get(body["model"])
        if weights is None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        choices = []
        for index in range(body["n"]):
            tokens, logprobs, stopped = self.text(weights, body["prompt"], body["seed"] + index, body["max_tokens"])
            choices.append(
                {
                    "index": index,
                    "text": "…",
                    "token_ids": tokens,
                    "logprobs": {"token_logprobs": logprobs, "tokens": [], "top_logprobs": []},
                    "finish_reason": "stop" if stopped else "length",
                    "prompt_token_ids": body["prompt"],
                }
            )
        return 200, {"model": body["model"], "choices": choices[::-1], "usage": {}}

    # SGLang ---------------------------------------------------------------------------------------------------------

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        answers = []
        names = body.get("lora_path", [None] * len(body["input_ids"]))
        for prompt, params, name in zip(body["input_ids"], body["sampling_params"], names, strict=True):
            weights = self.weights if name is None else self.adapters.get(name)
            if weights is None:
                return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {name}"}}
            tokens, logprobs, stopped = self.text(weights, prompt, params["sampling_seed"], params["max_new_tokens"])
            drawn = [[logprob, token, None] for token, logprob in zip(tokens, logprobs, strict=True)]
            about = {"finish_reason": {"type": "stop" if stopped else "length"}, "output_token_logprobs": drawn}
            answers.append({"text": "…", "meta_info": about | {"weight_version": self.version}})
        return 200, answers


# Faults of an answer that has been made: its bytes, changed.
CHANGED = {
    "no JSON": lambda found: b"<html>busy</html>",
    "no choices": lambda found: json.dumps({**found, "choices": None}).encode(),
    "other model": lambda found: json.dumps({**found, "model": "other"}).encode(),
    "other prompt": lambda found: json.dumps(
        {**found, "choices": [{**each, "prompt_token_ids": [1]} for each in found["choices"]]}
    ).encode(),
    "one less": lambda found: json.dumps({**found, "choices": found["choices"][1:]}).encode(),
    "twice": lambda found: json.dumps({**found, "choices": [*found["choices"][1:], found["choices"][1]]}).encode(),
    "cut text": lambda found: _of_tokens(found, lambda tokens: tokens[:-1]),
    "no such token": lambda found: _of_tokens(found, lambda tokens: [999] * len(tokens)),
    "texts": lambda found: _of_tokens(found, lambda tokens: ["1"] * len(tokens)),
    "NaN": lambda found: _of_logprobs(found, lambda numbers: [None] * len(numbers)),
    "too likely": lambda found: _of_logprobs(found, lambda numbers: [0.5] * len(numbers)),
}


def _of_tokens(found: dict[str, Any], change: Any) -> bytes:
    choices = [{**each, "token_ids": change(each["token_ids"])} for each in found["choices"]]
    for each in choices:
        numbers = each["logprobs"]["token_logprobs"][: len(each["token_ids"])]
        each["logprobs"] = {**each["logprobs"], "token_logprobs": numbers}
    return json.dumps({**found, "choices": choices}).encode()


def _of_logprobs(found: dict[str, Any], change: Any) -> bytes:
    choices = []
    for each in found["choices"]:
        numbers = change(each["logprobs"]["token_logprobs"])
        choices.append({**each, "logprobs": {**each["logprobs"], "token_logprobs": numbers}})
    return json.dumps({**found, "choices": choices}).encode()


TEXTS = ("/v1/completions", "/generate")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: EngineStub

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        stub = self.stub
        with stub.lock:
            fault = stub.faults.pop(0) if self.path in TEXTS and stub.faults else ""
            if fault == "lost":  # before it was done
                self.close_connection = True
                return self.connection.close()
            if fault == "restarted":
                stub.restart()
            if fault == "other weights":
                stub.version, stub.weights = "another", "others"
            status, found = stub.answer(self.command, self.path, body)
            if fault == "refused":
                status, found = 400, {"error": {"message": "the prompt is too long"}}
        if fault == "busy":
            status, found = 503, {"error": {"message": "come again"}}
        raw = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        if fault in CHANGED and status == 200:
            raw = CHANGED[fault](found)
        if fault == "late":
            time.sleep(0.3)
        if fault == "unanswered":  # after it was done
            self.close_connection = True
            return self.connection.close()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw[: len(raw) // 2] if fault == "cut off" else raw)
        if fault == "cut off":
            self.close_connection = True
        return None

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[EngineStub]:
    stub = EngineStub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
