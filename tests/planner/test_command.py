"""`xtrain plan`: fast as a process, without the heavy libraries, with exit codes and streams in order."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import xtrain

from xtrain.planner.load import plan_from_path
from xtrain.planner.review.page import render

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.xtrain"))
COMMAND = "from xtrain.cli.main import main; raise SystemExit(main())"


def started(*arguments, code=COMMAND, cwd=ROOT):
    """The command as a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=environment
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda path: path.stem)
def test_every_example_has_a_plan(spec, monkeypatch):
    monkeypatch.chdir(ROOT)  # lines name the spec, and a checkout may lie anywhere
    done = xtrain("plan", spec.relative_to(ROOT))
    assert done.returncode == 0, done.stderr
    compiled = plan_from_path(spec, [])
    assert compiled.plan is not None
    lines = render(compiled.plan).splitlines()  # on a terminal; no line is cut in a pipe
    assert len(lines) <= 120 and max(map(len, lines)) <= 100
    assert "\x1b" not in done.stdout + done.stderr
    assert "error" not in done.stderr


def test_nothing_heavy_is_imported():
    code = f"""
import sys
from xtrain.cli.main import main
for extra in ([], ["--json"]):
    assert main(["plan", "{ROOT / "specs/two_ranks_cpu.xtrain"}", *extra]) == 0
loaded = {{name.partition(".")[0] for name in sys.modules}}
heavy = {{"torch", "numba", "numpy", "textual", "rich", "tokenizers"}} & loaded
assert not heavy, heavy
assert not [name for name in sys.modules if name.startswith(("xtrain.runtime", "xtrain.server.engine", "xtrain.tui"))]
"""
    done = started(code=code)
    assert done.returncode == 0, done.stderr


def test_sixteen_thousand_ranks_take_no_time():
    """In calls of functions, which a busy machine does not change: 1.1 million take 0.5 s of processor time, half of it
    to import what every command does. A command that still has to compile what it imports is given again."""
    code = """
import cProfile, pstats, sys
profile = cProfile.Profile()
with profile:
    from xtrain.cli.main import main
    main()
print(pstats.Stats(profile).total_calls, file=sys.stderr)
"""
    for extra in ((), ("--json",)):
        for _ in range(2):
            run = started("plan", ROOT / "specs/llama_405b_16k.xtrain", *extra, code=code)
            if (calls := int(run.stderr.splitlines()[-1])) < 1_350_000:
                break
        assert calls < 1_350_000, extra


def test_json_holds_every_rank():
    began = time.process_time()
    done = xtrain("plan", ROOT / "specs/llama_405b_16k.xtrain", "--json")
    content = json.loads(done.stdout)
    assert content["world_size"] == 16384 == len(content["ranks"]) == len(content["memory"]["per_rank"])
    assert content["mesh"]["axes"] == {"pp": 16, "replicate": 1, "fsdp": 32, "ring": 1, "ulysses": 4, "tp": 8}
    assert content["ranks"][16383]["coordinates"].keys() == content["mesh"]["axes"].keys()
    assert content["parameters"]["total"] == 405_853_388_800
    assert time.process_time() - began < 5


def test_world_and_set(tmp_path):
    spec = ROOT / "specs/llama_8b_64gpu.xtrain"
    done = xtrain("plan", spec, "--world", "128", "--set", "optimizer.lr=1e-4", "--json")
    content = json.loads(done.stdout)
    assert content["mesh"]["axes"]["fsdp"] == 128
    lr = next(entry for entry in content["provenance"] if entry["path"] == "optimizer.lr")
    assert (lr["value"], lr["origin"]) == ("0.0001", "set")


def test_saving_and_showing_a_saved_plan(tmp_path):
    spec, out = ROOT / "specs/two_ranks_cpu.xtrain", tmp_path / "plans/plan.json"
    done = xtrain("plan", spec, "--out", out)
    assert done.returncode == 0 and f"xtrain run {out}" in done.stdout
    again = xtrain("plan", out)
    assert again.returncode == 0
    assert again.stdout == xtrain("plan", spec).stdout
    text = out.read_text()
    out.write_text(text.replace('"lr": 0.003', '"lr": 0.004'))
    changed = xtrain("plan", out)
    assert changed.returncode == 2 and "X704" in changed.stderr and "Traceback" not in changed.stderr


def test_a_plan_that_cannot_be_saved(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = xtrain("plan", ROOT / "specs/two_ranks_cpu.xtrain", "--out", blocked / "plan.json")
    assert done.returncode == 3 and "cannot be written" in done.stderr


def test_a_wrong_spec(tmp_path):
    spec = tmp_path / "wrong.xtrain"
    spec.write_text((ROOT / "specs/two_ranks_cpu.xtrain").read_text().replace("rows = 4", "rows = 5"))
    done = started("plan", spec)
    assert done.returncode == 2 and done.stdout == ""
    assert f"{spec}:40:10: error[X601]" in done.stderr
    assert "use rows 4 or 6" in done.stderr
    done = xtrain("plan", spec, "--json")
    assert [d["code"] for d in json.loads(done.stdout)["diagnostics"]] == ["X601"]


@pytest.mark.parametrize("arguments", [("--world", "0"), ("--world", "two"), ("--no-such",)])
def test_a_wrong_command_line(arguments):
    done = xtrain("plan", ROOT / "specs/two_ranks_cpu.xtrain", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_help_has_an_example():
    done = xtrain("plan", "--help")
    assert done.returncode == 0
    assert "xtrain plan specs/" in done.stdout
