"""Sweeps of real runs: what the command comes to, killed or not."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from projects import Project
from sweeps import KEY, write_spec

from xtrain.plan.serialise import load_plan
from xtrain.records.sweep import SweepState
from xtrain.runtime.jobs.sweep import measured

TRIALS, KILLS = 24, 10
METHOD = f"method asha {{ first = 2 steps, startup = 8 }}, trials = {TRIALS}, parallel = 3, retries = 5"


def folder_of(project: Project, root: str) -> Path:
    (found,) = (project.folder / root).glob("tiny-sweep-*")
    return found


def outcome(folder: Path) -> list[tuple]:
    state = SweepState.read(folder)
    return [
        (each.number, each.name, each.values, each.decisions, each.value, each.trained, each.status)
        for each in state.trials.values()
    ]


def whole(project: Project, root: str, *sets: str) -> Path:
    """A sweep that nothing happens to."""
    options = [word for text in (f"workspace.root={root}", *sets) for word in ("--set", text)]
    process = project.start("sweep.xtrain", *options)
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, f"{out}\n{err}"
    return folder_of(project, root)


def processes_of(folder: Path) -> list[int]:
    """Those that were started for the runs of a sweep."""
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdecimal() and str(folder.name).encode() in (each / "cmdline").read_bytes():
                found.append(int(each.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_four_trials_with_the_driver_killed_ten_times(tmp_path: Path):
    """The same trials, decisions and best as without; trials are killed as well; and what random search would cost."""
    optuna = pytest.importorskip("optuna")
    project = Project(tmp_path)
    write_spec(tmp_path, METHOD, save=2)
    alone = whole(project, "alone")
    draw, kills = random.Random(5), 0
    while True:
        process = project.start("sweep.xtrain", "--set", "workspace.root=killed")
        if kills < KILLS:
            time.sleep(draw.uniform(0.3, 3))
            if kills % 3 == 2 and list((tmp_path / "killed").glob("tiny-sweep-*")):
                for number in draw.sample(all_ := processes_of(folder_of(project, "killed")), min(2, len(all_))):
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                time.sleep(1)
            if process.poll() is None:
                process.kill()
                process.wait(60)
                kills += 1
                continue
        out, err = process.communicate(timeout=1500)
        assert process.returncode == 0, f"{out}\n{err}"
        break
    killed = folder_of(project, "killed")
    assert kills == KILLS
    assert outcome(killed) == outcome(alone)
    state = SweepState.read(killed)
    best = state.best()
    assert best is not None
    trained = sum(each.trained for each in state.trials.values())
    print(f"asha trained {trained} steps; random search trains {18 * TRIALS}; best {best.value}")
    assert trained < 0.6 * 18 * TRIALS
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(killed / "optuna.log")))
    study = optuna.load_study(study_name="tiny", storage=storage)
    assert len(study.trials) == TRIALS and study.best_trial.user_attrs["trial"] == best.number


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_trial_that_went_on_behind_rungs_is_the_run_in_one_piece(tmp_path: Path):
    project = Project(tmp_path)
    write_spec(tmp_path, "method asha { first = 2 steps, suggest = random }, trials = 2", save=100)
    folder = whole(project, "runs")
    state = SweepState.read(folder)
    first = state.trials[0]
    assert first.finished and len(first.values) == 2
    sets = [text for text in load_plan(folder / first.name / "plan.json").origin.sets if "workspace" not in text]
    # The same settings as a run of its own, from a spec without the sweep.
    (tmp_path / "alone.xtrain").write_text((tmp_path / "sweep.xtrain").read_text().partition("sweep {")[0])
    options = [word for text in sets for word in ("--set", text)]
    process = project.start("alone.xtrain", *options, "--set", "workspace.root=one")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    (alone,) = (tmp_path / "one" / "tiny").iterdir()
    for step in (2, 6, 18):
        assert measured(alone, KEY, step)[0] == measured(folder / first.name, KEY, step)[0]
