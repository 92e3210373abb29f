"""Usual mistakes in the form of blocks and statements, each a rule from `UnexpectedToken` to `Explanation` or None."""

from typing import Any, Final

from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.syntax.tokens import STATEMENTS, Token
from xtrain.dsl.syntax.unexpected_token import ENDS, LABELS, OPERATORS, Explanation, UnexpectedToken, mistake


def _body_without_braces(m: UnexpectedToken) -> Explanation | None:
    """`model qwen3:`, `model qwen3 (dim = 192)`, `model qwen3 dim = 192`, `tp -2`."""
    token, head = m.token, m.head
    if m.begin.type != "NAME" or not all(t.type in LABELS for t in head):
        return None
    words = [t.text for t in head]
    if token.type == "_EQ" and len(head) > 2 and head[-1].type == "NAME":
        written = f"{' '.join(words[:-1])} {{ {words[-1]} = … }}"
    elif token.type == "_EQ" and len(head) > 1:
        fix = " " if m.after.type == "LBRACE" else None
        fix_at = Span(token.source, m.before.end, m.after.start)
        message = f"`{' '.join(words)}` is a block and takes no `=`"
        return mistake("X101", message, token.span, "remove it", fix=fix, fix_at=fix_at)
    elif token.type in ("LPAR", "LSQB") or (token.type == "_COLON" and (m.after.type in ENDS or len(head) > 1)):
        written = f"{' '.join(words)} {{ … }}"
    elif token.type in OPERATORS - {"DSLASH"}:
        return mistake("X101", "a label is a single name, number or string", token.span, "compute it in a `let`")
    else:
        return None
    message = "the body of a block is written in braces"
    closer = _closer(m) if token.type == "LPAR" else None
    if closer is None:
        return mistake("X101", message, token.span, f"write `{written}`")
    whole = token.span.to(closer.span)
    fix = f"{{ {whole.text[1:-1].strip()} }}"
    return mistake("X101", message, token.span, f"write `{written}`", fix=fix, fix_at=whole)


def _closer(m: UnexpectedToken) -> Token | None:
    """The bracket that closes what the unexpected token opens, if what it holds are settings."""
    inner = m.tokens[m.at + 1 : m.at + 3]
    if [token.type for token in inner] != ["NAME", "_EQ"]:
        return None
    return next((t for t in m.tokens[m.at + 1 :] if t.type == "RPAR" and t.depth == m.token.depth), None)


def _value_with_body(m: UnexpectedToken) -> Explanation | None:
    """`model = qwen3 { … }`."""
    if m.begin.type in ("EVERY", "ON") or m.token.type != "LBRACE" or "LBRACE" in m.accepts:
        return None
    if m.before.type not in LABELS:
        return None
    hint = "a block is written `kind label { … }`, without `=`"
    labelled = len(m.head) == 3 and m.head[1].type == "_EQ"
    fix_at = Span(m.token.source, m.begin.end, m.before.start)
    return mistake("X101", "a value has no body", m.token.span, hint, fix=" " if labelled else None, fix_at=fix_at)


def _trigger(m: UnexpectedToken) -> Explanation | None:
    """`every` or `on` that stops before its actions, or has signs around them."""
    if m.begin.type not in ("EVERY", "ON"):
        return None
    if m.token.type == "_COLON":
        return mistake("X101", "there is no `:` before the actions", m.token.span, "remove it", fix="")
    if "NAME" not in m.accepts and m.token.type == "LBRACE":
        return mistake("X101", "actions are written without braces", m.token.span, "join them by `then`")
    if "NAME" not in m.accepts or "_NEWLINE" in m.accepts:
        return None
    if m.token.type == "LBRACE":
        return mistake("X101", "actions are written without braces", m.token.span, "join them by `then`")
    if m.begin.type == "EVERY" and len(m.head) == 2 and m.before.type == "NAME":
        message = "the period between `every` and its action is missing"
        return mistake("X101", message, m.before.span, f"write `every 10 steps {m.before.text}`")
    if len(m.head) == 1:
        of_every = "a period, such as `10 steps`"
        wanted = of_every if m.begin.type == "EVERY" else "the name of an event, such as `sigterm`"
        return mistake("X101", f"`{m.begin.text}` needs {wanted}", m.begin.span)
    if m.token.type in ENDS:
        return mistake("X101", "an action is missing", m.place, "write one here, such as `checkpoint`")
    return None


def _keyword_as_name(m: UnexpectedToken) -> Explanation | None:
    if m.before.type not in STATEMENTS.values() or m.token.type not in ("_EQ", "LBRACE"):
        return None
    message = f"`{m.before.text}` starts a statement and cannot be a name here"
    return mistake("X101", message, m.before.span, "choose another name")


def _bare_path(m: UnexpectedToken) -> Explanation | None:
    if m.begin.type != "INCLUDE" or len(m.head) != 1 or m.token.type in ENDS:
        return None
    line = m.token.source.text[m.token.start :].split("\n", 1)[0].split("#", 1)[0].rstrip()
    bare = all(character.isalnum() or character in "._-/" for character in line)
    fix_at = Span(m.token.source, m.token.start, m.token.start + len(line))
    hint = 'write `include "base.xtrain"`'
    return mistake(
        "X101",
        "a path is written in double quotes",
        m.token.span,
        hint,
        fix=f'"{line}"' if bare else None,
        fix_at=fix_at,
    )


def _path_assigned(m: UnexpectedToken) -> Explanation | None:
    """`optimizer.lr = 3e-4`, as `--set` has it."""
    kinds = {token.type for token in m.head}
    if m.token.type != "_EQ" or kinds != {"NAME", "_DOT"}:
        return None
    path = "".join(token.text for token in m.head)
    block, _, setting = path.rpartition(".")
    opened, closed = block.replace(".", " { "), " }" * block.count(".")
    hint = f"write `{opened} {{ {setting} = … }}{closed}`; in `sweep`, `{path} in […]`"
    return mistake("X101", "a setting stands inside its block, not behind a path", m.token.span, hint)


ITEM_RULES: Final = (_body_without_braces, _keyword_as_name, _trigger, _value_with_body, _bare_path, _path_assigned)


def beginning(m: UnexpectedToken) -> Explanation | None:
    """A token that no item begins with."""
    token, span = m.token, m.token.span
    if "BROKEN" not in m.accepts:
        return None
    match token.type:
        case "THEN":
            message = "a new line has ended the statement that this `then` belongs to"
            return mistake("X101", message, span, "put it on the line above", **_line_above(m))
        case "LBRACE":
            hint = "put it on the line of the block it belongs to"
            return mistake("X101", "this `{` has no block", span, hint, **_line_above(m))
        case "SLASH" | "DSLASH":
            fix = "#" if token.type == "DSLASH" else None
            return mistake("X101", "a comment begins with `#`", span, "write `#`", fix=fix)
        case "_COMMA":
            return mistake("X101", "there is nothing before this `,`", span, "remove it", fix="")
        case "LSQB":
            return mistake("X101", "no item begins with `[`", span, "a block is written `kind label { … }`")
        case "NUMBER" if m.before.type == "_COMMA" and m.before.end == token.start:
            fix_at = m.before.span
            fix = "_" if _groups(m) else None
            message, hint = "commas do not group digits", "write `1_000` for a thousand"
            return mistake("X101", message, span, hint, fix=fix, fix_at=fix_at)
        case "STRING" if token.value and str(token.value).isidentifier():
            return mistake("X101", "a name is written without quotes", span, f"write `{token.value}`", fix=token.value)
        case "NUMBER" | "STRING":
            return mistake("X101", f"an item begins with its name, not with a {m.found}", span, "write `name = value`")
    if token.type == "_ARROW" or token.type in OPERATORS:
        hint = "put it at the end of the line above, inside parentheses"
        above = _line_above(m) if token.type == "_ARROW" else {}
        return mistake("X101", f"a line cannot begin with `{token.text}`", span, hint, **above)
    return None


def _line_above(m: UnexpectedToken) -> dict[str, Any]:
    """The fix that joins the token to the line above, unless a comment is in the way."""
    behind = next((t.end for t in reversed(m.tokens[: m.at]) if t.type != "_NEWLINE"), None)
    if behind is None:
        return {}
    between = m.token.source.text[behind : m.token.start]
    if "\n" not in between or between.strip():
        return {}
    return {"fix": " ", "fix_at": Span(m.token.source, behind, m.token.start)}


def _groups(m: UnexpectedToken) -> bool:
    """Whether the number and the one before the comma are groups of digits: `1,000`."""
    first = m.tokens[max(m.at - 2, 0)]
    digits = m.token.text.split()[0]
    touches = first.type == "NUMBER" and first.end == m.before.start
    return touches and digits.isdecimal() and len(digits) == 3 and first.text.replace("_", "").isdecimal()
