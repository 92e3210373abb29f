"""`xtrain approve` and `xtrain mcp`: what an assistant can look at, and that it starts nothing without a person."""

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from commands import xtrain

from xtrain.cli.main import main
from xtrain.planner.load import plan_from_path
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.jobs.approvals import approve, approved

SPEC = """\
experiment tiny { budget = 2 steps }
model qwen3 { dim = 16, layers = 1, heads = 2, kv_heads = 1, head_dim = 8, ffn = 32 }
tokenizer bytes
dataset made { source = synthetic(documents = 32, length = 40) }
batch { sequence = 32 }
optimizer adamw { lr = 3e-3 }
launch { device = cpu }
"""
TOOLS = {"check", "plan", "diff", "explain", "docs", "runs", "metrics", "run"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.xtrain").write_text(SPEC)
    return tmp_path


@pytest.fixture
def keys(tmp_path):
    """`ann` and `bob`: SSH keys; `signers`: a file that allows ann's."""
    for name in ("ann", "bob"):
        asked = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)]
        subprocess.run(asked, check=True)
    (tmp_path / "signers").write_text(f"ann@example.com {(tmp_path / 'ann.pub').read_text()}")
    return tmp_path


def make_server(*given: Path):
    """Return a server; mcp takes a second to import, which each process that only collects this file would spend."""
    from xtrain.api.assistant import make_server as make

    return make(*given)


def calls(server, *asked):
    """Call tools through a client; (failed, text) of each."""
    from mcp import Client

    async def talk():
        async with Client(server) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
            found = [await client.call_tool(name, arguments) for name, arguments in asked]
            texts = ["\n".join(getattr(part, "text", "") for part in each.content) for each in found]
            return [(bool(each.is_error), text) for each, text in zip(found, texts, strict=True)]

    return asyncio.run(talk())


def test_a_client_looks_at_a_project_over_stdio(project):
    """With a spec whose model is code of its author, which no tool executes."""
    from mcp import StdioServerParameters

    (project / "bad.xtrain").write_text(SPEC.replace("budget", "bugdet"))
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "xtrain", "mcp"], cwd=str(project), env={**os.environ}
    )
    checked, wrong, planned, explained, found, outside, option, nul, listed = calls(
        server,
        ("check", {"spec": "tiny.xtrain"}),
        ("check", {"spec": "bad.xtrain"}),
        ("plan", {"spec": "tiny.xtrain", "settings": ["optimizer.lr=1e-4"], "part": "training"}),
        ("explain", {"code": "X742"}),
        ("docs", {"words": "learning rate"}),
        ("plan", {"spec": "/etc/passwd"}),
        ("check", {"spec": "--fix"}),
        ("docs", {"words": "a\0b"}),
        ("runs", {}),
    )
    assert checked == (False, "tiny.xtrain: ok")
    assert not wrong[0] and "did you mean `budget`?" in wrong[1]
    assert not planned[0] and "learning rate" in planned[1] and "1e-04" in planned[1].replace("0.0001", "1e-04")
    assert "not approved" in explained[1] and "optimizers.md" in found[1]
    assert nul[0] and "has a NUL character" in nul[1]
    assert outside[0] and option[0] and "is not below" in outside[1]
    assert listed == (False, "there is no run at runs or below it; `xtrain run SPEC` starts one")


def test_differences_and_metrics(project):
    with zipfile.ZipFile(Path(__file__).parents[1] / "data/run_0_1_0.zip") as archive:
        archive.extractall(project / "runs/other/six")
    (project / "more.xtrain").write_text(SPEC.replace("3e-3", "1e-3"))
    differs, metrics, missing = calls(
        make_server(project),
        ("diff", {"a": "tiny.xtrain", "b": "more.xtrain"}),
        ("metrics", {"run": "six", "keys": ["loss"], "last": 2}),
        ("metrics", {"run": "nothing"}),
    )
    assert not differs[0] and "optimizer.lr" in differs[1]
    assert not metrics[0] and metrics[1].count('"loss"') == 2 and "grad_norm" not in metrics[1]
    assert missing[0]


def test_a_plan_that_nobody_approved_is_not_started(project):
    plan_id = plan_of(project)
    refused, odd = calls(make_server(project), ("run", {"plan_id": plan_id}), ("run", {"plan_id": "../../x"}))
    assert refused[0] and "X742" in refused[1] and "xtrain approve" in refused[1]
    assert odd[0] and "is not the id of a plan" in odd[1]
    assert not (project / "runs").exists()


def plan_of(project) -> str:
    return json.loads(xtrain("plan", "tiny.xtrain", "--json", cwd=project).stdout)["id"]


def test_a_person_is_asked(project):
    """Without a terminal nobody can answer; in one, `no` and Ctrl-D approve nothing."""
    done = xtrain("approve", "tiny.xtrain", cwd=project)
    assert done.returncode == 2 and "a person must answer" in done.stderr
    plan_id = plan_of(project)
    for answer, code in (("no\n", 1), ("\x04", 1), ("yes\n", 0)):
        master, terminal = pty.openpty()
        os.write(master, answer.encode())
        command = [sys.executable, "-m", "xtrain", "approve", "tiny.xtrain", "--by", "ann"]
        asked = subprocess.run(command, cwd=project, stdin=terminal, capture_output=True, text=True)
        assert asked.returncode == code and f"May plan {plan_id} run?" in asked.stdout
        assert (project / "runs").exists() == (code == 0) != ("not approved" in asked.stdout)
    approval, file = approved(project / "runs", plan_id)
    assert (approval.by, approval.name, file.is_file()) == ("ann", "tiny", True)
    assert "no run" in xtrain("runs", cwd=project).stderr  # an approval is none


@pytest.mark.parametrize(("damage", "says"), [
    ("none", ""),
    ("unsigned", "is not signed"),
    ("other key", "is not valid"),
    ("other person", "is not valid"),
    ("changed", "is not valid"),
    ("other plan", "is for another plan"),
    ("other text", "is for another plan"),
    ("no signers", "no file of allowed signers"),
    ("not JSON", "is damaged"),
])  # fmt: skip
def test_signatures(project, keys, damage, says):
    plan_id, signers = plan_of(project), keys / "signers"
    key = keys / ("bob" if damage == "other key" else "ann")
    by = "bob@example.com" if damage == "other person" else "ann@example.com"
    assert xtrain("approve", "tiny.xtrain", "--key", key, "--by", by, cwd=project).returncode == 0
    folder = project / "runs/approvals" / plan_id
    approval = folder / "approval.json"
    if damage == "unsigned":
        (folder / "approval.json.sig").unlink()
    elif damage == "changed":
        approval.write_text(approval.read_text().replace('"tiny"', '"other"'))
    elif damage == "other plan":
        plan = xtrain("plan", "tiny.xtrain", "--set", "optimizer.lr=1", "--json", cwd=project).stdout
        (folder / "approved-plan.json").write_text(plan)
    elif damage == "other text":  # outside the plan's id
        saved = json.loads((folder / "approved-plan.json").read_text())
        (folder / "approved-plan.json").write_text(json.dumps({**saved, "spec_text": "experiment other {}"}))
    elif damage == "no signers":
        signers = keys / "none"
    elif damage == "not JSON":
        approval.write_text("{")
    if not says:
        assert approved(project / "runs", plan_id, signers)[0].by == by
        return
    with pytest.raises(EnvironmentFault, match=says) as fault:
        approved(project / "runs", plan_id, signers)
    assert fault.value.code == "X742"
    saved = folder / "approved-plan.json"
    done = xtrain("launch", saved, "--on", "local", "--dry", f"--approved={signers}", cwd=project)
    assert done.returncode == 3 and "error[X742]" in done.stderr


def test_another_file_with_the_id_of_an_approved_plan_is_not_launched(project, keys):
    """The folder of the spec, which holds its modules, is no part of the id."""
    assert (
        xtrain("approve", "tiny.xtrain", "--key", keys / "ann", "--by", "ann@example.com", cwd=project).returncode == 0
    )
    saved = project / "runs/approvals" / plan_of(project) / "approved-plan.json"
    copy, moved = project / "copy.json", project / "moved.json"
    copy.write_text(saved.read_text())
    moved.write_text(json.dumps({**json.loads(saved.read_text()), "spec": "elsewhere/tiny.xtrain"}))
    for file, code in ((copy, 0), (moved, 3)):
        done = xtrain("launch", file, "--on", "local", "--dry", f"--approved={keys / 'signers'}", cwd=project)
        assert done.returncode == code, done.stderr
    assert "error[X742]" in done.stderr and f"launch {saved.relative_to(project)}" in done.stderr


def test_a_user_without_a_name_names_the_person(project, monkeypatch, capsys):
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", getuser)
    assert main(["approve", "tiny.xtrain", "--key", "key"]) == 2
    assert "give --by NAME" in capsys.readouterr().err


def test_a_key_that_cannot_sign_approves_nothing(project):
    done = xtrain("approve", "tiny.xtrain", "--key", "no_key", cwd=project)
    assert done.returncode == 3 and "cannot sign" in done.stderr
    done = xtrain("launch", "tiny.xtrain", "--on", "local", "--approved", cwd=project)
    assert done.returncode == 2 and "--approved demands an approval, which needs a saved plan" in done.stderr


def test_a_policy_demands_approvals(project, keys):
    """Without --approved; with `signers`, an approval without a signature is not enough."""
    with_policy = f'{SPEC}\npolicy {{ approval = required, signers = "{keys / "signers"}" }}\n'
    (project / "tiny.xtrain").write_text(with_policy)
    done = xtrain("launch", "tiny.xtrain", "--on", "local", "--dry", cwd=project)
    assert done.returncode == 2 and "the policy demands an approval, which needs a saved plan" in done.stderr
    plan = plan_from_path(project / "tiny.xtrain").plan
    assert plan is not None
    with contextlib.chdir(project):
        saved = project / approve(plan, "ann@example.com") / "approved-plan.json"
    done = xtrain("launch", saved, "--on", "local", "--dry", cwd=project)
    assert done.returncode == 3 and "X742" in done.stderr and "is not signed" in done.stderr
    assert xtrain("approve", saved, "--key", keys / "ann", "--by", "ann@example.com", cwd=project).returncode == 0
    assert xtrain("launch", saved, "--on", "local", "--dry", cwd=project).returncode == 0
    sweep = "sweep { optimizer.lr in [1e-3, 1e-2], method grid, objective = eval.made.loss }"
    text = with_policy.replace("length = 40)", "length = 40), holdout = 20%")
    (project / "tiny.xtrain").write_text(f"{text}every 2 steps eval made\n{sweep}\n")
    done = xtrain("launch", "tiny.xtrain", "--on", "slurm", "--dry", cwd=project)
    assert done.returncode == 2 and "trials of a sweep have none" in done.stderr


def test_a_server_that_cannot_start_says_why(project, monkeypatch):
    done = xtrain("mcp", "--signers", "none", cwd=project)
    assert done.returncode == 2 and "there is no file none" in done.stderr
    monkeypatch.delitem(sys.modules, "xtrain.api.assistant", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    done = xtrain("mcp", cwd=project)
    assert done.returncode == 2 and 'pip install "xtrain[mcp]"' in done.stderr


def test_a_started_plan_may_fail(project):
    """Without signers; the list of runs says that its job is gone."""
    (project / "tiny.xtrain").write_text(SPEC.replace("synthetic(documents = 32, length = 40)", 'jsonl("none.jsonl")'))
    plan = plan_from_path(project / "tiny.xtrain").plan
    assert plan is not None
    approve(plan, "ann")
    (started,) = calls(make_server(project), ("run", {"plan_id": plan.id}))
    assert not started[0] and f"plan {plan.id}" in started[1]
    end = time.monotonic() + 120
    while time.monotonic() < end and '"gone"' not in (found := xtrain("runs", "--json", cwd=project).stdout):
        time.sleep(1)
    assert '"gone"' in found and '"never begun"' in found


@pytest.mark.slow
def test_an_approved_plan_is_started(project, keys):
    assert (
        xtrain("approve", "tiny.xtrain", "--key", keys / "ann", "--by", "ann@example.com", cwd=project).returncode == 0
    )
    (started,) = calls(make_server(project, keys / "signers"), ("run", {"plan_id": plan_of(project)}))
    assert not started[0], started[1]
    end = time.monotonic() + 240
    while time.monotonic() < end and not list((project / "runs").glob("tiny/*/finished")):
        time.sleep(1)
    (listed, metrics) = calls(make_server(project), ("runs", {}), ("metrics", {"run": "tiny", "keys": ["loss"]}))
    assert '"finished"' in listed[1] and metrics[1].count('"loss"') == 2
