"""What `tests/support/fuzz.py` is made of; with `-m slow` also what it finds, for longer by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "support" / "fuzz.py"


def fuzz(seconds, *arguments):
    """Run the fuzzer: executions, branches reached, branches there are."""
    command = [sys.executable, str(FUZZ), "--seconds", str(seconds), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.match(r"(\d+) executions in .* corpus of (\d+) texts, (\d+) of (\d+) branches, 0 findings", done.stdout)
    assert found is not None, done.stdout
    return [int(number) for number in found.groups()]


@pytest.mark.slow  # by default texts are cut off, put together and mended in test_prefixes, test_fuzz and test_autofix
def test_a_few_mutants_find_nothing():
    executions, corpus, reached, branches = fuzz(60, "--seed", "7", "--texts", "8")
    assert executions > 100 and corpus > 50
    assert branches > 2000 and reached > 0.5 * branches


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_minutes_find_nothing():
    _, _, reached, branches = fuzz(120)
    assert reached > 0.6 * branches


def test_the_fuzzer_finds_what_is_there(tmp_path, monkeypatch):
    """A mistake put into the lexer comes out, as short a text as can be."""
    sys.path.insert(0, str(FUZZ.parent))
    from fuzz import Fuzzer
    from instrument import Marks

    def target(text, fix):
        assert "7" not in text or "x" not in text.partition("7")[2]

    fuzzer = Fuzzer(Marks(), target)
    fuzzer.offer("one 7 and two x are here", fix=False)
    fuzzer.offer("another 7 with an x", fix=False)
    fuzzer.offer("7 only", fix=False)
    ((text, shown),) = fuzzer.findings.values()
    assert text == "7x" and "AssertionError" in shown and fuzzer.executions > 3


def test_marks_tell_branches_apart(tmp_path, monkeypatch):
    sys.path.insert(0, str(FUZZ.parent))
    from instrument import install

    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text("")
    (tmp_path / "room" / "m.py").write_text(
        'def f(a, b):\n    """Doc."""\n    if a:\n        c = 1 if b else 2\n    else:\n        c = 3\n'
        "    for each in ():\n        c = each\n    return a and b or c\n"
    )
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    marks = install(tmp_path, "fuzzed_package", ("room",))
    module_name = "fuzzed_package.room.m"
    package = type(sys)("fuzzed_package")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "fuzzed_package", package)
    import importlib

    module = importlib.import_module(module_name)
    for name in ("fuzzed_package.room", module_name):
        monkeypatch.delitem(sys.modules, name)
    seen = []
    for arguments in ((0, 0), (1, 0), (1, 1)):
        marks.hits[:] = bytes(len(marks.hits))
        assert module.f(*arguments) == {(0, 0): 3, (1, 0): 2, (1, 1): 1}[arguments]
        seen.append({marks.places[n][1] for n, hit in enumerate(marks.hits) if hit} - {1, 2})
    assert module.f.__doc__ == "Doc."
    assert 6 in seen[0] and 6 not in seen[1] and len({frozenset(lines) for lines in seen}) >= 2
    assert not any(8 in lines for lines in seen)
