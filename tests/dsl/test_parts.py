"""`use`: the user's Python is read and never run; what it declares, and what a spec gives it, is checked."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.spec_text import spec_json
from xtrain.dsl.user_parts.files import ModuleMissing, find_module, module_digest

PARTS = '''\
"""Parts that must never be run to be known."""
import xtrain
from xtrain import collator as link, source

raise SystemExit("this file was run")

@source
def my_documents(path: str, limit: int = 100, *, share: float = 0.5, names: list[str] = ["a"], deep=None):
    """Short documents.

    More of them.
    """
    yield path

@xtrain.source()
def plain():
    yield ""

@link(takes="labelled samples")
def drop_short(samples, least: int = 8, mode: "Literal['soft', 'hard']" = "soft"):
    return samples

@xtrain.collator("token samples", gives="labelled samples")
def shift(samples, generator, strict=True):
    return samples

def helper(x): ...
'''
BASE = re.sub(r"collate = .*", "", (Path(__file__).parent / "data" / "quickstart.xtrain").read_text())
USE = 'use "parts.py"\ndataset own { source = my_documents("x") }\n'


@pytest.fixture
def own(load, tmp_path):
    """Load a text with a file of parts beside it."""

    def run(text, parts=PARTS, name="parts.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(parts, encoding="utf-8")
        return load(f"{BASE}\n{text}", base=False)

    return run


def said(loaded):
    return [(d.code, d.message) for d in loaded.diagnostics]


def only(loaded):
    (found,) = loaded.diagnostics
    return found


def test_a_spec_names_parts_of_the_users(own):
    loaded = own(
        USE.replace('"x"', '"x", 3, share = 1, names = ["b", "c"], deep = { a: [1, 2.5, true, none] }')
        + "dataset other { source = plain() }\n"
        + "collate = to_tensor -> flatten -> shift(strict = false) -> drop_short -> drop_short(4, mode = hard)"
        " -> pack\n"
    )
    assert loaded.spec is not None, loaded.diagnostics.render()
    source = loaded.spec.datasets["own"].source
    assert isinstance(source, UserComponent)
    assert (source.module, source.function, source.purpose) == ("parts.py", "my_documents", "Short documents.")
    assert len(source.digest) == 32
    deep = {"a": (1, 2.5, True, None)}
    assert source.given() == {"path": "x", "limit": 3, "share": 1.0, "names": ("b", "c"), "deep": deep}
    assert source.kind == "python"
    shift, *drops = (link for link in loaded.spec.collate if isinstance(link, UserComponent))
    assert (shift.takes, shift.gives, shift.given()) == ("token samples", "labelled samples", {"strict": False})
    assert [link.given() for link in drops] == [{"least": 8, "mode": "soft"}, {"least": 4, "mode": "hard"}]
    assert drops[0].takes == drops[0].gives == "labelled samples"


def test_a_default_that_only_the_code_knows_is_left_to_it(own):
    parts = "from xtrain import source\nN = 3\n@source\ndef numbers(path: str, limit=N, share=0.5): ...\n"
    source = own(USE.replace("my_documents", "numbers"), parts).require().datasets["own"].source
    assert source.call()["arguments"] == {"path": "x", "share": 0.5}


def test_the_resolved_text_is_the_same_spec(own, tmp_path):
    loaded = own(
        USE.replace('"x"', '"x\\n\\"", share = -0.25, deep = { "c d": 1e-7 }')
        + "collate = to_tensor -> flatten -> shift_tokens -> drop_short(3) -> pack\n"
    )
    text = loaded.resolved_text()
    assert text.startswith('use "parts.py"\n')
    (tmp_path / "again.xtrain").write_text(text)
    again = load_spec("again.xtrain")
    assert not again.diagnostics, again.diagnostics.render()
    assert again.spec == loaded.spec
    assert spec_json(loaded.spec)["use"] == ["parts.py"]
    found = spec_json(loaded.spec)["dataset"]["own"]["source"]["my_documents"]
    assert found["share"] == -0.25


def test_paths_start_at_the_file_that_says_use(load, tmp_path, monkeypatch):
    (tmp_path / "specs" / "lib").mkdir(parents=True)
    (tmp_path / "specs" / "lib" / "parts.py").write_text(PARTS)
    (tmp_path / "specs" / "lib" / "base.xtrain").write_text(USE)
    (tmp_path / "specs" / "mine.xtrain").write_text(BASE + 'include "lib/base.xtrain"\nuse "./lib//parts.py"\n')
    seen = []
    for folder, path in (
        (tmp_path, "specs/mine.xtrain"),
        (tmp_path / "specs", "mine.xtrain"),
        ("/", tmp_path / "specs/mine.xtrain"),
    ):
        monkeypatch.chdir(folder)
        loaded = load_spec(path)
        assert loaded.spec is not None, loaded.diagnostics.render()
        seen.append(loaded.spec.datasets["own"].source)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].module == "lib/parts.py"


def test_a_dotted_name_is_found_without_importing_anything(own, tmp_path):
    for init in ("pkg/__init__.py", "pkg/deep/__init__.py"):
        (tmp_path / init).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / init).write_text("raise SystemExit('imported')\n")
    loaded = own("use pkg.deep.parts\n" + USE.partition("\n")[2], name="pkg/deep/parts.py")
    assert loaded.spec is not None, loaded.diagnostics.render()
    assert loaded.spec.datasets["own"].source.module == "pkg.deep.parts"
    assert loaded.resolved_text().startswith("use pkg.deep.parts\n")
    assert not any(name == "pkg" or name.startswith("pkg.") for name in sys.modules)


# (text behind `use "parts.py"`, code, part of the message, part of the hint)
CALLS = [
    ("dataset a { source = my_documents() }", "X220", "`my_documents` needs `path`", "my_documents(path = …)"),
    ("dataset a { source = my_documents }", "X220", "needs parentheses", "my_documents(path = …)"),
    ('dataset a { source = my_documents("x", limt = 3) }', "X203", "unknown argument `limt`", "`limit`"),
    ('dataset a { source = my_documents("x", path = "y") }', "X220", "`path` of `my_documents` is given twice", "one"),
    ('dataset a { source = my_documents("x", 1, 0.5) }', "X220", "takes 2 arguments without a name", "share, names"),
    ('dataset a { source = my_documents("x", "3") }', "X301", "`limit` must be a whole number", "3"),
    ('dataset a { source = my_documents("x", 2.5) }', "X306", "whole number", None),
    ('dataset a { source = my_documents("x", 10 steps) }', "X302", "plain number", "10"),
    ('dataset a { source = my_documents("x", share = 10%) }', "X302", "plain number", "0.1"),
    ('dataset a { source = my_documents("x", deep = 10%) }', "X302", "plain number", "0.1"),
    ('dataset a { source = my_documents("x", deep = word) }', "X202", "`word` is not defined", '"word"'),
    ('dataset a { source = my_documents("x", deep = auto) }', "X301", "cannot be `auto`", "none"),
    ('dataset a { source = my_documents("x", names = "b") }', "X301", "list of strings", '["b"]'),
    ("dataset a { source = plain(1) }", "X220", "`plain` takes no arguments", "remove"),
    ("dataset a { source = my_docments(1) }", "X219", "has no `my_docments`", "`my_documents`"),
    ("dataset a { source = drop_short() }", "X219", "`drop_short` is a collator", "link of `collate`"),
    ("collate = to_tensor -> plain -> pack", "X219", "`plain` is a source", "the `source` of"),
    ("collate = to_tensor -> drop_shot -> pack", "X219", "has no `drop_shot`", "`drop_short`"),
    ("collate = to_tensor -> drop_short(mode = sofd) -> pack", "X305", "cannot be `sofd`", "`soft`"),
    ("collate = to_tensor -> shift(generator = 1) -> pack", "X203", "unknown argument `generator`", None),
    ("collate = to_tensor -> helper -> pack", "X219", "has no `helper`", None),
]


@pytest.mark.parametrize(("text", "code", "message", "hint"), CALLS)
def test_calls_are_checked_against_signatures(own, text, code, message, hint):
    found = only(own('use "parts.py"\n' + text))
    assert (found.code, found.severity) == (code, "error")
    assert message in found.message
    assert hint is None or hint in f"{found.hint} {[note for note, _ in found.notes]}"
    assert found.span.source.path == "spec.xtrain"


# (a whole file, code, part of the message, text of the line that it points at)
DECLARED = [
    ("def f(:\n", "X222", "not valid Python", "def f(:"),
    (f"x = 1\ny = {'-' * 9000}x\n", "X222", "nested too deeply", "y = "),
    (f"x = 1\ny = ({' + '.join(5000 * ['x'])}\n + x)\n", "X222", "nested too deeply", "y = "),
    (f"x = 1\ny = ({' + '.join(2200 * ['x'])}\n + x)\n", "X222", "nested too deeply", "y = "),
    (f"@source\ndef f(a={'-' * 200}1): ...", "X223", "nested too deeply", "def f"),
    (f"@source\ndef f(a: {'|'.join(200 * ['int'])} = 1): ...", "X223", "nested too deeply", "def f"),
    ("x = 1\n\0", "X222", "not valid Python", None),
    ("x = 1\n", "X222", "declares nothing", None),
    ("def source(f): return f\n@source\ndef f(): ...\n", "X222", "declares nothing", None),
    ("@collator\ndef f(samples): ...", "X223", "lacks `takes`", "@collator"),
    ('@collator(takes="samples")\ndef f(samples): ...', "X223", "no kind of value `samples`", "@collator"),
    ("@collator(takes=KIND)\ndef f(samples): ...", "X223", "read without running the code", "KIND"),
    ('@collator(takes="microbatch", gives="token samples")\ndef f(b): ...', "X223", "cannot produce", "gives"),
    ('@collator(takes="labelled samples", gives="microbatch")\ndef f(b): ...', "X223", "only `pack`", "gives"),
    ('@collator("microbatch", "microbatch", 3)\ndef f(b): ...', "X223", "`takes` and `gives`", "3"),
    ('@collator(takes="microbatch")\ndef f(): ...', "X223", "no parameter for its input", "def f"),
    ('@collator(takes="part of a microbatch")\ndef f(b, generator): ...', "X223", "number of ranks", "generator"),
    ("@source(1)\ndef f(): ...", "X223", "takes no arguments", "@source"),
    ("@source\ndef f(*args): ...", "X223", "`*args`", "args"),
    ("@source\ndef f(**more): ...", "X223", "`**more`", "more"),
    ("@source\ndef f(a, /): ...", "X223", "by name", "def f"),
    ("@source\nasync def f(): ...", "X223", "async", "async def"),
    ('@source\ndef f(a: int = "a"): ...', "X223", "the default of `a` does not match its type, `int`", "def f"),
    ('@source\ndef f(a: list[int] = ["a"]): ...', "X223", "does not match its type, `list[int]`", "def f"),
    ("@source\ndef f(a: Literal['b'] = 'c'): ...", "X223", "does not match its type", "def f"),
    ("@source\ndef f(a, auto=1): ...", "X223", "`auto` cannot be set in a spec", "def f"),
    ("@source\ndef f(größe=1): ...", "X223", "`größe` cannot be set in a spec", "def f"),
    ("@source\ndef f(a: Annotated[float, between(1, 0)]): ...", "X223", "no number satisfies", "def f"),
    ("@source\ndef f(a: Annotated[int, between(0.2, 0.8)]): ...", "X223", "no whole number satisfies", "def f"),
    ("@source\ndef f(a: Annotated[int, proper_fraction]): ...", "X223", "no whole number", "def f"),
    ("@source\ndef f(a: Annotated[int, at_least(1), positive]): ...", "X223", "two bounds", "def f"),
    ("class A:\n    @source\n    def f(self): ...", "X223", "inside something else", "def f"),
    ("@source\ndef f(): ...\n@source\ndef f(): ...", "X223", "declared twice", "def f"),
    ("@source\ndef jsonl(): ...", "X224", "already a word", "def jsonl"),
    ("@source\ndef round(): ...", "X224", "already a word", "def round"),
    ('@collator(takes="microbatch")\ndef microbatches(b): ...', "X224", "already a word", "def microbatches"),
]


@pytest.mark.parametrize(("parts", "code", "message", "line"), DECLARED)
def test_declarations_are_checked_in_the_users_file(own, parts, code, message, line):
    parts = (
        parts
        if parts.startswith(("def ", "x ="))
        else f"from xtrain import at_least, between, collator, positive, proper_fraction, source\n# é\n{parts}\n"
    )
    found = only(own('use "parts.py"\ncollate = to_tensor -> flatten -> anything -> pack\n', parts))
    assert found.code == code
    assert message in found.message
    if line is not None:
        span = found.span
        assert span.source.path == "parts.py"
        assert line in span.source.line(span.line)
        assert any("is used here" in note for note, _ in found.all_notes)


MODULES = [
    ('use "nowhere.py"', "X221", "there is no such file", None),
    ('use "part.py"', "X221", "there is no such file", "parts.py"),
    ('use "parts"', "X221", "end in .py", 'use "parts.py"'),
    ('use ""', "X221", "end in .py", None),
    ('use "folder.py"', "X221", "it is a folder", None),
    ('use "latin.py"', "X221", "not UTF-8", None),
    ("use parts.py", "X221", "in quotes", 'use "parts.py"'),
    ("use nowhere", "X221", "no module `nowhere`", None),
    ("use nowhere.deep", "X221", "no module `nowhere`", None),
    ("use package.deep", "X221", "no module `deep` in `package`", None),
    ("use itertools", "X221", "not a module written in Python", None),
    ('use "a\\u{0}b.py"', "X221", "", None),
]


@pytest.mark.parametrize(("text", "code", "message", "hint"), MODULES)
def test_modules_that_cannot_be_read(own, tmp_path, text, code, message, hint):
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "package").mkdir()
    found = only(own(f"{text}\ndataset a {{ source = my_documents() }}\n"))
    assert found.code == code
    assert message in found.message
    assert hint is None or hint in found.hint


def test_fixes_of_modules_are_right(own):
    for text, meant in (('use "prts.py"', '"parts.py"'), ("use parts.py", '"parts.py"')):
        assert only(own(f"{text}\n")).fix.text == meant


def test_two_parts_of_one_name_and_unused_modules(own, tmp_path):
    own("")
    (tmp_path / "more.py").write_text(PARTS)
    found = list(own('use "parts.py"\nuse "more.py"\n').diagnostics)
    assert {d.code for d in found} == {"X224"} and len(found) == 4
    assert found[0].span.source.path == "more.py" and found[0].notes[0][1].source.path == "parts.py"
    (tmp_path / "more.py").write_text("from xtrain import source\n@source\ndef fine(): ...\n")
    unused = only(own(USE + 'use "parts.py"\nuse "more.py"\n'))
    assert (unused.code, unused.severity) == ("W204", "warning")
    assert '"more.py"' in unused.message and "fine" in unused.hint


def test_the_digest_follows_the_users_own_imports(tmp_path):
    files = {
        "parts.py": "import helper, json\nfrom lib.deep import a\n",
        "helper.py": "def f():\n    import late\n",
        "late.py": "",
        "lib/__init__.py": "",
        "lib/deep.py": "from . import near\n",
        "lib/near.py": "import parts\n",  # a circle
        "lib/other.py": "",
        "json/__init__.py": "",
        "stranger.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def digest():
        return module_digest(find_module("parts.py", tmp_path))

    before = digest()
    for name in files:
        path = tmp_path / name
        path.write_text(files[name] + "# changed\n")
        assert (digest() != before) == (name not in ("lib/other.py", "stranger.py")), name
        path.write_text(files[name])
    assert digest() == before


def test_a_package_is_followed_no_further_than_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {
        "kit/__init__.py": "",
        "kit/parts.py": "from .near import x\nimport outside\n",
        "kit/near.py": "",
        "outside.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    module = find_module("kit.parts", Path())
    before = module_digest(module)
    (tmp_path / "outside.py").write_text("x")
    assert module_digest(module) == before
    (tmp_path / "kit/near.py").write_text("x")
    assert module_digest(module) != before
    with pytest.raises(ModuleMissing):
        find_module("kit.nothing", Path())


def test_importing_xtrain_for_its_decorators_is_light():
    code = "import sys; from xtrain import collator, source; print(*({'torch', 'numpy', 'lark'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_decorators_know_what_the_reader_knows():
    from xtrain import collator, source

    def f(samples): ...

    assert source(f) is f and source()(f) is f
    assert collator("microbatch")(f) is f
    with pytest.raises(ValueError, match="one of: rows of token arrays"):
        collator("samples")
    with pytest.raises(ValueError, match="cannot give 'microbatch'"):
        collator("token samples", gives="microbatch")
