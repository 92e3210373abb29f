"""Pages of what is found in sources and collators of the user's own, by `use` and when a run calls them."""

from typing import Final

from .page import Code

PAGES: Final = (
    Code("X221", "a module that cannot be read", """
        `use "parts.py"` names a file, found relative to the spec that says so; `use package.module` a module, found in
        the working folder or where Python finds its modules. It is read, not imported, and has to be Python that is
        saved as UTF-8.
        """, 'use "nowhere.py"'),
    Code("X222", "a module without parts", """
        A module that `use` names is Python without mistakes of syntax, and declares a part or more: a function with
        `@source` or `@collator(takes=…)` above it, both imported from `xtrain`.
        """),
    Code("X223", "a part that is not declared as it must be", """
        What a part takes is read before anything is run: it stands at the top level of its file, names every parameter
        (no `*args`, `**kwargs` or `/`), and is no `async` function. A collator says as strings what kind of value it
        takes and, if that is another, what it gives: rows of token arrays, rows of token tensors, token samples,
        labelled samples, microbatch, or part of a microbatch. Only `pack` makes a microbatch, and only `shard` a part
        of one.
        """),
    Code("X224", "a part whose name is taken", """
        A spec names a part as it names a source, link or function of its own, so it cannot be called like one of those,
        and no two parts can have one name.
        """),
    Code("W204", "a module of which nothing is used", """
        No dataset has a source and `collate` has no link that this module declares: without its `use` the spec would
        say the same.
        """),
    Code("X512", "a source or collator of your own failed", """
        It raised an exception, or gave what it may not: a document that is neither a text nor a dict, a sample with
        other shapes or types than the place in the chain has, a token id that the model has no embedding for. The file
        and the line are those of your code.
        """),
    Code("X713", "code of your own is not what the plan was made of", """
        A plan holds a digest of each module that `use` names, together with your own modules that it imports: what
        runs is what was planned. Plan the spec again after a change.
        """),
)  # fmt: skip
