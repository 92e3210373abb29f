"""Pages of what is found about data when a spec is planned or run: X5xx and W5xx."""

from typing import Final

from xtrain.dsl.diagnostics.page import CodePage

PAGES: Final = (
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
