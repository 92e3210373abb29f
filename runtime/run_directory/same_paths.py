"""Runs of the same experiment that have another id, because their paths are written in other words.

Ids are made of text, so that they do not depend on the machine: `data/a.txt` and `/home/me/data/a.txt` are two of them.
"""

import json
from pathlib import Path
from typing import Any, Final

from ...dsl.schema.data import TEMPLATES
from ...dsl.schema.sources import SOURCES
from ...dsl.schema.tokenizers import tokenizer_kind
from ...planner.plan import Plan
from ..checkpoint.layout import CheckpointFolder

# Of the runs beside one, the newest so many are looked at: each costs the reading of its plan.
MOST: Final = 50
_BUILT_IN: Final = ("auto", *TEMPLATES)


def same_run(directory: Path, plan: Plan) -> Path | None:
    """The newest run beside `directory` that has a checkpoint and differs from `plan` in the wording of paths alone."""
    ours = meaning(plan.config, Path.cwd())
    for other in _newest(directory):
        try:
            config = json.loads((other / "plan.json").read_bytes())["config"]
            folder = Path(json.loads((other / "metadata/environment.json").read_bytes())["folder"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        same = config != plan.config and meaning(config, folder) == ours
        if same and CheckpointFolder(other / "checkpoints").latest() is not None:
            return other
    return None


def meaning(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What identifies an experiment, with every path as an absolute one without links. folder: relative ones start
    there."""
    found = {**config, "tokenizer": _tokenizer(config["tokenizer"], folder)}
    found["datasets"] = {name: _dataset(dataset, folder) for name, dataset in config["datasets"].items()}
    if "checkpoint" in config:
        found["checkpoint"] = {name: _place(path, folder) for name, path in config["checkpoint"].items()}
    return found


def _tokenizer(source: str, folder: Path) -> str:
    return _place(source, folder) if tokenizer_kind(source).of_files else source


def _dataset(dataset: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = {**dataset, "source": _source(dataset["source"], folder)}
    if isinstance(dataset["text"], dict) and "template" in dataset["text"]:
        found["text"] = {**dataset["text"], "template": _place(dataset["text"]["template"], folder)}
    return found


def _source(source: Any, folder: Path) -> Any:
    if not isinstance(source, list):
        return source
    name, given = source[0], source[1]
    kind = next((each for each in SOURCES.values() if each.__name__ == name), None)
    return source if kind is None else [name, kind.placed(given, lambda path: _place(path, folder))]


def _place(path: str, folder: Path) -> str:
    return path if path in _BUILT_IN else str((folder / path).resolve())


def _newest(directory: Path) -> list[Path]:
    found = []
    for plan in directory.parent.glob("*/plan.json"):
        if plan.parent != directory and "~" not in plan.parent.name:
            try:
                found.append((plan.stat().st_mtime, plan.parent))
            except OSError:
                continue  # it was removed just now
    return [other for _, other in sorted(found, reverse=True)[:MOST]]
