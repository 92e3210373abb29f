"""`fmt`, `check --fix`, `docs`, `schema`, `init` and `explain` as their user calls them: output, status, files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.cli.main import main
from xtrain.cli.rewrite import difference, like, write

ROOT = Path(__file__).parents[2]
BAD = """\
experiment x { budget = 10 stpes }
model qwen3 { dim = "64", layers = 2, heads = 2 }
tokenizer bytes
dataset web { source = python_stdlib() }
batch { sequense = 64 }
optimizer adamw { lr = 3e-4, gamma = 1 }
"""
GOOD = BAD.replace("stpes", "steps").replace('"64"', "64").replace("sequense", "sequence").replace(", gamma = 1", "")


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Run the command in an empty folder: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return (status, *capsys.readouterr())

    return run


def put(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# check --fix ----------------------------------------------------------------------------------------------------------


def test_fix_writes_what_is_certain_and_reports_the_rest(call):
    path = put("a.xtrain", BAD)
    status, out, err = call("check", path)
    assert status == 2 and err.endswith("a.xtrain: 4 errors; `xtrain check --fix` corrects 3\n") and not out
    status, out, err = call("check", "--fix", path)
    assert status == 2
    assert out.splitlines() == [
        "a.xtrain:1:28: fixed[X107]: `stpes` is now `steps`",
        'a.xtrain:2:21: fixed[X301]: `"64"` is now `64`',
        "a.xtrain:5:9: fixed[X203]: `sequense` is now `sequence`",
    ]
    assert "error[X203]: unknown setting `gamma`" in err and err.endswith("a.xtrain: 3 fixed, 1 error\n")
    assert path.read_text() == GOOD.replace("lr = 3e-4", "lr = 3e-4, gamma = 1")
    put("a.xtrain", GOOD.replace("sequence", "sequense"))
    assert call("check", path) == (2, "", ANY)
    status, out, err = call("check", "--fix", path)
    assert (status, err) == (0, "") and out.endswith("a.xtrain: 1 fixed\n") and path.read_text() == GOOD
    assert call("check", "--fix", path) == (0, "a.xtrain: ok\n", "")


class Any_:
    def __eq__(self, other):
        return True


ANY = Any_()


def test_fix_with_diff_writes_nothing(call):
    path = put("a.xtrain", BAD)
    status, out, err = call("check", "--fix", "--diff", path)
    assert status == 2 and path.read_text() == BAD
    assert out.startswith("--- a/a.xtrain\n+++ b/a.xtrain\n@@ ") and "+batch { sequence = 64 }\n" in out
    assert err == "a.xtrain: 3 fixes to write\n"
    assert call("check", "--diff", path)[0] == 2


def test_fix_as_json(call):
    path = put("a.xtrain", BAD)
    status, out, err = call("check", "--fix", "--json", path)
    found = [json.loads(line) for line in out.splitlines()]
    assert status == 2 and not err
    assert [(d["code"], d.get("fixed", False)) for d in found] == [
        ("X107", True), ("X301", True), ("X203", True), ("X203", False)
    ]  # fmt: skip
    assert found[0]["fix"] == {
        "path": "a.xtrain", "line": 1, "column": 28, "end_line": 1, "end_column": 33, "replacement": "steps"
    }  # fmt: skip
    assert found[3]["fix"] is None


def test_fix_of_included_files(call):
    put("parts/base.xtrain", GOOD.replace("layers", "layesr"))
    path = put("a.xtrain", 'include "parts/base.xtrain"\nbatch { micr = 2 }\n')
    status, out, _ = call("check", "--fix", path)
    assert status == 0 and "parts/base.xtrain:2:25: fixed[X203]" in out
    assert Path("parts/base.xtrain").read_text() == GOOD and path.read_text().endswith("micro = 2 }\n")


def test_fix_keeps_line_ends_marks_modes_and_links(call):
    windows = b"\xef\xbb\xbf" + BAD.replace("\n", "\r\n").encode()
    real = put("real", windows)
    real.chmod(0o600)
    Path("a.xtrain").symlink_to("real")
    call("check", "--fix", "a.xtrain")
    written = real.read_bytes()
    assert written.startswith(b"\xef\xbb\xbf") and written.count(b"\r\n") == written.count(b"\n") == 6
    assert Path("a.xtrain").is_symlink() and real.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in Path().iterdir()) == ["a.xtrain", "real"]


def test_fix_of_what_the_planner_finds(call):
    path = put("a.xtrain", GOOD.replace("()", "(), holdout = 1%") + "every 10 steps eval wbe\non finish eval wbe\n")
    status, out, err = call("check", "--fix", path)
    assert status == 0 and not err and out.count("fixed[X501]: `wbe` is now `web`") == 2


def test_fix_of_files_that_cannot_be_read_or_written(call, monkeypatch):
    assert call("check", "--fix", "no.xtrain")[0] == 2
    path = put("a.xtrain", BAD)

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xtrain.cli.rewrite.write", full)
    status, out, err = call("check", "--fix", path)
    assert status == 3 and "a.xtrain cannot be written: No space left on device" in err
    assert path.read_text() == BAD and not out


def test_fix_does_not_touch_the_command_line(call):
    path = put("a.xtrain", GOOD)
    status, out, err = call("check", "--fix", path, "--set", "optimzer.lr=1")
    assert status == 2 and not out and "did you mean `optimizer`?" in err and path.read_text() == GOOD


# fmt ------------------------------------------------------------------------------------------------------------------


def test_fmt_of_folders(call):
    put("s/a.xtrain", "a=1")
    put("s/deep/b.xtrain", "b = 1\n")
    put("s/.hidden/c.xtrain", "c=1")
    put("s/d.txt", "d=1")
    assert call("fmt", "--check", "s") == (1, "s/a.xtrain\n", "")
    status, out, err = call("fmt", "--check", "--diff", "s")
    assert status == 1 and "+a = 1\n" in out and not err
    assert call("fmt", "s") == (0, "s/a.xtrain: formatted\n", "")
    assert call("fmt", "--check", "s") == (0, "", "")
    assert Path("s/.hidden/c.xtrain").read_text() == "c=1"
    Path("none").mkdir()
    status, out, err = call("fmt", "none", "s")
    assert status == 2 and "there is no *.xtrain below none" in err


def test_fmt_goes_on_behind_a_file_that_it_cannot_read(call):
    put("a.xtrain", "a = (")
    put("b.xtrain", "b=1")
    put("c.xtrain", b"# caf\xe9")
    status, out, err = call("fmt", "a.xtrain", "c.xtrain", "no.xtrain", "b.xtrain")
    assert status == 2 and out == "b.xtrain: formatted\n"
    assert "X103" in err and "X121" in err and "X120" in err
    assert Path("a.xtrain").read_text() == "a = (" and Path("b.xtrain").read_text() == "b = 1\n"


def test_names_that_no_file_can_have(call):
    for name in ("x" * 5000, "x\0y"):
        assert call("fmt", name)[0] == 2
        assert call("check", "--fix", name)[0] == 2
    assert call("init", "x" * 5000)[0] == 3


def test_fmt_leaves_a_spec_that_it_would_change(call, monkeypatch):
    path = put("a.xtrain", "a=512")
    monkeypatch.setattr("xtrain.dsl.syntax.format.spelling", lambda text: "513")
    status, _, err = call("fmt", path)
    assert status == 70 and "a bug of the formatter" in err and path.read_text() == "a=512"


def test_fmt_makes_one_kind_of_file(call):
    path = put("a.xtrain", b"\xef\xbb\xbfa {\r\n x=1\r\n}\r\n")
    assert call("fmt", path)[0] == 0 and path.read_bytes() == b"a {\n  x = 1\n}\n"


def test_difference():
    assert (
        difference("a\nb\n", "a\nc", "f")
        == "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n\\ No newline at end of file\n"
    )
    assert "\x1b[31m-b\x1b[0m" in difference("b\n", "c\n", "f", color=True)
    assert difference("a\x0cb\u2028c\n", "a\x0cb\u2028d\n", "f").count("\n") == 5  # only \n ends a line
    assert difference("a", "a", "f") == ""


@pytest.mark.skipif(subprocess.run(["which", "patch"], capture_output=True).returncode != 0, reason="no patch here")
def test_patch_takes_the_difference(tmp_path):
    (tmp_path / "f").write_text("a\nb\nc")
    text = difference("a\nb\nc", "a\nx\nc\nd\n", "f")
    subprocess.run(["patch", "-p1"], cwd=tmp_path, input=text, text=True, check=True, capture_output=True)
    assert (tmp_path / "f").read_text() == "a\nx\nc\nd\n"


def test_like():
    assert like("a\nb\n", b"x\r\ny\n\r\n") == b"a\r\nb\r\n"
    assert like("a\n", b"") == b"a\n" and like("a\n", b"x\ry\r") == b"a\r"


def test_write_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "no")))
    with pytest.raises(OSError):
        write(path, b"new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_write_respects_permissions(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o400)
    with pytest.raises(PermissionError):
        write(path, b"new")


# docs, explain, schema ------------------------------------------------------------------------------------------------


def test_docs(call):
    assert call("docs")[0] == 0
    status, out, err = call("docs", "parallel.fsdp.reduce")
    assert status == 0 and out.startswith("parallel.fsdp.reduce  setting\n") and not err
    assert call("docs", "x203")[1] == call("explain", "X203")[1]
    assert call("docs", "X999")[0] == 2
    assert call("docs", "paralel") == (
        2, "", "xtrain docs: there is no topic `paralel`; did you mean `xtrain docs parallel`?\n"
    )  # fmt: skip
    assert call("docs", "qqqqqqqq")[2].endswith("`xtrain docs` lists all topics\n")
    status, out, _ = call("docs", "--markdown")
    assert status == 0 and out == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert call("docs", "--markdown", "parallel")[0] == 2


def test_explain(call):
    listed = call("explain")[1].splitlines()
    pages = json.loads(call("explain", "--json")[1])
    assert [page["code"] for page in pages] == [line[:4] for line in listed]
    for page in pages:
        status, out, _ = call("explain", page["code"].lower())
        assert status == 0 and out.startswith(f"{page['code']}: {page['title']}\n")
    assert "did you mean X203?" in call("explain", "X2O3")[2]


def test_schema(call):
    schema = json.loads(call("schema")[1])
    assert schema == json.loads(call("schema", "--json")[1]) and schema["title"] == "xtrain spec"
    path = put("a.xtrain", GOOD)
    spec = json.loads(call("schema", path, "--set", "optimizer.lr=1")[1])
    assert spec["model"]["dim"] == 64 and spec["optimizer"]["lr"] == 1.0
    put("a.xtrain", BAD)
    status, out, err = call("schema", path)
    assert status == 2 and not out and "error[X203]" in err
    assert call("schema", "--set", "a=1")[0] == 2


# init -----------------------------------------------------------------------------------------------------------------


def test_init(call):
    status, out, err = call("init", "tryout")
    assert (status, err) == (0, "")
    assert (
        out.startswith("Wrote tryout.xtrain.")
        and "xtrain plan tryout.xtrain" in out
        and "xtrain run tryout.xtrain" in out
    )
    assert call("check", "tryout.xtrain") == (0, "tryout.xtrain: ok\n", "")
    assert call("fmt", "--check", "tryout.xtrain") == (0, "", "")
    put("tryout.xtrain", "mine")
    status, out, err = call("init", "tryout")
    assert status == 2 and "--force" in err and Path("tryout.xtrain").read_text() == "mine"
    assert call("init", "tryout", "--force", "--template", "moe")[0] == 0
    assert "experiment tryout {" in Path("tryout.xtrain").read_text()


def test_init_in_a_folder(call):
    status, out, _ = call("init", "new dir/big.xtrain", "--template", "cluster")
    assert status == 0 and "xtrain plan 'new dir/big.xtrain'" in out
    assert "xtrain plan 'new dir/big.xtrain'" in Path("new dir/big.xtrain").read_text()
    assert call("fmt", "--check", "new dir")[0] == 0
    put("file", "")
    status, _, err = call("init", "file/x")
    assert status == 3 and "cannot be written" in err


@pytest.mark.parametrize(("arguments", "said"), [
    ((), "NAME is missing"),
    (("my-run",), "write `my_run`"),
    (("4x",), "write `run_4x`"),
    (("none",), "write `none_run`"),
    (("",), "a name consists of"),
    (("..",), "a name consists of"),
    (("a\nb/x",), "is not a path for a spec"),
    (("x", "--template", "clustre"), "did you mean `cluster`?"),
    (("x", "--template", "qqq"), "existing templates: quickstart, curriculum, ddp, fsdp, moe, cluster"),
])  # fmt: skip
def test_init_refuses(call, arguments, said):
    status, out, err = call("init", *arguments)
    assert status == 2 and not out and said in err
    assert not list(Path().iterdir())


def test_init_lists(call):
    status, out, _ = call("init", "--list")
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == [
        "jobs:", "distill", "dpo", "grpo", "lora", "pretrain", "qlora", "serve", "sft",
        "templates:", "quickstart", "curriculum", "ddp", "fsdp", "moe", "cluster",
    ]  # fmt: skip


# All of them ----------------------------------------------------------------------------------------------------------


def test_a_pipe_that_closes_early_is_no_error():
    command = f"{sys.executable} -m xtrain docs --markdown | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "# Reference of the language\n" and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "verb", [("generate", "--prompt", "a"), ("export", "--to", "b"), ("sweep", "show"), ("runs",), ("doctor",)]
)
def test_a_path_that_cannot_be_looked_at_is_named(call, verb):
    name = "x" * 300
    status, _, said = call(*verb, name)
    assert status == 2 and name in said and "File name too long" in said


def test_a_plan_in_a_pipe_has_no_cut_line(call, tmp_path):
    """And repeats at its end whether the run fits and how long it takes."""
    spec = str(ROOT / "specs" / "llama_405b_16k.xtrain")
    status, out, _ = call("plan", spec)
    *_, summary, verdict, more = out.splitlines()
    assert status == 0 and "…" not in out and max(map(len, out.splitlines())) > 100
    assert summary.startswith("Plan ") and more.startswith("more: ")
    assert verdict.startswith("memory fits: ") and verdict.endswith(" · run 13.6 d")
