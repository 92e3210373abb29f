"""Settings that trackers of projects share."""

from collections.abc import Mapping
from typing import Any

from xtrain.contracts.actions import PlannedTracker
from xtrain.dsl.schema.setting import execution_setting
from xtrain.dsl.values import value_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.findings import Findings


@frozen
class ProjectTracker(PlannedTracker):
    """A tracker that keeps runs in projects."""

    project: str | None = execution_setting("project; none: the name of the experiment", default=None)
    name: str | None = execution_setting("name of the run; none: the experiment and the run's folder", default=None)
    tags: tuple[str, ...] = execution_setting("tags of the run", default=(), example='["baseline"]')

    def does(self) -> str:
        project = "the project of the experiment" if self.project is None else f"project {self.project}"
        return f"passes records to {self.title}, {project}, {self.where()}"

    def where(self) -> str:
        """Return where the records are kept, in words."""
        raise NotImplementedError

    def check(self, found: Findings) -> None:
        """Check that names are not empty."""
        for setting in ("project", "name"):
            value, path = getattr(self, setting), f"log.{self.kind}.{setting}"
            if value is not None and not value_of(value).strip():
                found.fail(
                    path, "X622", path, f"{setting} is empty", f'write {setting} = "pretraining", or leave it out'
                )
            elif value is not None:
                found.passed(path, "it is not empty")

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return cls.title if args["project"] is None else f"{cls.title}, project {args['project']}"
