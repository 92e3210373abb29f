"""Pages of diagnostic codes: X1xx syntax, X2xx names, X3xx types and units, X5xx data, and user functions."""

import textwrap
from typing import Final

from attrs import frozen


@frozen
class CodePage:
    """A stable code. meaning: why it is reported. wrong: text that causes it; right: what to write instead.

    An empty `wrong` means that no text alone causes it.
    """

    code: str
    title: str
    meaning: str
    wrong: str = ""
    right: str = ""

    def page(self) -> str:
        """The page for people."""
        lines = [f"{self.code}: {self.title}", "", *_wrapped(self.meaning)]
        for heading, text in (("Wrong", self.wrong), ("Right", self.right)):
            if text:
                lines += ["", f"{heading}:", "", *(f"    {line}".rstrip() for line in text.strip("\n").split("\n"))]
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    lines: list[str] = []
    for paragraph in paragraphs:
        lines += ([""] if lines else []) + textwrap.wrap(paragraph, width=100, break_on_hyphens=False)
    return lines


SYNTAX_PAGES: Final = (
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


VALUE_PAGES: Final = (
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


DATA_PAGES: Final = (
    CodePage("X501", "an evaluation of an unknown dataset", """
        `eval NAME` evaluates the held-out part of a dataset of this spec.
        """, "every 100 steps eval webb  # the dataset is called web", "every 100 steps eval web"),
    CodePage("X502", "nothing to train on", """
        A spec needs a dataset with a `holdout` below 100%, and `mixture`, if there is one, must give it a weight.
        """, "dataset web { source = python_stdlib(), holdout = 100% }",
        "dataset web { source = python_stdlib(), holdout = 1% }"),
    CodePage("X503", "several datasets to train on", """
        With several datasets, `mixture` gives a weight to each dataset that is trained on. Datasets that are only
        evaluated have `holdout = 100%`.
        """, 'dataset web { source = text("web/*.txt") }\ndataset code { source = text("code/*.txt") }',
        'dataset web { source = text("web/*.txt") }\ndataset code { source = text("code/*.txt") }\n'
        "mixture { web = 0.8, code = 0.2 }"),
    CodePage("X504", "an evaluation of a dataset without hold-out", """
        `eval` uses the documents that training never sees; a dataset without hold-out has none.
        """, "dataset web { source = python_stdlib() }\nevery 100 steps eval web",
        "dataset web { source = python_stdlib(), holdout = 1% }\nevery 100 steps eval web"),
    CodePage("X505", "the tokenizer cannot be read", """
        The folder or file is missing, or is not a tokenizer. The size of the tokenizer's vocabulary is needed for the
        embedding; give `model.vocab` to plan without the tokenizer.
        """, 'tokenizer "no/such/folder"', "tokenizer bytes"),
    CodePage("X506", "the vocabulary is smaller than the tokenizer", """
        Every token id needs a row of the embedding. A model in a folder gets them by `vocab = tokenizer`; new rows of
        the embedding and the head begin as the mean of the others.
        """, "tokenizer bytes\nmodel qwen3 { dim = 192, layers = 4, heads = 6, vocab = 100 }",
        "tokenizer bytes\nmodel qwen3 { dim = 192, layers = 4, heads = 6 }"),
    CodePage("X507", "data that cannot be used as given", """
        The planner reports what it can see without reading the files: a pattern that matches only folders, a file where
        a folder is named, a separator that is not a token id, conversations or pairs for which neither the dataset nor
        the tokenizer has a chat template. The run reports the rest: no file matches a pattern (patterns are relative to
        the working folder), a file is damaged, records lack the field that is read, and the like.
        """, 'tokenizer bytes\ndataset qa { source = jsonl("qa.jsonl"), prompt = "question", response = "answer" }',
        'tokenizer bytes\n'
        'dataset qa { source = jsonl("qa.jsonl"), prompt = "question", response = "answer", template = "plain" }'),
    CodePage("X508", "the links of collate do not fit", """
        The input of each link must be the output of the link before it: rows of token arrays, rows of token tensors,
        token samples, labelled samples, microbatch.
        """, "collate = flatten -> to_tensor -> shift_tokens -> pack(sequential)",
        "collate = to_tensor -> flatten -> shift_tokens -> pack(sequential)"),
    CodePage("X509", "a group with sequential packing", """
        `group` says how many documents are reordered and packed together. `sequential` keeps the order of the
        documents, and has no groups.
        """, "collate = to_tensor -> flatten -> shift_tokens -> pack(sequential, group = 1k)",
        "collate = to_tensor -> flatten -> shift_tokens -> pack(multipack, group = 1k)"),
    CodePage("X513", "a weight of an unknown dataset", """
        The names in `mixture`, and in the `mix` of a phase, are those of datasets of this spec. `temperature` is a
        setting of `mixture`, so a dataset called `temperature` cannot be part of a mixture.
        """, "dataset web { source = python_stdlib() }\nmixture { webb = 1 }",
        "dataset web { source = python_stdlib() }\nmixture { web = 1 }"),
    CodePage("X514", "every weight is zero", """
        Every phase must train on at least one dataset. A dataset that `mix` does not name keeps its weight of
        `mixture`, and a weight of 0 stays 0 at any temperature.
        """, "dataset web { source = python_stdlib() }\nmixture { web = 0 }",
        "dataset web { source = python_stdlib() }\nmixture { web = 1 }"),
    CodePage("X515", "a weight of a dataset that is held out completely", """
        With `holdout = 100%` every document is kept for evaluation, and nothing is left to train on.
        """, "dataset web { source = python_stdlib(), holdout = 100% }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 1, noise = 1 }",
        "dataset web { source = python_stdlib(), holdout = 1% }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 1, noise = 1 }"),
    CodePage("X516", "contradictory settings of a record's format", """
        Records are plain text in the field `text`, conversations in the field `messages`, pairs of `prompt` and
        `response`, or questions with `choices`: one of the four. `train_on` and `template` are for conversations and
        pairs; all of a plain text is trained on. Questions are evaluated only, with `holdout = 100%`.
        """, 'dataset qa { source = jsonl("qa.jsonl"), prompt = "question" }',
        'dataset qa { source = jsonl("qa.jsonl"), prompt = "question", response = "answer" }'),
    CodePage("X517", "a field of a source that has none", """
        Records of jsonl, parquet, arrow, huggingface and of your own sources have fields. `text`, `python_stdlib` and
        `synthetic` give whole documents, and `tokens` gives token ids: they have no fields. `choices` is a list of
        texts, which only jsonl and your own sources have.
        """, 'dataset web { source = text("web/*.txt"), text = "content" }',
        'dataset web { source = jsonl("web/*.jsonl"), text = "content" }'),
    CodePage("X518", "weights in epochs beside plain weights", """
        A plain weight is a share of the rows. A weight in epochs says how often each epoch of the mixture takes all
        rows of a dataset; its share follows from the number of these rows. The two cannot be mixed: all weights of a
        mixture are of one kind, and so are all weights of a phase, including those that it keeps from `mixture`.
        """, "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 0.5 }",
        "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 0.5 epochs }"),
    CodePage("X519", "a temperature with weights in epochs", """
        The temperature makes shares more or less even. Weights in epochs are exact numbers, to which no temperature
        applies.
        """, "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 1 epoch, temperature = 2 }",
        "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 1 epoch }"),
    CodePage("X520", "the config.json of a model cannot be read", """
        `model "folder"` takes the family and the sizes of a model from the `config.json` of a folder, as transformers
        writes it; a label in quotes that is no family is the path of one. Where it is both, write `"./llama"` for the
        folder, or the family without quotes. `hub("organisation/name", revision = "…")` is a folder in the cache of
        huggingface_hub (HF_HUB_CACHE, or HF_HOME), which must have that revision: xtrain never downloads anything.
        """, 'model "no/such/folder" { }', 'model "models/Llama-3.2-1B" { }'),
    CodePage("X521", "a model of a family that xtrain does not have", """
        `model_type` and `architectures` of a `config.json` say which code computes a model. xtrain has the same
        computation for some of them, and for no others.
        """),
    CodePage("X522", "a key of config.json that xtrain does not support", """
        A family knows which keys of a `config.json` give its settings, which have the one value with which it computes
        the same as transformers, and which change nothing. Every other key that is not null is refused, as ignoring one
        may give a model that is almost right: quantised weights, biases, windows, scaled positions.
        """),
    CodePage("X523", "a setting that contradicts config.json", """
        What a spec says beside `model "folder"` must be what the file says. What may differ: the kernel of `attention`,
        how weights are drawn, and what routers add to the loss.
        """),
    CodePage("X524", "the weights of a folder do not fit", """
        The weights are `model.safetensors`, or the files that `model.safetensors.index.json` names. Every parameter of
        the model must be there, in its shape and as bf16, fp16, fp32 or fp64, and every tensor must be one of the
        model. Files must be complete, and no value NaN, infinite or too large for the format of the parameters. Pickles
        (`.bin`, `.pt`) are refused: they can run any code when they are read. `weights = none` takes the shape of the
        model alone.
        """),
    CodePage("X525", "a model that cannot be exported", """
        `xtrain export` and the action `export` write a folder that transformers reads. The family must have a form
        there, as those of xtrain that `model "folder"` takes do; one of your own has none. What a spec changes of a
        family, such as biases that balance routers, must be something that a `config.json` of that model type can say.
        """),
    CodePage("X526", "shares of a step that are not whole rows", """
        With `mixture { exact = true }` every step takes exactly the shares that the weights say, so the share of each
        dataset in the rows of a step must be a whole number of rows, in every phase and in every step: there is no ramp
        of the rows. Weights in epochs depend on the data and are never exact in a step.
        """, "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2, noise = 1, exact = true }\nbatch { sequence = 256, rows = 8 }",
        "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 3, noise = 1, exact = true }\nbatch { sequence = 256, rows = 8 }"),
    CodePage("X527", "a dataset without what the loss reads", """
        Losses of preferences compare the two answers of pairs, those of policies read `logprobs` and `advantages` along
        the tokens, and kto a `label` of each document. Every dataset that is trained on must have them. A
        loss of sequences is of whole documents: those that are longer than a row cannot be split.
        """, 'dataset prefs { source = jsonl("prefs.jsonl"), prompt = "prompt", response = "answer" }\nloss simpo',
        'dataset prefs { source = jsonl("prefs.jsonl"), prompt = "prompt", chosen = "good", rejected = "bad" }\n'
        "loss simpo"),
    CodePage("X528", "a rollout that does not fit", """
        A run with `rollout { … }` samples what it learns from: `reward` says how good each completion is, and the loss
        reads the advantages that are made of that. A group has several completions, which fill a row together with
        their prompts, so each prompt has a row of its own, `pack(single)`. Datasets need a prompt and an answer that is
        never cut. What a rollout does not make, log-probabilities of a reference among it, no loss can read.
        """, 'dataset sums { source = jsonl("sums.jsonl"), prompt = "q", response = "a", oversized = skip }\n'
        "collate = to_tensor -> flatten -> shift_tokens -> pack(single)\nloss grpo\nreward exact_answer\n"
        "rollout { group = 1, max_tokens = 20 }",
        'dataset sums { source = jsonl("sums.jsonl"), prompt = "q", response = "a", oversized = skip }\n'
        "collate = to_tensor -> flatten -> shift_tokens -> pack(single)\nloss grpo\nreward exact_answer\n"
        "rollout { group = 8, max_tokens = 20 }"),
    CodePage("W501", "no file matches yet", """
        No file on this machine matches the pattern of a dataset, or a folder, template or checkpoint that the spec
        names does not exist. The plan can be made without it; the run needs it. A path that exists and is something
        else is an error (X507, X720).
        """, 'dataset web { source = text("no/such/*.txt") }'),
    CodePage("W502", "no rows to balance", """
        `pack(best_fit)` distributes the rows of a step over the data ranks so that attention costs every rank about the
        same. With one data rank, or one row per rank and step, there is nothing to distribute, and `pack(multipack)`
        gives the same rows.
        """, "collate = to_tensor -> flatten -> shift_tokens -> pack(best_fit)",
        "collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)"),
    CodePage("W505", "the tokenizer cannot be read yet", """
        The plan takes the size of the embedding from `model.vocab`; the run will need the tokenizer.
        """, 'tokenizer "no/such/folder"'),
    CodePage("W506", "a dataset that nothing uses", """
        The dataset has no weight in `mixture` or in a phase, and no `eval` names it, so it is never read.
        """, "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\nmixture { web = 1 }",
        "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 1, noise = 1 }"),
    CodePage("W507", "a marker of a template is not one token", """
        The template sets turns apart with a text such as `<|im_start|>` that the tokenizer does not know as a token: it
        becomes the tokens of its characters. Where the template is that of the model, files beside `tokenizer.json`
        that declare the token are probably missing: tokenizer_config.json, added_tokens.json or
        special_tokens_map.json.
        """),
)  # fmt: skip


PART_PAGES: Final = (
    CodePage("X221", "a module that cannot be read", """
        `use "parts.py"` names a file, relative to the spec; `use package.module` names a module in the working folder
        or on Python's path. xtrain reads the file without importing it; it must be Python, saved as UTF-8.
        """, 'use "nowhere.py"'),
    CodePage("X222", "a module that declares nothing", """
        A module that `use` names must be valid Python and declare at least one function with a decorator that is
        imported from `xtrain`: `@source`, `@collator(takes=…)`, `@loss`, `@optimizer(state=…)`, `@schedule`, `@action`,
        `@hook("…")`, `@step`, `@evaluation_step`, `@family` or `@layer`, or one class with `@tracker`.
        """),
    CodePage("X223", "a function of your own with a wrong declaration", """
        xtrain reads the declaration without running the code, so the function must stand at the top level of its file,
        name every parameter (no `*args`, `**kwargs` or `/`), and must not be `async`. A collator gives the kind of its
        input (`takes`) and, if different, of its output (`gives`) as strings: rows of token arrays, rows of token
        tensors, token samples, labelled samples, microbatch, or part of a microbatch. Only `pack` makes a microbatch,
        and only `shard` a part of a microbatch. An optimizer lists what it keeps for each parameter, `state` and
        `scalars`, as strings. A hook names its place, and what it changes there if anything. The defaults of losses,
        optimizers, schedules, actions and hooks are plain values, as the plan contains them. A default is of the type
        that its parameter is annotated with, and within its bounds. Names of parameters are those that a spec can set:
        the letters a-z, digits and `_`, and not `true`, `false`, `none` or `auto`. Of a family and its layers
        the body is read too: assignments, `if` and `return` with pieces of a block, or with operations whose shapes,
        memory and FLOPs are known; tensor parallelism must divide a layer so that its ranks compute what one alone
        would. A tracker is a class with
        a method `open(self, context, …)` and at least one of `metrics(self, record)` and `event(self, record)`; its
        settings are the other parameters of `open`.
        """),
    CodePage("X224", "a function of your own whose name is taken", """
        A function of your own cannot have the name of what is built in where it is used: a source, link or function, or
        a loss, a model family, an optimizer, a schedule, an action or a tracker. No two of yours can have the same
        name.
        """),
    CodePage("W204", "a module of which nothing is used", """
        No dataset, no link of `collate`, no block and no action uses anything that this module declares, so its `use`
        has no effect.
        """),
    CodePage("W206", "an installed package with components that cannot be loaded", """
        A Python package that is installed beside xtrain offers components (entry point `xtrain.components`), and its
        module raised an exception when it was imported, or defines a component that there is already. The spec is
        checked without what the package offers.
        """),
    CodePage("X512", "a function of your own failed", """
        Your function raised an exception or returned an invalid value: a document that is neither a string nor a dict,
        a sample with the wrong shapes or types, a token id outside the vocabulary, a loss that is no finite number for
        each token by itself, activations of another shape or number format from a layer, an optimizer that keeps
        something else than it declares, a factor of the learning rate that is negative or not finite, metrics that are
        no numbers; or it has changed what it does not declare to change. The file and the line are those of your code.
        """),
    CodePage("X713", "your own code has changed since the plan was made", """
        A plan holds a digest of each module that `use` names, together with your own modules that it imports, so that
        only the planned code is run. The same holds for environment variables among the arguments of your own code.
        Plan the spec again after a change.
        """),
)  # fmt: skip
