"""`huggingface("…")`: datasets read by the library `datasets`."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from xtrain.contracts.data import PlannedSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.dsl.schema.setting import file_path, label, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.canonical import portable
from xtrain.plan.findings import Findings


@SOURCES.register()
@frozen
class HuggingFace(PlannedSource):
    """`huggingface("org/name or folder", …)`: a dataset of the Hugging Face library, from the hub or a local folder."""

    name: str = label(check=file_path)
    config: str | None = setting(
        "configuration of the dataset; none: its only configuration", default=None, example='"en"'
    )
    split: str = setting("split of the dataset", default="train")

    kind = "huggingface"
    sample = "org/name"
    records = "fields"
    former_options = ("name", "config", "split")

    def options(self, seed: int) -> dict[str, Any]:
        return {"name": _folder_or_name(self.name), "config": self.config, "split": self.split}

    def does(self) -> str:
        return f"the Hugging Face dataset {_parts(self.name, self.config, self.split)}"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"huggingface {_parts(**args['options'])}"

    def identity(self, seed: int) -> Any:
        return ["HuggingFace", [*self.options(seed).values()]]

    @classmethod
    def placed(cls, given: Any, place: Callable[[str], str]) -> Any:
        name, *rest = given
        return [place(name) if os.path.isdir(place(name)) else name, *rest]  # noqa: PTH112

    def check(self, dataset: str, vocabulary: Callable[[], int | None], found: Findings) -> None:
        """Check that the dataset is a folder, or a name on the hub with at most one `/`."""
        rule, path, name = f"data.files.{dataset}", f"dataset.{dataset}.source", self.name
        if os.path.isdir(name):  # noqa: PTH112 (any text is a name to it)
            found.passed(rule, f"folder {name}")
        elif os.path.exists(name):  # noqa: PTH110
            hint = 'give the folder that contains it, or use the source of its file type: `jsonl("…")`'
            found.fail(rule, "X507", path, f"dataset {dataset}: {name} is a file, not a folder", hint)
        elif name.startswith((".", "/", "~")) or portable(name).count("/") > 1:
            hint = "paths are relative to the working folder; the run looks again"
            found.warn(rule, "W501", path, f"{dataset}: there is no folder {name}", hint)
        else:
            found.unknown(rule, f"{name} is looked for when the run starts")


def _parts(name: str, config: str | None, split: str) -> str:
    return " · ".join([name, *([config] if config else []), split])


def _folder_or_name(name: str) -> str:
    """Normalize a path. A leading `./` is kept: it marks a folder; otherwise the hub's dataset of this name would be
    loaded."""
    path = portable(name)
    return f"./{path}" if name.startswith("./") and not path.startswith(("..", "/")) else path
