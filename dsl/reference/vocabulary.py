"""Meaning of words that belong to no block: statements, functions, units, multipliers, events."""

from typing import Final

# Word → (how it is written, what it does)
STATEMENTS: Final[dict[str, tuple[str, str]]] = {
    "setting": ("name = expression", "sets a setting of the enclosing block"),
    "block": (
        "kind label { … }",
        "a block; the body may be left out. A second block of the same kind adds to the first: the later value of "
        "each setting counts. Blocks of `dataset` with different names are different datasets. The label need not "
        "be repeated",
    ),
    "let": ("let name = expression", "a constant of this file, at top level"),
    "param": (
        "param name = expression",
        "a constant of all files, which `--set name=value` may replace by a value of the same type and unit",
    ),
    "include": (
        'include "path"',
        "the statements of another spec, relative to this file; later statements override them",
    ),
    "use": (
        'use "path.py", use package.module',
        "declares your own functions: a Python file, relative to this one, or a module on Python's path. Only a "
        "run imports it",
    ),
    "collate": ("collate = link -> link", "the chain of functions that converts documents to batches"),
    "every": (
        "every amount action then action",
        ("a tick: actions that run periodically; `every step` is `every 1 step`"),
    ),
    "on": (
        "on event action then action",
        ("actions that run when an event occurs; `on nan(n)`: after n consecutive non-finite steps"),
    ),
}

FUNCTIONS: Final[dict[str, tuple[str, str]]] = {
    "min": ("min(a, b, …)", "the smallest; all with the same unit"),
    "max": ("max(a, b, …)", "the largest; all with the same unit"),
    "round": ("round(a), round(a, digits)", "rounded to a whole number, or to that many digits; keeps the unit"),
    "ceil": ("ceil(a)", "rounded up; keeps the unit"),
    "floor": ("floor(a)", "rounded down; keeps the unit"),
    "sqrt": ("sqrt(a)", "the square root of a plain number"),
    "env": (
        'env("NAME"), env("NAME", default)',
        "an environment variable; with a default, of the default's type. Commands, settings of trackers and "
        "arguments of your own functions show `env(NAME)` instead of its text, which is read where it is used; "
        "`plain = true` shows the text",
    ),
}

UNITS: Final[dict[tuple[str, ...], str]] = {
    ("step", "steps"): "optimizer steps",
    ("token", "tokens"): "tokens trained on, over all ranks",
    ("epoch", "epochs"): "passes over the training data",
    ("sample", "samples"): "samples of the data; no setting uses them in this version",
    ("s", "min", "h", "d"): "time: seconds, minutes, hours, days",
    ("B", "KiB", "MiB", "GiB"): "bytes, and 2^10, 2^20, 2^30 bytes; `B` means bytes only after a space",
    ("%",): "a share",
}

MULTIPLIERS: Final[dict[tuple[str, ...], str]] = {
    ("k", "M", "B", "T"): "10^3, 10^6, 10^9, 10^12; follows its number without a space: `8k` is 8,000",
    ("Ki", "Mi", "Gi"): "2^10, 2^20, 2^30; follows its number without a space: `8Ki` is 8,192",
}

CONSTANTS: Final[dict[str, str]] = {
    "true": "value of a setting that is `true` or `false`",
    "false": "value of a setting that is `true` or `false`",
    "none": "switches off what a setting controls, where it may be `none`",
    "auto": "derived by the planner; the plan shows the value and why",
}

# Event → (when it occurs, the default behavior)
EVENTS: Final[dict[str, tuple[str, str]]] = {
    "start": ("training begins: before the first step of each start", "nothing"),
    "failure": (
        "the run fails, on each rank that still can; its actions need no other rank: `dump`, `notify`, your own",
        "nothing",
    ),
    "finish": (
        "the budget is used up", "`checkpoint`; added before the actions of the spec if they have none"
    ),
    "sigterm": ("a rank or the launcher got SIGTERM", "`checkpoint then stop`"),
    "sigint": ("Ctrl-C", "`checkpoint then stop`"),
    "sigusr1": (
        "a rank or the launcher got SIGUSR1, which Slurm sends shortly before the time limit of a job",
        "`checkpoint then stop`",
    ),
    "time_limit": ("the time limit `launch.time_limit` is reached", "`checkpoint then stop`"),
    "stop_at": ("the step of `launch.stop_at` or `launch.stop_after` is reached", "`checkpoint then stop`"),
    "stop_file": ("the file of `launch.stop_file` exists", "`checkpoint then stop`"),
    "loss_spike": ("the loss rises far above recent losses; see `alerts.loss_spike`", "only the alert"),
    "loss_above": ("the loss stays above `alerts.loss_above`", "only the alert"),
    "slow": ("steps take much longer than usual; see `alerts.slow`", "only the alert"),
    "starvation": ("ranks wait for data; see `alerts.starvation`", "only the alert"),
    "memory": ("a rank uses more memory than planned; see `alerts.memory`", "only the alert"),
    "disk": ("the run's file system is nearly full; see `alerts.disk`", "only the alert"),
    "stalled": ("some ranks make no progress; see `alerts.stalled`", "only the alert"),
    "nan": ("loss or gradient norm is NaN or infinite; with `nan(n)` in n consecutive steps", "`stop`: the run fails"),
}  # fmt: skip
