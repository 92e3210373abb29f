"""The first command of the README, and what it promises."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import xtrain

from xtrain.runtime.feed.packing.stored_rows import split_holdout
from xtrain.runtime.feed.token_store import TokenStore, open_store

ROOT = Path(__file__).parents[1]
PSEUDO_COUNT = 5

SHORT, WHOLE = 40, 300  # steps
HOLDOUT = 0.003  # of the short run

pytestmark = pytest.mark.timeout(900)


def run(folder: Path, *arguments: str) -> Path:
    """The folder, in which the quickstart has been run."""
    (folder / "random.py").write_text("raise ImportError('a file of the user, not the standard library')\n")
    command = [sys.executable, "-P", "-m", "xtrain", "run", str(ROOT / "specs" / "quickstart.xtrain"), "--ui", "plain"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """The folder of the first steps, with all that follows the last one."""
    less = (
        f"experiment.budget={SHORT} steps", f"dataset.stdlib.holdout={HOLDOUT:.1%}", "launch.ranks_per_node=1",
    )  # fmt: skip
    return run(tmp_path_factory.mktemp("begun"), *(word for text in less for word in ("--set", text)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of the whole quickstart, as the README types it."""
    return run(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(params=[SHORT, pytest.param(WHOLE, marks=pytest.mark.slow)], ids="{} steps".format)
def either(request: pytest.FixtureRequest) -> tuple[Path, int]:
    """The folder of a run, and the number of its steps."""
    return request.getfixturevalue("begun" if request.param == SHORT else "finished"), request.param


def run_directory(folder: Path) -> Path:
    (directory,) = (folder / "runs" / "quickstart").iterdir()
    return directory


def events(folder: Path, kind: str) -> list[dict]:
    lines = (run_directory(folder) / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def store_of(folder: Path) -> TokenStore:
    (path,) = (path for path in (folder / "runs" / "cache" / "tokens").iterdir() if path.is_dir())
    store = open_store(path)
    assert store is not None
    return store


def text_bytes(store: TokenStore, documents: np.ndarray) -> list[np.ndarray]:
    """The bytes of each document, without the marks of its begin and end."""
    return [store.document(int(d))[1:-1].astype(np.int64) for d in documents]


def bytes_loss(train: list[np.ndarray], heldout: list[np.ndarray]) -> float:
    """Nats a byte if nothing is known but how often each byte stands in the training text."""
    counts = sum(np.bincount(text, minlength=256) for text in train) + PSEUDO_COUNT / 256
    return float(-np.log(counts / counts.sum())[np.concatenate(heldout)].mean())


def trigram_loss(train: list[np.ndarray], heldout: list[np.ndarray]) -> float:
    """Nats a byte of an interpolated trigram model: each order backs off to the next with a pseudo-count of 5."""
    ones, twos, threes = np.zeros(256), np.zeros(256**2), np.zeros(256**3, dtype=np.int32)
    for text in train:
        ones += np.bincount(text, minlength=256)
        twos += np.bincount(text[:-1] * 256 + text[1:], minlength=256**2)
        np.add.at(threes, (text[:-2] * 256 + text[1:-1]) * 256 + text[2:], 1)
    p1 = (ones + PSEUDO_COUNT / 256) / (ones.sum() + PSEUDO_COUNT)
    after_one, after_two = twos.reshape(256, 256).sum(1), threes.reshape(256**2, 256).sum(1)
    total, number = 0.0, 0
    for text in heldout:
        p = p1[text]
        p[1:] = (twos[text[:-1] * 256 + text[1:]] + PSEUDO_COUNT * p[1:]) / (after_one[text[:-1]] + PSEUDO_COUNT)
        pair = text[:-2] * 256 + text[1:-1]
        p[2:] = (threes[pair * 256 + text[2:]] + PSEUDO_COUNT * p[2:]) / (after_two[pair] + PSEUDO_COUNT)
        total -= np.log(p).sum()
        number += len(text)
    return total / number


def heldout_loss(folder: Path, heldout: np.ndarray) -> float:
    """The loss of the last evaluation, which must have seen all of the held-out text."""
    store = store_of(folder)
    *_, last = events(folder, "eval")
    assert last["tokens"] == sum(len(store.document(int(d))) - 1 for d in heldout), "every held-out byte counts once"
    return last["loss"]


def test_its_first_steps_learn_more_than_how_often_each_byte_stands(begun):
    store = store_of(begun)
    train, heldout = split_holdout(store.offsets, HOLDOUT, seed=0)
    alone = bytes_loss(text_bytes(store, train), text_bytes(store, heldout))
    assert 2.8 < alone < 3.5
    assert heldout_loss(begun, heldout) < alone - 0.5


@pytest.mark.slow
def test_it_learns_more_than_a_trigram_model_of_the_same_bytes(finished):
    store = store_of(finished)
    train, heldout = split_holdout(store.offsets, 0.05, seed=0)
    trigram = trigram_loss(text_bytes(store, train), text_bytes(store, heldout))
    assert 1.5 < trigram < 1.9
    assert heldout_loss(finished, heldout) < trigram


@pytest.mark.slow
def test_its_samples_look_like_python(finished):
    (generated,) = events(finished, "generate")
    store = store_of(finished)
    train, _ = split_holdout(store.offsets, 0.05, seed=0)
    corpus = b" ".join(text.astype(np.uint8).tobytes() for text in text_bytes(store, train))
    known = set(re.findall(rb"[A-Za-z_]{2,}", corpus))
    text = " ".join(sample["text"] for sample in generated["samples"]).encode()
    words = re.findall(rb"[A-Za-z_]{2,}", text)
    assert len(words) > 10
    assert sum(word in known for word in words) / len(words) > 0.6
    assert re.search(rb"[(){}\[\]=:#]", text)


def test_its_files_are_where_the_documentation_says(either):
    folder, count = either
    directory = run_directory(folder)
    for name in ("plan.json", "spec.xtrain", "metrics.jsonl", "events.jsonl", "ranks/00000.jsonl"):
        assert (directory / name).stat().st_size > 0
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, count + 1))
    documented = {
        "step", "time", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "data_seconds",
        "memory_bytes", "phase", "valid_tokens", "valid_tokens_per_second", "tflops", "comm_seconds",
    }  # fmt: skip
    assert all(documented <= r.keys() for r in steps[1:])
    times = {name for name in documented if name.endswith(("seconds", "per_second", "tflops"))}
    assert documented - times <= steps[0].keys() and not times & steps[0].keys(), "the first step warms up"
    if count == WHOLE:
        assert steps[99]["eval/stdlib/loss"] < 2.3


def test_the_finished_run_can_be_sampled(either):
    arguments = ("generate", str(run_directory(either[0])), "--prompt", "def ", "--tokens", "60", "--json")
    first = xtrain(*arguments)  # the weights alone
    assert first.returncode == 0 and not first.stderr, first.stderr
    second = xtrain(*arguments, "--checkpoint", "latest")  # the full state of the same step
    assert json.loads(first.stdout)["text"] == json.loads(second.stdout)["text"] != ""


def test_its_resolved_spec_makes_the_same_plan(either):
    directory = run_directory(either[0])
    again = json.loads(xtrain("plan", directory / "spec.xtrain", "--json").stdout)
    assert again["id"] == json.loads((directory / "plan.json").read_text())["id"]
