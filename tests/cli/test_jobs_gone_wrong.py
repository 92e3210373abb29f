"""`xtrain launch` and `xtrain runs` where a queue, a cluster or a file says what nobody expects: a message and an exit
code, never a traceback, and no job that is not known."""

import json
import re
import shlex
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import evolve
from commands import commands, submitted, taken_to

from xtrain.cli.main import main
from xtrain.cli.run_sweep import SweepLines
from xtrain.plan.serialise import dumps, plan_id
from xtrain.planner.load import plan_from_path
from xtrain.records.sweep import SweepEndEvent
from xtrain.runtime.jobs.submitted import job_folder, read_job
from xtrain.runtime.observe import stopping as outside_commands


@pytest.fixture
def job(monkeypatch, tmp_path, capsys) -> Path:
    """The file of a job that waits."""
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    commands(tmp_path, monkeypatch, sbatch="echo 17", squeue='echo "17 PENDING Priority"', scancel="")
    assert main(["launch", "slurm.xtrain"]) == 0
    capsys.readouterr()
    return job_folder(submitted()[0]) / "job.json"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"id": "17"}', "\x00", *(("id", each) for each in (5, "")),
             *(("launcher", each) for each in (None, {}, {"kind": 5})), ("more", 1)],
)  # fmt: skip
def test_a_file_of_a_job_that_is_damaged_is_that_of_no_job(job, capsys, text):
    job.write_text(text if isinstance(text, str) else json.dumps({**json.loads(job.read_text()), text[0]: text[1]}))
    assert main(["runs"]) == 0
    assert re.search(r"waiting$", capsys.readouterr().out.strip())
    assert main(["launch", "--cancel", str(submitted()[0])]) == 3
    assert "was not submitted" in capsys.readouterr().err
    assert main(["launch", "slurm.xtrain"]) == 0


@pytest.mark.parametrize("change", [{"kind": "cloud"}, {"new": 1}, {"time": [1]}])
def test_a_job_of_another_xtrain(job, capsys, change):
    """Whose launcher is not here, or had other settings: nobody knows whether the job is over."""
    found = json.loads(job.read_text())
    job.write_text(json.dumps({**found, "launcher": {**found["launcher"], **change}}))
    assert main(["runs", "--json"]) == 0
    assert "has settings that launcher" in json.loads(capsys.readouterr().out)["state"]
    assert main(["launch", "--cancel", str(submitted()[0])]) == 3
    assert main(["launch", "slurm.xtrain"]) == 3
    said = capsys.readouterr().err
    assert "error[X461]" in said and f"or remove {job} if that job has certainly ended" in said


def test_a_run_that_has_not_begun(job, capsys, monkeypatch, tmp_path):
    """What `xtrain launch` proposes says how its job stands."""
    (directory,) = submitted()
    for verb in (["watch", str(directory), "--ui", "plain"], ["control", str(directory), "stop"]):
        assert main(verb) == 3
        said = capsys.readouterr().err
        assert (
            said == f"xtrain {verb[0]}: the run {directory} has not started: its job slurm 17 is PENDING (Priority)\n"
        )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["watch", str(directory)]) == 3
    assert "its job slurm 17 cannot be queried: the command squeue was not found" in capsys.readouterr().err


def test_a_plan_of_another_xtrain(monkeypatch, tmp_path, capsys):
    """It is shown, and launched by another launcher."""
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    plan = plan_from_path("slurm.xtrain", ["launch.nodes=1"]).plan
    plan = evolve(plan, launch={**plan.launch, "launcher": {"kind": "cloud"}})
    Path("plan.json").write_text(dumps(evolve(plan, id=plan_id(plan))))
    assert main(["plan", "plan.json"]) == 0
    assert "launcher cloud: settings that launcher cloud does not have here" in capsys.readouterr().out
    assert main(["launch", "plan.json", "--dry"]) == 2
    assert "the plan has settings that launcher cloud does not have here; use" in capsys.readouterr().err
    assert main(["launch", "plan.json", "--dry", "--on", "local"]) == 0


def test_a_queue_that_is_not_here_any_more(job, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["runs"]) == 0
    assert "unknown: the command squeue was not found; run xtrain where it is installed\n" in capsys.readouterr().out
    assert main(["launch", "slurm.xtrain"]) == 3
    said = capsys.readouterr().err
    assert "was given to slurm 17, whose state is unknown: the command squeue was not found" in said


@pytest.mark.parametrize(("squeue", "state"), [
    ("echo hello", "gone"),  # of a site that has something to say
    ("printf '\\xff\\xfe\\n17 RUNNING None\\n'", "RUNNING"),
    ('printf "17 PENDING \\033[31mred\\n"', "PENDING (\\u{1b}[31mred)"),
    ("printf 'down\\nfor good' >&2; exit 1", "`squeue …` failed with exit code 1: down for good"),
    ("kill -9 $$", "`squeue …` was killed by SIGKILL: no output"),
    ("sleep 5", "`squeue …` did not finish within 0.5 s"),
])  # fmt: skip
def test_what_a_queue_may_answer(job, capsys, monkeypatch, tmp_path, squeue, state):
    monkeypatch.setattr(outside_commands, "PATIENCE_SECONDS", 0.5)
    commands(tmp_path, monkeypatch, squeue=squeue)
    assert main(["runs"]) == 0
    said = re.sub(r"`squeue .*`", "`squeue …`", capsys.readouterr().out.splitlines()[-1])
    assert said.endswith(state)


def test_variables_that_would_override_a_script(monkeypatch, tmp_path):
    """The job is what the plan says, whatever the shell has in its environment."""
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    calls = commands(tmp_path, monkeypatch, sbatch="env | grep ^S >> seen; echo 17")
    over = ("TIMELIMIT", "JOB_NAME", "SIGNAL", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "ARRAY_INX", "WAIT", "EXCLUSIVE")
    for name in (*(f"SBATCH_{each}" for each in over), "SBATCH_ACCOUNT", "SBATCH_QOS", "SLURM_PTY_PORT", "SLURM_CONF"):
        monkeypatch.setenv(name, "mine")
    assert main(["launch", "slurm.xtrain", "--set", 'launcher.account="lab"', "--set", "launcher.cpus=1"]) == 0
    seen = {line.partition("=")[0] for line in Path("seen").read_text().splitlines()}
    left = {each for each in seen if each.startswith(("SBATCH_", "SLURM_PTY_"))}
    assert calls() and left == {"SBATCH_QOS"} and "SLURM_CONF" in seen, "what the script leaves open is of the user"


def test_a_queue_that_takes_long(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(outside_commands, "PATIENCE_SECONDS", 0.3)
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    commands(tmp_path, monkeypatch, sbatch="exec sleep 5")
    assert main(["launch", "slurm.xtrain"]) == 3
    said = capsys.readouterr().err
    assert "did not finish within 0.3 s, and may have submitted a job; see with `squeue --me`" in said


@pytest.mark.parametrize("answer", ["", "Submitted batch job 19", "queue is full"])
def test_a_job_without_a_number(monkeypatch, tmp_path, capsys, answer):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    commands(tmp_path, monkeypatch, sbatch=f"echo {shlex.quote(answer)}")
    assert main(["launch", "slurm.xtrain"]) == 3
    said = capsys.readouterr().err
    assert (
        f"without printing a job number: {answer or 'no output'}; see with `squeue --me`" in said and submitted() == []
    )


def test_a_queue_that_takes_no_trials(monkeypatch, tmp_path, capsys):
    """None of them is said to train."""
    taken_to(tmp_path, monkeypatch, "slurm_sweep.xtrain")
    commands(tmp_path, monkeypatch, sbatch="echo 'the queue is closed' >&2; exit 1", squeue="true")
    assert main(["launch", "slurm_sweep.xtrain"]) == 3
    assert "error[X461]" in (said := capsys.readouterr()).err and "the queue is closed" in said.err
    (folder,) = Path("runs").glob("*-sweep-*")
    assert main(["sweep", "show", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 1 and {row["status"] for row in rows} == {"waiting"}


def test_a_number_among_other_lines(monkeypatch, tmp_path):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    commands(tmp_path, monkeypatch, sbatch="printf 'site says hello\\n21;east\\n'")
    assert main(["launch", "slurm.xtrain"]) == 0
    assert read_job(submitted()[0]).id == "21"


def test_a_job_that_cannot_be_written_down_is_cancelled(job, capsys, monkeypatch, tmp_path):
    job.unlink()
    job.with_name("job.json.partial").mkdir()
    calls = commands(tmp_path, monkeypatch, sbatch="echo 23", scancel="")
    assert main(["launch", "slurm.xtrain"]) == 3
    said = capsys.readouterr().err
    assert "error[X706]" in said and "cannot be written: Is a directory, and so slurm job 23 was cancelled" in said
    assert calls()[-1] == "scancel 23"


def test_a_cluster_that_does_not_answer_in_json(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "jobset.xtrain")
    commands(tmp_path, monkeypatch, kubectl='[ "$1" = get ] && echo "a warning"; true')
    assert main(["launch", "jobset.xtrain"]) == 0
    assert main(["launch", "--cancel", str(submitted()[0])]) == 3
    assert "error[X461]: kubectl did not print a JSON object" in capsys.readouterr().err


def test_a_background_that_takes_nothing(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "local.xtrain")
    assert main(["launch", "local.xtrain", "--dry"]) == 0
    file = Path(re.findall(r"^# (/.*)/job.sh$", capsys.readouterr().out, re.MULTILINE)[0], "output.txt")
    file.mkdir(parents=True)
    assert main(["launch", "local.xtrain"]) == 3
    assert f"cannot be started in the background: {file}: Is a directory; start" in capsys.readouterr().err
    assert submitted() == []


def test_a_cluster_without_jobsets(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "jobset.xtrain")
    says = 'error: the server doesn\'t have a resource type "jobset"'
    commands(tmp_path, monkeypatch, kubectl=f"echo {shlex.quote(says)} >&2; exit 1")
    assert main(["launch", "jobset.xtrain"]) == 3
    said = capsys.readouterr().err
    assert says in said and "or use `manifest = job`" in said and submitted() == []


def test_two_that_submit_a_run_at_once(monkeypatch, tmp_path, capsys):
    """Only one job is submitted; the other command sees it."""
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    slow = "touch begun; while [ ! -e other ]; do sleep 0.02; done; echo 17"
    calls = commands(tmp_path, monkeypatch, sbatch=slow, squeue='echo "17 PENDING Priority"')
    codes: list[int] = []
    first, second = (threading.Thread(target=lambda: codes.append(main(["launch", "slurm.xtrain"]))) for _ in "ab")
    first.start()
    while not Path("begun").exists():
        time.sleep(0.01)
    second.start()
    time.sleep(0.5)  # it would have submitted a job of its own by now
    Path("other").touch()
    first.join()
    second.join()
    assert codes == [0, 3] and [each.split()[0] for each in calls()] == ["sbatch", "squeue"]
    assert "slurm 17 is PENDING (Priority)" in capsys.readouterr().err


def test_files_in_the_way(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    commands(tmp_path, monkeypatch, sbatch="echo 17")
    Path("runs").write_text("")
    assert main(["launch", "slurm.xtrain"]) == 3
    assert "cannot be written: Not a directory; set workspace.root" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "says"),
    [("slurm.xtrain", "slurm.xtrain is a file, but --cancel takes the directory of a run"),
        ("runs/none", "run runs/none was not submitted"),
        ("my sweep", "my sweep is a sweep; `xtrain sweep stop 'my sweep'` makes")],
)  # fmt: skip
def test_what_is_no_run_cannot_be_cancelled(monkeypatch, tmp_path, capsys, place, says):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    Path("my sweep").mkdir()
    Path("my sweep/sweep.jsonl").touch()
    assert main(["launch", "--cancel", place]) == 3
    assert says in capsys.readouterr().err


def test_settings_of_a_launcher_that_the_spec_does_not_have(monkeypatch, tmp_path, capsys):
    """Those of `--on`."""
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    text = Path("slurm.xtrain").read_text()
    Path("plain.xtrain").write_text(text[: text.index("launcher")])
    assert main(["launch", "plain.xtrain", "--on", "slurm", "--set", 'launcher.partition="gpu"', "--dry"]) == 0
    assert "#SBATCH --partition=gpu\n" in capsys.readouterr().out
    assert main(["launch", "plain.xtrain", "--on", "kubernetes", "--dry"]) == 2
    assert "`launcher` needs `image` and `volumes`" in capsys.readouterr().err


def test_commands_that_are_proposed_can_be_copied(capsys):
    """Whatever a folder is called."""
    lines = SweepLines(cast(Any, SimpleNamespace(folder="it's runs/a-sweep-1")), "plain")
    lines.show(SweepEndEvent(step=0, status="done", best=2))
    command = capsys.readouterr().out.partition("trial 002: ")[2]
    assert shlex.split(command) == ["xtrain", "sweep", "best", "it's runs/a-sweep-1"]


def test_where_runs_are_listed_from(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    commands(tmp_path, monkeypatch, sbatch="echo 17")
    assert main(["launch", "slurm.xtrain", "--set", 'workspace.root="my runs"']) == 0
    assert f"state: xtrain runs 'my runs'; lines: xtrain watch '{tmp_path}/my runs/two/" in capsys.readouterr().out
    assert main(["runs", "--json"]) == 3
    assert capsys.readouterr().out == "", "what is no JSON is not printed among it"


def test_a_folder_that_no_script_can_name(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "new\nline"
    folder.mkdir()
    taken_to(folder, monkeypatch, "slurm.xtrain")
    assert main(["launch", "slurm.xtrain", "--dry"]) == 3
    assert "new\\nline', which has a line break in its name" in capsys.readouterr().err
