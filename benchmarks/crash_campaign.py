"""Kills real runs at random moments, and gives the same command again until they end as if nothing had happened.

    OMP_NUM_THREADS=1 python benchmarks/crash_campaign.py [--kills 100] [--seed 1] [--ranks 2] [--mode both]

A run of a small mixture of experts saves after every step and keeps two checkpoints. At moments drawn from the seed
(set-up, between steps, while a checkpoint is written, gets its name and pointers, while old ones are removed, the end)
SIGKILL goes to the launcher, to all ranks, to one, or to all at once. After every kill no pointer may name a checkpoint
whose content is not what was written, and none that was there may be gone; in the end metrics, weights, moments and
counters are those of the run that nobody touched, bit for bit. With --restarts ranks are killed while their launcher
lives, which starts them again by itself.

The seed fixes what is tried, in which order, whom it hits and when; where a moment falls is still a matter of the
machine. Prints a JSON line for each run and one for all; exit code 1 if anything was not as it must be.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from killing import MOMENTS, VICTIMS, Start, command, logged
from torch.distributed.checkpoint import FileSystemReader

from xtrain.runtime.store.checkpoints import POINTERS, TENSORS, CheckpointEntry, CheckpointFolder
from xtrain.runtime.store.reading import read_tensors

STEPS = 20
SPEC = """
experiment campaign {{ seed = 3, budget = {steps} steps }}
model qwen3_moe {{
  dim = 32, layers = 2, heads = 4, kv_heads = 2, head_dim = 8, experts = 4, experts_per_token = 2, expert_ffn = 24
  router {{ score = sigmoid, bias_speed = 1e-2 }}
}}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl"), holdout = 10% }}
batch {{ sequence = 64, micro = 1, rows = 8 }}
optimizer adamw {{ lr = 3e-3 }}
scheduler cosine {{ warmup = 10%, floor = 10% }}
workspace {{ root = "runs" }}
every 1 step log
every 4 steps eval lines {{ batches = 4 }}
every 1 step checkpoint
checkpoint {{ backend = {backend}, mode = {mode}, keep = 2, best = eval.lines.loss }}
{more}
"""
MOST_KILLS = 6  # of one run
# Keys of a record that say how fast it went, and no two runs have in common; besides those in seconds and by second.
MEASURED = {"time", "memory_bytes", "tflops", "mfu", "mfu_causal", "hfu", "dropped"}
Fault = str


class Campaign:
    """A folder with data, one spec for each mode, and what a run that is left alone gives."""

    def __init__(self, folder: Path, ranks: int, backend: str, restarts: bool) -> None:
        self.folder, self.ranks, self.backend, self.restarts = folder, ranks, backend, restarts
        words = [f"line {i} " + "abc def ghi "[: i % 13] * (1 + i % 9) for i in range(400)]
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
        self.expected: dict[str, dict[str, Any]] = {}
        self.seconds = 5.0

    def spec(self, mode: str) -> Path:
        more = f"fault_tolerance {{ restarts = {MOST_KILLS} }}" if self.restarts else ""
        path = self.folder / f"{mode}.xtrain"
        path.write_text(SPEC.format(steps=STEPS, mode=mode, backend=self.backend, more=more))
        return path

    def directory(self, name: str) -> Path:
        return self.folder / "runs" / "campaign" / name

    def start(self, mode: str, name: str) -> Start:
        given = command(self.spec(mode), name, self.ranks)
        return Start.of(given, self.folder, self.directory(name), self.seconds)

    def left_alone(self, mode: str) -> None:
        """Run without a kill: what is expected, and how long a start takes."""
        name = f"{mode}-whole"
        begin = time.monotonic()
        start = self.start(mode, name)
        while not start.ended() and logged(start.directory) == 0:
            time.sleep(0.01)
        self.seconds = time.monotonic() - begin
        if code := start.wait():
            raise SystemExit(f"a run that nobody touched has ended with {code}: see {self.folder}/{name}.log")
        self.expected[mode] = result(self.directory(name))

    def run(self, number: int, mode: str, kills: int, chance: random.Random) -> dict[str, Any]:
        """One run with up to so many kills, and what came of it."""
        name = f"{mode}-{number:03d}"
        kills_done: list[dict[str, Any]] = []
        faults: list[Fault] = []
        start, step, hit = self.start(mode, name), 0, False
        try:
            while len(kills_done) < kills and (killed := self.kill(start, chance)):
                kills_done.append(killed)
                launcher_lives = self.restarts and killed["victim"] not in ("launcher", "everything")
                if not launcher_lives:
                    start.wait()
                found, step = spoilt(start.folder, step)
                faults += found
                hit = launcher_lives
                if launcher_lives:
                    self.await_ranks(start)
                else:
                    start = self.start(mode, name)
            code = start.wait()
            if code and hit:  # a launcher whose ranks were killed may have given up
                code = self.start(mode, name).wait()
            if code:
                faults.append(f"exit code {code}")
        except TimeoutError as error:
            faults.append(str(error))
        finally:  # also where the campaign itself is interrupted
            start.kill("everything", chance)
        if not faults:
            faults = differences(result(self.directory(name)), self.expected[mode])
        return {"run": number, "mode": mode, "ranks": self.ranks, "kills": kills_done, "faults": faults}

    def kill(self, start: Start, chance: random.Random) -> dict[str, Any] | None:
        """Kill at the next moment; None where the run has ended before. What is drawn does not depend on that."""
        moment = chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        victim = chance.choice(VICTIMS)
        if not start.reach(moment, STEPS, chance):
            return None
        seconds = time.monotonic() - start.began
        hit = start.kill(victim, chance)
        return {"moment": moment, "victim": hit, "seconds": round(seconds, 3), "step": logged(start.directory)}

    def await_ranks(self, start: Start) -> None:
        """The launcher has noticed, and all ranks are there again."""
        before = set(start.ranks())
        deadline = time.monotonic() + 60
        while not start.ended() and time.monotonic() < deadline:
            now = start.ranks()
            if len(now) == self.ranks and not before & set(now):
                break
            time.sleep(0.02)
        start.steps = logged(start.directory)


def spoilt(folder: CheckpointFolder, before: int) -> tuple[list[Fault], int]:
    """What a kill has spoilt: pointers that name no intact checkpoint, or fewer than before; the step of `latest`."""
    faults: list[Fault] = []
    for pointer in POINTERS:
        while named := folder.named(pointer):
            entry = CheckpointEntry(folder.root / named, int(named[-12:]))
            flaws = entry.flaws(content=True)
            if folder.named(pointer) == named:  # else a living launcher has started others
                faults += [f"{pointer} names {named}: {flaw}" for flaw in flaws]
                break
    step = int(named[-12:]) if (named := folder.named()) else 0
    if step < before:
        faults.append(f"latest has gone from step {before} back to {step}")
    return faults, step


def result(directory: Path) -> dict[str, Any]:
    """All of a run that must not depend on kills: metrics by step, and what its last checkpoints hold."""
    found: dict[str, Any] = {}
    for number, line in enumerate((directory / "metrics.jsonl").read_text().splitlines()):
        record = json.loads(line)
        computed = record.keys() - MEASURED
        found[f"line {number}"] = {k: record[k] for k in computed if not k.endswith(("seconds", "per_second"))}
    folder = CheckpointFolder(directory / "checkpoints")
    for pointer in POINTERS:
        entry = folder.pointed(pointer)
        found[pointer] = entry and entry.name
        if entry is not None:
            state = {k: v for k, v in entry.state().items() if k not in ("time", "files", "seal", "plan_id", "record")}
            found[f"{pointer}/state"] = state
            found |= {f"{pointer}/{name}": value for name, value in tensors(entry.path).items()}
    found["kept"] = [entry.name for entry in folder.published()]
    found["remains"] = [path.name for path in folder.remains()]
    return found


def tensors(path: Path) -> dict[str, torch.Tensor]:
    if (file := path / TENSORS).is_file():
        return torch.load(file, weights_only=True)
    entries = FileSystemReader(path).read_metadata().state_dict_metadata.items()
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}  # type: ignore[union-attr]
    read_tensors(state, path)
    return state


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[Fault]:
    """Names of what is not the same, bit for bit."""
    names = [name for name in ours.keys() | theirs.keys() if not same(ours.get(name), theirs.get(name))]
    return [f"{name} differs" for name in sorted(names)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mode", choices=("sync", "async", "both"), default="both")
    parser.add_argument("--backend", choices=("dcp", "file"), default="dcp", help="`file` is for one rank")
    parser.add_argument("--restarts", action="store_true", help="the launcher starts ranks again by itself")
    parser.add_argument("--folder", type=Path, help="where runs are kept; default: a folder that is removed at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = (options.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(folder, options.ranks, options.backend, options.restarts)
        sys.exit(carry_out(campaign, options))


def carry_out(campaign: Campaign, options: argparse.Namespace) -> int:
    begin = time.monotonic()
    modes = ("sync", "async") if options.mode == "both" else (options.mode,)
    for mode in modes:
        campaign.left_alone(mode)
    kills: list[dict[str, Any]] = []
    number = faults = 0
    while len(kills) < options.kills:
        chance = random.Random(f"{options.seed} {number}")
        most = min(chance.randint(2, MOST_KILLS), options.kills - len(kills))
        outcome = campaign.run(number, modes[number % len(modes)], most, chance)
        print(json.dumps(outcome), flush=True)
        kills += outcome["kills"]
        faults += bool(outcome["faults"])
        number += 1
    figures = {
        "kills": len(kills),
        "runs": number,
        "faulty_runs": faults,
        "seed": options.seed,
        "ranks": options.ranks,
        "modes": modes,
        "backend": options.backend,
        "restarts": options.restarts,
        "moments": dict(Counter(kill["moment"] for kill in kills)),
        "victims": dict(Counter(kill["victim"] for kill in kills)),
        "seconds": round(time.monotonic() - begin),
    }
    print(json.dumps(figures), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    main()
