"""Kills a training server at random moments, under clients that ask again until they have an answer.

    OMP_NUM_THREADS=1 python benchmarks/server_kills.py [--kills 30] [--seed 1] [--layout "fsdp 2"]

Two models are trained side by side, two passes a step, and saved every third step. At places drawn from the seed, up to
50 ms behind the sending of a pass, an optim_step or a save, or up to 8 s, which may be while it starts, SIGKILL goes to
the server, to a rank, or to all at once; the server is started again by the same command, a rank by the server. In the
end losses, norms and weights are those of a server that nobody touched (fp64, relative 1e-10), the store has every
request once, each is done, and every checkpoint has the step of its name.

The seed fixes what is hit and when it is aimed at; where a moment falls is a matter of the machine. Prints a JSON line
for each kill and one for all; exit code 1 if anything was not as it must be.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import define, field

from xtrain.client import Pending, RemoteModel, Server, TrainingRow
from xtrain.server.database import examine
from xtrain.server.engine.keeping import read_kept
from xtrain.server.state import Accepted, Done, decoded
from xtrain.server.store import Store

SPEC: Final = """
experiment kills {{ seed = 3 }}
model llama {{ dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, init_std = 0.2 }}
tokenizer bytes
precision {{ params = fp64 }}
adapter lora {{ rank = 8, alpha = 16 }}
serve {{ adapters = 2, max_tokens = 64, rows = 2, port = {port} }}
parallel {{ {layout} }}
launch {{ device = cpu }}
workspace {{ root = "runs" }}
"""
MODELS: Final = 2
SAVE_EVERY: Final = 3
VICTIMS: Final = ("server", "rank", "everything")
AIM: Final = 0.05  # seconds behind the sending of a request
ANY: Final = 8.0  # seconds behind it of a quarter of all, which hit a start as well
PATIENCE: Final = 600.0
CLOSE: Final = 1e-10
KEY: Final = "tml-kills"


@define(eq=False)
class RestartedServer:
    """A server that is started again by the same command whenever it was killed."""

    folder: Path
    layout: str
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    rank_killed_at: int = 0  # start during which that was; a server whose ranks do not start ends
    problems: list[str] = field(factory=list)
    _stopping: bool = False
    _watch: threading.Thread = field(init=False)
    _started: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (self.folder / "kills.xtrain").write_text(SPEC.format(port=self.port, layout=self.layout))
        self._watch = threading.Thread(target=self._run, daemon=True)
        self._watch.start()
        self._started.wait()

    @property
    def store(self) -> Path:
        (found,) = self.folder.glob("runs/**/server")
        return found

    def _run(self) -> None:
        command = [sys.executable, "-m", "xtrain", "serve", "kills.xtrain"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XTRAIN_KEY": KEY}
        while not self._stopping:
            with (self.folder / "server.log").open("ab") as log:
                self.process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
            self.starts += 1
            self._started.set()
            code = self.process.wait()
            if code not in (-signal.SIGKILL, 75) and self.rank_killed_at != self.starts:
                self.problems.append(f"the server ended with {code}")
                return

    def pids(self) -> list[int]:
        """The ranks that are alive."""
        assert self.process is not None
        with suppress(OSError):
            found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
            return [int(pid) for pid in found.split()]
        return []

    def kill(self, victim: str, chance: random.Random) -> int:
        """How many processes it has hit."""
        assert self.process is not None
        ranks = self.pids()
        chosen = {"server": [self.process.pid], "everything": [self.process.pid, *ranks]}.get(victim, ranks)
        if victim == "rank" and ranks:
            chosen, self.rank_killed_at = [chance.choice(ranks)], self.starts
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(chosen)

    def stop(self) -> None:
        assert self.process is not None
        self._stopping = True
        self.process.send_signal(signal.SIGTERM)
        self._watch.join(60)
        if self.process.poll() != 75:
            self.problems.append(f"SIGTERM: {self.process.poll()}")
            self.process.kill()


@define(eq=False)
class Kills:
    """The kills of a campaign. planned: number of a request → victim, and seconds behind its sending."""

    server: RestartedServer
    chance: random.Random
    planned: dict[int, tuple[str, float]] = field(factory=dict)
    sent: int = 0
    hit: Counter[str] = field(factory=Counter)
    _timers: list[threading.Timer] = field(factory=list)

    def sending(self, moment: str) -> None:
        """A request is about to be sent."""
        aimed = self.planned.pop(self.sent, None)
        self.sent += 1
        if aimed is not None:
            victim, after = aimed
            if after > AIM:
                moment = "any moment"
            timer = threading.Timer(after, self._kill, (victim, moment))
            self._timers.append(timer)
            timer.start()

    def _kill(self, victim: str, moment: str) -> None:
        starts = self.server.starts
        while not self.server.kill(victim, self.chance):  # it is being started
            time.sleep(0.01)
        self.hit[f"{victim} at {moment}"] += 1
        print(json.dumps({"kill": self.hit.total(), "victim": victim, "at": moment, "starts": starts}), flush=True)

    def wait(self) -> None:
        for timer in self._timers:
            timer.join()


def rows(model: int, step: int, call: int) -> list[TrainingRow]:
    rng = np.random.default_rng([model, step, call])
    return [TrainingRow.of_text(rng.integers(0, 256, rng.integers(5, 40)).tolist()) for _ in range(3)]


def train(server: RestartedServer, steps: int, kills: Kills) -> list[list[float]]:
    """Of each model losses and norms in turn, the same whatever happens to the server."""
    client = Server(f"http://127.0.0.1:{server.port}", key=KEY, patience=PATIENCE)
    models = [client.create_model(4, seed=number) for number in range(MODELS)]
    found: list[list[float]] = [[] for _ in models]
    for step in range(1, steps + 1):
        asked: list[tuple[int, str, Pending[Any]]] = []
        for number, model in enumerate(models):
            for call in range(2):
                kills.sending("pass")
                asked.append((number, "pass", model.forward_backward(rows(number, step, call))))
            kills.sending("optim_step")
            asked.append((number, "optim_step", model.optim_step(1e-2, eps=1e-3)))
            if step % SAVE_EVERY == 0:
                kills.sending("save")
                asked.append((number, "save", _save(model, f"step-{step}", step)))
        for number, kind, pending in asked:
            result = pending.result()
            if kind != "save":
                found[number].append(result.loss if kind == "pass" else result["grad_norm"])
    kills.wait()
    for model in models:
        model.save("last").result()
    client.close()
    return found


def _save(model: RemoteModel, name: str, step: int) -> Pending[str]:
    return model.save_for_sampler(name) if step % (2 * SAVE_EVERY) == 0 else model.save(name)


def verify(folder: Path, steps: int, problems: list[str]) -> dict[str, dict[str, np.ndarray]]:
    """The tensors of the last checkpoint of each model. Every request must have been accepted once and done once."""
    accepted, done, damage = dict[str, Accepted](), set[str](), list[str]()
    for _, content in examine(folder, damage):
        entry = decoded(content)
        if isinstance(entry, Accepted):
            accepted[entry.id] = entry
        elif isinstance(entry, Done):
            done.add(entry.id)
            if entry.failed:
                problems.append(f"{accepted[entry.id].kind} failed: {entry.body[:200]!r}")
    problems += damage
    keys = Counter((entry.queue, entry.seq) for entry in accepted.values())
    if twice := [key for key, count in keys.items() if count > 1]:
        problems.append(f"accepted twice: {twice}")
    if left := accepted.keys() - done:
        problems.append(f"not done: {left}")
    store, last = Store(folder), dict[str, dict[str, np.ndarray]]()
    requests = 3 * steps + steps // SAVE_EVERY + 1
    if wrong := [model.next - 1 for model in store.state.models.values() if model.next - 1 != requests]:
        problems.append(f"{wrong} requests of a model; {requests} were asked for")
    for one in store.state.checkpoints.values():
        if one.kind == "weights":
            kept = read_kept(store.weights(one.folder))
            if kept.step != (steps if one.name == "last" else int(one.name.removeprefix("step-"))):
                problems.append(f"{one.path} has step {kept.step}")
            if one.name == "last":
                last[one.model.rpartition(":")[2]] = {name: each.numpy() for name, each in kept.tensors.items()}
    if len(store.state.checkpoints) != MODELS * (steps // SAVE_EVERY + 1):
        problems.append(f"there are {len(store.state.checkpoints)} checkpoints")
    store.close()
    return last


def gap(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


def campaign(folder: Path, kills: int, seed: int, layout: str) -> int:
    chance = random.Random(seed)
    steps = max(6, -(-kills * 4 // 3 // SAVE_EVERY) * SAVE_EVERY)
    began = time.monotonic()
    left = RestartedServer(folder / "left", layout)
    expected = train(left, steps, Kills(left, chance))
    left.stop()
    wanted = verify(left.store, steps, left.problems)
    print(json.dumps({"undisturbed": round(time.monotonic() - began, 1), "steps": steps}), flush=True)

    began = time.monotonic()
    server = RestartedServer(folder / "killed", layout)
    many = Kills(server, chance)
    total = MODELS * (3 * steps + steps // SAVE_EVERY)
    for number in chance.sample(range(total), kills):
        after = chance.uniform(0, AIM if chance.random() < 0.75 else ANY)
        many.planned[number] = (chance.choice(VICTIMS), after)
    found = train(server, steps, many)
    server.stop()
    problems = left.problems + server.problems
    last = verify(server.store, steps, problems)
    curves = max(gap(a, b) for a, b in zip(found, expected, strict=True))
    weights = max(gap(last[model][name], value) for model, tensors in wanted.items() for name, value in tensors.items())
    if max(curves, weights) > CLOSE:
        problems.append(f"curves differ by {curves:.1e}, weights by {weights:.1e}")
    summary = {
        "kills": many.hit.total(),
        "by": dict(sorted(many.hit.items())),
        "starts": server.starts,
        "requests": many.sent,
        "seconds": round(time.monotonic() - began, 1),
        "curves": curves,
        "weights": weights,
        "problems": problems,
    }
    print(json.dumps(summary), flush=True)
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", default="fsdp 1", help="what `parallel` says, such as `pp 2`")
    parser.add_argument("--folder", type=Path, help="where servers are kept; default: one that is removed at the end")
    given = parser.parse_args()
    if given.folder is not None:
        return campaign(given.folder, given.kills, given.seed, given.layout)
    with tempfile.TemporaryDirectory() as folder:
        return campaign(Path(folder), given.kills, given.seed, given.layout)


if __name__ == "__main__":
    sys.exit(main())
