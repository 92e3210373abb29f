"""Between lexer and parser: which line ends count, which words start a statement, how deep each token stands."""

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.syntax.brackets import match_brackets
from xtrain.dsl.syntax.tokens import CLOSERS, CONSTANTS, OPENERS, SEPARATORS, STATEMENTS, Token

# Before a `{` these say that a value is meant: it opens a map, not the body of a block.
_BEFORE_A_VALUE = frozenset(
    {
        "_EQ", "_COLON", "_ARROW", "_TO", "LPAR", "LSQB", "PLUS", "MINUS", "STAR", "SLASH", "DSLASH", "PERCENT", "POW",
        "EVERY",
    }
)  # fmt: skip


def layout_tokens(tokens: list[Token], source: SourceText, diagnostics: Diagnostics) -> tuple[list[Token], bool]:
    """The tokens the parser sees, and whether brackets had to be repaired.

    Comments go. A line end counts only between items, once, and not behind a comma or an opening bracket. Words that
    start a statement (`let`), `then` and `in` become words of their own where they can stand; elsewhere they are names,
    and so they are before `=` and `.` inside a block, where no statement can stand.
    """
    tokens, repaired = match_brackets([t for t in tokens if t.type != "COMMENT"], diagnostics)
    result: list[Token] = []
    opened: list[str] = []  # block, map, ( or [
    reacting = [False]  # for each depth: the statement is `every` or `on`, where `then` joins actions
    fresh = True  # the next token is the first of a statement
    for place, token in enumerate(tokens):
        inside = opened[-1] if opened else "block"
        if token.type == "_NEWLINE":
            before = result[-1].type if result else "_NEWLINE"
            if inside in ("LPAR", "LSQB") or before in ("LBRACE", *SEPARATORS):
                continue
        elif token.type == "NAME":
            is_setting = bool(opened) and place + 1 < len(tokens) and tokens[place + 1].type in ("_EQ", "_DOT")
            _classify(token, first=fresh and not is_setting, reacting=reacting[-1])
            if token.text == "in" and opened and inside == "block" and _is_path(result):
                token.type = "IN"
            called = place + 1 < len(tokens) and tokens[place + 1].type == "LPAR"
            if token.text == "hub" and called and result and result[-1].starts_item:
                token.type = "HUB"  # a label: `model hub("…")`
        if token.type in CLOSERS:
            opened.pop()
            reacting.pop()
        token.depth = len(opened)
        token.starts_item = fresh and token.type not in CLOSERS and token.type not in SEPARATORS
        if token.starts_item:
            reacting[-1] = token.type in ("EVERY", "ON")
        if token.type in OPENERS:
            value = inside != "block" or (bool(result) and result[-1].type in _BEFORE_A_VALUE)
            opened.append(token.type if token.type != "LBRACE" else "map" if value else "block")
            reacting.append(False)
        result.append(token)
        inside = opened[-1] if opened else "block"
        fresh = inside == "block" and token.type in ("LBRACE", *SEPARATORS)
    result.append(Token("$END", source, len(source.text.rstrip()), len(source.text.rstrip())))
    return result, repaired


def _is_path(tokens: list[Token]) -> bool:
    """Whether the item that has begun is a path so far, `optimizer.lr`."""
    for token in reversed(tokens):
        if token.type not in ("NAME", "_DOT"):
            return False
        if token.starts_item:
            return tokens[-1].type == "NAME"
    return False


def _classify(token: Token, *, first: bool, reacting: bool) -> None:
    word = token.text
    if first and word in STATEMENTS:
        token.type = STATEMENTS[word]
    elif word in CONSTANTS:
        token.type = CONSTANTS[word]
    elif word == "then" and reacting:
        token.type = "THEN"
