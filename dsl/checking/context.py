"""What a conversion of a value knows of the setting it is for, and of its surroundings."""

from collections.abc import Mapping as MappingOf
from typing import Any, Protocol

from attrs import field, frozen

from xtrain.dsl.checking.unknown_settings import UnknownSettings
from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.evaluation.evaluate import Definition, Evaluator
from xtrain.dsl.evaluation.sections import Section
from xtrain.dsl.evaluation.values import Called, Value
from xtrain.dsl.schema.actions import Action
from xtrain.dsl.schema.component import Registry
from xtrain.dsl.schema.setting import Setting
from xtrain.dsl.spec import Origin


@frozen
class Context:
    """The setting a value is for: its name, the word that opens its block, the class and metadata."""

    name: str
    kind: str
    block: type
    meta: Setting = field(repr=False)
    is_label: bool = False
    is_element: bool = False
    is_end: bool = False

    @property
    def subject(self) -> str:
        if self.is_element:
            return f"each element of `{self.name}`"
        if self.is_end:
            return f"each end of `{self.name}`"
        return f"the {self.name} of `{self.kind}`" if self.is_label else f"`{self.name}`"


class OwnPart(Protocol):
    """A function of the user's own that a spec can name."""

    used: bool

    def convert(self, kinds: Registry, call: Called, value: Value, context: Context, around: "Converter") -> Any:
        """See `part_calls.DeclaredPart`."""
        ...


class OwnParts(Protocol):
    """The functions of the user's own, by name. unread: some could not be read."""

    unread: bool

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> OwnPart: ...

    def of_kind(self, kind: str) -> list[str]: ...

    def actions(self) -> MappingOf[str, type[Action]]: ...


class Converter(Protocol):
    """What a conversion needs of its surroundings."""

    @property
    def diagnostics(self) -> Diagnostics: ...

    @property
    def constants(self) -> MappingOf[str, Definition]: ...

    @property
    def parts(self) -> OwnParts: ...

    def convert(self, annotation: Any, value: Value, context: Context) -> Any:
        """See `convert.convert`."""
        ...


class BlockConverter(Converter, Protocol):
    """What building a block needs of its surroundings."""

    evaluator: Evaluator
    origins: dict[str, Origin]
    unknown: UnknownSettings

    def block(self, block: type, section: Section, path: str) -> Any:
        """See `structure.Structurer`."""
        ...

    def leave_out(self, path: str) -> list[Any]:
        """See `structure.Structurer`."""
        ...
