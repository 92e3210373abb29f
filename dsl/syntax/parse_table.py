"""Computation of the parse table by lark.

`python -m xtrain.dsl.syntax.table` renews `grammar.json`, which spares starts of commands the import of lark.
"""

import json
from typing import Any

from lark import Lark
from lark.grammar import Rule
from lark.lexer import Lexer
from lark.parsers.lalr_analysis import Shift


class NoLexer(Lexer):
    """Lexer without tokens: lark takes one to compute the table, which parses nothing."""

    def __init__(self, lexer_conf: Any) -> None: ...

    def lex(self, lexer_state: Any, parser_state: Any) -> Any:
        return iter(())


def table_text(grammar: str, digest: str) -> str:
    """Return the text of the table: a line for each rule and each state. digest: of the grammar."""
    parser: Any = Lark(grammar, parser="lalr", lexer=NoLexer, start="file").parser
    made = parser.parser._parse_table
    # lark numbers rules and states in the order of sets, which differs between processes.
    rules = sorted(parser.parser_conf.rules, key=lambda rule: str(described(rule)) + str(rule))
    (start,), (end,) = made.start_states.values(), made.end_states.values()
    order = [start]
    for state in order:
        reached = [
            to for _, (action, to) in sorted(made.states[state].items(), key=lambda one: one[0]) if action is Shift
        ]
        order += [to for to in dict.fromkeys(reached) if to not in order]
    states = [
        {
            symbol: order.index(to) if action is Shift else ~rules.index(to)
            for symbol, (action, to) in sorted(made.states[state].items(), key=lambda one: one[0])
        }
        for state in order
    ]
    assert len(states) == len(made.states)
    lines = (
        ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
        for rows in (list(map(described, rules)), states)
    )
    head = f'{{"grammar": "{digest}", "rules": [\n{next(lines)}\n], "states": [\n{next(lines)}\n]'
    return f'{head}, "start": 0, "end": {order.index(end)}}}\n'


def described(rule: Rule) -> list[Any]:
    """Return a rule as `GrammarRule` has it."""
    assert not any(rule.options.empty_indices) and not rule.options.keep_all_tokens
    name = rule.origin.name
    expansion: Any = rule.expansion
    kept = [at for at, symbol in enumerate(expansion) if not (symbol.is_term and symbol.filter_out)]
    single = bool(rule.options.expand1 and not rule.alias)
    method = None if name.startswith("_") else rule.alias or name
    return [name, len(rule.expansion), kept, method, single]
