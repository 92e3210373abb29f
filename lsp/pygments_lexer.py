"""The lexer of Pygments: `pygmentize -l xtrain`, Sphinx, MkDocs and notebooks colour specs with it."""

from typing import Any

from pygments.lexer import RegexLexer, bygroups
from pygments.token import String, Whitespace, string_to_tokentype

from xtrain.lsp.lexemes import Lexeme, lexemes


def _rule(lexeme: Lexeme) -> tuple[str, Any]:
    types = [string_to_tokentype(token) for token in lexeme.tokens]
    return lexeme.pattern, types[0] if len(types) == 1 else bygroups(*types)


_ESCAPE = (r"\\(?:u\{[0-9A-Fa-f]*\}|.)", String.Escape)


class SpecLexer(RegexLexer):
    """Lexer of specs: `*.xtrain`."""

    name = "xtrain"
    aliases = ["xtrain"]  # noqa: RUF012
    filenames = ["*.xtrain"]  # noqa: RUF012
    tokens = {  # noqa: RUF012
        "root": [
            (r"\s+", Whitespace),
            (r'"""', String.Double, "triple"),
            (r'"', String.Double, "string"),
            *(_rule(each) for each in lexemes()),
        ],
        "triple": [(r'"""', String.Double, "#pop"), _ESCAPE, (r'[^"\\]+|"', String.Double)],
        "string": [
            (r'"', String.Double, "#pop"),
            (r"\n", Whitespace, "#pop"),
            _ESCAPE,
            (r'[^"\\\n]+|\\', String.Double),
        ],
    }
