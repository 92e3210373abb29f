"""Specs without bounds: each is refused with a diagnostic after little work, whoever wrote it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.dsl.diagnostics.diagnostic import MOST_ERRORS, MOST_SHOWN, Diagnostics, SourceText, SpecErrors
from xtrain.dsl.evaluation.statements import LARGEST
from xtrain.dsl.load import load_spec
from xtrain.dsl.syntax.format import format_source
from xtrain.dsl.syntax.parser import MOST_TOKENS, parse_file
from xtrain.lsp.analysis import Analysis, OpenSpecs

SPEC = (Path(__file__).parents[2] / "specs" / "quickstart.xtrain").read_text(encoding="utf-8")
TEXTS = {
    "a long string": (f'let x = "{"a" * 10_000_000}"', "X120", "larger than 1,048,576 bytes"),
    "a long comment": (f"# {'x' * LARGEST}", "X120", "larger than"),
    "line ends": ("\n" * LARGEST, "X120", "larger than"),
    "a long list": (f"let x = [{'1, ' * MOST_TOKENS}]", "X120", "more than 65,536 tokens"),
    "a long sum": (f"let x = 1{'+1' * MOST_TOKENS}", "X120", "more than 65,536"),
    "a sum that is nested": ("let x = 1" + "+1" * 1000, "X307", "nested too deeply"),
    "blocks in blocks": ("a {" * 20_000, "X130", "nested too deeply"),
    "closed blocks in blocks": ("a {" * 8_000 + "}" * 8_000, "X130", "nested too deeply"),
    "maps in maps": ("let x = " + "{a: " * 2_000 + "1" + "}" * 2_000, "X130", "nested too deeply"),
    "a text that doubles": (
        "\n".join(['let a0 = "0123456789"', *(f"let a{n} = a{n - 1} + a{n - 1}" for n in range(1, 60))]), "X307",
        "the result is too large",
    ),
    "unknown blocks": ("\n".join(f"nope{n} {{ a = 1 }}" for n in range(1_100)), "X201", "there is no block"),
    "signs without meaning": ("\x01" * 50_000, "X109", "not part of the language"),
    "open strings": ('"\n' * 20_000, "X102", "string"),
    "closing braces": ("}" * 20_000, "X104", "closes nothing"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_without_bounds(name):
    text, code, words = TEXTS[name]
    loaded = load_spec("spec.xtrain", (), {"spec.xtrain": SPEC + text})
    assert loaded.spec is None
    found = loaded.diagnostics.errors
    assert len(found) <= MOST_ERRORS
    assert any(each.code == code and words in each.message for each in found), {(d.code, d.message) for d in found}
    shown = loaded.diagnostics.render()
    assert len(shown) < 300_000 and (len(found) <= MOST_SHOWN) == (" more\n" not in shown[-40:])
    specs = OpenSpecs()
    specs.open("/spec.xtrain", SPEC + text)
    assert isinstance(specs.analysis("/spec.xtrain"), Analysis)
    if code in ("X102", "X104", "X109", "X130"):
        with pytest.raises(SpecErrors):
            format_source(SourceText("spec.xtrain", text))


def test_text_below_the_bounds_is_read_whole():
    source = SourceText("spec.xtrain", f"let x = [{'1, ' * 30_000}]")
    diagnostics = Diagnostics()
    (let,) = parse_file(source, diagnostics).items
    assert not diagnostics.has_errors and let.span.text == source.text


def test_bounds_hold_for_all_files_of_a_spec_together(tmp_path):
    half = {f"f{n}.xtrain": f"# {'x' * (LARGEST // 2)}\n" for n in range(3)}
    many = {f"g{n}.xtrain": f"let x = [{'1, ' * 12_000}]\n" for n in range(4)}
    for files, said in ((half, "larger than"), (many, "more than 65,536 tokens")):
        text = "\n".join(f'include "{name}"' for name in files)
        found = load_spec("spec.xtrain", (), {"spec.xtrain": text, **files}).diagnostics.errors
        assert any(each.code == "X120" and said in each.message for each in found)


def test_warnings_and_long_names_are_shown_in_part():
    many = "\n".join(f"let x{n} = 1" for n in range(2_000))
    loaded = load_spec("spec.xtrain", (), {"spec.xtrain": f"{SPEC}\n{many}\nlet {'y' * 100_000} = 1"})
    assert loaded.spec is not None
    shown = loaded.diagnostics.render()
    assert shown.count("W201") == MOST_SHOWN and shown.endswith("and 1,901 warnings more\n") and len(shown) < 50_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["/dev/zero", "/dev/urandom", "pipe.xtrain", "folder.xtrain", "large.xtrain"])
@pytest.mark.parametrize("how", ["include", "spec", "editor"])
def test_only_regular_files_are_read(tmp_path, name, how, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.xtrain")
    Path("folder.xtrain").mkdir()
    with Path("large.xtrain").open("wb") as file:
        file.truncate(2**40)
    Path("spec.xtrain").write_text(f'include "{name}"\n{SPEC}')
    if how == "editor":  # looks at all specs of the folder for those that include the one that is open
        specs = OpenSpecs()
        specs.open(str(tmp_path / "spec.xtrain"), f'include "{name}"\n{SPEC}')
        loaded = specs.analysis(str(tmp_path / "spec.xtrain")).loaded
    else:
        loaded = load_spec("spec.xtrain" if how == "include" else name)
    assert [each.code for each in loaded.diagnostics.errors] == ["X120"]
    words = "larger than" if name.startswith("large") else "folder" if name.startswith("folder") else "not a regular"
    assert words in loaded.diagnostics.errors[0].message


def test_the_command_has_bounds_too(tmp_path):
    """Memory of the whole process, which a text of a megabyte at most does not drive up."""
    for number, name in enumerate(("a long list", "a long sum", "a long string", "blocks in blocks")):
        (tmp_path / f"{number}.xtrain").write_text(SPEC + TEXTS[name][0])

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))

    command = [sys.executable, "-m", "xtrain", "check", *sorted(map(str, tmp_path.glob("*.xtrain")))]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr) < 10_000
