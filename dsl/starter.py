"""Starters of `xtrain init`: annotated specs in `starters/`, each valid as it is, renamed for the user.

Templates of specs for jobs are in `starters/jobs/`, named after the job and the records that it needs.
"""

import re
from pathlib import Path
from typing import Final

from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.syntax.tree import CONSTANTS
from xtrain.lazy_attrs import frozen

_FOLDER: Final = Path(__file__).with_name("starters")
_ORDER: Final = ("quickstart", "curriculum", "ddp", "fsdp", "moe", "cluster")


@frozen
class Starter:
    """A starter. about: its first sentence. text: the whole spec, named after the starter."""

    name: str
    about: str
    text: str

    def named(self, name: str, file: str) -> str:
        """Return the spec with another name for its experiment and another file in the commands of its comments."""
        text = re.sub(rf"^experiment {self.name}\b", f"experiment {name}", self.text, flags=re.MULTILINE)
        return re.sub(rf"\b{self.name}\.xtrain\b", lambda _: file, text)


def starters() -> dict[str, Starter]:
    """Return name → starter, the simplest first."""
    return {name: _read(name) for name in _ORDER}


def _read(name: str) -> Starter:
    text = (_FOLDER / f"{name}.xtrain").read_text(encoding="utf-8")
    prose = " ".join(line.lstrip("# ") for line in text.split("\n#\n", 1)[0].splitlines())
    return Starter(name, re.split(r"[.:] ", prose)[0], text)


@frozen
class JobTemplate:
    """Template of a spec for a job. about: its first sentence. records: answers, pairs, questions, texts or none."""

    about: str
    records: str
    text: str


def jobs() -> dict[str, JobTemplate]:
    """Return name → template of a job."""
    return {path.name.split(".")[0]: _job(path) for path in sorted((_FOLDER / "jobs").glob("*.template"))}


def _job(path: Path) -> JobTemplate:
    text = path.read_text(encoding="utf-8")
    return JobTemplate(text.partition(".\n")[0].removeprefix("# "), path.name.split(".")[1], text)


def near_starter(name: str) -> str | None:
    """Return the starter closest to a wrong name."""
    return closest(name, _ORDER)


def name_problem(name: str) -> str | None:
    """Return why `name` is invalid for an experiment, with what to write instead; None if valid."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name not in CONSTANTS:
        return None
    if name in CONSTANTS:
        return f"`{name}` is a word of the language; write `{name}_run`"
    better = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")
    better = f"run_{better}" if better[:1].isdigit() else better
    said = "a name consists of letters, digits and `_`, and does not begin with a digit"
    return f"{said}; write `{better}`" if better else said
