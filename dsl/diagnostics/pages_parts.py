"""Pages of what is found in sources and collators of the user's own, by `use` and when a run calls them."""

from typing import Final

from xtrain.dsl.diagnostics.page import CodePage

PAGES: Final = (
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
