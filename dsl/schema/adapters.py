"""Adapters, which are trained in addition to a frozen model, and tasks: several adapters on one model."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.model import Resuming
from xtrain.dsl.schema.optimizers import OF_STEP, Optimizer
from xtrain.dsl.schema.setting import Auto, Role, TextCheck, file_path, is_unspoken, label, setting, settings_of

DROPOUT_CHUNK: Final = 2**20  # numbers that go into a matrix for which is drawn at a time
ADAPTERS: Final = Registry["Adapter"]("adapter", "adapters")


def trained_in_full() -> Any:
    """The setting `train` that every adapter has."""
    return setting(
        "modules and parameters of the model that are trained in full beside it, as `frozen` of `model` names them",
        default=(),
        example='["lm_head", "norm"]',
    )


def begun_from() -> Any:
    """The setting `from` of adapters that PEFT can have written."""
    return setting(
        "folder with an adapter that PEFT has saved, for its settings and first values; relative paths start at the "
        "working folder",
        default=None,
        check=file_path,
        added=True,
        example='"adapters/chat"',
    )


@ADAPTERS.base
class Adapter(Component):
    """`adapter NAME { … }`: small matrices that are trained beside those of a model; without this block there are
    none, and the model itself is trained."""

    targets: tuple[str, ...]
    train: tuple[str, ...]
    resuming: ClassVar[Mapping[str, Resuming]] = {}
    """Setting → what another value means for going on with a checkpoint; `shape` of those that are not here."""
    from_: str | None
    peft_keys: ClassVar[frozenset[str]] = frozenset()
    """The keys of PEFT's `adapter_config.json` that `of_peft` reads."""
    free: ClassVar[frozenset[str]] = frozenset()
    """Settings that may differ from those of a folder."""

    @property
    def drops(self) -> float:
        """The share of what goes into its matrices that is dropped in training."""
        return 0.0

    @property
    def row_numbers(self) -> tuple[str, ...]:
        """Which numbers of rows (`place` in the run, `dataset`) are needed where it is computed."""
        return ("place",) if self.drops else ()

    @property
    def decomposes(self) -> bool:
        """Whether its first values are made of the matrices that it is of, which are the rest from there on."""
        return False

    def as_written(self, arch: Any) -> "Adapter":
        """The adapter that computes the same beside the model as it was read or drawn, and that PEFT reads so. arch:
        the `Architecture` without adapter."""
        return self

    def auto(self) -> dict[str, tuple[Any, str]]:
        """The values of settings that may be `auto`, each with the reason."""
        return {}

    def resolved(self) -> "Adapter":
        """Without a setting that is `auto`."""
        found = {name: value for name, (value, _) in self.auto().items() if isinstance(getattr(self, name), Auto)}
        return attrs.evolve(self, **found)

    def to_json(self) -> dict[str, Any]:
        """Its name and its settings that say what is computed, as JSON."""
        values: dict[str, Any] = {"kind": self.kind}
        for name, (attribute, meta) in settings_of(type(self)).items():
            value = getattr(self, attribute.name)
            if meta.role is Role.EXPERIMENT and not is_unspoken(attribute, meta, value):
                values[name] = list(value) if isinstance(value, tuple) else value
        return values

    def of_peft(self, folder: Any, arch: Any) -> dict[str, tuple[Any, str]]:
        """Its settings as a `PeftFolder` has them, each with the key that says it. arch: the `Architecture` without
        adapter. Raises PeftUnreadable."""
        raise NotImplementedError

    def for_peft(self, matrices: Sequence[tuple[int | None, Any, tuple[str, ...]]]) -> dict[str, Any]:
        """What `adapter_config.json` says of it beside the names of matrices. matrices: (layer, `BlockParameter`, what
        files call its modules) of all that it is of."""
        raise NotImplementedError

    def on(self, blocks: tuple[Any, ...], arch: Any) -> tuple[Any, ...]:
        """The decoder blocks of every layer with what it adds to them. arch: the `Architecture` without adapter."""
        raise NotImplementedError

    def on_head(self, arch: Any) -> tuple[Any, ...]:
        """What it has beside the head of a vocabulary, as of `AdaptedMatrix`; that is computed as the product of two
        factors."""
        return ()

    def args(self) -> dict[str, Any]:
        """The JSON arguments of the node that gives it its first values, beside `kind` and `seed`."""
        return {}

    def title(self) -> str:
        """What it is, in words."""
        raise NotImplementedError

    def does(self) -> str:
        """Which first values it has, in words: what its node does."""
        raise NotImplementedError

    def unfit(self, arch: Any) -> tuple[str, str, str] | None:
        """What of it does not fit a model: the setting at fault, what is wrong, and what to do."""
        return None

    def excess(self, arch: Any) -> tuple[str, str, str] | None:
        """What of it is more than a model has room for, and does no harm: as `unfit`."""
        return None

    @property
    def largest(self) -> int:
        """The rank of its widest matrices."""
        raise NotImplementedError

    def of_rank(self, rank: int) -> "Adapter":
        """The same with another rank, of settings that are resolved."""
        raise NotImplementedError

    def unfit_for_folder(self) -> tuple[str, str, str] | None:
        """What of it does not go with values that a folder has, as of `unfit`."""
        return None

    def unfit_for_task(self) -> tuple[str, str, str] | None:
        """What of it keeps it from being that of one of several tasks, as of `unfit`."""
        return None

    def unfit_for_slot(self) -> tuple[str, str, str] | None:
        """The same of those that clients of a server ask for."""
        return self.unfit_for_task()


@attrs.frozen
class TaskAdapters(Adapter):
    """The adapters of several tasks over one model, by the names of the tasks, in the order of these, as plans have
    them. Not chosen by a spec: its `task` blocks are it."""

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

    def on(self, blocks: tuple[Any, ...], arch: Any) -> tuple[Any, ...]:
        found = list(blocks)
        for task, adapter in self.tasks.items():
            for layer, own in enumerate(adapter.on(blocks, arch)):
                if own is not blocks[layer]:
                    before = () if found[layer] is blocks[layer] else found[layer].matrices
                    named = (attrs.evolve(matrix, task=task) for matrix in own.matrices)
                    found[layer] = attrs.evolve(own, matrices=(*before, *named))
        return tuple(found)

    def on_head(self, arch: Any) -> tuple[Any, ...]:
        own = ((task, matrix) for task, adapter in self.tasks.items() for matrix in adapter.on_head(arch))
        return tuple(attrs.evolve(matrix, task=task) for task, matrix in own)


def adapter_of(content: Mapping[str, Any]) -> Adapter:
    """The adapter with the values of `to_json`. Raises KeyError for one that is not registered."""
    if "tasks" in content:
        return TaskAdapters(tasks={name: adapter_of(each) for name, each in content["tasks"].items()})
    values = {name: tuple(each) if isinstance(each, list) else each for name, each in content.items() if name != "kind"}
    return ADAPTERS[content["kind"]](**values)


# What is done with all gradients alike, and not for each task.
_SHARED: Final = tuple(name for name in OF_STEP if name != "clip")


def _problem(text: str) -> str | None:
    """The name is a part of the names of parameters, which are separated by dots."""
    return None if re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII) else "must be letters, digits and `_`"


part_of_names: Final = TextCheck(
    "letters, digits and `_`", "write one word, such as `sql`", r"^[A-Za-z_][A-Za-z0-9_]*$", _problem
)


@frozen
class AdapterTask:
    """`task NAME { … }`: an adapter that is trained on the rows of some datasets alone, beside those of other tasks and
    over the same model; each trains as it would in a run of its own."""

    name: str = label(check=part_of_names)
    datasets: tuple[str, ...] = setting(
        "datasets whose rows go through its adapter; none are named: the one of its own name",
        default=(),
        example='["sql", "schemas"]',
    )
    adapter: Adapter = setting("its adapter", default=None, added=True, example="adapter lora { rank = 16 }")
    optimizer: Optimizer = setting(
        "an optimizer of its own, with its own `clip`; without it one as that of the spec",
        default=None,
        added=True,
        without=_SHARED,
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """The datasets whose rows train it."""
        return self.datasets or (self.name,)
