"""Sources of the user's own: loaded from where the plan says, told with their lines when they fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.plan.serialise import to_json
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.changes import open_sides
from xtrain.runtime.base.user_parts import PartChanged, PartFailed, part_of, parts_to_copy, user_source

HEAD = "from xtrain import source\n"
SPEC = """
use "lib/parts.py"
experiment tiny { budget = 2 steps }
model llama { dim = 32, layers = 2, heads = 4 }
tokenizer bytes
dataset own { source = f() }
batch { sequence = 64 }
optimizer adamw { lr = 1e-3 }
"""


def options(folder: Path, module: str = "parts.py", function: str = "f", **arguments):
    digest = module_digest(find_module(module, folder))
    return {"module": module, "function": function, "digest": digest, "arguments": arguments}


def write(folder: Path, code: str, name: str = "parts.py"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(HEAD + code)


def test_documents_come_in_their_order(tmp_path):
    write(
        tmp_path,
        "@source\ndef f(count, word='a'):\n    for i in range(count): yield {'text': f'{word}{i}'} if i else word\n",
    )
    found = user_source(options(tmp_path, count=3, word="b"), tmp_path)
    assert list(found) == ["b", {"text": "b1"}, {"text": "b2"}]
    write(tmp_path, "@source()\ndef f(): return ['x', 'y']\n", "more.py")
    assert list(user_source(options(tmp_path, "more.py"), tmp_path)) == ["x", "y"]


@pytest.mark.parametrize(("body", "message", "line"), [
    ("    return 'one'\n", "source `f` returns str instead of yielding documents", 2),
    ("    return {'text': 'x'}\n", "returns dict instead", 2),
    ("    return 3\n", "returns int instead", 2),
    ("    yield 'x'\n    yield None\n", "gave None as document 2", 2),
    ("    yield 'x'\n    yield b'y'\n", "gave bytes as document 2", 2),
    ("    yield 'x'\n    open('/nowhere/at/all')\n", "source `f`: FileNotFoundError: ", 5),
    ("    raise OSError\n", "source `f`: OSError", 4),
    ("    yield 'x'\n    raise SystemExit(0)\n", "source `f`: SystemExit: 0", 5),
    ("    import json\n    yield json.loads('{')\n", "source `f`: JSONDecodeError: ", 5),
])  # fmt: skip
def test_what_a_source_does_wrong_is_reported_with_its_line(tmp_path, body, message, line):
    write(tmp_path, f"@source\ndef f():\n{body}")
    with pytest.raises(PartFailed) as caught:
        list(user_source(options(tmp_path), tmp_path))
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.line) == (tmp_path / "parts.py", line)
    assert "runtime" not in str(caught.value)


def test_a_changed_module_is_refused_before_anything_is_run(tmp_path):
    write(tmp_path, "@source\ndef f(): yield 'x'\n")
    planned = options(tmp_path)
    write(tmp_path, "raise SystemExit\n")
    with pytest.raises(PartChanged, match="has changed since the plan was made"):
        list(user_source(planned, tmp_path))


def test_modules_beside_a_file_can_be_imported_and_hide_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "WORD = 'ours'\n", "own_neighbour.py")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    write(tmp_path, "", "colorsys.py")
    code = "import colorsys\nfrom own_neighbour import WORD\n"
    code += "@source\ndef f(): yield WORD + str(hasattr(colorsys, 'ONE_SIXTH'))\n"
    write(tmp_path, code)
    assert list(user_source(options(tmp_path), tmp_path)) == ["oursTrue"]
    monkeypatch.delitem(sys.modules, "own_neighbour")


def test_a_package_is_imported_under_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "own_kit/__init__.py")
    write(tmp_path, "WORD = 'near'\n", "own_kit/near.py")
    write(tmp_path, "from .near import WORD\n@source\ndef f(): yield __name__ + WORD\n", "own_kit/parts.py")
    assert list(user_source(options(tmp_path, "own_kit.parts"), Path())) == ["own_kit.partsnear"]
    for name in [name for name in sys.modules if name.startswith("own_kit")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_module_is_loaded_once_a_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "from pathlib import Path\nlog = Path(__file__).with_name('log')\n"
    code += "log.write_text(log.read_text() + 'x' if log.exists() else 'x')\n"
    write(tmp_path, code + "@source\ndef f(): yield 'x'\n@source\ndef g(): yield 'y'\n")
    asked = (("f", tmp_path), ("g", Path()))
    both = [part_of("source", options(tmp_path, function=name), base).load() for name, base in asked]
    assert both[0].__module__ == both[1].__module__
    assert (tmp_path / "log").read_text() == "x"


def test_a_source_needs_no_torch(tmp_path):
    write(tmp_path, "@source\ndef f(): yield 'x'\n")
    code = (
        "import sys; from pathlib import Path; from xtrain.runtime.base.user_parts import user_source\n"
        f"print(list(user_source({options(tmp_path)!r}, Path({str(tmp_path)!r}))), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['x']", "False"]


def test_a_run_keeps_the_files_that_it_ran(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "spec.xtrain").write_text(SPEC)
    write(tmp_path, "import beside_it\n@source\ndef f(): yield 'x'\n", "specs/lib/parts.py")
    write(tmp_path, "", "specs/lib/beside_it.py")
    plan = plan_from_path("specs/spec.xtrain").plan
    directory = tmp_path / "runs" / "one"
    directory.mkdir(parents=True)
    (directory / "spec.xtrain").write_text(plan.spec_text)
    keep(plan, directory)
    again = plan_from_path(directory / "spec.xtrain").plan
    assert (again.id, again.config_id) == (plan.id, plan.config_id)
    keep(again, directory)  # onto themselves
    assert plan_from_path(directory / "spec.xtrain").plan.id == plan.id
    write(tmp_path, "# changed\n", "specs/lib/beside_it.py")
    with pytest.raises(PartChanged, match=r"specs/lib/parts.py, or a module that it imports"):
        keep(plan, directory)
    assert open_side(directory, plan, "optimizer.lr=1e-4").config_id != plan.config_id


def keep(plan, directory: Path) -> None:
    for name, content in parts_to_copy(plan, directory).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def open_side(directory: Path, plan, text: str):
    """What `xtrain diff DIRECTORY --set …` compares a run with."""
    (directory / "plan.json").write_text(json.dumps(to_json(plan)))
    _, side, found = open_sides([str(directory)], [text], None)
    assert side is not None, found.render()
    return side.plan
