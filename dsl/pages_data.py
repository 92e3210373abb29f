"""Pages of what is found about data when a spec is planned or run: X5xx and W5xx."""

from typing import Final

from .page import Code

PAGES: Final = (
    Code("X501", "an evaluation of an unknown dataset", """
        `eval NAME` evaluates the held-out part of a dataset of this spec.
        """, "every 100 steps eval webb  # the dataset is called web", "every 100 steps eval web"),
    Code("X502", "nothing to train on", """
        A spec needs a dataset that is not held out whole, and a mixture needs the weight of one.
        """, "dataset web { source = python_stdlib(), holdout = 100% }",
        "dataset web { source = python_stdlib(), holdout = 1% }"),
    Code("X503", "several datasets to train on", """
        How much is learned from each of several datasets is said by `mixture`: a weight a name. Datasets that are only
        evaluated are held out whole.
        """, 'dataset web { source = text("web/*.txt") }\ndataset code { source = text("code/*.txt") }',
        'dataset web { source = text("web/*.txt") }\ndataset code { source = text("code/*.txt") }\n'
        "mixture { web = 0.8, code = 0.2 }"),
    Code("X504", "an evaluation of a dataset without hold-out", """
        `eval` uses the documents that training never sees; a dataset without hold-out has none.
        """, "dataset web { source = python_stdlib() }\nevery 100 steps eval web",
        "dataset web { source = python_stdlib(), holdout = 1% }\nevery 100 steps eval web"),
    Code("X505", "the tokenizer cannot be read", """
        The folder or file of the tokenizer is missing or not one. Its size is needed for the embedding; give
        `model.vocab` to plan without it.
        """, 'tokenizer "no/such/folder"', "tokenizer bytes"),
    Code("X506", "the vocabulary is smaller than the tokenizer", """
        Every token id needs a row of the embedding.
        """, "tokenizer bytes\nmodel qwen3 { dim = 192, layers = 4, heads = 6, vocab = 100 }",
        "tokenizer bytes\nmodel qwen3 { dim = 192, layers = 4, heads = 6 }"),
    Code("X507", "data that cannot be used as given", """
        The plan finds what lies here and is something else: a pattern that matches folders alone, a file where a
        folder is named, a separator that is no token, conversations or pairs for which neither the dataset nor the
        tokenizer has a template. The run finds what is in the files: none that matches a pattern (patterns start at
        the folder the command is run in), a damaged one, records without the field that is read, and the like.
        """, 'tokenizer bytes\ndataset qa { source = jsonl("qa.jsonl"), prompt = "question", response = "answer" }',
        'tokenizer bytes\n'
        'dataset qa { source = jsonl("qa.jsonl"), prompt = "question", response = "answer", template = "plain" }'),
    Code("X508", "the links of collate do not fit", """
        Each link takes what the one before it gives: rows of token arrays, tensors, samples, labelled samples, rows.
        """, "collate = flatten -> to_tensor -> shift_tokens -> pack(sequential)",
        "collate = to_tensor -> flatten -> shift_tokens -> pack(sequential)"),
    Code("X509", "a group for documents packed in their order", """
        `group` says how many documents are packed together, in another order than they come in. `sequential` keeps
        their order.
        """, "collate = to_tensor -> flatten -> shift_tokens -> pack(sequential, group = 1k)",
        "collate = to_tensor -> flatten -> shift_tokens -> pack(multipack, group = 1k)"),
    Code("X513", "a weight of an unknown dataset", """
        The names in `mixture`, and in the `mix` of a phase, are those of datasets of this spec. `temperature` is a
        setting of `mixture`, so no dataset in one can be called that.
        """, "dataset web { source = python_stdlib() }\nmixture { webb = 1 }",
        "dataset web { source = python_stdlib() }\nmixture { web = 1 }"),
    Code("X514", "every weight is zero", """
        In every phase some dataset has to be trained on. A dataset that `mix` does not name keeps its weight of
        `mixture`, and a weight of 0 stays 0 at any temperature.
        """, "dataset web { source = python_stdlib() }\nmixture { web = 0 }",
        "dataset web { source = python_stdlib() }\nmixture { web = 1 }"),
    Code("X515", "a weight of a dataset that is held out whole", """
        With `holdout = 100%` every document is kept for evaluation, and nothing is left to train on.
        """, "dataset web { source = python_stdlib(), holdout = 100% }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 1, noise = 1 }",
        "dataset web { source = python_stdlib(), holdout = 1% }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 1, noise = 1 }"),
    Code("X516", "the form of records contradicts itself", """
        Records are plain text in the field `text`, conversations in the field `messages`, or pairs of `prompt` and
        `response`: one of the three. `train_on` and `template` are for the last two; plain text is trained on whole.
        """, 'dataset qa { source = jsonl("qa.jsonl"), prompt = "question" }',
        'dataset qa { source = jsonl("qa.jsonl"), prompt = "question", response = "answer" }'),
    Code("X517", "a field of a source that has none", """
        Records of jsonl, parquet, arrow, huggingface and of your own functions have fields. A text file is a document
        as a whole, and so is a module of the standard library or one that is made; token ids are tokens already.
        """, 'dataset web { source = text("web/*.txt"), text = "content" }',
        'dataset web { source = jsonl("web/*.jsonl"), text = "content" }'),
    Code("X518", "weights in epochs beside plain ones", """
        A plain weight is a share of the rows. In epochs, a weight says how often each epoch of the mixture takes all
        rows of a dataset, and its share follows from how many these are. The two cannot be added up: a mixture has the
        one or the other, and so has a phase together with what it keeps of `mixture`.
        """, "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 0.5 }",
        "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 0.5 epochs }"),
    Code("X519", "a temperature with weights in epochs", """
        The temperature brings shares closer together or further apart. Weights in epochs are kept as they are.
        """, "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 1 epoch, temperature = 2 }",
        "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 2 epochs, noise = 1 epoch }"),
    Code("W501", "no file matches yet", """
        Nothing on this machine matches the pattern of a dataset, or a folder, template or checkpoint that the spec
        names is not there. The plan can be made; the run will look again. What is there and is something else is an
        error (X507, X720).
        """, 'dataset web { source = text("no/such/*.txt") }'),
    Code("W502", "no rows to balance", """
        `pack(best_fit)` deals the rows of a step to the data ranks by what attention costs in them. With one data rank,
        or one row a rank and step, there is nothing to choose; the rows are those of `pack(multipack)`.
        """, "collate = to_tensor -> flatten -> shift_tokens -> pack(best_fit)",
        "collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)"),
    Code("W505", "the tokenizer cannot be read yet", """
        The plan takes `model.vocab` for the size of the embedding; the run will need the tokenizer.
        """, 'tokenizer "no/such/folder"'),
    Code("W506", "a dataset that nothing uses", """
        It has no weight in `mixture` or in a phase, and no `eval` names it: nothing of it is read.
        """, "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\nmixture { web = 1 }",
        "dataset web { source = python_stdlib() }\ndataset noise { source = synthetic() }\n"
        "mixture { web = 1, noise = 1 }"),
)  # fmt: skip
