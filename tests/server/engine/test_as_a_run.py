"""A client that sends what the steps of a run see gets what the run gets: losses, norms, moments and weights."""

import json
import subprocess
import sys
import tarfile
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from forked_ranks import Outcome
from served import KEY, listening, served, server_plan
from trials import MODELS, Laboratory, Trial

from xtrain.client import IGNORED, RemoteModel, Server, TrainingRow
from xtrain.server.engine.keeping import KeptState, read_kept
from xtrain.server.engine_interface import Engine

pytestmark = [pytest.mark.distributed, pytest.mark.matrix]

STEPS, ROWS, RANK = 5, 8, 3
ADAM = {"eps": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "grad_clip_norm": 0.5}
TALKS = 'dataset talks { source = jsonl("talks.jsonl"), messages = "messages", template = "plain" }'
WHOLE = Trial(
    rows=ROWS,
    steps=STEPS,
    settings=("model.layers=2",),
    optimizer="adamw { lr = 1e-2, eps = 1e-3, betas = [0.9, 0.95], weight_decay = 0.1",
    more=f"{TALKS}\nmixture {{ lines = 1, talks = 1, exact = true }}",
)
# Of the matrices that a client's adapter has by default.
ADAPTED = f'adapter lora {{ rank = {RANK}, alpha = 16, targets = ["all_linear", "lm_head"] }}'
ADAPTER = evolve(WHOLE, more=f"{WHOLE.more}\n{ADAPTED}")


def test_the_trial_has_answers_that_are_learned_and_steps_that_clip(lab: Laboratory) -> None:
    targets = [target for row in chain(*texts_of_steps(lab)) for target in row.targets]
    assert 0.1 < np.mean(np.array(targets) == IGNORED) < 0.9
    for trial in (ADAPTER, WHOLE):
        norms = [norm for _, _, norm in local(lab, trial).curve]
        assert norms and min(norms) > ADAM["grad_clip_norm"]


@pytest.mark.parametrize(("layout", "calls"), [
    (("parallel.tp=2",), 3),
    ((), 1),
    (("parallel.fsdp=2", "parallel.tp=2"), 3),
    (("parallel.fsdp=2", "parallel.tp=2"), 1),
    (("parallel.fsdp=2", "parallel.tp=2"), 7),
], ids=str)  # fmt: skip
def test_a_client_with_the_texts_of_a_run_trains_as_the_run(
    lab: Laboratory, tmp_path: Path, layout: tuple[str, ...], calls: int
) -> None:
    plan = server_plan(tmp_path, "model.layers=2", *layout, model=MODELS["dense"], rows=4)
    found = served(plan, train, tmp_path / "run", texts_of_steps(lab), calls)
    compare(found, tmp_path / "run", lab, ADAPTER)


@pytest.mark.parametrize("layout", [
    ("parallel.fsdp=2",),
    (),
    ("parallel.tp=2",),
    ("parallel.fsdp=2", "parallel.tp=2"),
    ("parallel.pp=2",),
    ("parallel.cp=2", "parallel.cp.ring=2"),
], ids=str)  # fmt: skip
def test_all_of_a_model_is_trained_as_a_run_trains_it(lab: Laboratory, tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Samples, forwards, saves and another model that was there before change nothing of it."""
    plan = server_plan(tmp_path, "model.layers=2", *layout, model=MODELS["dense"], rows=4, rank=0)
    found = served(plan, train_whole, tmp_path / "run", texts_of_steps(lab))
    compare(found, tmp_path / "run", lab, WHOLE)


def compare(found: list[dict[str, float]], folder: Path, lab: Laboratory, trial: Trial) -> None:
    run = local(lab, trial)
    for ours, (step, loss, norm) in zip(found, run.curve, strict=True):
        assert ours["loss"] == pytest.approx(loss, rel=1e-10), step
        assert ours["grad_norm"] == pytest.approx(norm, rel=1e-10), step
    assert gap(read_kept(folder / "1"), local(lab, trial, steps=1)) < 1e-10  # the moments are those of one gradient
    assert gap(read_kept(folder / f"{STEPS}"), run) < 1e-10


def local(lab: Laboratory, trial: Trial, steps: int = STEPS) -> Outcome:
    return lab.alone(evolve(trial, steps=steps), saves=False)


@cache
def texts_of_steps(lab: Laboratory) -> list[list[TrainingRow]]:
    """The documents of every step, as `xtrain data show` has them."""
    spec = WHOLE.write(lab.folder, alone=True)
    command = ["data", "show", spec.name, "--json", "--tokens", "-n", str(STEPS * ROWS)]
    done = subprocess.run(
        [sys.executable, "-m", "xtrain", *command], cwd=lab.folder, capture_output=True, text=True, check=True
    )
    steps: list[list[TrainingRow]] = [[] for _ in range(STEPS)]
    for line in done.stdout.splitlines():
        row = json.loads(line)
        for segment in row["segments"]:
            stretches = segment["stretches"]
            ids = list(chain(*(each["ids"] for each in stretches)))
            learned = list(chain(*([each["trained"]] * len(each["ids"]) for each in stretches)))
            targets = [id if known else IGNORED for id, known in zip(ids[1:], learned[1:], strict=True)]
            steps[row["place"] // ROWS].append(TrainingRow(tokens=ids[:-1], targets=targets))
    return steps


def train(engine: Engine, folder: Path, steps: list[list[TrainingRow]], calls: int) -> list[dict[str, float]]:
    """On the first rank: a program that takes the steps in so many calls, and two others that train meanwhile."""
    found = []
    with listening(engine, folder / "server") as url, Server(url, key=KEY) as server:
        model = server.create_model(RANK, seed=3)
        others = [server.create_model(5, seed=1), server.create_model(8, seed=2, train_mlp=False)]
        for number, rows in enumerate(steps, start=1):
            passes, beside = [], []
            for call in range(calls):
                part = rows[call * len(rows) // calls : (call + 1) * len(rows) // calls]
                passes.append(model.forward_backward(part))
                beside.append(others[0].forward_backward(part[::2]))
                beside.append(
                    others[1].forward_backward([sampled(row) for row in part[1::2]] or [sampled(part[0])], "ppo")
                )
            beside += [other.optim_step(3e-2, reduction="sum") for other in others]
            step = model.optim_step(1e-2, **ADAM).result()
            for each in beside:
                each.result()
            outcomes = [each.result() for each in passes]
            loss = sum(each.loss for each in outcomes) / sum(each.tokens for each in outcomes)
            found.append({"loss": loss, **step})
            if number in (1, len(steps)):
                keep(server, model, folder / str(number))
    return found


def train_whole(engine: Engine, folder: Path, steps: list[list[TrainingRow]]) -> list[dict[str, float]]:
    """On the first rank: a program that trains the model itself, in three calls a step, and looks at it meanwhile."""
    found = []
    with listening(engine, folder / "server") as url:
        with Server(url, key=KEY) as server:
            before = server.create_model()
            before.forward_backward(steps[1])
            before.optim_step(0.1).result()
        with Server(url, key=KEY) as server:
            base = server.sampler()
            first = base.sample([5, 6], max_tokens=4, seed=1).result()
            model = server.create_model()
            for number, rows in enumerate(steps, start=1):
                passes = [model.forward_backward(rows[call::3]) for call in range(3)]
                seen = model.forward(rows[:1]).result().logprobs[0]
                step = model.optim_step(1e-2, **ADAM).result()
                outcomes = [each.result() for each in passes]
                assert seen == pytest.approx(outcomes[0].logprobs[0], abs=1e-5)
                loss = sum(each.loss for each in outcomes) / sum(each.tokens for each in outcomes)
                found.append({"loss": loss, **step})
                check_samples(model, number)
                assert base.sample([5, 6], max_tokens=4, seed=1).result() == first
                if number in (1, len(steps)):
                    keep(server, model, folder / str(number))
                if number == 3:  # the rest is trained by another, from what this one saved
                    path = model.save("three").result()
        with Server(url, key=KEY) as server:
            again = server.load_model(path)
            assert [again.forward_backward(rows).result().loss for rows in steps[3:4]] == pytest.approx(
                [found[3]["loss"] * sum(each != IGNORED for row in steps[3] for each in row.targets)], rel=1e-10
            )
    return found


def check_samples(model: RemoteModel, number: int) -> None:
    """What it writes has the log-probabilities that it is trained with."""
    (answer,) = model.sampler().sample([3, 4, 5], max_tokens=4, seed=number).result()
    passed = model.forward([TrainingRow.of_answer([3, 4, 5], answer, 1.0)], "importance_sampling").result()
    assert passed.logprobs[0][2:] == pytest.approx(answer.logprobs, abs=1e-5)


def sampled(row: TrainingRow) -> TrainingRow:
    """The row as one of a policy loss."""
    count = len(row.tokens)
    return TrainingRow(tokens=row.tokens, targets=row.targets, logprobs=[-5.5] * count, advantages=[0.1] * count)


def keep(server: Server, model: RemoteModel, folder: Path) -> None:
    folder.mkdir()
    server.download(model.save(folder.name).result(), folder / "saved.tar")
    with tarfile.open(folder / "saved.tar") as found:
        found.extractall(folder, filter="data")
    for path in list(folder.rglob("trained.*")):
        path.rename(folder / path.name)


def gap(kept: KeptState, run: Outcome) -> float:
    """The largest difference of a tensor, relative to its largest element."""
    moments = {f"{name}/{moment}": f"optimizer.{name}.{moment}" for name in kept.tensors for moment in MOMENTS}
    names = {name: moments.get(name, name) for name in kept.tensors}
    adapter = any("lora_" in name for name in kept.tensors)
    own: dict[str, Any] = {name: each for name, each in run.tensors.items() if not adapter or "lora_" in name}
    assert set(names.values()) == own.keys()
    found = {name: np.abs(kept.tensors[name].numpy() - own[theirs]).max() for name, theirs in names.items()}
    return max(each / max(np.abs(own[names[name]]).max(), 1e-300) for name, each in found.items())


MOMENTS = ("exp_avg", "exp_avg_sq")
