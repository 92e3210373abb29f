"""What is made of the table of lexemes: the TextMate and tree-sitter grammars, the lexer of Pygments, the extension."""

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from grammars import files, rules
from lark import Lark, UnexpectedInput
from lark import logger as lark_logger
from pygments.token import STANDARD_TYPES, Error, Text, Token, string_to_tokentype

from xtrain.dsl.evaluation.evaluate import FUNCTIONS
from xtrain.dsl.reference.reference import every_page
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.data_components import LINKS, SOURCES
from xtrain.dsl.syntax.tree import CONSTANTS, STATEMENTS
from xtrain.dsl.values import UNITS
from xtrain.lsp.pygments_lexer import SpecLexer, lexemes

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "editors" / "vscode"
FOLDERS = ("specs", "dsl/starters", "tests/dsl/gallery", "tests/dsl/data")
SPECS = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.xtrain"))]
RIGHT = [path for path in SPECS if "gallery" not in path.parts and "data" not in path.parts]


def test_files_for_editors_are_those_of_the_table():
    old = [path.name for path, text in files().items() if path.read_text(encoding="utf-8") != text]
    assert not old, "run `python tests/support/grammars.py --write`"


def colour(text: str, word: str) -> str:
    """The lexeme that a word of a text is, by the table alone."""
    at = text.index(word)
    return next(each.name for each in lexemes() if re.compile(each.pattern).match(text, at))


def test_every_word_of_the_schema_has_its_colour():
    expected = {f"{word} x": "statement" for word in STATEMENTS}
    expected |= dict.fromkeys(CONSTANTS, "constant")
    expected |= {f"{kind} {{": "block" for kind in blocks.KINDS}
    expected |= {f"{name} x": "action" for name in blocks.ACTIONS if name not in blocks.KINDS}
    expected |= {f"{name} x": "event" for name in blocks.EVENTS}
    expected |= {f"{name}(": "call" for name in (*FUNCTIONS, *SOURCES, *LINKS)}
    for page in every_page():
        expected |= {f"{f.name} = 1": "setting" for f in page.fields if not f.is_block and f.name != "NAME"}
        expected |= {f"{inner.name} {{": "block" for inner in page.inner if page.group == "block"}
    assert len(expected) > 350
    assert {text: found for text, kind in expected.items() if (found := colour(text, text)) != kind} == {}
    assert all(colour(f"10 {unit}", "10") == ("percent" if unit == "%" else "quantity") for unit in UNITS)
    assert {string_to_tokentype(name) for each in lexemes() for name in each.tokens} <= STANDARD_TYPES.keys()
    assert colour("10 % 3", "10") == "number" and colour("steps = 3", "steps") != "quantity"


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_pygments_colours_every_spec(path: Path):
    text = path.read_text(encoding="utf-8")
    tokens = list(SpecLexer(ensurenl=False, stripnl=False).get_tokens_unprocessed(text))
    assert "".join(value for _, _, value in tokens) == text
    plain = [value for _, kind, value in tokens if kind in (Token, Text) and value.strip()]
    wrong = [value for _, kind, value in tokens if kind is Error]
    assert not plain and not (wrong and path in RIGHT)


def lark_rule(rule: dict[str, Any], terminals: dict[str, str]) -> str:
    """A rule of the tree-sitter grammar as one of lark."""

    def terminal(text: str) -> str:
        return terminals.setdefault(text, f"T{len(terminals)}")

    def inner(each: dict[str, Any]) -> str:
        return lark_rule(each, terminals)

    match rule["type"]:
        case "SEQ":
            return " ".join(f"({inner(each)})" for each in rule["members"])
        case "CHOICE":
            alternatives = [inner(each) for each in rule["members"] if each["type"] != "BLANK"]
            blank = "?" if len(alternatives) < len(rule["members"]) else ""
            return f"({' | '.join(alternatives)}){blank}"
        case "REPEAT" | "REPEAT1":
            return f"({inner(rule['content'])}){'*' if rule['type'] == 'REPEAT' else '+'}"
        case "FIELD" | "PREC":
            return inner(rule["content"])
        case "SYMBOL":
            return f"r_{rule['name'].strip('_')}"
        case "STRING":
            return terminal(json.dumps(rule["value"]))
    return terminal("/" + rule["value"].replace("/", "\\/") + "/")


def test_the_tree_sitter_grammar_reads_every_spec(caplog: pytest.LogCaptureFixture):
    """As one for LALR(1), which is what tree-sitter makes of it; the one conflict is a call, which has `prec`."""
    terminals: dict[str, str] = {}
    written = [
        f"r_{name.strip('_')}: {lark_rule(rule, terminals)}" for name, rule in rules().items() if name != "comment"
    ]
    names = [f"{name}: {text}" for text, name in terminals.items()]
    ignored = ["BLANK: /[ \\t\\r\\f\\v]+/", "COMMENT: /#[^\\n]*/", "%ignore BLANK", "%ignore COMMENT"]
    with caplog.at_level("DEBUG", logger="lark"):
        lark_logger.setLevel("DEBUG")
        parser = Lark("\n".join([*written, *names, *ignored]), parser="lalr", start="r_source_file", debug=True)
    conflicts = {line for line in caplog.messages if "conflict" in line.lower()}
    assert all(f"terminal {terminals[json.dumps('(')]}" in line for line in conflicts) and conflicts, conflicts
    for path in RIGHT:
        parser.parse(path.read_text(encoding="utf-8"))
    with pytest.raises(UnexpectedInput):
        parser.parse("model qwen3 {")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_the_extension_is_built_and_vs_code_colours_every_spec(tmp_path: Path):
    """By npm into a .vsix, and by VS Code's own tokenizer: no token without a scope, as Pygments has none."""
    folder = tmp_path / "vscode"
    shutil.copytree(EXTENSION, folder, ignore=shutil.ignore_patterns("node_modules", "*.vsix"))
    installed = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"npm cannot install what the extension needs: {installed.stderr[-300:]}")
    subprocess.run(["npm", "run", "package"], cwd=folder, check=True, capture_output=True)
    names = zipfile.ZipFile(folder / "xtrain.vsix").namelist()
    needed = ("extension.js", "package.json", "syntaxes/xtrain.tmLanguage.json", "language-configuration.json")
    assert {f"extension/{name}" for name in needed} <= set(names)
    assert any("vscode-languageclient/node.js" in name for name in names) and not any("colours" in n for n in names)
    subprocess.run(["node", "--check", "extension.js"], cwd=folder, check=True)

    texts = [path.read_text(encoding="utf-8") for path in SPECS]
    command = ["node", "colours.mjs"]
    done = subprocess.run(command, cwd=folder, input=json.dumps(texts), capture_output=True, text=True, check=True)
    for path, text, tokens in zip(SPECS, texts, json.loads(done.stdout), strict=True):
        assert "".join(word for word, _ in tokens).replace("\n", "") == text.replace("\n", "")
        unscoped = [word for word, scopes in tokens if word.strip() and len(scopes) < 2]
        wrong = [word for word, scopes in tokens if any(scope.startswith("invalid") for scope in scopes)]
        assert not unscoped and not (wrong and path in RIGHT), (path, unscoped, wrong)
    scopes = dict(json.loads(done.stdout)[SPECS.index(ROOT / "specs/quickstart.xtrain")])
    assert scopes["model"][-1] == "storage.type.block.xtrain" and scopes["steps"][-1] == "keyword.other.unit.xtrain"


def test_an_escape_of_a_string_is_one_word():
    for text in ('"a\\u{e9}b"', '"""a\\u{e9}b"""'):
        found = [word for kind, word in SpecLexer().get_tokens(text) if kind is Token.Literal.String.Escape]
        assert found == ["\\u{e9}"]
