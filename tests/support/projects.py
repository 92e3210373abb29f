"""Runs of the real command, as a user gives it, over small specs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from forking import ForkedCommand

TINY = """
experiment tiny {{ seed = 3, budget = {steps} steps }}
model qwen3 {{ dim = 32, layers = 1, heads = 4, kv_heads = 2, ffn = 48, tie_embeddings = {tied}, init_std = 0.1 }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl"), holdout = 10% }}
batch {{ sequence = 64, micro = 2, rows = 8 }}
optimizer adamw {{ lr = 3e-3 }}
scheduler cosine {{ warmup = 10%, floor = 10% }}
every 1 step log
every 1000 steps checkpoint
{more}
"""


class Project:
    """A user's folder: data of uneven documents, a spec, and the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        words = [f"line {i} " + "abc def ghi "[: i % 13] * (1 + i % 9) for i in range(400)]
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))

    def spec(self, *, steps: int = 6, tied: bool = True, more: str = "", name: str = "tiny.xtrain") -> str:
        (self.folder / name).write_text(TINY.format(steps=steps, tied=str(tied).lower(), more=more))
        return name

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "xtrain", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return {**clean, "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str, torchrun: int = 0, fresh: bool = False) -> subprocess.Popen | ForkedCommand:
        """Start `xtrain run`, as a rank of `torchrun` ranks if there are any; forked, unless it is to be `fresh`."""
        if not fresh:
            return ForkedCommand(["run", *arguments], self.folder, self.environment, torchrun=torchrun)
        command = self.command("run", *arguments)
        if torchrun:
            ranks = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun), "-m", "xtrain")
            command[2:3] = ranks
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, root: str = "", expect: int = 0) -> Path:
        """Run to the end and return the run directory."""
        process = self.start(*arguments, *(("--set", f"workspace.root={root}") if root else ()), "--ui", "plain")
        out, err = process.communicate(timeout=240)
        assert process.returncode == expect, f"exit code {process.returncode}\n{out}\n{err}"
        return self.directory(root)

    def directory(self, root: str = "") -> Path:
        (found,) = (d for d in (self.folder / (root or "runs") / "tiny").iterdir() if "~" not in d.name)
        return found


def called(project: Project, *arguments: str) -> tuple[int, str, str]:
    """The exit code of `xtrain ARGUMENTS` in the folder, and what it wrote to either stream."""
    process = ForkedCommand([*arguments], project.folder, project.environment)
    out, err = process.communicate(timeout=240)
    return process.wait(), out, err


def records(directory: Path, kind: str) -> list[dict]:
    """All lines of `metrics` or `events` of a run."""
    return list(map(json.loads, (directory / f"{kind}.jsonl").read_text().splitlines()))


def curve(directory: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every logged step."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(directory, "metrics") if "loss" in r]


def events(directory: Path, kind: str) -> list[dict]:
    return [r for r in records(directory, "events") if r["event"] == kind]


def worst(ours: list, theirs: list) -> tuple[float, float]:
    """The largest relative difference of losses and of gradient norms."""
    assert [a[0] for a in ours] == [b[0] for b in theirs]
    return tuple(max(abs(a[i] - b[i]) / abs(b[i]) for a, b in zip(ours, theirs, strict=True)) for i in (1, 2))
