"""Files of a release: formats of 0.1.0 are read, the version is one, images and the workflow do what they say."""

import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import llms
import pytest
import yaml
from forking import ForkedCommand

from xtrain.api.runs import open_run
from xtrain.plan.serialise import load_plan
from xtrain.records.events import events_since
from xtrain.records.lines import UnknownEvent
from xtrain.version import __version__

ROOT = Path(__file__).parents[1]
RUN = "runs/tiny/26a3a497a8b7eac7"


@pytest.fixture
def run(tmp_path):
    """A run of four steps that xtrain 0.1.0 wrote: plan format 6, checkpoint format 2."""
    with zipfile.ZipFile(ROOT / "tests/data/run_0_1_0.zip") as archive:
        archive.extractall(tmp_path / RUN)
    return tmp_path / RUN


def test_plans_of_0_1_0_are_read(run):
    plan = load_plan(run / "plan.json")
    assert (plan.id, plan.config_id, plan.timeline.steps) == ("af3b2cff4304a077", "26a3a497a8b7eac7", 4)


def test_records_of_0_1_0_are_read(run):
    found = open_run(run)
    assert [record["step"] for record in found.metrics()] == [1, 2, 3, 4] and found.status == "done"
    events = events_since(run / "events.jsonl")
    assert len(events) > 10 and not any(isinstance(event, UnknownEvent) for event in events)


@pytest.mark.distributed
def test_checkpoints_of_0_1_0_are_resumed(run, tmp_path):
    """With the losses of a run of 0.1.0 that was not interrupted."""
    (tmp_path / "tiny.xtrain").write_text((run / "spec.xtrain").read_text())
    words = ["run", "tiny.xtrain", "--set", "experiment.budget=6 steps", "--ui", "plain"]
    command = ForkedCommand(words, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    out, err = command.communicate(timeout=240)
    assert command.returncode == 0 and "resumed  step 4" in out, out + err
    losses = [record["loss"] for record in open_run(run).metrics()]
    assert losses[-2:] == pytest.approx([5.355533031707115, 5.241101874679815], rel=1e-6)


def test_there_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {__version__}" in changelog.splitlines()
    assert len(changelog.encode()) <= 10_240, "fold older entries"


def test_the_workflow_runs_what_a_change_has_to_pass():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["checks"]["steps"] if "run" in step] == [".ci/run"]


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda file: file.stem)
def test_images_are_linted(file):
    done = subprocess.run(["hadolint", "--no-color", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^ARG EXTRAS=(.*)$", file.read_text(), re.MULTILINE)[0].split(",")) <= set(extras)


def test_the_index_for_language_models_is_current():
    assert llms.FILE.read_text() == llms.text(), "python tests/support/llms.py --write"
