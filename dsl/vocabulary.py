"""What the words of the language mean that belong to no block: statements, functions, units, multipliers, events."""

from typing import Final

# Word → (how it is written, what it does)
STATEMENTS: Final[dict[str, tuple[str, str]]] = {
    "setting": ("name = expression", "gives a setting of the enclosing block"),
    "block": (
        "kind label { … }",
        "a block; the body may be left out. A second block of the same kind adds to the first: later settings win, one "
        "by one. Blocks of `dataset` with different names are different things. Where a block has been given its label "
        "once, it need not be repeated",
    ),
    "let": ("let name = expression", "a constant of this file, at top level"),
    "param": (
        "param name = expression",
        "a constant that all files know and `--set name=value` may replace, by a value of the same type and unit",
    ),
    "include": (
        'include "path"',
        "the statements of another spec, found relative to this file; later statements override it",
    ),
    "use": (
        'use "path.py", use package.module',
        "makes sources and collators of your own known: a file, found relative to this one, or a module that Python "
        "finds. It is read, and imported only by a run",
    ),
    "collate": ("collate = link -> link", "the chain that makes rows of documents"),
    "every": ("every amount action then action", "a tick; `every step` is `every 1 step`"),
    "on": ("on event action then action", "a reaction to an event; `on nan(n)`: to n in a row"),
}

FUNCTIONS: Final[dict[str, tuple[str, str]]] = {
    "min": ("min(a, b, …)", "the smallest; all with the same unit"),
    "max": ("max(a, b, …)", "the largest; all with the same unit"),
    "round": ("round(a), round(a, digits)", "the nearest number, of whole digits or of so many; the unit stays"),
    "ceil": ("ceil(a)", "rounded up; the unit stays"),
    "floor": ("floor(a)", "rounded down; the unit stays"),
    "sqrt": ("sqrt(a)", "the root of a plain number"),
    "env": ('env("NAME"), env("NAME", default)', "an environment variable; with a default, of the default's type"),
}

UNITS: Final[dict[tuple[str, ...], str]] = {
    ("step", "steps"): "optimizer steps",
    ("token", "tokens"): "tokens trained on, over all ranks",
    ("epoch", "epochs"): "passes over the training data",
    ("sample", "samples"): "samples of the data; no setting counts them in this version",
    ("s", "min", "h", "d"): "time: seconds, minutes, hours, days",
    ("B", "KiB", "MiB", "GiB"): "bytes, and 2^10, 2^20, 2^30 of them; apart from its number, `B` means bytes",
    ("%",): "a share",
}

MULTIPLIERS: Final[dict[tuple[str, ...], str]] = {
    ("k", "M", "B", "T"): "10^3, 10^6, 10^9, 10^12; touches its number: `8k` is 8,000",
    ("Ki", "Mi", "Gi"): "2^10, 2^20, 2^30; touches its number: `8Ki` is 8,192",
}

CONSTANTS: Final[dict[str, str]] = {
    "true": "yes, of a setting that is `true` or `false`",
    "false": "no, of a setting that is `true` or `false`",
    "none": "switches off what a setting controls, where it may be `none`",
    "auto": "derived by the planner; the plan shows what it came to and why",
}

# Event → (when it occurs, what happens unless the spec says otherwise)
EVENTS: Final[dict[str, tuple[str, str]]] = {
    "finish": (
        "the budget is used up", "`checkpoint`; it is added in front of what the spec says if that has none"
    ),
    "sigterm": ("a rank or the launcher got SIGTERM", "`checkpoint then stop`"),
    "sigint": ("Ctrl-C", "`checkpoint then stop`"),
    "sigusr1": (
        "a rank or the launcher got SIGUSR1, as Slurm sends when a job's time is nearly over", "`checkpoint then stop`"
    ),
    "time_limit": ("the time of `launch.time_limit` is over", "`checkpoint then stop`"),
    "stop_at": ("the step of `launch.stop_at` or `launch.stop_after` is reached", "`checkpoint then stop`"),
    "stop_file": ("there is a file where `launch.stop_file` says", "`checkpoint then stop`"),
    "loss_spike": ("the loss rises far above the last ones; see `alerts.loss_spike`", "the alert alone"),
    "slow": ("steps take much longer than before; see `alerts.slow`", "the alert alone"),
    "starvation": ("ranks wait for rows; see `alerts.starvation`", "the alert alone"),
    "memory": ("a rank holds more than is planned; see `alerts.memory`", "the alert alone"),
    "disk": ("the run's file system is nearly full; see `alerts.disk`", "the alert alone"),
    "stalled": ("nothing gets on, because of some ranks; see `alerts.stalled`", "the alert alone"),
    "nan": ("loss or gradient norm is not a number, in n steps in a row with `nan(n)`", "`stop`, as a failure"),
}  # fmt: skip
