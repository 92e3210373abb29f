"""Pages of X3xx, types and units, and of the warnings of the text itself."""

from typing import Final

from xtrain.dsl.diagnostics.page import CodePage

PAGES: Final = (
    CodePage("X301", "a value of the wrong type", """
        Types are not converted: a number in quotes is a string, 1 is not `true`, and a name is not a string. The one
        exception is a whole number where a floating-point number is expected.
        """, 'batch { sequence = "512" }', 'batch { sequence = 512 }'),
    CodePage("X302", "a unit is missing, wrong, or not wanted", """
        A quantity names its unit, so that 10 steps and 10 tokens cannot be confused; a plain number has none. The hint
        shows what the setting takes.
        """, 'experiment try { budget = 600 }', 'experiment try { budget = 600 steps }'),
    CodePage("X303", "units that do not go together", """
        Only quantities of the same unit can be added, subtracted or compared; a quantity can be multiplied and divided
        by a plain number; two quantities of the same unit divide to a plain number; a percentage of a quantity is a
        quantity.
        """, 'experiment try { budget = 10 steps + 20 tokens }', 'experiment try { budget = 10 steps + 20 steps }'),
    CodePage("X304", "a value out of range", """
        The value has the right type and lies outside the range that the setting allows. A name that becomes a folder
        name, as that of an experiment, a dataset or a run, must not be empty, contain `/`, or be `.` or `..`.
        """, 'optimizer adamw { lr = -3e-4 }', 'optimizer adamw { lr = 3e-4 }'),
    CodePage("X305", "a word that the setting does not accept", """
        The setting takes one of a fixed list of words, written with or without quotes.
        """, 'parallel { cp 4 { fold = al } }', 'parallel { cp 4 { fold = all } }'),
    CodePage("X306", "not a whole number", """
        Widths, counts and numbers of steps are whole. Division gives a whole number only if it comes out even; round
        the others with `round`, `ceil`, `floor`, or divide by `//`.
        """, 'batch { sequence = 1000 / 3 }', 'batch { sequence = 1000 // 3 }'),
    CodePage("X307", "arithmetic without a valid result", """
        Division by zero, the root of a negative number, a result of more than 300 digits, or an expression nested
        hundreds of levels deep.
        """, 'batch { sequence = 512 / 0 }', 'batch { sequence = 512 / 2 }'),
    CodePage("X308", "a function with the wrong arguments", """
        min(a, b, …), max(a, b, …), round(a) or round(a, digits), ceil(a), floor(a), sqrt(a), env("NAME", default).
        """, 'batch { sequence = min(512) }', 'batch { sequence = min(512, 1024) }'),
    CodePage("X309", "an operator on something that is not a number", """
        Operators work on numbers and quantities. The one exception joins two strings: `"data/" + "web"`.
        """, 'batch { sequence = 2 * "512" }', 'batch { sequence = 2 * 512 }'),
    CodePage("X310", "a param set to another type", """
        The default of a `param` fixes its type and unit; `--set` must give a value of the same type and unit.
        """),
    CodePage("W201", "an unused let", """
        Nothing refers to this constant. Either it is left over, or a setting that should use it does not.
        """, 'let width = 512', 'let length = 512\nbatch { sequence = length }'),
    CodePage("W202", "an unused param", """
        Nothing refers to this parameter, so setting it changes nothing.
        """, 'param width = 512', 'param length = 512\nbatch { sequence = length }'),
    CodePage("W203", "a file is included twice", """
        The second include has no effect: everything in the file has been included already.
        """),
    CodePage("W205", "a setting that one file gives twice", """
        Two blocks of one file give the same setting, and the later value counts. This is how a spec overrides an
        included file; within one file the first value has no effect.
        """, 'optimizer adamw { lr = 3e-4 }\noptimizer adamw { lr = 1e-3 }', 'optimizer adamw { lr = 1e-3 }'),
)  # fmt: skip
