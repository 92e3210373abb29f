"""`xtrain check`, `fmt` and `explain` as a user calls them; and what they do not import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.cli import check, explain, fmt
from xtrain.cli.main import main

DATA = Path(__file__).parent / "data"


@pytest.fixture
def call(capsys):
    """Run a verb: exit status, standard output, standard error."""

    def run(verb, *arguments):
        status = main([verb.__name__.rpartition(".")[2], *arguments])
        return (status, *capsys.readouterr())

    return run


def test_check(call, tmp_path):
    good, bad = str(DATA / "quickstart.xtrain"), tmp_path / "bad.xtrain"
    bad.write_text("batch { sequense = 3 }")
    assert call(check, good) == (0, f"{good}: ok\n", "")
    status, out, err = call(check, good, str(bad))
    assert status == 2 and out == f"{good}: ok\n"
    assert "error[X203]" in err and "did you mean `sequence`?" in err
    assert err.endswith(f"{bad}: 3 errors; `xtrain check --fix` corrects 1\n")
    status, out, err = call(check, "--json", str(bad))
    assert status == 2 and [json.loads(line)["code"] for line in out.splitlines()] == ["X502", "X203", "X205"]
    assert call(check, good, "--set", "optimizer.lr=1")[0] == 0
    assert call(check, good, "--set", "optimizer.lr=x")[0] == 2
    assert call(check, "no/such.xtrain")[0] == 2


def test_explain(call):
    status, out, _ = call(explain, "x203")
    assert status == 0 and out.startswith("X203: ") and "Wrong:" in out
    assert json.loads(call(explain, "X203", "--json")[1])["code"] == "X203"
    status, out, err = call(explain, "X2O3")
    assert (status, out) == (2, "") and "did you mean X203?" in err
    assert call(explain, "hello")[0] == 2
    lines = call(explain)[1].splitlines()
    assert lines[0].startswith("X101  ") and len(json.loads(call(explain, "--json")[1])) == len(lines)


def test_fmt(call, tmp_path):
    file = tmp_path / "a.xtrain"
    file.write_text("batch{sequence=3}")
    status, out, err = call(fmt, "--check", str(file))
    assert (status, out, err) == (1, f"{file}\n", "")
    status, out, _ = call(fmt, "--diff", str(file))
    assert status == 0 and "+batch { sequence = 3 }" in out and "-batch{sequence=3}" in out
    assert file.read_text() == "batch{sequence=3}"
    assert call(fmt, str(file)) == (0, f"{file}: formatted\n", "")
    assert file.read_text() == "batch { sequence = 3 }\n"
    assert call(fmt, "--check", str(file)) == (0, "", "")
    file.write_text("batch {")
    assert call(fmt, str(file))[0] == 2 and file.read_text() == "batch {"
    assert call(fmt, "no/such.xtrain")[0] == 2


def test_fmt_of_standard_input():
    done = _run("from xtrain.cli.main import main; import sys; sys.exit(main(['fmt', '-']))", "let a=1")
    assert done.stdout == "let a = 1\n" and done.returncode == 0


def _run(code, text=""):
    return subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=False)


def test_the_language_imports_nothing_heavy():
    code = f"""
import sys
from xtrain.dsl.load import load_spec
from xtrain.dsl.diagnostics import codes
from xtrain.dsl.syntax import format
from xtrain.cli import check
load_spec({str(DATA / "every_form.xtrain")!r}).resolved_text()
heavy = {{"torch", "numba", "numpy", "textual", "networkx", "rich"}} & set(sys.modules)
# Of plans only what components are written with.
rooms = tuple(f"xtrain.{{room}}." for room in ("plan", "blocks", "contracts", "planner", "server", "runtime", "tui"))
made_of = {{f"blocks.{{name}}" for name in ("adapted", "attention", "block", "feed_forward", "op_trace")}}
made_of |= {{f"contracts.{{name}}" for name in ("actions", "data", "models", "optimizers", "stacks")}}
made_of |= {{f"plan.{{name}}" for name in ("architecture", "arithmetic", "canonical", "data", "estimates", "findings")}}
made_of |= {{f"plan.{{name}}" for name in ("graph", "hardware", "learning_rate", "plan", "step_sizes", "weight_files")}}
loaded = {{name for name in sys.modules if name.startswith(rooms)}} - {{f"xtrain.{{name}}" for name in made_of}}
assert not heavy and not loaded, (heavy, loaded)
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr
