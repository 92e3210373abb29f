"""Many clients of one training server: requests a second, latencies, memory; and passes of several models together.

    OMP_NUM_THREADS=1 python benchmarks/server_load.py [--seconds 600] [--clients 32] [--models 8] [--url URL]
        [--beside 'python toy.py --serve {port} --key {key}']

Of the clients of a model one trains it (a pass and a step in flight, weights for sampling every tenth step), the others
sample from its newest weights, two samples of eight tokens a request. A client asks its next request once it has the
result of the one before. Without --url it starts `xtrain serve` with a model of 32 dims on one CPU rank; with it, it
asks any server that speaks the protocol of the Tinker SDK; token ids are below 48. Prints a JSON line every 30 s and
one at the end: requests (with their retrievals) a second, milliseconds from sending to result by kind, MiB of the
started server and of each of its ranks. `together`: trained tokens a second where the clients of all models
send passes at once, over those where each is sent when that of another has its result. --beside: a command that starts
another server, with its port and key in place of the braces; it is asked the same for as long, behind the first one,
and the last line has the figures of both, and the ratio of requests a second. Exit code 1 if any request to the first
has failed.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
from attrs import define, field

from xtrain.server.messages import MESSAGES

SPEC: Final = """
experiment load {{ seed = 3 }}
model llama {{ dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
tokenizer bytes
adapter lora {{ rank = 8, alpha = 16 }}
serve {{ adapters = {models}, max_tokens = 64, rows = 16, port = {port} }}
launch {{ device = cpu }}
workspace {{ root = "runs" }}
"""
PROTOBUF: Final = "application/x-protobuf"
TOKENS: Final = 16  # of a text, of which a pass has two
VOCABULARY: Final = 48
SAMPLED: Final = 8
EXPORTS: Final = 10  # steps between two exports
ROUNDS: Final = 20  # of passes in a turn, together and one by one
TURNS: Final = 3
REPORT: Final = 30.0
PERCENTILES: Final = (50, 90, 99)


@define(eq=False)
class Figures:
    """What all clients have measured. seconds: from sending to result, by kind."""

    seconds: dict[str, list[float]] = field(factory=lambda: defaultdict(list))
    requests: int = 0
    errors: list[str] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def add(self, kind: str, seconds: float) -> None:
        with self._lock:
            self.seconds[kind].append(seconds)

    def count(self) -> None:
        with self._lock:
            self.requests += 1

    def latencies(self) -> dict[str, list[float]]:
        """Percentiles in milliseconds, by kind."""
        with self._lock:
            found = {kind: np.percentile(each, PERCENTILES) * 1000 for kind, each in self.seconds.items()}
        return {kind: each.round(1).tolist() for kind, each in sorted(found.items())}


class Connection:
    """One client: a connection that stays."""

    def __init__(self, url: str, key: str, figures: Figures) -> None:
        place = urlsplit(url)
        self._http = HTTPConnection(place.hostname or "", place.port, timeout=120)
        self._key, self._figures = key, figures

    def ask(self, path: str, body: dict[str, Any] | bytes | None) -> Any:
        """The JSON, or the bytes, of an answer. Raises RuntimeError where it is no 200."""
        media = PROTOBUF if isinstance(body, bytes) else "application/json"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        for _ in range(20):
            self._figures.count()
            headers = {"x-api-key": self._key, "content-type": media}
            method = "GET" if body is None else "POST"
            answer = self._sent(method, f"/api/v1/{path}", None if body is None else content, headers)
            raw = answer.read()
            if answer.status == 429:
                time.sleep(float(answer.headers.get("retry-after", "1")))
                continue
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {raw[:200]!r}")
            return raw if answer.headers.get_content_type() == PROTOBUF else json.loads(raw)
        raise RuntimeError(f"{path}: 429 too often")

    def _sent(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> HTTPResponse:
        """The answer. A server closes a connection on which nothing was asked for some time: then on a new one."""
        try:
            self._http.request(method, path, content, headers)
            return self._http.getresponse()
        except ConnectionError:
            self._http.close()
        self._http.request(method, path, content, headers)
        return self._http.getresponse()

    def result(self, promise: dict[str, Any]) -> Any:
        while True:
            found = self.ask("retrieve_future", {"request_id": promise["request_id"]})
            if isinstance(found, bytes):
                return found
            if "error" in found:
                raise RuntimeError(found["error"])
            if found.get("type") != "try_again":
                return found

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._figures.add(kind, time.monotonic() - began)


@define(eq=False)
class Model:
    """A model on the server, and the path of its newest weights for sampling."""

    id: str
    session: str
    seq: int = 0
    path: str = ""

    def numbered(self) -> dict[str, Any]:
        self.seq += 1
        return {"model_id": self.id, "seq_id": self.seq}

    def a_pass(self, rng: np.random.Generator) -> bytes:
        named = self.numbered()
        out = MESSAGES["ForwardBackwardRequest"](**named, loss_fn="cross_entropy")
        for _ in range(2):
            ids = rng.integers(1, VOCABULARY, TOKENS + 1)
            row = out.data.add(chunks=[{"text": {"tokens": ids[:-1].astype("<i4").tobytes()}}])
            for name, values, dtype in (("target_tokens", ids[1:].astype("<i8"), 2), ("weights", _ONES, 1)):
                row.inputs.add(key=name, value={"dense": values.tobytes(), "dtype": dtype, "shape": [TOKENS]})
        return out.SerializeToString()

    def export(self, to: Connection) -> None:
        body = self.numbered() | {"path": f"at-{self.seq}", "ttl_seconds": 60}
        self.path = to.result(to.ask("save_weights_for_sampler", body))["path"]


_ONES: Final = np.ones(TOKENS, "<f4")


def created(to: Connection, base: str, number: int) -> Model:
    session = to.ask("create_session", {})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": {"rank": 4, "seed": number}}
    return Model(to.result(to.ask("create_model", body))["model_id"], session)


def train(to: Connection, model: Model, rng: np.random.Generator, until: float) -> None:
    step = 0
    while time.monotonic() < until:
        with to.timed("step"):
            passed = to.ask("forward_backward", model.a_pass(rng))
            body = model.numbered() | {"adam_params": {"learning_rate": 1e-3}}
            stepped = to.ask("optim_step", body)
            with to.timed("pass"):
                to.result(passed)
            to.result(stepped)
        step += 1
        if step % EXPORTS == 0:
            with to.timed("export"):
                model.export(to)


def sample(to: Connection, model: Model, rng: np.random.Generator, until: float) -> None:
    session = to.ask("create_session", {})["session_id"]
    path, sampler, samplers, seq = "", "", 0, 0
    while time.monotonic() < until:
        if model.path != path:
            path, seq = model.path, 0
            body = {"session_id": session, "sampling_session_seq_id": samplers, "model_path": path}
            sampler, samplers = to.ask("create_sampling_session", body)["sampling_session_id"], samplers + 1
        chunk = {"type": "encoded_text", "tokens": rng.integers(1, VOCABULARY, TOKENS).tolist()}
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [chunk]}, "num_samples": 2}
        with to.timed("sample"):
            to.result(to.ask("asample", body | {"sampling_params": {"max_tokens": SAMPLED, "seed": seq}}))
        seq += 1


def together(connections: list[Connection], models: list[Model]) -> dict[str, float]:
    """Tokens a second where each model's client sends its next pass once it has the result of the one before, and
    where the next client sends its pass once that of the one before has its result. In turns; the first are not
    counted, as more than one size of a batch is new then."""
    rng = np.random.default_rng(0)
    clients = list(zip(connections, models, rng.spawn(len(models)), strict=True))

    def passes(client: tuple[Connection, Model, np.random.Generator], count: int) -> None:
        to, model, own = client
        for _ in range(count):
            to.result(to.ask("forward_backward", model.a_pass(own)))

    def at_once(count: int) -> None:
        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(lambda client: passes(client, count), clients))

    def one_by_one(count: int) -> None:
        for _ in range(count):
            for client in clients:
                passes(client, 1)

    seconds = {at_once: 0.0, one_by_one: 0.0}
    at_once(ROUNDS)
    for _ in range(TURNS):
        for way in seconds:
            began = time.monotonic()
            way(ROUNDS)
            seconds[way] += time.monotonic() - began
    speeds = [2 * TOKENS * len(models) * ROUNDS * TURNS / each for each in seconds.values()]
    return {"at_once": round(speeds[0], 1), "one_by_one": round(speeds[1], 1), "ratio": round(speeds[0] / speeds[1], 2)}


def memory(pid: int | None) -> list[int]:
    """MiB of a process and of each of those that it has started."""
    sizes, pids = [], [] if pid is None else [pid]
    while pids:
        one = pids.pop(0)
        with suppress(OSError):
            pages = int(Path(f"/proc/{one}/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE") // 2**20)
            pids += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return sizes


def load(url: str, key: str, clients: int, count: int, seconds: float, pid: int | None) -> dict[str, Any]:
    """Its figures, as they are printed."""
    figures = Figures()
    first = Connection(url, key, figures)
    base = first.ask("get_server_capabilities", None)["supported_models"][0]["model_name"]
    models = [created(first, base, number) for number in range(count)]
    connections = [Connection(url, key, figures) for _ in models]
    ratio = together(connections, models)
    print(json.dumps({"together": ratio}), flush=True)
    for to, model in zip(connections, models, strict=True):
        model.export(to)
    until, threads = time.monotonic() + seconds, []
    figures.requests = 0

    def run(number: int) -> None:
        work = train if number < count else sample
        try:
            work(Connection(url, key, figures), models[number % count], np.random.default_rng(number), until)
        except Exception as error:
            figures.errors.append(f"client {number}: {type(error).__name__}: {error}")

    began, sizes = time.monotonic(), [memory(pid)]
    for number in range(clients):
        threads.append(threading.Thread(target=run, args=(number,)))
        threads[-1].start()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(REPORT)
        sizes.append(memory(pid))
        line = {"seconds": round(time.monotonic() - began), "requests": figures.requests, "mib": sizes[-1]}
        print(json.dumps(line | {"errors": len(figures.errors)}), flush=True)
        if not threads[0].is_alive():
            for thread in threads:
                thread.join()
    passed = time.monotonic() - began
    summary = {
        "clients": clients,
        "models": count,
        "seconds": round(passed, 1),
        "requests_per_second": round(figures.requests / passed, 1),
        "done": {kind: len(each) for kind, each in sorted(figures.seconds.items())},
        f"milliseconds at {PERCENTILES}": figures.latencies(),
        "mib": sizes,
        "together": ratio,
        "errors": figures.errors,
    }
    print(json.dumps(summary), flush=True)
    return summary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def other(command: str, key: str) -> Iterator[tuple[int, str]]:
    """The process and the address of a server that a command starts, once it listens."""
    port = free_port()
    words = [word.format(port=port, key=key) for word in shlex.split(command)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"{words[0]} has ended with code {process.returncode}")
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield process.pid, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The figures of two servers side by side: ours, the other's."""
    latencies = f"milliseconds at {PERCENTILES}"
    kinds = [kind for kind in ours[latencies] if kind in theirs[latencies]]
    speeds = [each["requests_per_second"] for each in (ours, theirs)]
    return {
        "requests_per_second": speeds,
        "ratio": round(speeds[0] / speeds[1], 2),
        "errors": [len(each["errors"]) for each in (ours, theirs)],
        latencies: {kind: [each[latencies][kind] for each in (ours, theirs)] for kind in kinds},
        "done": {kind: [each["done"][kind] for each in (ours, theirs)] for kind in kinds},
    }


def started(folder: Path, models: int, key: str) -> tuple[subprocess.Popen[str], str]:
    """A server, and where it listens."""
    port = free_port()
    (folder / "load.xtrain").write_text(SPEC.format(models=models, port=port))
    command = [sys.executable, "-m", "xtrain", "serve", "load.xtrain"]
    environment = os.environ | {"XTRAIN_KEY": key}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return process, line.split()[-1]
    raise SystemExit("the server has not started")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--key", default="tml-load")
    parser.add_argument("--beside", help="command of another server, with {port} and {key} in it")
    given = parser.parse_args()
    load_of = (given.key, given.clients, given.models, given.seconds)
    if given.url is not None:
        ours, stopped = load(given.url, *load_of, None), True
    else:
        with tempfile.TemporaryDirectory() as folder:
            process, url = started(Path(folder), given.models, given.key)
            try:
                ours = load(url, *load_of, process.pid)
                process.send_signal(signal.SIGTERM)
                stopped = process.wait(60) == 75
            finally:
                process.kill()
                process.wait()
    if given.beside is not None:
        with other(given.beside, given.key) as (pid, url):
            print(json.dumps({"beside": compared(ours, load(url, *load_of, pid))}), flush=True)
    return int(not stopped or bool(ours["errors"]))


if __name__ == "__main__":
    sys.exit(main())
