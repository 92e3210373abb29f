"""What is said where a certificate is demanded and does not hold, and where a plan cannot be proved."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from commands import xtrain

from xtrain.plan.certificate import Certificate, ComparedLayout, Issued
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.inspect import prove as proofs
from xtrain.runtime.store.certificates import certificate_path, check_certificate

SPEC = """
experiment tiny {{ budget = 4 steps }}
launch {{ device = cpu{launch} }}
model qwen3 {{ dim = 32, layers = 4, heads = 4 }}
tokenizer bytes
use "texts.py"
dataset lines {{ source = texts() }}
batch {{ sequence = 64, rows = 8 }}
optimizer adamw {{ lr = 3e-3 }}
parallel {{ {axes} }}
"""
OWN = 'from xtrain import source\n\n\n@source\ndef texts():\n    yield "a"\n'
MANY = "fsdp 2\n tp 2\n cp 4 { ring = 2, ulysses = 2 }\n pp 2"


@pytest.fixture
def plan(tmp_path, monkeypatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    return planned()


def planned(launch: str = "", axes: str = "", own: str = OWN) -> Plan:
    Path("texts.py").write_text(own)
    Path("tiny.xtrain").write_text(SPEC.format(launch=launch, axes=axes))
    plan = plan_from_spec("tiny.xtrain").plan
    assert plan is not None
    return plan


def certified(plan: Plan, monkeypatch: pytest.MonkeyPatch, /, **changed: Any) -> Certificate:
    """What `prove` says of a plan whose small experiment took no time, with some facts changed."""
    equal = ComparedLayout(
        layout="fsdp 2", ranks=2, resumed=False, loss=0.0, norm=0.0, evaluation=0.0, routing=0.0, tensor=1e-15,
        worst="norm.weight", seconds=1.0,
    )  # fmt: skip
    monkeypatch.setattr(proofs, "_compare", lambda ranks, small, plans, first: [equal])
    monkeypatch.setattr(proofs.RankForks, "start", lambda self: None)
    monkeypatch.setattr(proofs, "issued_alike", lambda *given: Issued(ranks=(0,), calls=1, problems=()))
    found = evolve(proofs.prove(plan), **changed)
    path = certificate_path(plan)
    path.parent.mkdir(parents=True)
    path.write_text(found.text())
    return found


def refusal(plan: Plan, path: Path | None = None) -> str:
    with pytest.raises(EnvironmentFault) as refused:
        check_certificate(plan, path)
    assert refused.value.code == "X740"
    return str(refused.value)


def test_a_certificate_holds_for_its_plan_whatever_the_name_of_the_run(plan, monkeypatch):
    found = certified(plan, monkeypatch)
    assert "sources of your own: files with a few small records stand for lines" in found.uncovered
    assert not any("tokenizer" in each for each in found.uncovered)
    assert found.holds and found.own == {"texts.py": plan.node("setup.data.lines").args["options"]["digest"]}
    named = plan_from_spec("tiny.xtrain", ("workspace.run=this",)).plan
    assert named is not None and named.id != plan.id
    assert check_certificate(named, None).plan == plan.id
    assert plan_from_spec("tiny.xtrain", ("launch.certificate=required",)).plan is not None


def test_another_tokenizer_is_not_covered(plan, monkeypatch):
    from tokenizers import Tokenizer, models

    Path("words").mkdir()
    tokens = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokens.add_special_tokens(["[END]"])
    tokens.save("words/tokenizer.json")
    Path("words/tokenizer_config.json").write_text('{"eos_token": "[END]", "bos_token": "[END]"}')
    text = Path("tiny.xtrain").read_text().replace("tokenizer bytes", 'tokenizer "words"')
    Path("tiny.xtrain").write_text(text)
    compiled = plan_from_spec("tiny.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    assert "the tokenizer: the tokens are bytes of the texts" in certified(compiled.plan, monkeypatch).uncovered


def test_merged_adapters_are_covered_and_ends_by_a_metric_are_not(plan, monkeypatch):
    ticks = "adapter lora { rank = 2 }\nevery 5 steps merge\n"
    ticks += "every 5 steps eval lines then early_stop { metric = eval.lines.loss }\n"
    Path("tiny.xtrain").write_text(
        Path("tiny.xtrain").read_text().replace("source =", "holdout = 10%, source =") + ticks
    )
    compiled = plan_from_spec("tiny.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    assert "the actions early_stop" in certified(compiled.plan, monkeypatch).uncovered


WRONG = ComparedLayout(
    layout="fsdp 2", ranks=2, resumed=True, loss=1e-16, norm=1e-3, evaluation=0.0, routing=0.0, tensor=float("inf"),
    worst="norm.weight", seconds=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"subject": "0" * 16, "plan": "1" * 16, "name": "other"}, "is the certificate of plan 1{16} .other., not of"),
        ({"own": {"texts.py": "1" * 16}}, "was made before texts.py changed; prove the plan again"),
        ({"code": "1" * 16, "version": "0.0.9"}, "was made by xtrain 0.0.9 with other source files"),
        ({"torch": "2.0.1"}, "was made with torch 2.0.1, and this is torch 2"),
        (
            {"compared": (WRONG,)},
            "says that the layout does not compute .*: fsdp 2, resumed after step 2: the gradient norm differs by "
            "1.0e-03, norm.weight differs by inf",
        ),
        ({"issued": Issued(ranks=(0,), calls=1, problems=("call 1: rank 0 …",))}, "one process computes: call 1: rank"),
    ],
    ids=["of another plan", "own code", "xtrain", "torch", "faults", "collectives"],
)
def test_a_certificate_that_does_not_hold(plan, monkeypatch, changed, words):
    certified(plan, monkeypatch, **changed)
    assert re.search(words, refusal(plan))


def test_own_code_that_changed_since(plan, monkeypatch):
    certified(plan, monkeypatch)
    path = certificate_path(plan)
    assert "was made before texts.py changed" in refusal(planned(own=OWN.replace('"a"', '"b"')), path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no certificate: runs/certificates/.* does not exist; `xtrain prove` with the same spec"),
        (lambda text: text.replace('"steps": 4', '"steps": 400'), "was changed after it was made; prove"),
        (lambda text: "[]", "is no certificate of this version"),
        (lambda text: text.replace('"steps"', '"stages"'), "is no certificate"),
        (lambda text: text[:100], "is no certificate"),
    ],
    ids=["none", "edited", "a list", "other keys", "cut"],
)
def test_a_file_that_is_no_certificate(plan, monkeypatch, content, words):
    if content is not None:
        text = certified(plan, monkeypatch).text()
        assert content(text) != text
        certificate_path(plan).write_text(content(text))
    assert re.search(words, refusal(plan))


def test_commands_that_demand_one(plan, monkeypatch):
    absent = "has no certificate"
    for command in (("run", "--ui", "none"), ("launch", "--dry", "--on", "local")):
        refused = xtrain(command[0], "tiny.xtrain", *command[1:], "--require-certificate", cwd=Path.cwd())
        assert refused.returncode == 3 and absent in refused.stderr and "X740" in refused.stderr
    demanding = planned(launch=", certificate = required")
    refused = xtrain("launch", "tiny.xtrain", "--dry", "--on", "local", cwd=Path.cwd())
    assert refused.returncode == 3 and absent in refused.stderr
    certified(demanding, monkeypatch)
    assert xtrain("launch", "tiny.xtrain", "--dry", "--on", "local", cwd=Path.cwd()).returncode == 0


def test_a_sweep_has_no_certificate():
    words = "each trial of a sweep is a plan of its own, and has no certificate; prove a trial's spec alone"
    for arguments in (("--require-certificate",), ("--set", "launch.certificate=required")):
        refused = xtrain("run", "specs/sweep_cpu.xtrain", *arguments)
        assert refused.returncode == 2 and words in refused.stderr


@pytest.mark.parametrize(
    ("axes", "arguments", "words"),
    [
        (MANY, ("--ranks", "2"), "needs more than 2 small ranks: fsdp 2 · tp 2 · pp 2 · ring 2 · ulysses 2; allow 32"),
        ("fsdp 2", ("--ranks", "0"), "`0` is not a number of ranks"),
        (
            "fsdp 2",
            ("--out", "tiny.xtrain/c.json"),
            "tiny.xtrain is no folder that you may write to",
        ),
        ("fsdp 2", ("--out", "."), ". is a folder; give the path of a file"),
    ],
    ids=["ranks", "none", "a file as folder", "a folder as file"],
)
def test_a_plan_that_cannot_be_proved(plan, axes, arguments, words):
    planned(axes=axes)
    refused = xtrain("prove", "tiny.xtrain", *arguments, cwd=Path.cwd())
    assert refused.returncode in (2, 3) and words in refused.stderr, refused.stderr


def test_a_server_has_nothing_to_prove(plan):
    refused = xtrain("prove", "specs/serve_cpu.xtrain")
    assert refused.returncode == 3
    assert "X741" in refused.stderr and "a server spec has no training step to prove" in refused.stderr


@pytest.mark.slow
def test_a_terminated_proof_leaves_nothing(plan, tmp_path):
    planned(axes="fsdp 2")
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "xtrain", "prove", "tiny.xtrain"]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not [*folder.glob("*/jobs")] and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not [*folder.glob("xtrain-prove-*")]
