"""Faults that tests/mutants.py plants: every kind, where it is found, and nothing in texts and annotations."""

import ast
import json
import pickle
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import executed_lines
import pytest
from executed_lines import BETWEEN, ExecutedLines, Record
from faults import faults


@pytest.mark.parametrize(("code", "planted"), [
    ("a < b", {"a <= b"}),
    ("a == b", {"a != b"}),
    ("a not in b", {"a in b"}),
    ("a and b", {"((b))", "((a))"}),
    ("z = x if a else y", {"z = x if not (a) else y", "z = x if True else y", "z = x if False else y"}),
    ("[x for x in y if x]", {"[x for x in y if True]"}),
    ("x[1:]", {"x[2:]"}),
    ("x = True", {"x = False"}),
    ("x = 0.5", {"x = 1.0"}),
    ("a - b", {"a + b"}),
    ("f'{a}' + b", set()),
    ("f(a, b=c)", {"None"}),
    ("x = f(a, b)", {"x = f(b, a)"}),
    ("x = min(a, b)", {"x = a", "x = b"}),
    ("x = sorted(a)", {"x = (a)"}),
    ("x = a.sum(d)", {"x = a"}),
    ("x['rows']", {"x['rowx']"}),
    ("x = 'a text for people'", set()),
    ("x = f(help='rows', strict=True, kw_only=True, init=False, maxsize=2)", set()),
    ("assert a < b and c", set()),
    ("Kind = Literal['rows', 'columns']", set()),
    ("x: 'Text' = a", set()),
    ("__all__ = ['a']", set()),
    ("é = 'x'; a < b", {"é = 'y'; a < b", "é = 'x'; a <= b"}),
])  # fmt: skip
def test_faults_of_a_line(code: str, planted: set[str]):
    text = f"{code}\n".encode()
    found = {fault.planted(text).decode().strip() for fault in faults(text)}
    assert found == planted
    assert all(ast.parse(each) for each in found)


def test_lines_of_processes_belong_to_the_test_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executed_lines, "FOLDER", tmp_path)
    monkeypatch.setattr(executed_lines, "DIGESTS", tmp_path / "digests.json")
    with pytest.raises(FileNotFoundError):
        ExecutedLines()
    text, path = b"a text", str(executed_lines.ROOT / "plan/mesh.py")
    digests = {"plan/mesh.py": blake2b(text, digest_size=16).hexdigest()}
    (tmp_path / "digests.json").write_text(json.dumps(digests))
    for name, records in {
        "worker": [
            Record("gw0", BETWEEN, 0, 1, 0, {path: 1 << 1}),
            Record("gw0", "a.py::one", 1, 2, 0.5, {path: 1 << 2}),
            Record("gw0", "a.py::two", 2, 3, 0.1, {path: 1 << 3}),
        ],
        "other worker": [Record("gw1", "b.py::three", 1, 3, 0.1, {path: 1 << 2})],
        "rank": [Record("gw0", None, 1.5, 2.5, 0, {path: 1 << 4})],
    }.items():
        (tmp_path / f"{name}.pickle").write_bytes(b"".join(pickle.dumps(tuple(record)) for record in records))
    (tmp_path / "killed.pickle").write_bytes(pickle.dumps(tuple(records[0]))[:-3])
    recorded = ExecutedLines()
    found = {line: sorted(recorded.tests("plan/mesh.py", text, range(line, line + 1))) for line in range(1, 6)}
    assert found == {1: [], 2: ["a.py::one", "b.py::three"], 3: ["a.py::two"], 4: ["a.py::one"], 5: []}
    assert sorted(recorded.tests("plan/mesh.py", text, range(3, 5))) == ["a.py::one", "a.py::two"]
    assert recorded.tests("plan/mesh.py", b"another", range(3, 5)) is None
    assert recorded.seconds == {"a.py::one": 0.5, "a.py::two": 0.1, "b.py::three": 0.1}


RECORDED = """
import os, sys
sys.path.append("tests/support")
import executed_lines
from pathlib import Path
executed_lines.FOLDER = Path(sys.argv[1])
recorder = executed_lines.Recorder()
from xtrain.text.page import clip, shorten
recorder.restart()
if not os.fork():
    clip("a", 2)
    os._exit(0)
os.wait()
shorten("a", 2)
recorder.write("a test")
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring")
def test_forks_record_lines_of_their_own(tmp_path: Path):
    subprocess.run([sys.executable, "-c", RECORDED, tmp_path], check=True, cwd=executed_lines.ROOT)
    lines = {}
    for path in tmp_path.glob("*.pickle"):
        _, test, *_, masks = pickle.loads(path.read_bytes())
        lines[test] = {name.removeprefix(f"{executed_lines.ROOT}/"): mask for name, mask in masks.items()}
    assert lines.keys() == {"a test", None}
    assert lines["a test"].keys() == lines[None].keys() == {"text/page.py"}
    assert lines["a test"]["text/page.py"] & lines[None]["text/page.py"] == 0
