"""Random texts that follow the grammar: every form of the language, with blanks, line ends and comments in odd places.

They need not mean anything: what a name stands for is no business of the parser and the formatter.
"""

import random

from hypothesis import strategies as st

NAMES = ("a", "dim", "web", "_x9", "let", "on", "then", "every", "kv_heads", "use", "B", "step", "auto_", "truex", "e4")
KINDS = ("model", "a", "tp", "optimizer", "parallel", "x_1", "then", "log")
NUMBERS = (
    "42", "0", "1_000", "3e-4", "0.95", "2.0", "1e9", "8k", "8Ki", "1.5k", "20B", "2T", "4k steps", "4k   steps",
    "1 step", "20B tokens", "20B\ttokens", "3 epochs", "30min", "30 min", "2 h", "1.5 GiB", "4 B", "10%", "2.5 %",
    "1Gi", "7 samples", "1E+3", "5 d",
)  # fmt: skip
STRINGS = (
    '""', '"a b"', r'"\" \\ \n \t \u{1F600}"', '"# no comment"', '"é{}[](),="', '"""triple"""', '""""""',
    '"""two\n   lines # here\n"""', '"""a "quoted" \\" word\n\n\n  }"""', '"1,2"', '"->"',
)  # fmt: skip
COMMENTS = ("# c", "#", "#tight", "#  wide  ", "# { [ (", '# "', "# é → ü", "## twice", "#\t tab\t")
LABELS = ("qwen3", "web", "2", "8Ki", "auto", "none", '"c++"')
KEYS = ("web", "code", '"c d"', "x")
MODULES = ('"a.py"', "a.b", "package")
PERIODS = ("step", "10 steps", "30min", "2 * n", "10%", "-3 steps", "(1 + 2) * 1 step")
CONSTANTS = ("true", "false", "none", "auto")
OPERATORS = ("+", "-", "*", "/", "//", "%", "**")


class _Writer:
    """Writes one text from a source of randomness. deep: how many levels of brackets may still be opened."""

    def __init__(self, source: random.Random) -> None:
        self.random = source

    def pick(self, choices):
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() > 1 - share  # hypothesis shrinks towards 0: towards what is not written

    # What stands between words ----------------------------------------------------------------------------------------

    def gap(self) -> str:
        """Blanks between two words of a line."""
        return self.pick((" ", " ", " ", "  ", "\t", " \f "))

    def tight(self) -> str:
        """Blanks where there need be none."""
        return self.pick(("", "", " ", "  "))

    def lines(self) -> str:
        """One or more line ends, with comments and empty lines."""
        parts = [self.pick(("", " ", f" {self.pick(COMMENTS)}")) + "\n"]
        while self.chance(0.3):
            parts.append(self.pick(("", "   ", self.pick(COMMENTS), f"  {self.pick(COMMENTS)}")) + "\n")
        return "".join(parts) + self.pick(("", "  ", "\t"))

    def inside(self) -> str:
        """What may stand between the words inside ( ) and [ ]."""
        return self.lines() if self.chance(0.15) else self.tight()

    def separator(self) -> str:
        """Between two items of a block, or two entries of a map."""
        if self.chance(0.4):
            return self.tight() + "," + (self.lines() if self.chance(0.3) else self.tight())
        return self.lines()

    # Items ------------------------------------------------------------------------------------------------------------

    def file(self) -> str:
        items = [self.statement() for _ in range(self.random.randrange(7))]
        before = self.lines() if self.chance(0.3) else ""
        after = self.lines() if self.chance(0.7) else self.pick(("", "  ", " # last"))
        return before + self._joined(items) + after

    def _joined(self, items: list[str]) -> str:
        return "".join(item + (self.separator() if place < len(items) - 1 else "") for place, item in enumerate(items))

    def statement(self) -> str:
        form = self.random.randrange(9)
        if form == 0:
            word = self.pick(("let", "param"))
            return f"{word}{self.gap()}{self.pick(NAMES)}{self.tight()}={self.tight()}{self.expression(3)}"
        if form == 1:
            return f"include{self.gap()}{self.pick(STRINGS)}"
        if form == 2:
            return f"use{self.gap()}{self.pick(MODULES)}"
        if form == 3:
            return f"every{self.gap()}{self.pick(PERIODS)}{self.gap()}{self.actions()}"
        if form == 4:
            return f"on{self.gap()}{self.pick(('nan', 'sigterm'))}{self.arguments(1)}{self.gap()}{self.actions()}"
        return self.block(3) if form < 8 else self.assign(3, top=True)

    def actions(self) -> str:
        found = [self.block(2, kinds=("log", "eval", "checkpoint")) for _ in range(self.random.randrange(1, 4))]
        return f"{self.gap()}then{self.gap()}".join(found)

    def arguments(self, deep: int) -> str:
        return self.call_arguments(deep) if self.chance(0.4) else ""

    def block(self, deep: int, kinds=KINDS) -> str:
        labels = [self.pick(LABELS) for _ in range(self._few())]
        head = self.gap().join([self.pick(kinds), *labels])
        if deep == 0 or self.chance(0.25):
            return head
        return f"{head}{self.gap()}{self.body(deep - 1)}"

    def _few(self) -> int:
        return self.pick((0, 0, 1, 1, 1, 2))

    def body(self, deep: int) -> str:
        many = self.random.randrange(5) if deep else self.random.randrange(2)
        items = [self.block(deep) if deep and self.chance(0.3) else self.assign(deep, top=False) for _ in range(many)]
        begin = self.lines() if self.chance(0.4) else self.tight()
        end = self.pick((self.tight(), self.lines(), f"{self.tight()},{self.tight()}")) if items else self.tight()
        return "{" + begin + self._joined(items) + end + "}"

    def assign(self, deep: int, *, top: bool) -> str:
        names = [name for name in NAMES if not top or name not in ("let", "on", "every", "use")]
        return f"{self.pick(names)}{self.tight()}={self.tight()}{self.expression(deep)}"

    # Expressions ------------------------------------------------------------------------------------------------------

    def expression(self, deep: int) -> str:
        if deep and self.chance(0.1):
            links = [self.sum(deep - 1) for _ in range(self.random.randrange(2, 5))]
            return f"{self.gap()}->{self.gap()}".join(links)
        if self.chance(0.05):
            return self.pick(("..", " .. ", "..", " ..")).join((self.sum(deep), self.sum(deep)))
        return self.sum(deep)

    def sum(self, deep: int) -> str:
        parts = [self.unary(deep)]
        while self.chance(0.25):
            parts += [self.pick(OPERATORS), self.unary(deep)]
        return " ".join(parts)

    def unary(self, deep: int) -> str:
        return self.pick(("-", "- ")) + self.atom(deep) if self.chance(0.1) else self.atom(deep)

    def atom(self, deep: int) -> str:
        form = self.random.randrange(10 if deep else 6)
        if form < 3:
            return self.pick(NUMBERS)
        if form == 3:
            return self.pick(STRINGS)
        if form == 4:
            return self.pick(CONSTANTS)
        if form == 5:
            return self.pick((".", " . ", ". ")).join(self.pick(NAMES) for _ in range(self.pick((1, 1, 1, 2, 3))))
        if form == 6:
            return "[" + self._elements([self.expression(deep - 1) for _ in range(self._many())]) + "]"
        if form == 7:
            return self.pick(("f", "pack", "min", "text")) + self.tight() + self.call_arguments(deep - 1)
        if form == 8:
            return "(" + self.inside() + self.expression(deep - 1) + self.inside() + ")"
        return self.map(deep - 1)

    def _many(self) -> int:
        return self.pick((0, 1, 2, 3, 12))

    def call_arguments(self, deep: int) -> str:
        found = [self.expression(deep) for _ in range(self.random.randrange(3))]
        found += [f"{self.pick(NAMES)}{self.tight()}={self.tight()}{self.expression(deep)}"
                  for _ in range(self.random.randrange(3))]  # fmt: skip
        return "(" + self._elements(found) + ")"

    def _elements(self, found: list[str]) -> str:
        text = "".join(
            element + (f"{self.inside()},{self.inside()}" if place < len(found) - 1 else "")
            for place, element in enumerate(found)
        )
        last = self.pick(("", "", ",")) if found else ""
        return self.inside() + text + self.inside() + last + self.inside()

    def map(self, deep: int) -> str:
        entries = [
            f"{self.pick(KEYS)}{self.tight()}:{self.tight()}{self.expression(deep)}"
            for _ in range(self.random.randrange(4))
        ]
        begin = self.lines() if entries and self.chance(0.3) else self.tight()
        end = self.pick((self.tight(), self.lines())) if entries else self.tight()
        return "{" + begin + self._joined(entries) + end + "}"


def write(source: random.Random) -> str:
    """One text."""
    return _Writer(source).file()


def spec_texts() -> st.SearchStrategy[str]:
    """Texts of the grammar. Most are read without a diagnostic; `assume` it where it matters."""
    return st.randoms(use_true_random=False).map(write)
