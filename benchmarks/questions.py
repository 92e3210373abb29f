"""What commands cost that certify a plan or answer questions about a run: prove, replay, blame, bisect, seen, forget,
review, approve, solve and calibrate.

    OMP_NUM_THREADS=1 python benchmarks/questions.py

One small run on two ranks, and each command on it in a process of its own. Processor seconds of a command and of all
ranks it starts, so that other work on the machine counts little; start-up is part of them.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SPEC: Final = """
experiment tiny {{ seed = 25, budget = 28 steps }}
model qwen3 {{ dim = 32, layers = 1, heads = 4, kv_heads = 2, ffn = 48, tie_embeddings = true, init_std = 0.1 }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl") }}
dataset sums {{ source = jsonl("sums.jsonl") }}
mixture {{ lines = 0.5, sums = 0.5 }}
batch {{ sequence = 64, micro = 2, rows = 8 }}
optimizer adamw {{ lr = {rate} }}
scheduler cosine {{ warmup = 10%, floor = 10% }}
parallel {{ fsdp 2 }}
cluster cpu {{ nodes = 1, devices = 2, memory = 8 GiB, flops = 0.1T, link = 1 GiB, network = 1 GiB, price = 3 }}
every 1 step log
every 12 steps checkpoint
checkpoint {{ keep = none }}
"""
POISON: Final = (40, 131, 222)
LAW: Final = {
    "metric": "eval.lines.loss", "runs": 9, "parameters": [1e4, 1e9], "tokens": [1e5, 1e11], "error": 0.01,
    "fitted": {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28},
    "samples": [{"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}] * 9,
}  # fmt: skip


def command(folder: Path, *words: str, codes: Sequence[int] = (0,)) -> float:
    """Run a command; return its processor seconds and those of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "xtrain", *words], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode in codes, (words, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def prepared(folder: Path) -> None:
    """Write the data and the specs."""
    drawn = random.Random(1)
    sums = [{"text": f"{i} + {i + 7} = {2 * i + 7}; " * (1 + i % 4)} for i in range(300)]
    for document in POISON:
        sums[document] = {"text": "".join(chr(drawn.randrange(0x4E00, 0x9FFF)) for _ in range(21))}
    lines = [{"text": f"line {i}: " + "abc def " * (i % 9)} for i in range(400)]
    for name, records in (("sums", sums), ("data", lines)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "tiny.xtrain").write_text(SPEC.format(rate="1e-2"))
    (folder / "other.xtrain").write_text(SPEC.format(rate="1.1e-2"))
    (folder / "law.json").write_text(json.dumps(LAW))
    key = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key")
    subprocess.run(key, cwd=folder, check=True)


def measured(folder: Path) -> list[tuple[str, str, float]]:
    """Return command, meaning and processor seconds."""
    prepared(folder)
    found = [("`run`", "28 steps, 2 ranks, for comparison", command(folder, "run", "tiny.xtrain", "--ui", "none"))]
    command(folder, "run", "other.xtrain", "--set", 'workspace.run="other"', "--ui", "none")
    for number in range(3):
        sets = ("--set", f'workspace.run="{number}"', "--set", f"batch.sequence={32 * 2**number}")
        command(folder, "run", "tiny.xtrain", *sets, "--set", "experiment.budget=8 steps", "--ui", "none")
    runs = folder / "runs/tiny"
    (first,) = (run.name for run in runs.iterdir() if run.name not in ("other", "0", "1", "2"))
    run = f"runs/tiny/{first}"
    rows: list[tuple[str, str, tuple[str, ...], tuple[int, ...]]] = [
        ("`replay`", "4 steps from the checkpoint of step 24", (run, "--from", "25"), (0,)),
        ("`blame`", "the documents of a spike, by bisection", (run, "--step", "26"), (0,)),
        ("`bisect`", "other rate; both windows of 12 steps again", (run, "runs/tiny/other"), (1,)),
        ("`seen`", "how often and when one document", (run, "--document", "sums.jsonl:41"), (0, 1)),
        ("`seen --matching`", "300 records, 13-grams", (run, "--matching", "sums.jsonl", "--ngram", "13"), (0, 1)),
        ("`forget`", "one document; retrains from before it", (run, "sums.jsonl:132"), (0,)),
        ("`review`", "two specs", ("tiny.xtrain", "other.xtrain"), (0,)),
        ("`approve`", "with a key", ("tiny.xtrain", "--by", "ann", "--key", "key"), (0,)),
        ("`solve`", "2 sizes on one cluster", ("tiny.xtrain", "--budget", "5", "--law", "law.json", "--size",
            "model.layers=1", "--size", "model.layers=2"), (0,)),
        ("`calibrate`", "the five runs", ("runs/tiny",), (0,)),
        ("`prove`", "fsdp 2: 4 steps in fp64, twice", ("tiny.xtrain",), (0,)),
    ]  # fmt: skip
    for name, what, words, codes in rows:
        found.append((name, what, command(folder, name.strip("`").split()[0], *words, codes=codes)))
        print(*found[-1], file=sys.stderr, flush=True)
    return found


def table(found: Sequence[tuple[str, str, float]]) -> str:
    whole = found[0][2]
    lines = ["| command | here | processor time | of the run |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {what} | {seconds:.1f} s | {seconds / whole:.1f} |" for name, what, seconds in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(table(measured(Path(folder))))


if __name__ == "__main__":
    main()
