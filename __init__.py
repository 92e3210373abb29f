"""xtrain: declare a training experiment, review its execution plan, run exactly that plan."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .runtime.data.collate.batch import IGNORE_INDEX as IGNORE_INDEX
    from .runtime.data.collate.batch import Microbatch as Microbatch
    from .runtime.data.collate.collators import Sample as Sample
    from .runtime.data.part_decorators import action as action
    from .runtime.data.part_decorators import collator as collator
    from .runtime.data.part_decorators import evaluation_step as evaluation_step
    from .runtime.data.part_decorators import hook as hook
    from .runtime.data.part_decorators import loss as loss
    from .runtime.data.part_decorators import optimizer as optimizer
    from .runtime.data.part_decorators import schedule as schedule
    from .runtime.data.part_decorators import source as source
    from .runtime.data.part_decorators import step as step
    from .runtime.data.part_decorators import tracker as tracker
    from .runtime.hooks.bodies import StepContext as StepContext
    from .runtime.hooks.context import RunContext as RunContext
    from .runtime.reporting.trackers import TrackerContext as TrackerContext

# What parts of a user's own are written with → its module. Loaded when asked for: a file of sources needs no torch.
_OFFERED = {
    "source": "runtime.data.part_decorators",
    "action": "runtime.data.part_decorators",
    "collator": "runtime.data.part_decorators",
    "loss": "runtime.data.part_decorators",
    "hook": "runtime.data.part_decorators",
    "optimizer": "runtime.data.part_decorators",
    "evaluation_step": "runtime.data.part_decorators",
    "schedule": "runtime.data.part_decorators",
    "step": "runtime.data.part_decorators",
    "tracker": "runtime.data.part_decorators",
    "RunContext": "runtime.hooks.context",
    "StepContext": "runtime.hooks.bodies",
    "TrackerContext": "runtime.reporting.trackers",
    "Sample": "runtime.data.collate.collators",
    "Microbatch": "runtime.data.collate.batch",
    "IGNORE_INDEX": "runtime.data.collate.batch",
}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)
