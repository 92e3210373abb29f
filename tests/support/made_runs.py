"""Directories of runs that never ran: of any shape and any end, from the real plans of `specs/`, in milliseconds.

What they hold is what docs/metrics.md says of a run's files; the numbers follow from the step alone.
"""

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from attrs import define, field

Record = dict[str, Any]
Shape = Literal["dense", "experts", "datasets", "pipeline", "large", "huge"]
End = Literal["waiting", "starting", "running", "done", "stopped", "failed", "killed"]

SPECS = Path(__file__).parents[2] / "specs"
# The spec of each shape, and its number of ranks where that is not the spec's own.
SHAPES: dict[Shape, tuple[str, int | None]] = {
    "dense": ("two_ranks_cpu.xtrain", None),
    "experts": ("moe_cpu.xtrain", 4),
    "datasets": ("curriculum.xtrain", None),
    "pipeline": ("pipeline_cpu.xtrain", None),
    "large": ("llama_8b_64gpu.xtrain", None),
    "huge": ("llama_8b_64gpu.xtrain", 512),
}
START = 1_795_000_000.0
STEP_SECONDS = 0.5
TRIALS, RUNGS = 10, (8, 24, 72)  # of `made_sweep`


@cache
def plan_text(shape: Shape = "dense", steps: int | None = None) -> str:
    """plan.json of a shape, as a run keeps it; steps: the budget, where it is not the spec's own."""
    from xtrain.plan.serialise import to_json
    from xtrain.planner.load import plan_from_spec

    spec, world = SHAPES[shape]
    sets = () if steps is None else (f"experiment.budget={steps} steps",)
    compiled = plan_from_spec(SPECS / spec, sets, world)
    assert compiled.plan is not None, [said.message for said in compiled.diagnostics]
    return json.dumps(to_json(compiled.plan), sort_keys=True)


@define(kw_only=True)
class MadeRun:
    """A run's directory, to be gone on with. slow: rank → how many times as long its steps take. device: on `cuda`
    several ranks do not tell how long they wait for each other."""

    directory: Path
    plan: dict[str, Any] = field(repr=False)
    start: float = START
    slow: Mapping[int, float] = field(factory=dict)
    device: str = "cpu"
    step: int = 0
    attempt: int = 1
    _beats: dict[int, int] = field(factory=dict)

    @property
    def world_size(self) -> int:
        return self.plan["world_size"]

    @property
    def datasets(self) -> list[str]:
        """Those that are trained on."""
        return list(self.plan["timeline"]["phases"][0]["shares"]) or ["data"]

    @property
    def experts(self) -> int:
        """Of a layer; 0 in a dense model."""
        return self.plan["architecture"].get("experts") or 0

    def now(self, step: float | None = None) -> float:
        return self.start + 10 + STEP_SECONDS * (self.step if step is None else step)

    def append(self, name: str, *records: Record) -> None:
        """Write lines as a run does, each of them whole."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records)

    def event(self, event: str, *, at: float | None = None, **fields: Any) -> Record:
        when = self.now() if at is None else self.start + at
        record = {"time": when, "step": self.step, "event": event, **fields}
        self.append("events.jsonl", record)
        return record

    def begin(self) -> None:
        """All events from `run_start` to `setup_done`."""
        self.run_start()
        for number, node in enumerate(node for node in self.plan["graph"]["nodes"] if node["kind"] == "setup"):
            at = 1 + number / 8
            self.event("setup_begin", at=at, node=node["id"])
            self.event("setup", at=at + 0.1, node=node["id"], seconds=0.1, detail=node["does"])
        self.event("setup_done", at=9.9, seconds=9.9)

    def run_start(self, resumed_step: int | None = None) -> None:
        self.event(
            "run_start",
            at=0 if resumed_step is None else self.now(resumed_step) - self.start,
            run_id=self.directory.name,
            plan_id=self.plan["id"],
            name=self.plan["name"],
            world_size=self.world_size,
            device=self.device,
            steps=self.plan["steps"],
            attempt=self.attempt,
            resumed_step=resumed_step,
            directory=str(self.directory),
        )

    def metrics(self, step: int, **fields: Any) -> Record:
        """The record of a step, as a run of this shape writes it."""
        names, experts, layers = self.datasets, self.experts, self.plan["architecture"]["layers"]
        loss = loss_of(step)
        tokens = self.plan["tokens_per_step"]
        slowest = STEP_SECONDS * max((1.0, *self.slow.values()))
        record: Record = {
            "step": step,
            "time": self.now(step),
            "loss": loss,
            "grad_norm": 0.4 + 2 / (1 + step / 20) + 0.05 * math.cos(step),
            "lr": 3e-4 * min(1.0, step / 50),
            "tokens": step * tokens,
            "tokens_per_second": tokens / slowest,
            "step_seconds": slowest,
            "data_seconds": 0.004 + 0.002 * math.sin(step / 7),
            "comm_seconds": 0.06 + 0.01 * math.sin(step / 5),
            "memory_bytes": 1_300_000_000 + 1_000 * (step % 97),
            "tflops": 0.31,
            "valid_tokens": tokens - 17,
            "valid_tokens_per_second": (tokens - 17) / slowest,
            "phase": "train",
        }
        if len(names) > 1:
            record |= {f"loss/{name}": loss * (0.8 + 0.2 * place) for place, name in enumerate(names)}
            record |= {f"rows/{name}": step * (place + 1) for place, name in enumerate(names)}
        if experts:
            weights = [1 + 0.3 * math.sin(step / 9 + expert) for expert in range(experts)]
            loads = [weight / sum(weights) for weight in weights]
            record |= {"moe/aux_loss": 1.02, **{f"moe/load/{layer}": loads for layer in range(layers)}}
        return self._known(record) | fields

    def log(self, first: int, last: int, *, every: int = 1, own_lines: int = 40) -> None:
        """The steps from `first` to `last`, logged every so many; of each rank the last `own_lines` of them."""
        steps = range(first + (-first) % every, last + 1, every)
        self.append("metrics.jsonl", *map(self.metrics, steps))
        for rank in range(self.world_size):
            self.append(f"ranks/{rank:05d}.jsonl", *(self.own(rank, step) for step in steps[-own_lines:]))
        self.step = last

    def own(self, rank: int, step: int) -> Record:
        """A rank's own line of a step."""
        seconds = STEP_SECONDS * self.slow.get(rank, 1.0) * (1 + 0.002 * math.sin(rank + step))
        nodes = [node["id"] for node in self.plan["graph"]["nodes"] if node["kind"] == "step"]
        shares = [10.0 if "forward" in node else 1.0 for node in nodes]
        record: Record = {
            "step": step,
            "time": self.now(step),
            "memory_bytes": 1_300_000_000 - 1_000_000 * (rank % 5),
            "node_seconds": {
                node: round(seconds * share / sum(shares), 6) for node, share in zip(nodes, shares, strict=True)
            },
            "step_seconds": seconds,
            "data_seconds": 0.004,
            "comm_seconds": 0.06,
            "resident_bytes": 1_200_000_000 - 1_000_000 * (rank % 5),
        }
        return self._known(record)

    def _known(self, record: Record) -> Record:
        if self.device == "cuda" and self.world_size > 1:
            del record["comm_seconds"]
        return record

    def beat(self, ranks: Collection[int] | None = None, *, pid: int | None = None, **fields: Any) -> None:
        """Each of the ranks (None: all) writes its line once more. pid: of this process, unless another is given."""
        process = os.getpid() if pid is None else pid
        for rank in range(self.world_size) if ranks is None else ranks:
            count = self._beats[rank] = self._beats.get(rank, 0) + 1
            line = {
                "rank": rank, "host": socket.gethostname(), "pid": process, "born": _born(process),
                "attempt": self.attempt, "alive": count, "time": round(time.time(), 3), "step": self.step + 1,
                "node": "step.forward_backward", "marks": 100 * self.step + count, "within": 3, "lasting": False,
                "idle": 0.1, "place": "", "debugger": False, **fields,
            }  # fmt: skip
            path = self.directory / "ranks" / f"{rank:05d}.beat"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(line, separators=(",", ":")).ljust(639) + "\n")

    @contextmanager
    def alive(self, began: float = 0.0) -> Iterator[None]:
        """Hold the locks of the run, as its launcher and its first rank do. began: since when, seconds since 1970."""
        with ExitStack() as stack:
            for name in (".launcher.lock", ".worker.lock"):
                lock = stack.enter_context((self.directory / name).open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.utime(lock.fileno(), (began, began))
            yield

    def evaluate(self, **fields: Any) -> None:
        """An evaluation of each dataset after the step that has ended: events, and a record of its own."""
        losses = {name: 1.05 * loss_of(self.step) for name in self.datasets}
        for name, loss in losses.items():
            said = {"dataset": name, "loss": loss, "tokens": 65536, "batches": 16, "seconds": 0.8}
            self.event("eval", node=f"tick.eval.{name}", weights="trained", **said | fields)
        found = {f"eval/{name}/loss": loss for name, loss in losses.items()}
        self.append("metrics.jsonl", {"step": self.step, "time": self.now(), **found})

    def checkpoint(self) -> None:
        path = self.directory / "checkpoints" / f"ckpt-s{self.step:012d}"
        path.mkdir(parents=True, exist_ok=True)
        said = {"path": str(path), "bytes": 150_000_000, "seconds": 0.41, "blocked_seconds": 0.02}
        self.event("checkpoint", node="tick.checkpoint", **said)

    def print(self, rank: int, stream: Literal["stdout", "stderr"], text: str) -> Path:
        """What a rank prints, where the agent that has started it puts it; it has a file for each of both."""
        name = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self.start + self.attempt)) + "-4711"
        folder = self.directory / "logs" / name / f"{name}_h2x8kk0z" / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        for each in ("stdout", "stderr"):
            (folder / f"{each}.log").touch()
        with (folder / f"{stream}.log").open("a") as file:
            file.write(text)
        return folder / f"{stream}.log"

    def roll_back(self, step: int) -> None:
        """Go back as `on nan rollback` does: another metrics.jsonl lies in the place of the old one."""
        path = self.directory / "metrics.jsonl"
        lines = [line for line in path.read_text().splitlines(True) if json.loads(line)["step"] <= step]
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(lines))
        beside.replace(path)
        before, self.step = self.step, step
        self.append("events.jsonl", {
            "time": self.now(before), "step": step, "event": "rollback", "from_step": before,
            "checkpoint": f"ckpt-s{step:012d}", "number": 1, "of": 3, "rows_left_out": 24, "seconds": 0.2,
        })  # fmt: skip

    def end(self, status: str, **fields: Any) -> None:
        codes = {"done": 0, "complete": 0, "stopped": 75, "interrupted": 130, "failed": 1}
        seconds, loss = (None, None) if status == "failed" else (self.now() - self.start, loss_of(self.step))
        said = {"status": status, "exit_code": codes[status], "seconds": seconds, "loss": loss}
        self.event("run_end", **said | fields)


def made_run(
    directory: Path,
    shape: Shape = "dense",
    *,
    end: End = "done",
    logged: int = 200,
    steps: int | None = None,
    every: int = 1,
    start: float = START,
    slow: Mapping[int, float] | None = None,
    device: str = "cpu",
) -> MadeRun:
    """A run of `steps` steps of which `logged` have been made, evaluated every quarter, saved halfway.

    end: `waiting` (there is a plan and nothing else), `starting` (half of set-up), `running` (it could be live: hold
    `alive()` and call `beat()`), `killed` (the same, and nobody is there), or how it says itself that it has ended.
    """
    text = plan_text(shape, steps)
    run = MadeRun(directory=directory, plan=json.loads(text), start=start, slow=slow or {}, device=device)
    for name in ("ranks", "logs", "checkpoints", "metadata"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(text)
    if end == "waiting":
        return run
    if end == "starting":
        run.run_start()
        run.event("setup_begin", at=1, node="setup.bootstrap")
        return run
    run.begin()
    quarter = max(1, logged // 4)
    for first in range(1, logged + 1, quarter):
        run.log(first, min(logged, first + quarter - 1), every=every, own_lines=10)
        run.evaluate()
        if first <= logged // 2 < first + quarter:
            run.checkpoint()
    run.print(0, "stdout", "step 1\na line of a library\n" * 50)
    if end in ("running", "killed"):
        run.beat(pid=None if end == "running" else _no_process())
    elif end == "failed":
        run.event("failure", rank=1 % run.world_size, error="RuntimeError: boom", exit_code=1, traceback="", code="")
        run.end("failed")
    else:
        run.end(end)
    return run


def loss_of(step: int) -> float:
    """A loss that falls and wavers."""
    return 1.2 + 4.5 / (1 + step / 40) ** 0.5 + 0.02 * math.sin(step * 1.7)


def made_sweep(folder: Path) -> None:
    """Trials as `asha` leaves them: two in training, some stopped early; the loss follows from the rate."""
    lines: list[dict] = [{"event": "sweep_begin", "sweep_id": "s", "attempt": "a", "lag": 2}]
    lines[0]["objective"] = "eval/web/loss"
    for number in range(TRIALS):
        rate = 10 ** (-4 + 3 * (number * 3 % TRIALS) / TRIALS)
        away = abs(math.log10(rate) + 2)
        rungs = 3 if away < 0.5 else 2 if away < 1 else 1
        name, loss = f"{number:03d}-x", lambda step, away=away: 2 + away + 6 / (step + 2)
        point = {"optimizer.lr": f"{rate:.4g}", "model.ffn": ("64", "128")[number % 2]}
        asked = {"event": "trial_asked", "trial": number, "name": name, "point": point, "sameness": name}
        lines.append({**asked, "config_id": "c", "same_as": None})
        trained = RUNGS[rungs - 1] if number < TRIALS - 2 else 16
        with made_run(folder / name, logged=1).directory.joinpath("metrics.jsonl").open("w") as file:
            for step in range(2, trained + 1, 2):
                row = {"step": step, "time": START + step, "tokens": 512 * step, "loss": loss(step) - 0.1}
                file.write(json.dumps(row | ({"eval/web/loss": loss(step)} if step % 4 == 0 else {})) + "\n")
        for rung in range(rungs if number < TRIALS - 2 else 1):
            step, last = RUNGS[rung], rung == 2
            measured = {"event": "trial_measured", "trial": number, "rung": None if last else rung, "trained": step}
            lines.append({**measured, "tokens": 512 * step, "value": loss(step)})
            goes_on = number >= TRIALS - 2 or rung < rungs - 1
            if not last:
                decided = {"event": "trial_decided", "trial": number, "rung": rung, "goes_on": goes_on}
                lines.append({**decided, "place": 1, "of": number + 1})
        if number >= TRIALS - 2:
            lines.append({"event": "trial_started", "trial": number, "rung": 1})
    text = "".join(json.dumps({"step": 0, "time": START, **each}) + "\n" for each in lines)
    (folder / "sweep.jsonl").write_text(text)


def long_run(directory: Path, steps: int = 1_000_000) -> MadeRun:
    """A dense run of which every one of `steps` steps was logged: about 400 bytes each, in seconds."""
    run = made_run(directory, steps=steps, end="waiting")
    run.begin()
    for first in range(1, steps + 1, 10_000):
        rates = {"mfu": 0.4125, "mfu_causal": 0.385, "hfu": 0.51}  # as of a run on GPUs: about 400 bytes a line
        lines = (run.metrics(step, **rates) for step in range(first, min(steps, first + 9_999) + 1))
        run.append("metrics.jsonl", *lines)
    run.step = steps
    for rank in range(run.world_size):
        run.append(f"ranks/{rank:05d}.jsonl", *(run.own(rank, step) for step in range(steps - 9, steps + 1)))
    return run


def _born(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _no_process() -> int:
    """The number of a process that has ended."""
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    return child
