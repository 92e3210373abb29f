"""The spec that learns from its own answers does so; a run with rollouts that is killed goes on to the same rewards."""

import json
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
KILLER = """
import json, os, signal, threading
from pathlib import Path
from xtrain import hook

def reach(name):
    \"\"\"Kill the run at the moment that the file `moment` names: the n-th time that this start comes there.\"\"\"
    wanted, count = json.loads(Path("moment").read_text()) if Path("moment").exists() else ("", 0)
    if name != wanted:
        return
    with open("reached", "a") as file:
        file.write("x")
    if Path("reached").stat().st_size == count:
        os.killpg(int(Path("victim").read_text()), signal.SIGKILL)

HOOKS
"""
PLACES = ("before_backward", "after_backward", "before_optimizer", "after_optimizer", "after_step", "before_checkpoint")
MOMENTS = [
    *(("reset", 3), ("step", 5), ("finish", 2), ("step", 19), ("reset", 17), ("finish", 17), ("step", 40)),
    *((place, 1) for place in PLACES),
    *(("generate", count) for count in (1, 1, 2)),
]


def killing(folder: Path) -> None:
    """Write a spec whose run kills itself at moments that a file names."""
    hooks = "".join(f'@hook("{each}")\ndef at_{each}(context):\n    reach("{each}")\n\n' for each in PLACES)
    # While turns are sampled: some time after the rows of a step have been read.
    hooks += '@hook("before_step")\ndef at_step(context):\n    threading.Timer(0.05, reach, ["generate"]).start()\n'
    world = WORLD.replace("import os\n", "import os\nfrom killer import reach\n", 1)
    for method in ("reset(self, task, random, each: float = 0.5)", "step(self, text)", "finish(self)"):
        begin = f"def {method}:\n"
        assert begin in world
        world = world.replace(begin, f'{begin}        reach("{method.partition("(")[0]}")\n')
    spec = EPISODES.replace('use "world.py"', 'use "world.py"\nuse "killer.py"').replace("budget = 8", "budget = 12")
    used = "".join(f"hook at_{each}\n" for each in (*PLACES, "step"))
    (folder / "killer.py").write_text(KILLER.replace("HOOKS", hooks))
    (folder / "sampled.py").write_text(PARTS)
    (folder / "world.py").write_text(world)
    (folder / "killed.xtrain").write_text(spec + used)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_sixteen_times_has_the_same_episodes(tmp_path: Path):
    """In calls of the environment, while turns are sampled, around the backward, the update and a save."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        killing(folder)
    expected = run(whole, whole / "killed.xtrain")
    command = [sys.executable, "-m", "xtrain", "run", "killed.xtrain", "--ui", "plain"]
    ends = []
    for moment in MOMENTS:
        (killed / "moment").write_text(json.dumps(moment))
        (killed / "reached").unlink(missing_ok=True)
        process = subprocess.Popen(
            command, cwd=killed, env=Project(tmp_path).environment, start_new_session=True, stdout=subprocess.DEVNULL
        )
        (killed / "victim").write_text(str(process.pid))
        ends.append(process.wait(timeout=300))
    assert ends == [-signal.SIGKILL] * len(MOMENTS)
    (killed / "moment").unlink()
    found = run(killed, killed / "killed.xtrain")
    names = ("step", "reward", "loss", "grad_norm", "rollout/reward_std", "rollout/turns", "rollout/lost")
    names += ("rollout/tokens",)
    assert [[each[name] for name in names] for each in found] == [[each[name] for name in names] for each in expected]
    assert len(expected) == 12 and max(each["rollout/turns"] for each in expected) > 1


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
