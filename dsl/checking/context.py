"""What a conversion of a value knows of the setting it is for, and of its surroundings."""

from collections.abc import Mapping as MappingOf
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from ..diagnostics.diagnostic import Diagnostics
from ..evaluation.evaluate import Definition
from ..evaluation.values import FAILED, Failed, Value
from ..schema.setting import Setting
from .type_errors import TypeMismatch

if TYPE_CHECKING:
    from .user_parts import DeclaredParts


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


class Converter(Protocol):
    """What a conversion needs of its surroundings."""

    @property
    def diagnostics(self) -> Diagnostics: ...

    @property
    def constants(self) -> MappingOf[str, Definition]: ...

    @property
    def parts(self) -> "DeclaredParts": ...

    def convert(self, annotation: Any, value: Value, context: Context) -> Any:
        """See `convert.convert`."""
        ...


def report(wrong: TypeMismatch, around: Converter) -> Failed:
    """Tell of a value that does not fit; what stands in for it."""
    place = wrong.value
    around.diagnostics.error(
        wrong.code, wrong.message, place.span, hint=wrong.hint, notes=(*wrong.notes, *place.notes),
        fix=wrong.fix if not place.via else None,  # the mistake stands where the name was defined
    )  # fmt: skip
    return FAILED
