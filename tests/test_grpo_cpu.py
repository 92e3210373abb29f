"""The spec that learns from its own answers does so; a run with rollouts that is killed goes on to the same rewards."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from statistics import mean

import pytest
from projects import Project, records
from sweeps import PARTS, TEMPLATE, WORLD

SPECS = Path(__file__).parents[1] / "specs"

pytestmark = pytest.mark.timeout(900)


def run(folder: Path, spec: Path) -> list[dict]:
    """The records of the steps of a run in `folder`."""
    command = [sys.executable, "-m", "xtrain", "run", str(spec), "--ui", "plain"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (folder / "runs" / spec.stem).iterdir()
    return records(directory, "metrics")


@pytest.mark.slow
def test_answers_get_right_more_often(tmp_path: Path):
    run(tmp_path, SPECS / "grpo_begin_cpu.xtrain")
    rewards = [record["reward"] for record in run(tmp_path, SPECS / "grpo_cpu.xtrain")]
    before, after = mean(rewards[:6]), mean(rewards[-6:])
    # There are 19 sums of two digits: to guess the likeliest one is right in a tenth of the questions.
    assert after > 0.7 and after - before > 0.15


@pytest.mark.slow
def test_a_teacher_of_its_own_samples_gets_them_right(tmp_path: Path):
    for name in ("grpo_begin_cpu", "opd/opd_teacher_cpu"):
        run(tmp_path, SPECS / f"{name}.xtrain")
    rewards = [record["reward"] for record in run(tmp_path, SPECS / "opd" / "opd_cpu.xtrain")]
    assert mean(rewards[:6]) < 0.7 and mean(rewards[-6:]) > 0.85


@pytest.mark.slow
def test_a_model_learns_to_follow_hints(tmp_path: Path):
    for name in ("guess_begin_cpu", "guess_cpu"):
        found = run(tmp_path, SPECS / "environments" / f"{name}.xtrain")
    rewards = [record["reward"] for record in found]
    assert mean(rewards[:6]) < 0.2 and mean(rewards[-6:]) > 0.35


@pytest.mark.slow
def test_a_model_learns_the_way_out_of_a_text_world(tmp_path: Path):
    for name in ("walk_begin_cpu", "walk_cpu"):
        found = run(tmp_path, SPECS / "environments" / f"{name}.xtrain")
    rewards = [record["reward"] for record in found]
    assert mean(rewards[:6]) < 0.4 and mean(rewards[-6:]) > 0.85


@pytest.mark.slow
def test_a_model_learns_to_call_a_calculator(tmp_path: Path):
    for name in ("sums_begin_cpu", "sums_cpu"):
        found = run(tmp_path, SPECS / "environments" / f"{name}.xtrain")
    begun, ended = found[:6], found[-6:]
    assert mean(each["reward"] for each in begun) < 0.5 and mean(each["reward"] for each in ended) > 0.7
    assert mean(each["rollout/turns"] for each in begun) < 1.5 and mean(each["rollout/turns"] for each in ended) > 1.75


EPISODES = """
use "sampled.py"
use "world.py"
experiment killed { seed = 5, budget = 8 steps }
model qwen3 { dim = 32, layers = 1, heads = 4, kv_heads = 2, ffn = 48, tie_embeddings = true, init_std = 0.2 }
tokenizer bytes
dataset sums {
  source = made_sums(), prompt = "question", response = "answer", oversized = skip
  template = "TEMPLATE"
}
batch { sequence = 512, rows = 4, micro = 2 }
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
environment echo { each = 0.25 }
rollout { environment = echo, group = 4, turns = 3, max_tokens = 30 }
optimizer adamw { lr = 1e-2 }
loss grpo { }
launch { device = cpu }
every 1 step log
every 1 step checkpoint
""".replace("TEMPLATE", TEMPLATE)
KILLS = int(os.environ.get("XTRAIN_KILLS", "2"))


@pytest.mark.slow
def test_a_run_that_is_killed_in_an_episode_has_the_same_episodes(tmp_path: Path):
    """At random moments: while turns are sampled, tools called, episodes scored, or weights updated."""
    whole, killed, moments = tmp_path / "whole", tmp_path / "killed", Random(11)
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "sampled.py").write_text(PARTS)
        (folder / "world.py").write_text(WORLD)
        (folder / "killed.xtrain").write_text(EPISODES)
    expected = run(whole, whole / "killed.xtrain")
    command = [sys.executable, "-m", "xtrain", "run", "killed.xtrain", "--ui", "plain"]
    for number in range(KILLS):
        process = subprocess.Popen(
            command, cwd=killed, env=Project(tmp_path).environment, start_new_session=True, stdout=subprocess.DEVNULL
        )
        while not list(killed.glob("runs/killed/*/metrics.jsonl")) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 4.0 + number))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = run(killed, killed / "killed.xtrain")
    names = (
        "step",
        "reward",
        "loss",
        "grad_norm",
        "rollout/reward_std",
        "rollout/turns",
        "rollout/lost",
        "rollout/tokens",
    )
    assert [[each[name] for name in names] for each in found] == [[each[name] for name in names] for each in expected]
    assert len(expected) == 8 and max(each["rollout/turns"] for each in expected) > 1


SPEC = """
use "sampled.py"
experiment killed { seed = 5, budget = 8 steps }
model qwen3 { dim = 32, layers = 1, heads = 4, kv_heads = 2, ffn = 48, tie_embeddings = true, init_std = 0.2 }
tokenizer bytes
dataset sums {
  source = made_sums(), prompt = "question", response = "answer", values = { weight: "weight" }, template = "plain"
  oversized = skip
}
batch { sequence = 160, rows = 4, micro = 2 }
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
loss grpo { kl = k3, kl_weight = 0.05 }
rollout { group = 4, max_tokens = 8, temperature = 0.9 }
reward half_right { }
optimizer adamw { lr = 1e-2 }
launch { device = cpu }
every 1 step log
every 1 step checkpoint
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ", steps = 3", ", updates = 2"])
def test_a_run_that_is_killed_goes_on_to_the_same_rewards(tmp_path: Path, more: str):
    """By default distributed/test_rollouts.py resumes runs with rollouts, and test_survival.py kills a run."""
    spec = SPEC.replace("temperature = 0.9", f"temperature = 0.9{more}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "sampled.py").write_text(PARTS)
        (folder / "killed.xtrain").write_text(spec)
    expected = run(whole, whole / "killed.xtrain")
    command = [sys.executable, "-m", "xtrain", "run", "killed.xtrain", "--ui", "plain"]
    process = subprocess.Popen(
        command, cwd=killed, env=Project(tmp_path).environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    while not list(killed.glob("runs/killed/*/checkpoints/latest")) and process.poll() is None:
        time.sleep(0.02)
    # In step 2 or later, in whatever it does then; a fast machine may be done by that time.
    time.sleep(Random(7).uniform(0, 1.0))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = run(killed, killed / "killed.xtrain")
    names = ("step", "reward", "loss", "grad_norm", "policy/ratio", "policy/clipped", "policy/reference_kl")
    names += ("rollout/reward_std", "rollout/tokens", *([] if more else ["rollout/logprob_gap"]))
    assert len(expected) == 8 and len({record["reward"] for record in expected}) > (3 if "updates" in more else 4)
    assert [[record[name] for name in names] for record in found] == [
        [record[name] for name in names] for record in expected
    ]


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_reference(tmp_path: Path):
    (tmp_path / "sampled.py").write_text(PARTS)
    begins = SPEC.replace("budget = 8 steps", "budget = 1 steps").replace("killed", "begins")
    learns = SPEC.replace("budget = 8 steps", "budget = 2 steps") + 'checkpoint { pretrained = "runs/begins/first" }\n'
    for name, text in (("begins", begins + 'workspace { run = "first" }\n'), ("killed", learns)):
        (tmp_path / f"{name}.xtrain").write_text(text)
    run(tmp_path, tmp_path / "begins.xtrain")
    known = run(tmp_path, tmp_path / "killed.xtrain")
    assert known[0]["policy/reference_kl"] < 1e-9 < known[1]["policy/reference_kl"]
    longer = learns.replace("budget = 2 steps", "budget = 3 steps")
    (tmp_path / "killed.xtrain").write_text(longer)
    assert run(tmp_path, tmp_path / "killed.xtrain")[:2] == known
    shutil.rmtree(tmp_path / "runs" / "begins")
    (tmp_path / "begins.xtrain").write_text((tmp_path / "begins.xtrain").read_text().replace("seed = 5", "seed = 6"))
    run(tmp_path, tmp_path / "begins.xtrain")
    (tmp_path / "killed.xtrain").write_text(longer.replace("budget = 3 steps", "budget = 4 steps"))
    with pytest.raises(AssertionError, match="whose weights have changed"):
        run(tmp_path, tmp_path / "killed.xtrain")
