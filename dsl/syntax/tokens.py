"""`Token`: a word of the language and where it stands."""

from typing import Any, Final

from attrs import define

from xtrain.dsl.diagnostics.source import SourceText, Span

SEPARATORS: Final = ("_COMMA", "_NEWLINE")
OPENERS: Final = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
CLOSERS: Final = {closer: opener for opener, closer in OPENERS.items()}
STATEMENTS: Final = {"include": "INCLUDE", "use": "USE", "let": "LET", "param": "PARAM", "every": "EVERY", "on": "ON"}
CONSTANTS: Final = {"true": "TRUE", "false": "FALSE", "none": "NONE", "auto": "AUTO"}


@define(eq=False)
class Token:
    """A token of `grammar.lark`. `ERROR` stands where the lexer has already said what is wrong.

    value: what a number or string stands for. depth: the number of brackets around it. starts_item: it is the first of
    a statement. assumed: it does not stand in the text; the layout put it there.
    """

    type: str
    source: SourceText
    start: int
    end: int
    value: Any = None
    depth: int = 0
    starts_item: bool = False
    assumed: bool = False

    @property
    def span(self) -> Span:
        return Span(self.source, self.start, self.end)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]
