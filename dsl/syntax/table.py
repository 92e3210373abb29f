"""LALR(1) parsing by the table in `grammar.json`, which lark computes from `grammar.lark` (`parse_table.py`)."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xtrain.dsl.syntax.tree import Token
from xtrain.lazy_attrs import frozen

GRAMMAR, KEPT = (Path(__file__).with_name(f"grammar.{kind}") for kind in ("lark", "json"))


class UnfitToken(Exception):
    """The table has no action for a token; states have been reduced as far as possible."""


class _Inlined(list[Any]):
    """Parts of a rule whose name begins with `_`: parts of the rule around it."""


@frozen
class GrammarRule:
    """A rule of the grammar. size: number of symbols. kept: places of the symbols that are parts of the node. method:
    builds the node; None for a rule that is inlined. single: a single part takes the place of the node."""

    name: str
    size: int
    kept: tuple[int, ...]
    method: str | None
    single: bool


@frozen
class Table:
    """Parse table. states: symbol → next state, or the complement of the number of a rule to reduce. end: the state of
    the start symbol."""

    rules: Sequence[GrammarRule]
    states: Sequence[dict[str, int]]
    start: int
    end: int


def digest_of(grammar: bytes) -> str:
    """Return the digest of a grammar, which its table carries."""
    return blake2b(grammar, digest_size=8).hexdigest()


def computed() -> str:
    """Return the text of the table, computed by lark."""
    from xtrain.dsl.syntax.parse_table import table_text

    grammar = GRAMMAR.read_bytes()
    return table_text(grammar.decode(), digest_of(grammar))


@cache
def table() -> Table:
    """Return the table of the grammar; lark computes it if the file is of another grammar."""
    read = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    if read.get("grammar") != digest_of(GRAMMAR.read_bytes()):
        read = json.loads(computed())
    del read["grammar"]
    rules = tuple(
        GrammarRule(name, size, tuple(kept), method, single) for name, size, kept, method, single in read.pop("rules")
    )
    return Table(rules=rules, **read)


class Parse:
    """A parse that receives tokens one by one, and can be copied at any of them. build: method → builds a node from
    its parts."""

    def __init__(self, build: Callable[[str], Callable[[list[Any]], Any]]) -> None:
        self.build = build
        self.table = table()
        self.states: list[int] = [self.table.start]
        self.values: list[Any] = []

    def copy(self) -> "Parse":
        """Return a parse that continues from here independently."""
        copied = Parse(self.build)
        copied.states, copied.values = self.states.copy(), self.values.copy()
        return copied

    def feed(self, token: Token) -> Any:
        """Read a token; return the tree after `$END`, else None. Raises UnfitToken."""
        states, values = self.states, self.values
        while (action := self.table.states[states[-1]].get(token.type)) is not None:
            if action >= 0:
                states.append(action)
                values.append(token)
                return None
            rule = self.table.rules[~action]
            begin = len(values) - rule.size
            value = self._node(rule, [values[begin + at] for at in rule.kept])
            del values[begin:], states[len(states) - rule.size :]
            values.append(value)
            states.append(self.table.states[states[-1]][rule.name])
            if token.type == "$END" and states[-1] == self.table.end:
                return value
        raise UnfitToken

    def _node(self, rule: GrammarRule, parts: list[Any]) -> Any:
        if rule.method is None:
            return _Inlined(parts)
        found, pending = [], parts[::-1]
        while pending:
            part = pending.pop()
            if isinstance(part, _Inlined):
                pending.extend(reversed(part))
            else:
                found.append(part)
        return found[0] if rule.single and len(found) == 1 else self.build(rule.method)(found)

    def accepts(self) -> set[str]:
        """Return the types of the tokens that fit here."""
        return {name for name in self.table.states[self.states[-1]] if name.isupper() and self._fits(name)}

    def _fits(self, name: str) -> bool:
        states = self.states.copy()
        while (action := self.table.states[states[-1]].get(name)) is not None:
            if action >= 0:
                return True
            rule = self.table.rules[~action]
            del states[len(states) - rule.size :]
            states.append(self.table.states[states[-1]][rule.name])
            if name == "$END" and states[-1] == self.table.end:
                return True
        return False


if __name__ == "__main__":
    KEPT.write_text(computed(), encoding="utf-8")
