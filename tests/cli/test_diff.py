"""`xtrain diff`: what may be compared with what, what it prints, how it ends."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.cli.main import main
from xtrain.plan.checkpoints import STATE
from xtrain.plan.serialise import dumps, signed
from xtrain.planner.load import plan_from_spec

ROOT = Path(__file__).parents[2]
SPEC = "quickstart.xtrain"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    shutil.copy(ROOT / "specs" / SPEC, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def diff(capsys, monkeypatch):
    """Runs the verb on a terminal without colors: (exit status, what it printed, what it said on stderr)."""
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        status = main(["diff", *arguments])
        out, err = capsys.readouterr()
        assert max(map(len, out.splitlines()), default=0) <= 100 or "--json" in arguments
        return status, out, err

    return call


def save(path: Path, sets: tuple[str, ...] = (), world: int | None = None) -> Path:
    plan = plan_from_spec(SPEC, sets, world).plan
    assert plan is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(signed(plan, sets, world)))
    return path


def a_run(folder: Path, step: int | None, sets: tuple[str, ...] = ()) -> Path:
    """A run directory as far as it is looked at: its plan, and a checkpoint that seems whole."""
    plan = plan_from_spec(SPEC, sets).plan
    assert plan is not None
    run = folder / "runs" / "quickstart" / f"1a2b3c4d-{plan.config_id}"
    save(run / "plan.json", sets)
    if step is not None:
        entry = run / "checkpoints" / f"ckpt-s{step:012d}"
        entry.mkdir(parents=True)
        (entry / ".metadata").write_bytes(b"x")
        (entry / STATE).write_text(json.dumps({"step": step, "files": {".metadata": 1}}))
        (run / "checkpoints" / "latest").write_text(entry.name)
    return run


def test_one_spec_against_itself_with_an_override(folder, diff):
    status, out, _ = diff(SPEC, "--set", "optimizer.lr=1e-3")
    assert status == 0
    assert "safe: a checkpoint of A can be resumed under B" in out
    assert "optimizer.lr  0.003 → 0.001" in out and "set --set:1:14" in out
    assert "xtrain run quickstart.xtrain --set optimizer.lr=1e-3 --set workspace.run=RUN" in out
    assert diff(SPEC, SPEC, "--set", "optimizer.lr=1e-3")[1] == out


def test_nothing_differs(folder, diff):
    status, out, _ = diff(SPEC)
    assert status == 0 and "same: " in out and "SAME PLAN" in out and "MEMORY" not in out
    assert "xtrain run quickstart.xtrain" in out


def test_two_specs_take_the_same_options(folder, diff):
    other = folder / "other.xtrain"
    other.write_text((folder / SPEC).read_text().replace("lr = 3e-3", "lr = 2e-3"))
    content = json.loads(diff(SPEC, "other.xtrain", "--world", "2", "--set", "model.layers=2", "--json")[1])
    assert content["a"]["world_size"] == content["b"]["world_size"] == 2
    assert [change["path"] for change in content["values"]] == ["optimizer.lr"]


@pytest.mark.parametrize(
    ("changes", "status"), [((), 0), (("optimizer.lr=1e-3",), 1), (("experiment.budget=9 steps",), 1)]
)
def test_the_exit_code_tells_if_it_is_asked_to(folder, diff, changes, status):
    arguments = [part for text in changes for part in ("--set", text)]
    assert diff(SPEC, *arguments)[0] == 0
    assert diff(SPEC, *arguments, "--exit-code")[0] == status


def test_a_plan_and_its_spec(folder, diff):
    save(folder / "plan.json", ("optimizer.lr=1e-3",))
    assert diff("plan.json", SPEC, "--exit-code")[0] == 1
    assert diff("plan.json", SPEC, "--set", "optimizer.lr=1e-3", "--exit-code")[0] == 0
    (folder / SPEC).unlink()
    status, out, _ = diff("plan.json", "--set", "batch.micro=8")
    assert status == 0 and "1 · 8: the same rows in every step" in out
    command = "xtrain run quickstart.xtrain --set optimizer.lr=1e-3 --set batch.micro=8"
    assert command in out, "the command has what the plan was made with"


def test_a_run_and_a_changed_spec(folder, diff):
    run = a_run(folder, 100)
    status, out, _ = diff(str(run), SPEC, "--set", "optimizer.lr=1e-3")
    assert status == 0
    assert "· checkpoint of step 100" in out
    assert "step 101 takes the rate" in out
    assert f"--set workspace.run={run.name}" in out and "workspace.root" not in out


def test_a_run_that_is_only_made_longer_is_found_by_itself(folder, diff):
    run = a_run(folder, 100)
    _, out, _ = diff(str(run), "--set", "experiment.budget=600 steps")
    assert "the run is found without this" in out and "workspace.run" not in out
    assert "xtrain run quickstart.xtrain --set 'experiment.budget=600 steps'" in out


def test_what_else_the_command_has_to_say(folder, diff):
    run = a_run(folder, 100)
    sets = ("checkpoint.resume=false", "workspace.root=elsewhere", "experiment.name=other")
    _, out, _ = diff(str(run), SPEC, *(part for text in sets for part in ("--set", text)))
    command = out.replace("\\\n", "").partition("    xtrain run")[2].partition("\n")[0].split("--set ")
    said = {word.strip() for word in command[1:]}
    assert said == {
        "experiment.name=other", "checkpoint.resume=true", f"workspace.run={run.name}", "workspace.lineage=quickstart",
        "workspace.root=runs",
    }  # fmt: skip


def test_a_run_without_a_checkpoint(folder, diff):
    assert "A has no checkpoint yet" in diff(str(a_run(folder, None)), SPEC)[1]


def test_what_is_incompatible_begins_a_run_of_its_own(folder, diff):
    _, out, _ = diff(str(a_run(folder, 100)), "--set", "model.layers=5")
    assert "incompatible: a checkpoint of A is refused under B" in out
    assert "B starts a new run" in out and "workspace.run" not in out
    assert "model.layers  4 → 5: layers.4.input_layernorm.weight" in out


def test_json_has_everything_under_its_names(folder, diff):
    status, out, err = diff(SPEC, "--world", "2", "--set", "optimizer.lr=1e-3", "--json")
    content = json.loads(out)
    assert status == 0 and err == ""
    assert content["differ"] and not content["same_experiment"]
    assert content["a"]["plan_id"] != content["b"]["plan_id"] and content["b"]["sets"] == ["optimizer.lr=1e-3"]
    verdict = content["verdict"]
    assert (verdict["kind"], verdict["effect"], verdict["certain"]) == ("resharded", "learning", True)
    assert {"kind", "path", "text", "effect", "certain"} == verdict["reasons"][0].keys()
    assert {change["group"] for change in content["values"]} == {"experiment", "mesh"}
    assert {node["change"] for node in content["nodes"]} == {"added", "changed"}
    assert content["memory"][0]["before"]["parameters"] > content["memory"][0]["after"]["parameters"]
    amounts = {row["name"]: row for row in content["amounts"]}
    assert (amounts["ranks"]["before"], amounts["ranks"]["after"]) == (1, 2)
    assert amounts["checkpoint"]["before"] == amounts["checkpoint"]["after"] > 0
    assert isinstance(content["traffic"], list)
    assert content["go_on"]["run_b"].startswith("xtrain run quickstart.xtrain --world 2")


@pytest.mark.parametrize(("arguments", "code"), [
    (("no.xtrain",), "X120"),
    ((SPEC, "no.json"), "X704"),
    ((SPEC, "empty"), "X704"),
    ((SPEC, "--set", "optimizer.lrr=1"), "X217"),
    (("plan.json", "plan2.json", "--world", "2"), "X704"),
    (("plan.json", "--set", "batch.rows=7"), "X601"),
])  # fmt: skip
def test_what_cannot_be_read_is_exit_code_two(folder, diff, arguments, code):
    save(folder / "plan.json")
    (folder / "empty").mkdir()
    shutil.copy("plan.json", "plan2.json")
    status, out, err = diff(*arguments)
    assert status == 2 and f"error[{code}]" in err and "Traceback" not in err and out == ""
    status, out, _ = diff(*arguments, "--json")
    assert status == 2 and json.loads(out)["diagnostics"][0]["code"] == code


def test_the_verb_is_light_and_quick_and_has_an_example(folder):
    probe = "import sys; from xtrain.cli.main import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    run = a_run(folder, 100)
    command = [sys.executable, "-c", probe, "diff", str(run), "--set", "optimizer.lr=1e-3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "RESUME" in done.stdout
    assert not {"torch", "numba", "textual", "tokenizers"} & set(done.stderr.split())
    shown = subprocess.run([sys.executable, "-m", "xtrain", "diff", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0 and "xtrain diff specs/" in shown.stdout


def test_a_name_no_file_can_have_is_no_traceback(folder, diff):
    status, _, said = diff("x" * 5000, "x" * 5000)
    assert status == 2 and "X120" in said


def test_a_budget_that_ends_before_the_checkpoint_is_no_move_that_changes_nothing(folder, diff):
    run = a_run(folder, 100)
    _, out, _ = diff(str(run), "--set", "experiment.budget=50 steps")
    assert "incompatible" in out and "bit for bit" not in out
    assert "50 steps, and the checkpoint is of step 100: nothing is left to train (X722)" in out
    assert "workspace.run=NEW" in out  # else B would find A's run, and be refused
    _, out, _ = diff(str(run), SPEC, "--set", "experiment.budget=100 steps", "--set", f'checkpoint.from="{run}"')
    assert "nothing is left to train (X722)" in out and "Use a larger experiment.budget" in out
