"""The files for editors that are made of the table of lexemes.

`python tests/support/grammars.py --write` renews them; a test holds them against the table.
"""

import json
import sys
from pathlib import Path
from typing import Any

from xtrain.lsp.pygments_lexer import NUMBER, Lexeme, lexemes, word_lists

ROOT = Path(__file__).parents[2]
VSCODE = ROOT / "editors" / "vscode"
TREE_SITTER = ROOT / "editors" / "tree-sitter-xtrain"
Rule = dict[str, Any]


def files() -> dict[Path, str]:
    """Path → what the file has to hold."""
    return {
        VSCODE / "syntaxes" / "xtrain.tmLanguage.json": json.dumps(textmate(), indent=2) + "\n",
        TREE_SITTER / "grammar.js": grammar_js(),
        TREE_SITTER / "queries" / "highlights.scm": highlights(),
    }


# TextMate -------------------------------------------------------------------------------------------------------------


def textmate() -> dict[str, Any]:
    """The TextMate grammar, as JSON."""
    escape = {"match": r'\\(?:["\\nt]|u\{[0-9A-Fa-f]+\})', "name": "constant.character.escape.xtrain"}
    wrong = {"match": r"\\.", "name": "invalid.illegal.escape.xtrain"}
    strings = [
        {
            "name": f"string.quoted.{kind}.xtrain",
            "begin": begin,
            "end": end,
            "beginCaptures": {"0": {"name": "punctuation.definition.string.begin.xtrain"}},
            "endCaptures": {"0": {"name": "punctuation.definition.string.end.xtrain"}},
            "patterns": [escape, wrong],
        }
        for kind, begin, end in (("triple", '"""', '"""'), ("double", '"', r'"|$'))
    ]
    return {
        "$schema": "https://raw.githubusercontent.com/martinring/tmlanguage/master/tmlanguage.json",
        "name": "xtrain",
        "scopeName": "source.xtrain",
        "fileTypes": ["xtrain"],
        "patterns": [*strings, *(_textmate_rule(each) for each in lexemes())],
    }


def _textmate_rule(lexeme: Lexeme) -> dict[str, Any]:
    if len(lexeme.scopes) == 1:
        return {"match": lexeme.pattern, "name": f"{lexeme.scopes[0]}.xtrain"}
    captures = {str(number): {"name": f"{scope}.xtrain"} for number, scope in enumerate(lexeme.scopes, 1) if scope}
    return {"match": lexeme.pattern, "captures": captures}


# tree-sitter ----------------------------------------------------------------------------------------------------------


def rules() -> dict[str, Rule]:
    """The rules of the tree-sitter grammar, in the form of its `grammar.json`.

    Values are flat rows of atoms and operators: what they mean is the server's. A line end separates items, and nothing
    else inside brackets.
    """
    words = word_lists()
    atoms = choice(*map(symbol, ("number", "string", "constant", "reference", "call", "list", "group")))
    inside = repeat(choice(atoms, symbol("map"), symbol("operator"), *map(text, (",", ":", "=", "\n"))))
    reaction = repeat1(choice(atoms, symbol("operator"), symbol("body"), text("then")))
    separators = repeat1(symbol("_separator"))
    items = seq(symbol("_item"), repeat(seq(separators, symbol("_item"))), optional(separators))
    multiplier = "|".join(sorted(words.multipliers, key=len, reverse=True))
    statements = [text(word) for word in words.statements if word not in ("then", "in")]
    return {
        "source_file": seq(optional(separators), optional(symbol("_items"))),
        "_items": items,
        "_separator": choice(text(","), text("\n")),
        "_item": choice(*map(symbol, ("let", "param", "include", "use", "every", "on", "assignment", "vary", "block"))),
        "let": seq(text("let"), field("name", symbol("identifier")), text("="), field("value", symbol("value"))),
        "param": seq(text("param"), field("name", symbol("identifier")), text("="), field("value", symbol("value"))),
        "include": seq(text("include"), symbol("string")),
        "use": seq(text("use"), choice(symbol("string"), symbol("reference"))),
        "every": seq(text("every"), reaction),
        "on": seq(text("on"), field("event", symbol("identifier")), reaction),
        "assignment": seq(field("name", choice(symbol("identifier"), *statements)), text("="),
            field("value", symbol("value"))),
        "vary": seq(field("name", symbol("reference")), text("in"), field("value", symbol("value"))),
        "block": seq(field("kind", symbol("identifier")), repeat(field("label", symbol("_label"))),
            optional(symbol("body"))),
        "_label": choice(*map(symbol, ("identifier", "string", "number", "constant", "call"))),
        "body": seq(text("{"), optional(separators), optional(symbol("_items")), text("}")),
        "value": repeat1(choice(atoms, symbol("map"), symbol("operator"))),
        "reference": seq(symbol("identifier"), repeat(seq(text("."), symbol("identifier")))),
        "call": first(seq(field("function", symbol("identifier")), symbol("group"))),
        "group": seq(text("("), inside, text(")")),
        "list": seq(text("["), inside, text("]")),
        "map": seq(text("{"), inside, text("}")),
        "operator": choice(*map(text, ("->", "..", "**", "//", "+", "-", "*", "/", "%"))),
        "number": seq(symbol("_digits"), optional(symbol("unit"))),
        "_digits": pattern(rf"{NUMBER.replace('?:', '')}({multiplier})?%?"),
        "unit": choice(*map(text, words.units)),
        "constant": choice(*map(text, words.constants)),
        "string": choice(pattern(r'"([^"\\\n]|\\.)*"'), pattern(r'"""([^"\\]|\\(.|\n)|"[^"]|""[^"])*"""')),
        "identifier": pattern(r"[A-Za-z_][A-Za-z0-9_]*|1f1b"),
        "comment": pattern(r"#[^\n]*"),
    }  # fmt: skip


def seq(*members: Rule) -> Rule:
    return {"type": "SEQ", "members": list(members)}


def choice(*members: Rule) -> Rule:
    return {"type": "CHOICE", "members": list(members)}


def repeat(content: Rule) -> Rule:
    return {"type": "REPEAT", "content": content}


def repeat1(content: Rule) -> Rule:
    return {"type": "REPEAT1", "content": content}


def optional(content: Rule) -> Rule:
    return choice(content, {"type": "BLANK"})


def field(name: str, content: Rule) -> Rule:
    return {"type": "FIELD", "name": name, "content": content}


def first(content: Rule) -> Rule:
    """What is meant where a text can be read in two ways."""
    return {"type": "PREC", "value": 1, "content": content}


def symbol(name: str) -> Rule:
    return {"type": "SYMBOL", "name": name}


def text(value: str) -> Rule:
    return {"type": "STRING", "value": value}


def pattern(value: str) -> Rule:
    return {"type": "PATTERN", "value": value}


def grammar_js() -> str:
    """`grammar.js`, which `tree-sitter generate` makes a parser of."""
    lines = [
        "// Made by `python tests/support/grammars.py --write` of xtrain. `tree-sitter generate` makes a parser of it.",
        "module.exports = grammar({",
        '  name: "xtrain",',
        "  word: ($) => $.identifier,",
        "  extras: ($) => [/[ \\t\\r\\f\\v]/, $.comment],",
        "  rules: {",
        *(f"    {name}: ($) => {script(rule)}," for name, rule in rules().items()),
        "  },",
        "});",
    ]
    return "\n".join(lines) + "\n"


def script(rule: Rule) -> str:
    """A rule as JavaScript."""
    match rule["type"]:
        case "SEQ":
            return f"seq({', '.join(map(script, rule['members']))})"
        case "CHOICE" if rule["members"][-1] == {"type": "BLANK"}:
            return f"optional({script(rule['members'][0])})"
        case "CHOICE":
            return f"choice({', '.join(map(script, rule['members']))})"
        case "REPEAT" | "REPEAT1":
            return f"{rule['type'].lower()}({script(rule['content'])})"
        case "PREC":
            return f"prec({rule['value']}, {script(rule['content'])})"
        case "FIELD":
            return f'field("{rule["name"]}", {script(rule["content"])})'
        case "SYMBOL":
            return f"$.{rule['name']}"
        case "STRING":
            return json.dumps(rule["value"])
    return f"/{rule['value'].replace('/', chr(92) + '/')}/"


def highlights() -> str:
    """The query that gives nodes their colours; Neovim and Helix know the names of these."""
    words = word_lists()

    def among(capture: str, names: tuple[str, ...]) -> str:
        listed = " ".join(f'"{name}"' for name in names)
        return f"((identifier) @{capture}\n  (#any-of? @{capture} {listed}))"

    lines = [
        "; Made by `python tests/support/grammars.py --write` of xtrain. Later patterns count more.",
        "(identifier) @variable",
        among("constant", words.choices),
        among("function.builtin", (*words.calls, *words.actions)),
        "(on event: (identifier) @constant)",
        "(call function: (identifier) @function)",
        "(assignment name: (identifier) @property)",
        "(block kind: (identifier) @type)",
        "(comment) @comment",
        "(string) @string",
        "(number) @number",
        "(unit) @keyword.modifier",
        "(constant) @constant.builtin",
        "(operator) @operator",
        f"[{' '.join(json.dumps(word) for word in words.statements)}] @keyword",
        '["=" ":"] @operator',
        '["{" "}" "(" ")" "[" "]"] @punctuation.bracket',
        '["," "."] @punctuation.delimiter',
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__" and "--write" in sys.argv:
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
