"""Pages of X1xx, syntax, and X2xx, names and fields."""

from typing import Final

from xtrain.dsl.diagnostics.page import CodePage

PAGES: Final = (
    CodePage("X101", "a word does not fit here", """
        The text is valid up to this word, and cannot continue with it. The hint says what may stand here. Only the
        statement around the word is skipped; the rest of the spec is still checked.
        """, 'batch { sequence = 512 = 8 }', 'batch { sequence = 512 }'),
    CodePage("X102", "a string is never closed", """
        A string in double quotes ends on the line on which it begins. A string over several lines stands between
        triple double quotes.
        """, 'tokenizer "assets/tokenizer', 'tokenizer "assets/tokenizer"'),
    CodePage("X103", "a bracket is never closed", """
        The marked bracket has no closing bracket. For braces, the place where the block must have ended is found by
        indentation, and a note points at it.
        """, 'optimizer adamw { lr = 3e-4, betas = [0.9, 0.95 }', 'optimizer adamw { lr = 3e-4, betas = [0.9, 0.95] }'),
    CodePage("X104", "a bracket closes nothing", """
        There is no open bracket that this one could close: there is one too many, or one was closed too early.
        """, 'batch { sequence = 512 } }', 'batch { sequence = 512 }'),
    CodePage("X105", "the wrong operator between a name and its value", """
        A setting is given its value with `=`. Inside a map, `:` joins a key and its value. There is no comparison, so
        `==` has no meaning.
        """, 'batch { sequence: 512 }', 'batch { sequence = 512 }'),
    CodePage("X106", "a value is missing", """
        After `=`, `->`, `:`, an operator or a comma in a list, a value must follow on the same line.
        """, 'batch { sequence = }', 'batch { sequence = 512 }'),
    CodePage("X107", "the unit or multiplier of a number does not exist", """
        A multiplier follows its number without a space: k M B T are 10^3, 10^6, 10^9, 10^12, and Ki Mi Gi are 2^10,
        2^20, 2^30. A unit may be separated by a space: steps tokens epochs samples, s min h d, B KiB MiB GiB, %.
        """, 'scheduler constant { warmup = 10 stpes }', 'scheduler constant { warmup = 10 steps }'),
    CodePage("X108", "a number is too large or too small", """
        Numbers have at most 300 digits and exponents from -300 to 300.
        """, 'optimizer adamw { lr = 1e-999 }', 'optimizer adamw { lr = 1e-9 }'),
    CodePage("X109", "a character that is not part of the language", """
        Names are made of the letters a-z, digits and `_`; strings stand in double quotes; items end with a new line or
        a comma. Text that was copied from a document often has typographic quotes or unusual spaces.
        """, "tokenizer 'bytes'", 'tokenizer "bytes"'),
    CodePage("X110", "an escape that does not exist", """
        A string knows the escapes \\\\ \\" \\n \\t and \\u{1F600}, the number of a character in hexadecimal digits.
        """, 'workspace { root = "C:\\runs" }', 'workspace { root = "C:\\\\runs" }'),
    CodePage("X111", "two items on one line", """
        A new line or a comma ends an item, also after the closing brace of a block; list elements and arguments are
        separated by commas.
        """, 'batch { sequence = 512 micro = 8 }', 'batch { sequence = 512, micro = 8 }'),
    CodePage("X120", "a file cannot be read", """
        The spec, or a file that it includes, does not exist, is not a regular file, or may not be read. The path of an
        include starts at the folder of the file that includes it. A spec has, with all that it includes, at most 1 MiB
        and 65,536 words and signs.
        """, 'include "no_such_file.xtrain"'),
    CodePage("X121", "a file is not UTF-8 text", """
        Specs are UTF-8, with or without byte-order mark. A file in another encoding has to be saved as UTF-8.
        """),
    CodePage("X130", "blocks are nested too deeply", """
        Blocks are nested dozens of levels deep, where the language has two levels. Most often, closing braces are
        missing.
        """),
    CodePage("X201", "there is no block of this kind", """
        The word that opens a block must be one of the kinds of this version of xtrain.
        """, 'optimzer adamw { lr = 3e-4 }', 'optimizer adamw { lr = 3e-4 }'),
    CodePage("X202", "an unknown name", """
        In an expression, a name stands for a `let` of the same file or a `param` of any file. Where a setting takes a
        number, a string or a quantity, any other name is a mistake.
        """, 'batch { sequence = 4 * sise }', 'let size = 128\nbatch { sequence = 4 * size }'),
    CodePage("X203", "a setting that the block does not have", """
        Every name in a block must be one of its settings: nothing is ever silently ignored. A note lists the settings.
        """, 'batch { sequense = 512 }', 'batch { sequence = 512 }'),
    CodePage("X204", "a required setting is missing", """
        The block lacks a setting that has no default. If the block is written more than once, any of these places may
        give the setting.
        """, 'batch { micro = 8 }', 'batch { sequence = 512, micro = 8 }'),
    CodePage("X205", "a required block is missing", """
        Every spec needs `experiment`, `model`, `tokenizer`, `batch` and `optimizer`. They may stand in an included
        file.
        """, '# an empty spec'),
    CodePage("X206", "something is given twice", """
        In one body of a block, and in one map, each name may stand once. In one file two blocks of the same name, such
        as `dataset web` twice, may not give the same setting: one of the two values would be lost. To override a value
        of an included spec, write the block again: the later value of each setting counts.
        """, 'batch { sequence = 512, sequence = 1024 }', 'batch { sequence = 1024 }'),
    CodePage("X207", "a label is missing or one too many", """
        Most blocks take one label: the name of the experiment or dataset, the family of the model, the kind of the
        optimizer, the size of an axis. `batch`, `parallel` and the like take none.
        """, 'optimizer { lr = 3e-4 }', 'optimizer adamw { lr = 3e-4 }'),
    CodePage("X208", "a setting of another kind of block", """
        Some settings exist only for some labels: `experts` only in mixture-of-experts families, `decay` only in the
        schedule `wsd`.
        """, 'scheduler cosine { decay = 10% }', 'scheduler wsd { decay = 10% }'),
    CodePage("X209", "not supported yet", """
        The word is reserved, and this version of xtrain does not implement it. It is refused rather than ignored.
        """, 'loss kl { }'),
    CodePage("X210", "a block where a setting belongs, or the other way round", """
        A setting is `name = value`, a block is `kind label { … }` without `=`. The axes inside `parallel` are blocks:
        their size is the label.
        """, 'parallel { tp = 2 }', 'parallel { tp 2 }'),
    CodePage("X211", "a constant is defined twice", """
        A `let` or `param` is defined once. A `param` of an included file gets another value by `--set name=value`.
        """, 'let width = 512\nlet width = 1024', 'let width = 512'),
    CodePage("X212", "a constant is defined in terms of itself", """
        Constants may refer to each other in any order, but not in a cycle. The hint shows the cycle.
        """, 'let a = b + 1\nlet b = a', 'let a = b + 1\nlet b = 1'),
    CodePage("X213", "a spec includes itself", """
        An include leads back, directly or through other files, to the file it stands in. The hint shows the cycle.
        """),
    CodePage("X214", "an action or event that does not exist", """
        `every AMOUNT` and `on EVENT` are followed by actions, joined by `then`.
        """, 'every 10 steps lgo', 'every 10 steps log'),
    CodePage("X216", "a statement inside a block", """
        include, use, let, param, every and on stand at the top level of a file, not inside braces. Several values of a
        setting, `optimizer.lr in [1e-3, 3e-3]`, stand in `sweep`.
        """, 'batch {\n  let size = 8\n  sequence = 512\n}', 'let size = 8\nbatch { sequence = 64 * size }'),
    CodePage("X217", "a path of --set, or of a sweep, that does not exist", """
        The path of `--set`, and of what a `sweep` varies, names a `param`, or a block and one of its settings:
        `optimizer.lr`, `dataset.web.holdout`, `model.router.aux_loss`. The path of an axis, `parallel.tp`, sets its
        size. A tick is addressed by its action: `every.eval.web`, `every.checkpoint`, and `every.log.1` if two ticks
        have the same action.
        """),
    CodePage("X218", "a --set without path or value", """
        `--set` takes `path.to.setting=value`. A value with spaces needs quotes for the shell:
        `--set "experiment.budget=20 steps"`.
        """),
    CodePage("X219", "a source or link that does not exist, or a function in the wrong place", """
        A dataset's `source` and the links of `collate` are those that are built in, and your own sources and collators
        from modules that `use` names. The label of `loss`, `optimizer` or `scheduler` may name a loss, optimizer or
        schedule of your own, and no function of another kind.
        """, 'collate = to_tensor -> flaten', 'collate = to_tensor -> flatten'),
    CodePage("X220", "the arguments of a source or link are wrong", """
        `python_stdlib()` takes no arguments; `text("…")` and `jsonl("…")` take one or more paths or patterns, each a
        string; a source or collator of your own takes the parameters of its function. A source is always
        written with parentheses.
        """, 'dataset web { source = text() }', 'dataset web { source = text("data/*.txt") }'),
    CodePage("X225", "a wrong number after an event", """
        `on nan(n)` says what happens at the n-th step in a row whose loss or gradient norm is NaN or infinite: n is one
        whole number, at least 1. Other events take no number.
        """, 'on nan(2, 3) skip', 'on nan(3) skip'),
    CodePage("X226", "an action with the wrong brackets", """
        `notify("…")` takes one string in parentheses: a shell command. The string may be composed of constants. Other
        actions take a name, or settings in braces, and no parentheses.
        """, 'on finish notify "./page-me.sh"', 'on finish notify("./page-me.sh")'),
    CodePage("X227", "something that a server has no use for", """
        A spec with `serve` is that of a training server. What is trained on, by which loss, how far and how often comes
        from its clients, so the spec has no dataset, batch, optimizer, budget or trigger; it has a model, the largest
        adapter that a client may ask for, and how the model is spread over ranks.
        """, "serve { }\noptimizer adamw { lr = 3e-4 }"),
)  # fmt: skip
