"""`@source` and `@collator`: what makes a function of the user's own known to a spec that says `use "parts.py"`.

They leave the function as it is and say of it what it is. Without torch and numpy, so that a file of sources stays
light.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, overload

from attrs import frozen

from ...dsl.user_parts.links import KINDS, may_give

F = TypeVar("F", bound=Callable[..., Any])
MARK: Final = "__xtrain_part__"


@frozen
class Mark:
    """What a function is to a spec. takes, gives: kinds of value of `dsl.links`; empty for a source."""

    kind: Literal["source", "collator"]
    takes: str = ""
    gives: str = ""


@overload
def source(function: F) -> F: ...
@overload
def source() -> Callable[[F], F]: ...
def source(function: F | None = None) -> F | Callable[[F], F]:
    """Make a function a source of documents: `dataset web { source = name(…) }`.

    It yields documents, in the same order each time: a text, or a dict whose fields the dataset's `text`, `messages`,
    or `prompt` and `response` name. Its parameters are the arguments that a spec gives.
    """
    mark = _marker(Mark("source"))
    return mark if function is None else mark(function)


def collator(takes: str, gives: str | None = None) -> Callable[[F], F]:
    """Make a function a link of the collate chain: `collate = to_tensor -> flatten -> name(…) -> …`.

    takes, gives: kinds of value, as `labelled samples`; without `gives` it gives what it takes. The function is called
    once for each row, with what there is of that row as its first argument. The other parameters are the arguments
    that a spec gives, but for one that is called `generator`: it gets a numpy Generator of that row.
    Raises ValueError for a kind that there is not, or that cannot be made of what is taken.
    """
    if takes not in KINDS:
        raise ValueError(f"a collator cannot take {takes!r}; it takes one of: {', '.join(KINDS)}")
    given = takes if gives is None else gives
    if given not in may_give(takes):
        raise ValueError(f"a collator of {takes} cannot give {gives!r}; it gives one of: {', '.join(may_give(takes))}")
    return _marker(Mark("collator", takes, given))


def _marker(mark: Mark) -> Callable[[F], F]:
    def set_mark(function: F) -> F:
        setattr(function, MARK, mark)
        return function

    return set_mark
