"""Every spec in `specs/` is right and formatted; the command tells mistakes with exit code 2.

That each of them has a plan, and in which time, is tested in tests/planner/test_command.py.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import xtrain

from xtrain.cli.run import _print_notes
from xtrain.runtime.store.beginning import FINISHED

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.xtrain"))


def started(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "xtrain", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("spec", SPECS, ids=lambda p: p.stem)
def test_every_spec_is_right_and_formatted(spec):
    assert xtrain("fmt", "--check", spec).returncode == 0
    checked = xtrain("check", spec)
    assert checked.returncode == 0 and "error[" not in checked.stderr, checked.stderr


def test_the_json_of_a_plan_has_the_documented_names():
    plan = json.loads(xtrain("plan", "specs/quickstart.xtrain", "--json", "--world", "2").stdout)
    assert plan["world_size"] == 2 and plan["mesh"]["axes"]["fsdp"] == 2
    assert plan["parameters"]["total"] == plan["parameters"]["active"] == 821_120
    assert plan["steps"] == 300 and plan["tokens_per_step"] == 8 * 256
    assert [r["coordinates"]["fsdp"] for r in plan["ranks"]] == [0, 1]
    assert plan["memory"]["per_rank"][0]["total_bytes"] > 0
    assert "setup.parallel.fsdp" in {node["id"] for node in plan["graph"]["nodes"]}
    assert plan["graph"]["edges"] and plan["timeline"] and plan["checks"] and plan["id"]


def test_a_plan_has_the_same_id_wherever_and_however_its_spec_is_named(tmp_path):
    text = (ROOT / "specs" / "quickstart.xtrain").read_text()
    (tmp_path / "copy.xtrain").write_text("# another comment\n" + text)
    there = json.loads(xtrain("plan", "copy.xtrain", "--json", cwd=tmp_path).stdout)
    here = json.loads(xtrain("plan", "specs/quickstart.xtrain", "--json").stdout)
    assert there["id"] == here["id"]


WRONG = [("plan", "no.xtrain"), ("run", "no.xtrain"), ("check", "no.xtrain"), ("run", "no.json"), ("fly",)]


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_command_line_is_exit_code_two(arguments, tmp_path):
    done = xtrain(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr


def test_the_exit_code_is_that_of_the_process(tmp_path):
    done = started("run", "no.xtrain", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("finished", "said"), [(None, False), (2, False), (3, True)])
def test_a_finished_run_says_so_before_its_set_up(tmp_path, capsys, finished, said):
    if finished is not None:
        (tmp_path / FINISHED).write_text(str(finished))
    plan = SimpleNamespace(timeline=SimpleNamespace(steps=3))
    _print_notes(SimpleNamespace(directory=tmp_path, plan=plan, aside=None, unread="", changes=(), other=None))
    assert ("note: this run has finished: step 3 of 3 is done" in capsys.readouterr().err) == said


@pytest.mark.parametrize(
    "command",
    ["check", "plan", "schema", "run", "launch --on slurm", "data show", "data build", "find-lr", "doctor",
        "diff specs/quickstart.xtrain", "fmt --check", "serve"],
)  # fmt: skip
def test_a_spec_with_a_mistake_is_refused_by_every_verb(command: str, tmp_path: Path):
    spec, served = tmp_path / "wrong.xtrain", command == "serve"
    text = (ROOT / "specs" / ("serve_cpu.xtrain" if served else "quickstart.xtrain")).read_text()
    spec.write_text(text.replace("seed = 7", "seed = 7 stepz") if served else text.replace("300 steps", "300 stepz"))
    found = xtrain(*command.split(), spec)
    assert found.returncode == 2 and found.stdout == ""
    assert "X107" in found.stderr and "`stepz` is not a unit" in found.stderr
