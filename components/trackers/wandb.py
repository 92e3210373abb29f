"""`log { wandb { project = "…" } }`: Weights & Biases."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from xtrain.contracts.actions import PlannedTracker
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import execution_setting, settings_of
from xtrain.dsl.values import value_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.findings import Findings

# W&B's limits for names.
LONGEST_NAME: Final = 128
LONGEST_TAG: Final = 64
NOT_IN_NAMES: Final = r"/\#?%:"


@TRACKERS.register()
@frozen
class Wandb(PlannedTracker):
    """`wandb { project = "…" }`: Weights & Biases, with the package `wandb`; its files are in the run's `wandb/`."""

    kind: ClassVar[str] = "wandb"
    title = "W&B"
    package = "wandb"
    install = "xtrain[wandb]"

    project: str | None = execution_setting("W&B project; none: W&B is not used", default=None, example='"pretraining"')
    entity: str | None = execution_setting("user or team of the project; none: the user of the login", default=None)
    name: str | None = execution_setting(
        "name of the run in W&B; none: the experiment and the run's folder", default=None
    )
    group: str | None = execution_setting("group of runs in W&B; none: no group", default=None)
    tags: tuple[str, ...] = execution_setting("tags of the run in W&B", default=(), example='["baseline"]')
    notes: str | None = execution_setting("notes about the run in W&B", default=None)
    mode: Literal["online", "offline"] = execution_setting(
        "online, or offline: nothing is sent until `wandb sync`", default="online"
    )

    @classmethod
    def in_log(cls) -> tuple[type, Any]:
        return cls, execution_setting("Weights & Biases", default=cls())

    @classmethod
    def chosen(cls, value: Any) -> "Wandb | None":
        return None if value.project is None else value

    def does(self) -> str:
        if self.mode == "offline":
            return f"keeps records for W&B, project {self.project}, in wandb/"
        return f"sends records to W&B, project {self.project}"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"W&B, project {args['project']}, {args['mode']}"

    def check(self, found: Findings) -> None:
        """Check that names are valid in W&B."""
        for name in ("project", "entity", "name", "group"):
            value, path = getattr(self, name), f"log.wandb.{name}"
            if value is None:
                continue
            wrong = _flaw_of_name(value_of(value), project=name == "project")
            if wrong:
                hint = f'use letters, digits, `-`, `_` and `.`, as in {name} = "pretraining"'
                found.fail(path, "X622", path, f"{name} {wrong}, and W&B does not accept such a name", hint)
            else:
                found.passed(path, f"{len(value_of(value))} characters")
        path = "log.wandb.tags"
        long = next((tag for tag in map(value_of, self.tags) if not 1 <= len(tag) <= LONGEST_TAG), None)
        if long is not None:
            message = f"a tag has {len(long)} characters, and W&B takes 1 to {LONGEST_TAG}"
            found.fail(path, "X622", path, message, "use shorter tags, and `notes` for sentences")
        elif self.tags:
            found.passed(path, f"{len(self.tags)} of 1 to {LONGEST_TAG} characters")

    def idle(self) -> dict[str, tuple[str, str]]:
        if self.project is not None:
            return {}
        why = ("log.wandb.project is none", "name a project, or remove it")
        return {name: why for name in settings_of(Wandb) if name != "project"}


def _flaw_of_name(value: str, *, project: bool) -> str:
    if not value.strip():
        return "is empty"
    if len(value) > LONGEST_NAME:
        return f"has {len(value)} characters, more than {LONGEST_NAME}"
    bad = next((sign for sign in value if sign in NOT_IN_NAMES), "") if project else ""
    return f"has a `{bad}`" if bad else ""
