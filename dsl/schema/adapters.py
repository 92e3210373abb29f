"""Adapters, trained next to a frozen model, and tasks: several adapters over one model."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import attrs

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.optimizers import OF_STEP, Optimizer
from xtrain.dsl.schema.setting import Auto, Role, TextCheck, file_path, is_unspoken, label, setting, settings_of, unless
from xtrain.lazy_attrs import frozen

DROPOUT_CHUNK: Final = 2**20  # input elements per dropout draw
ADAPTERS: Final = Registry["Adapter"](
    "adapter", "adapters", op="setup.adapter", contract="xtrain.contracts.models.PlannedAdapter"
)


def trained_in_full() -> Any:
    """Declare the setting `train`, which every adapter has."""
    return setting(
        "modules and parameters of the model that are trained in full next to the adapter, named as in `frozen` of "
        "`model`",
        default=(),
        resuming="elsewhere",
        example='["lm_head", "norm"]',
    )


def begun_from() -> Any:
    """Declare the setting `from` of adapters that can start from a PEFT folder."""
    return setting(
        "folder of a PEFT adapter, source of settings and initial values; relative paths start at the working folder",
        default=None,
        check=file_path,
        added=True,
        example='"adapters/chat"',
    )


@ADAPTERS.base
class Adapter(Component):
    """`adapter NAME { … }`: small matrices trained next to a frozen model; without this block the model itself
    is trained."""

    targets: tuple[str, ...]
    train: tuple[str, ...]
    from_: str | None
    peft_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of PEFT's `adapter_config.json` that `of_peft` reads."""
    free: ClassVar[frozenset[str]] = frozenset()
    """Settings that may differ from the folder's settings."""

    @property
    def drops(self) -> float:
        """Dropout probability of the input of the adapter's matrices."""
        return 0.0

    @property
    def row_numbers(self) -> tuple[str, ...]:
        """Row numbers (`place` in the run, `dataset`) that its computation needs."""
        return ("place",) if self.drops else ()

    @property
    def decomposes(self) -> bool:
        """True if the initial values are computed from the adapted matrices, which then keep the remainder."""
        return False

    @property
    def begins_again(self) -> bool:
        """True if a new adapter can follow one that was merged: no value of it belongs to the first matrices."""
        return not self.decomposes

    def auto(self) -> dict[str, tuple[Any, str]]:
        """Return the values of settings that may be `auto`, each with its reason."""
        return {}

    def resolved(self) -> "Adapter":
        """Return the adapter with every `auto` resolved."""
        found = {name: value for name, (value, _) in self.auto().items() if isinstance(getattr(self, name), Auto)}
        return attrs.evolve(self, **found)

    def to_json(self) -> dict[str, Any]:
        """Return the name and the settings that determine the computation, as JSON."""
        values: dict[str, Any] = {"kind": self.kind}
        for name, (attribute, meta) in settings_of(type(self)).items():
            value = getattr(self, attribute.name)
            if meta.role is Role.EXPERIMENT and not is_unspoken(attribute, meta, value):
                values[name] = list(value) if isinstance(value, tuple) else value
        return values

    def args(self) -> dict[str, Any]:
        """Return the JSON arguments of the node that initializes the adapter, without `kind` and `seed`."""
        return {}

    def title(self) -> str:
        """Return a description of the adapter."""
        raise NotImplementedError

    def does(self) -> str:
        """Return a description of its initial values: the text of its node."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """Rank of the widest matrices."""
        raise NotImplementedError

    def of_rank(self, rank: int) -> "Adapter":
        """Return the adapter with another rank; its settings are resolved."""
        raise NotImplementedError

    def unfit_for_folder(self) -> tuple[str, str, str] | None:
        """Return (setting, what is wrong, what to do) if the adapter conflicts with the values of a folder."""
        return None

    def unfit_for_task(self) -> tuple[str, str, str] | None:
        """Return (setting, what is wrong, what to do) if the adapter cannot be one of several tasks' adapters."""
        return None

    def unfit_for_slot(self) -> tuple[str, str, str] | None:
        """Return (setting, what is wrong, what to do) if clients of a server cannot request the adapter."""
        return self.unfit_for_task()


@frozen
class TaskAdapters(Adapter):
    """Adapters of several tasks over one model, by task name, in plan order. A spec creates it with `task` blocks, not
    by name."""

    tasks: Mapping[str, Adapter] = attrs.field(factory=dict, converter=lambda found: dict(sorted(found.items())))
    targets: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    from_: str | None = None

    @property
    def row_numbers(self) -> tuple[str, ...]:
        return ("dataset",)

    def title(self) -> str:
        return f"adapters of {', '.join(self.tasks)}"

    def to_json(self) -> dict[str, Any]:
        return {"tasks": {name: adapter.to_json() for name, adapter in self.tasks.items()}}


def adapter_of(content: Mapping[str, Any]) -> Adapter:
    """Return the adapter that `to_json` described. Raises KeyError for an unregistered kind."""
    if "tasks" in content:
        return TaskAdapters(tasks={name: adapter_of(each) for name, each in content["tasks"].items()})
    values = {name: tuple(each) if isinstance(each, list) else each for name, each in content.items() if name != "kind"}
    return ADAPTERS[content["kind"]](**values)


# Applied to all gradients together, not to each task.
_SHARED: Final = tuple(name for name in OF_STEP if name != "clip")


part_of_names: Final = TextCheck(
    "letters, digits and `_`",
    "write one word, such as `sql`",
    r"^[A-Za-z_][A-Za-z0-9_]*$",
    unless(re.compile(r"[A-Za-z_]\w*", re.ASCII), "must be letters, digits and `_`"),
)


@frozen
class AdapterTask:
    """`task NAME { … }`: an adapter trained only on the rows of some datasets, next to other tasks over the same model;
    each task trains as in a run of its own."""

    name: str = label(check=part_of_names)
    datasets: tuple[str, ...] = setting(
        "datasets whose rows use its adapter; none: the dataset with the name of the task",
        default=(),
        example='["sql", "schemas"]',
    )
    adapter: Adapter = setting("its adapter", default=None, added=True, example="adapter lora { rank = 16 }")
    optimizer: Optimizer = setting(
        "separate optimizer with its own `clip`; without it, one like the spec's optimizer",
        default=None,
        added=True,
        without=_SHARED,
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """Datasets whose rows train the adapter."""
        return self.datasets or (self.name,)
