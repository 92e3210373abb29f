"""`xtrain launch`: what each launcher is given, and what becomes of its answers.

Write the expectations anew with `PYTHONPATH=tests/support python tests/cli/test_launch.py` and read the diff.
"""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from commands import LAUNCHES, commands, submitted, taken_to
from dense import json_text

from xtrain.cli.main import main
from xtrain.plan.graph import launcher_args, launcher_of
from xtrain.planner.load import plan_from_path
from xtrain.planner.rules import validate as stack_rules
from xtrain.runtime.base.locks import LAUNCHER_LOCK, hold
from xtrain.runtime.jobs.submitted import job_folder, read_job

SPECS = sorted(path.name for path in LAUNCHES.glob("*.xtrain"))
JOBSET = Path(__file__).parents[1] / "support" / "jobset_schema.json"
KUBERNETES = "1.35"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package of a stack counts as installed: what is submitted is trained elsewhere."""
    monkeypatch.setattr(stack_rules, "is_installed", lambda package: True)


def dry(spec: str, *arguments: str) -> str:
    """What is printed, with the places of this machine and the text and id of the plan left out."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["launch", spec, "--dry", *arguments]) == 0
    text = re.sub(r'"plan.json": ".*"', '"plan.json": "PLAN"', said.getvalue())
    text = text.replace(str(Path.cwd()), "/here").replace(shlex.quote(sys.executable), "PYTHON")
    for plan in re.findall(r"for plan ([0-9a-f]{16})|\"xtrain/plan\": \"([0-9a-f]{16})\"", text):
        text = text.replace("".join(plan), "planid").replace("".join(plan)[:8], "planid")
    return re.sub(r"\b[0-9a-f]{16}\b", "RUN", text)


def dense(text: str) -> str:
    """Return what is printed with manifests, which are indented by two, in fewer lines."""

    def in_fewer_lines(manifest: re.Match[str]) -> str:
        content = json.loads(manifest[0])
        assert json.dumps(content, indent=2) == manifest[0]
        return json_text(content).removesuffix("\n")

    return re.sub(r"^{$.*?^}$", in_fewer_lines, text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_submitted(spec, monkeypatch, tmp_path):
    taken_to(tmp_path, monkeypatch, spec)
    assert dense(dry(spec)) == (LAUNCHES / spec).with_suffix(".expected").read_text()
    assert os.listdir(tmp_path) == [spec], "nothing is written"  # noqa: PTH208 - names alone


@pytest.mark.parametrize("spec", [each for each in SPECS if each.startswith(("slurm", "local"))])
def test_scripts_are_bash(spec, monkeypatch, tmp_path):
    taken_to(tmp_path, monkeypatch, spec)
    done = subprocess.run(["bash", "-n"], input=dry(spec), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


# Kubernetes -----------------------------------------------------------------------------------------------------------


def objects(spec: str) -> dict[str, Any]:
    """Kind → object."""
    text = dry(spec)
    return {each["kind"]: each for each in json.loads(text[text.index("\n") :])["items"]}


def is_valid(found: dict[str, Any]) -> None:
    """Raises ValidationError, also for a field that is unknown."""
    if found["kind"] != "JobSet":
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
        return
    jsonschema.validate(found, json.loads(JOBSET.read_text()))
    for each in found["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **each["template"]}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("spec", ["jobset.xtrain", "job.xtrain"])
def test_manifests_fit_the_schemas(spec, monkeypatch, tmp_path):
    taken_to(tmp_path, monkeypatch, spec)
    found = objects(spec)
    assert {"jobset.xtrain": ["ConfigMap", "JobSet"], "job.xtrain": ["ConfigMap", "Service", "Job"]}[spec] == [*found]
    for each in found.values():
        is_valid(each)
    pod = _pod(found)
    pod["containers"][0]["ressources"] = pod["containers"][0].pop("resources")
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        is_valid(found.get("JobSet") or found["Job"])


def test_trials_of_a_sweep_fit_the_schemas(monkeypatch, tmp_path):
    """Two begin together, each with a plan of its own."""
    taken_to(tmp_path, monkeypatch, "jobset_sweep.xtrain")
    manifests = [
        json.loads(part[part.index("\n") :]) for part in re.split(r"^# ", dry("jobset_sweep.xtrain"), flags=re.M)[1:]
    ]
    assert len(manifests) == 2
    for each in (each for one in manifests for each in one["items"]):
        is_valid(each)


def _pod(found: dict[str, Any]) -> dict[str, Any]:
    job = found["JobSet"]["spec"]["replicatedJobs"][0]["template"] if "JobSet" in found else found["Job"]
    return job["spec"]["template"]["spec"]


def test_ranks_of_pods_meet_where_the_first_pod_is(monkeypatch, tmp_path):
    """A JobSet's pods are called `set-job-replica-index.subdomain`, those of a Job `job-index.subdomain`."""
    taken_to(tmp_path, monkeypatch, "jobset.xtrain", "job.xtrain")
    for spec, first in (("jobset.xtrain", "-ranks-0-0"), ("job.xtrain", "-0")):
        found = objects(spec)
        name = found["ConfigMap"]["metadata"]["name"]
        command = _pod(found)["containers"][0]["command"][-1]
        assert f'--node "$JOB_COMPLETION_INDEX" --meet {name}{first}.{name}:29500' in command
    assert _pod(found)["subdomain"] == found["Service"]["metadata"]["name"] == name
    assert found["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": found["Job"]["metadata"]["name"]}


@pytest.mark.parametrize(("age", "alive"), [(0, True), (600, False), (None, False)])
def test_a_pod_is_alive_as_long_as_its_first_rank_beats(monkeypatch, tmp_path, age, alive):
    taken_to(tmp_path, monkeypatch, "jobset.xtrain")
    probe = _pod(objects("jobset.xtrain"))["containers"][0]["livenessProbe"]["exec"]["command"]
    ranks = tmp_path / "work" / "mine" / "runs" / "Web Text.2" / "RUN" / "ranks"
    ranks.mkdir(parents=True)
    (ranks / "00000.beat").touch()  # of the other pod
    if age is not None:
        (ranks / "00008.beat").touch()
        os.utime(ranks / "00008.beat", (time.time() - age,) * 2)
    probe[-1] = probe[-1].replace("/work", f"{tmp_path}/work")
    done = subprocess.run(probe, env={**os.environ, "JOB_COMPLETION_INDEX": "1"}, capture_output=True)
    assert (done.returncode == 0) is alive


def test_a_pod_is_asked_for_the_heartbeats_of_its_run(monkeypatch, tmp_path):
    """Whatever that is called: Kubernetes puts variables in place of `$(NAME)`, and `$` in place of `$$`."""
    taken_to(tmp_path, monkeypatch, "job.xtrain")
    text = Path("job.xtrain").read_text().replace("experiment two", 'experiment "$$ $(HOME)"')
    Path("job.xtrain").write_text(text)
    command = _pod(objects("job.xtrain"))["containers"][0]["livenessProbe"]["exec"]["command"][-1]
    assert "'/work/runs/$$ $(HOME)/RUN/ranks'" in command.replace("$$", "$")


def test_a_plan_that_no_configmap_holds(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "job.xtrain")
    monkeypatch.setattr("xtrain.components.launchers.kubernetes_run.PLAIN_BYTES", 100)
    assert main(["launch", "job.xtrain", "--dry"]) == 3
    assert re.search(r"error\[X461\]: the plan takes [0-9.]+ KiB packed", capsys.readouterr().err)


def test_a_large_plan_is_packed(monkeypatch, tmp_path):
    """A ConfigMap holds 1 MiB."""
    taken_to(tmp_path, monkeypatch, "job.xtrain")
    monkeypatch.setattr("xtrain.components.launchers.kubernetes_run.PLAIN_BYTES", 20_000)
    found = objects("job.xtrain")
    packed = found["ConfigMap"]["binaryData"]["plan.json.gz"]
    assert "data" not in found["ConfigMap"]
    unpacked = subprocess.run("base64 -d | gzip -dc", shell=True, input=packed.encode(), capture_output=True).stdout
    assert json.loads(unpacked)["name"] == "two"
    assert "gzip -dc /launch/plan.json.gz > /tmp/plan.json && exec xtrain run /tmp/plan.json" in str(found["Job"])
    is_valid(found["ConfigMap"])


def test_kubectl_is_called(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "jobset.xtrain")
    # The name that is asked for, in an object.
    object_ = '{"metadata": {"name": "\'${2#*/}\'"}, "spec": {"suspend": true}, "status": {}}'
    calls = commands(tmp_path, monkeypatch, kubectl=f"case \"$1\" in get) echo '{object_}';; esac")
    assert main(["launch", "jobset.xtrain"]) == 0
    (directory,) = submitted()
    name = read_job(directory).id
    assert re.fullmatch(r"jobset/web-text-2-[0-9a-f]{8}", name)
    file = job_folder(directory) / "job.k8s.json"
    deleted = f"kubectl delete {name} configmap/{name.partition('/')[2]} --namespace team-a --ignore-not-found"
    assert calls() == [
        f"{deleted} --cascade=foreground --wait=true",  # what an earlier job has left
        f"kubectl apply --namespace team-a --filename {file}",
    ]
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (row["status"], row["job"], row["state"]) == ("waiting", f"kubernetes {name}", "Suspended")
    assert main(["launch", "--cancel", str(directory)]) == 0
    assert calls()[-1] == f"{deleted} --cascade=foreground --wait=false"


@pytest.mark.parametrize(("conditions", "over", "says"), [
    ([{"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}], True, "Completed (AllJobsCompleted)"),
    ([{"type": "Failed", "status": "True", "reason": "FailedJobs"}], True, "Failed (FailedJobs)"),
    ([{"type": "Failed", "status": "False", "reason": "x"}], False, "Active"),
    ([{"type": "Suspended", "status": "True", "reason": "Queued"}], False, "Suspended (Queued)"),
    (None, True, "gone"),
])  # fmt: skip
def test_states_of_kubernetes(monkeypatch, tmp_path, conditions, over, says):
    from xtrain.components.launchers.kubernetes_run import LAUNCHER

    taken_to(tmp_path, monkeypatch, "jobset.xtrain")
    answer = {"metadata": {"name": "x"}, "spec": {}, "status": {"conditions": conditions}}
    launcher = launcher_of(plan_from_path("jobset.xtrain").plan)
    commands(tmp_path, monkeypatch, kubectl=conditions and f"echo {shlex.quote(json.dumps(answer))}")
    state = LAUNCHER.states(launcher, ["jobset/x"])["jobset/x"]
    assert (state.over, str(state)) == (over, says)
    several = {"kind": "List", "items": [answer] if conditions else []}
    calls = commands(tmp_path, monkeypatch, kubectl=f"echo {shlex.quote(json.dumps(several))}")
    states = LAUNCHER.states(launcher, ["jobset/x", "jobset/y"])
    assert [str(each) for each in states.values()] == [says, "gone"]
    assert "get jobset/x jobset/y --namespace team-a --ignore-not-found" in calls()[-1]


def test_what_a_trial_leaves_in_kubernetes(monkeypatch, tmp_path):
    """Exit codes and lines of its pods; then its objects are deleted."""
    from xtrain.components.launchers.kubernetes_run import LAUNCHER

    taken_to(tmp_path, monkeypatch, "jobset.xtrain")
    launcher = launcher_of(plan_from_path("jobset.xtrain").plan)
    ended = [{"containerStatuses": [{"state": {"terminated": {"exitCode": code}}}]} for code in (0, 75)]
    pods = shlex.quote(json.dumps({"items": [{"status": each} for each in (*ended, {})]}))
    calls = commands(tmp_path, monkeypatch, kubectl=f'case "$1" in get) echo {pods};; logs) echo "a line";; esac')
    found = LAUNCHER.collect(launcher, "jobset/x")
    assert (found.code, found.output) == (75, "a line\n")
    assert [each.split()[1] for each in calls()] == ["get", "logs", "delete"]
    assert all("--selector jobset.sigs.k8s.io/jobset-name=x --namespace team-a" in each for each in calls()[:2])
    commands(tmp_path, monkeypatch, kubectl='case "$1" in get) echo \'{"items": []}\';; esac')
    assert LAUNCHER.collect(launcher, "jobset/x").code is None, "nobody knows it"


# Slurm, whose commands are stood in for -------------------------------------------------------------------------------


def test_a_job_of_slurm_from_its_submission_to_its_end(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    calls = commands(tmp_path, monkeypatch, sbatch="echo '17;east'", squeue='echo "17 PENDING Priority"', scancel="")
    assert main(["launch", "slurm.xtrain"]) == 0
    (directory,) = submitted()
    files = job_folder(directory)
    assert calls() == [f"sbatch --parsable {files}/job.sh"]
    assert f"slurm job 17: plan {read_job(directory).plan} in {directory}" in capsys.readouterr().out
    # The job has a plan of its own, and in it the folder of the run.
    plan = plan_from_path(files / "job-plan.json").plan
    assert plan.workspace["run"] == directory.name and plan.id == read_job(directory).plan
    assert plan.origin.sets == (f'workspace.run="{directory.name}"',)

    assert main(["runs", "--json"]) == 0
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (row["run"], row["status"], row["state"]) == (f"two/{directory.name}", "waiting", "PENDING (Priority)")
    assert calls()[-1] == "squeue --noheader --array --states=all --jobs 17 --format %i %T %r"
    # It has a job: another one would train in the same directory.
    assert main(["launch", "slurm.xtrain"]) == 3
    assert "error[X707]" in (said := capsys.readouterr().err) and "slurm 17 is PENDING (Priority)" in said
    assert main(["launch", "--cancel", str(directory)]) == 0
    assert calls()[-1] == "scancel 17"
    commands(tmp_path, monkeypatch, squeue='echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    capsys.readouterr()
    assert main(["runs"]) == 0
    assert re.search(r"never begun +slurm 17 +gone", capsys.readouterr().out)
    assert main(["launch", "slurm.xtrain"]) == 0, "then it can be submitted again"


def test_a_queue_that_cannot_be_asked(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    monkeypatch.setenv("PATH", str(tmp_path))  # there may be a Slurm on this machine
    assert main(["launch", "slurm.xtrain"]) == 3
    assert "error[X461]: the command sbatch was not found" in capsys.readouterr().err
    commands(tmp_path, monkeypatch, sbatch='echo "invalid partition specified: x" >&2; exit 1')
    assert main(["launch", "slurm.xtrain"]) == 3
    assert "failed with exit code 1: invalid partition specified: x" in capsys.readouterr().err
    assert submitted() == [], "a job that was refused is none"


def test_secrets_are_named_and_not_written(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "slurm_container.xtrain")
    commands(tmp_path, monkeypatch, sbatch="echo 5")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert main(["launch", "slurm_container.xtrain"]) == 3
    assert "error[X709]: launcher.secrets names WANDB_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_API_KEY", "hush-9471")
    assert main(["launch", "slurm_container.xtrain"]) == 0
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3 and not any("hush-9471" in text for text in files)


def script_of(spec: str) -> Path:
    assert main(["launch", spec]) == 0
    (directory,) = submitted()
    return job_folder(directory) / "job.sh"


@contextlib.contextmanager
def running_script(script: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Nothing of it is left, also where a test has failed."""
    environment = {**os.environ, "SLURM_JOB_ID": "17", **environment}
    command = ["bash", str(script)]
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def code_of(script: Path) -> int:
    with running_script(script) as job:
        return job.wait(60)


# Stands in for srun: says that it runs, and saves and stops when it is asked.
SAVES = 'trap "exit 75" USR1; echo "ready $XTRAIN_RESTART"; while true; do sleep 0.05; done'


@pytest.mark.parametrize(("count", "requeued"), [("0", True), ("6", True), ("7", False)])
def test_a_job_whose_time_is_over_is_requeued(monkeypatch, tmp_path, count, requeued):
    taken_to(tmp_path, monkeypatch, "slurm_container.xtrain")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    calls = commands(tmp_path, monkeypatch, sbatch="echo 17", srun=SAVES, scontrol="")
    with running_script(script_of("slurm_container.xtrain"), SLURM_RESTART_COUNT=count) as job:
        assert job.stdout.readline() == f"ready {count}\n", "a start of a job that follows another one goes on"
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 75
    assert ("scontrol requeue 17" in calls()) is requeued
    (srun,) = [each for each in calls() if each.startswith("srun")]
    assert "--container-image=/images/x train.sqsh" in srun and "--wait=180" in srun


@pytest.mark.parametrize(("srun", "code"), [
    ('trap "exit 75" USR1; kill -USR1 $PPID; while true; do sleep 0.05; done', 75),
    ("kill -USR1 $PPID $$", 138),  # which the run has not begun to answer
])  # fmt: skip
def test_the_time_of_a_job_is_over_while_its_run_starts(monkeypatch, tmp_path, srun, code):
    taken_to(tmp_path, monkeypatch, "slurm_container.xtrain")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    calls = commands(tmp_path, monkeypatch, sbatch="echo 17", srun=srun, scontrol="")
    assert code_of(script_of("slurm_container.xtrain")) == code
    assert "scontrol requeue 17" in calls()


@pytest.mark.parametrize(("spec", "code", "starts"), [
    ("slurm_container.xtrain", 0, 1),
    ("slurm_container.xtrain", 1, 4),  # of restarts, which xtrain leaves to the job on several machines
    ("slurm_container.xtrain", 137, 4),
    ("slurm_container.xtrain", 3, 1),
    ("slurm_container.xtrain", 75, 1),  # stopped by `xtrain control`, or at a step
    ("slurm.xtrain", 1, 1),
])  # fmt: skip
def test_how_a_job_ends_without_a_signal(monkeypatch, tmp_path, spec, code, starts):
    taken_to(tmp_path, monkeypatch, spec)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    calls = commands(tmp_path, monkeypatch, sbatch="echo 17", srun=f"exit {code}", scontrol="")
    assert code_of(script_of(spec)) == code
    assert [each.split()[0] for each in calls()] == ["sbatch", *["srun"] * starts]


# the rest -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_a_launcher_is_the_same_in_its_plan(spec, monkeypatch, tmp_path):
    taken_to(tmp_path, monkeypatch, spec)
    plan = plan_from_path(spec).plan
    launcher = launcher_of(plan)
    assert launcher_args(launcher) == plan.launch["launcher"]
    assert f"launcher {launcher.kind}" in shown(plan)


def shown(plan) -> str:
    from xtrain.planner.review.page import render

    return render(plan)


@pytest.mark.parametrize(("arguments", "says"), [
    (("plain.xtrain",), "the spec has no `launcher`; use --on local, kubernetes, slurm"),
    (("slurm.xtrain", "--on", "cloud"), "there is no launcher `cloud`"),
    (("slurm.xtrain", "--on", "kubernetes"), "kubernetes needs settings; write `launcher kubernetes { image ="),
    (("slurm.xtrain", "--on", "local"), "local is one machine, but the plan is for 2"),
    (("local.xtrain", "--set", "optimizer.lr=-1"), "X3"),
])  # fmt: skip
def test_what_cannot_be_launched(monkeypatch, tmp_path, capsys, arguments, says):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain", "local.xtrain")
    text = Path("slurm.xtrain").read_text()
    Path("plain.xtrain").write_text(text[: text.index("launcher")])
    assert main(["launch", *arguments]) == 2
    assert says in capsys.readouterr().err


SLURM, POD = "launcher slurm { cpus = 2, ", 'launcher kubernetes { image = "x", '


@pytest.mark.parametrize(("launcher", "says"), [
    (SLURM + "time = 0.5 s, warn = 0.1 s }", "asked to stop 1.00 s before the end of 500 ms"),
    (SLURM + "warn = 20 h }", "launcher.warn: the run would be asked to stop 20.0 h before the end"),
    (SLURM + "}\nlaunch { stop_deadline = 1 d }", "asked to stop 24.0 h before the end, and Slurm allows at most 18.2"),
    (SLURM + 'partition = "a\\nb" }', "`partition` must be one line, but contains U+000A"),
    (SLURM + 'qos = " " }', "`qos` must not be empty"),
    (SLURM + 'options = ["--comment=a\\nb"] }', "`options` must be one line"),
    (SLURM + 'options = ["-"] }', "`-` is not an option of sbatch"),
    (SLURM + 'options = ["--array=0-3"] }', "`--array=0-3` does not go with the job of a run"),
    (SLURM + 'options = ["-N3"] }', "`-N3` repeats launch.nodes"),
    (SLURM + 'secrets = ["A B"] }', "`secrets` must be the name of an environment variable"),
    (SLURM + 'container = "x", mounts = ["/a"] }', "`/a` is not a pair of folders"),
    (SLURM + 'container = "x", mounts = ["/a:/b,/c:/d"] }', "`/a:/b,/c:/d` is not a pair of folders"),
    (SLURM + "gpus = 4 }\nlaunch { device = cuda, ranks_per_node = 8 }", "a node has 4 GPUs, and each of its 8 "),
    (POD + 'volumes = ["a:/work"], gpus = 1 }\nlaunch { device = cuda, ranks_per_node = 2 }', "use gpus 2, or launch"),
    (SLURM + 'mounts = ["/a:/b"] }', "W401]: mounts has no effect: no `container` is given"),
    (POD + 'volumes = ["Runs:/work"] }', "`Runs:/work` is not a claim with a folder"),
    (POD + 'volumes = ["a:/work", "b:/x/../y"] }', "`b:/x/../y` is not a claim with a folder"),
    (POD + 'volumes = ["a:/work", "a:/work/"] }', "`a:/work/` is where `a:/work` is"),
    (POD + 'volumes = ["a:/work", "b:/dev/shm"] }', "`b:/dev/shm` is where shared memory is"),
    (POD + 'volumes = ["a:/work"], workdir = "/work/../etc" }', "the working folder `/work/../etc` is on no volume"),
    (POD + 'volumes = ["a:/work"] }\nworkspace { root = "/home/x" }', "of the runs, `/home/x`, is on no volume"),
    (POD + 'volumes = ["a:/work"], namespace = "team_a" }', "`namespace` must be a name of small letters"),
    (POD + 'volumes = ["a:/work"], queue = "Team" }', "`queue` must be a name of small letters"),
    (POD + 'volumes = ["a:/work"], secrets = ["a b"] }', "`secrets` must be a name of small letters"),
    (POD + 'volumes = ["a:/work"], nodes = ["a b=c"] }', "`a b=c` is not a label"),
    (POD + 'volumes = ["a:/work"], nodes = ["a=b", "a=c"] }', "`a` is given twice"),
    (POD + 'volumes = ["a:/work"], restarts = 2147483648 }', "`restarts` must lie between 0 and 2147483647"),
    (POD + 'volumes = ["a:/work"], manifest = job, restarts = 3 }', "W401]: restarts has no effect: a Job"),
    ('launcher kubernetes { image = "a b", volumes = ["a:/work"] }', "`image` must be the name of an image"),
])  # fmt: skip
def test_settings_that_no_job_can_have(monkeypatch, tmp_path, launcher, says):
    """They are told of before a queue or a cluster would, or would take them for something else."""
    taken_to(tmp_path, monkeypatch, "local.xtrain")
    text = Path("local.xtrain").read_text()
    text = text.replace("launch { device = cpu }\n", "" if "device" in launcher else "launch { device = cpu }\n")
    Path("spec.xtrain").write_text(text[: text.index("launcher")] + launcher)
    compiled = plan_from_path("spec.xtrain")
    assert says in compiled.diagnostics.render(color=False)
    assert (compiled.plan is None) is ("W401" not in says)


@pytest.mark.parametrize(("launcher", "nodes", "hint"), [
    (SLURM + "}", 2, ""),
    (POD + 'volumes = ["a:/work"] }', 1, ""),
    (POD + 'volumes = ["a:/work"] }', 2, "set launcher.restarts, or remove it"),
    (POD + 'volumes = ["a:/work"], manifest = job }', 2, "use launcher slurm, or remove it"),
    ("", 2, "use launcher slurm, or remove it"),
])  # fmt: skip
def test_who_starts_several_machines_again(monkeypatch, tmp_path, launcher, nodes, hint):
    """A plan does not speak of restarts that nobody makes."""
    taken_to(tmp_path, monkeypatch, "local.xtrain")
    text = Path("local.xtrain").read_text().replace("device = cpu }", f"device = cpu, nodes = {nodes} }}")
    more = f"fault_tolerance {{ restarts = 3 }}\n{launcher}\n"
    Path("spec.xtrain").write_text(text[: text.index("launcher")] + more)
    compiled = plan_from_path("spec.xtrain")
    said = compiled.diagnostics.render(color=False)
    assert ("W401]: restarts has no effect" in said) is bool(hint) and hint in said
    again = "up to 10" if "launcher." in hint else None if hint else "up to 3"
    assert re.findall(r"RESTARTS +(.*), each from the last checkpoint", shown(compiled.plan)) == [again] * bool(again)


def test_amounts_that_slurm_takes_whole(monkeypatch, tmp_path):
    """Of nothing it would make no limit, or all that there is."""
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    sets = ("launcher.time=90.2 min", "launcher.warn=0.1 s", "launcher.memory=900 KiB", "launcher.cpus=1")
    script = dry("slurm.xtrain", *(word for each in sets for word in ("--set", each)))
    for option in ("--time=90:12", "--signal=B:USR1@1", "--mem=1M"):
        assert f"#SBATCH {option}\n" in script


def test_a_process_in_the_background(monkeypatch, tmp_path, capsys):
    taken_to(tmp_path, monkeypatch, "local.xtrain")
    fake = tmp_path / "fake python"
    fake.write_text('#!/bin/sh\necho "$PWD: $*"\nexec sleep 600\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert main(["launch", "local.xtrain"]) == 0
    (directory,) = submitted()
    job = read_job(directory)
    try:
        assert main(["launch", "local.xtrain"]) == 3
        assert f"local {job.id} is RUNNING" in capsys.readouterr().err
        ends = time.monotonic() + 30
        while not (job_folder(directory) / "output.txt").read_text() and time.monotonic() < ends:
            time.sleep(0.02)
    finally:
        assert main(["launch", "--cancel", str(directory)]) == 0
        os.waitpid(int(job.id.partition("-")[0]), 0)  # it was started by this process
    output = (job_folder(directory) / "output.txt").read_text()
    assert output == f"{tmp_path}: -P -m xtrain run {job_folder(directory)}/job-plan.json --accept-drift --ui plain\n"
    assert main(["launch", "--cancel", str(directory)]) == 0
    assert "is over: gone" in capsys.readouterr().out


STARTED = {"event": "run_start", "time": 5.0, "attempt": 1}
ENDED = {"event": "run_end", "time": 9.0, "step": 7, "status": "stopped", "exit_code": 75}


@pytest.mark.parametrize(("events", "queue", "status"), [
    ([], "PENDING Priority", "waiting"),
    ([], "RUNNING None", "not begun"),
    ([], "", "never begun"),
    ([STARTED], "RUNNING None", "running"),
    ([STARTED], "", "lost"),
    ([STARTED], "PENDING BeginTime", "lost, waiting"),  # its machine was lost
    ([STARTED, ENDED], "PENDING BeginTime", "stopped, waiting"),
    ([STARTED, ENDED], "COMPLETING None", "stopped"),
    ([STARTED, ENDED], "", "stopped"),
    ([STARTED, ENDED, STARTED], "RUNNING None", "running"),
])  # fmt: skip
def test_what_a_run_and_its_job_say_together(monkeypatch, tmp_path, capsys, events, queue, status):
    taken_to(tmp_path, monkeypatch, "slurm.xtrain")
    commands(tmp_path, monkeypatch, sbatch="echo 17", squeue=f'echo "17 {queue}"' if queue else "true")
    assert main(["launch", "slurm.xtrain"]) == 0
    (directory,) = submitted()
    if events:
        directory.mkdir()
        (directory / "plan.json").write_text("{}")
        (directory / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
        (directory / "metrics.jsonl").write_text('{"step": 7, "time": 8.0, "loss": 2.5}\n')
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert row["status"] == status
    assert (row["step"], row["loss"]) == ((7, 2.5) if events else (None, None))
    if events:
        assert main(["runs", str(directory), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run"] == directory.name, "not `.`"


def test_a_run_without_a_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--cancel", "runs/x/y"]) == 3
    assert "run runs/x/y was not submitted" in capsys.readouterr().err
    assert main(["runs"]) == 3


@pytest.mark.parametrize(("last", "locked", "status"), [
    ({**ENDED, "status": "done"}, False, "finished"),
    ({**ENDED, "status": "complete"}, False, "finished"),
    ({**ENDED, "status": "environment"}, False, "failed"),
    ({**ENDED, "status": "interrupted"}, False, "stopped"),
    (STARTED, True, "running"),
    (ENDED, True, "running"),  # started again
    (STARTED, False, "lost"),
    ({"event": "failure", "time": 9.0, "rank": 0, "error": "x", "exit_code": 1}, False, "failed"),
])  # fmt: skip
def test_the_state_of_a_run_of_this_machine(tmp_path, monkeypatch, capsys, last, locked, status):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "tiny" / "ab12cd34"
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text("{}")
    (directory / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (STARTED, last)))
    (directory / ".launcher.lock").touch()
    lock = hold(directory, LAUNCHER_LOCK) if locked else None
    for named in ([], ["tiny"], ["ab12"], ["runs/tiny"]):  # as `xtrain watch` takes it
        assert main(["runs", *named, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == status
    if lock is not None:
        lock.close()


if __name__ == "__main__":
    import tempfile

    for each in SPECS:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(stack_rules, "is_installed", lambda package: True)
            taken_to(Path(folder), patch, each)
            (LAUNCHES / each).with_suffix(".expected").write_text(dense(dry(each)))
