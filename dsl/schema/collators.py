"""The links of `collate`: what is asked of them, and the kinds of value that flow through a chain of them.

One vocabulary for the links of a spec, the edges of a plan, the stages of a run and the `@collator` of a user.
"""

from typing import Any, ClassVar, Final, Literal, Self, get_args, get_origin

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.packings import Packing
from xtrain.dsl.schema.setting import Auto, settings_of

# In the order in which they come to be.
RAW_ROWS: Final = "rows of token arrays"
TENSOR_ROWS: Final = "rows of token tensors"
TOKEN_SAMPLES: Final = "token samples"
LABELLED_SAMPLES: Final = "labelled samples"
MICROBATCH: Final = "microbatch"
LOCAL_MICROBATCH: Final = "part of a microbatch"

KINDS: Final = (RAW_ROWS, TENSOR_ROWS, TOKEN_SAMPLES, LABELLED_SAMPLES, MICROBATCH, LOCAL_MICROBATCH)
# Who makes these decides how rows are laid out and cut, which the plan has to know: only `pack` and `shard` do.
_LAID_OUT: Final = (MICROBATCH, LOCAL_MICROBATCH)


def may_give(takes: str) -> tuple[str, ...]:
    """The kinds that a collator of the user's may make of what it takes: the same, or a later one before `pack`."""
    if takes in _LAID_OUT:
        return (takes,)
    return tuple(kind for kind in KINDS[KINDS.index(takes) :] if kind not in _LAID_OUT)


LINKS: Final = Registry["Link"]("collator", "collators", call="{}", order=lambda link: KINDS.index(link.takes))


@LINKS.base
class Link(Component):
    """`NAME`: a link of `collate`, which takes one kind of value and gives another.

    Its node is called `collate.NAME`; the function with this op stands in the module `…_torch` beside it. `run`, in
    what follows, is a `Resolved`, see `planner/resolved.py`.
    """

    takes: str
    gives: str
    usual: ClassVar[bool] = False
    """Whether `collate` has it in a spec that does not say what `collate` is."""
    changes: ClassVar[bool] = False
    """Whether documents, or what of them is predicted, are others behind it."""
    by_layout: ClassVar[bool] = False
    """Whether the layout decides if it stands in a plan, whatever the spec says."""

    @classmethod
    def usually(cls, conversations: bool) -> "Link":
        """As it is in such a spec, in which there are conversations or answers to train on, or not."""
        return cls()

    @property
    def name(self) -> str:
        """What it is called in a chain."""
        return self.kind

    @property
    def written(self) -> str:
        """The link as a chain has it, with settings that are not at their defaults: `pack(multipack, group = 10)`."""
        given = []
        for place, (name, (attribute, _)) in enumerate(settings_of(type(self)).items()):
            value = getattr(self, attribute.name)
            if value == attribute.default:
                continue
            is_word = any(get_origin(part) is Literal for part in (attribute.type, *get_args(attribute.type)))
            is_text = isinstance(value, str) and not is_word and not isinstance(value, Auto)
            text = f'"{value}"' if is_text else str(value).lower() if isinstance(value, bool) else str(value)
            given.append(text if place == 0 and is_word else f"{name} = {text}")
        return f"{self.kind}({', '.join(given)})" if given else self.kind

    @property
    def op(self) -> str:
        """That of its node."""
        return f"collate.{self.kind}"

    def args(self, run: Any) -> dict[str, Any]:
        """The JSON arguments of its node."""
        return {}

    def axes(self, run: Any) -> tuple[str, ...]:
        """The axes of the mesh whose ranks do different things."""
        return ()

    def does(self, run: Any) -> str:
        """What its node does, in words."""
        raise NotImplementedError

    def identity(self, align: int) -> list[Any]:
        """What identifies it in that of an experiment, as JSON. align: of documents in rows."""
        return [type(self).__name__, {}]


class RowLink(Link):
    """A link that lays samples side by side into rows; a chain has one."""

    align: int | Auto
    group: int | Auto

    @property
    def packing(self) -> type[Packing]:
        """Which documents share a row; where that differs between datasets, that of all but conversations."""
        raise NotImplementedError

    @property
    def grouped(self) -> int | None:
        """Documents that are packed together; None where documents are packed in their order."""
        raise NotImplementedError

    def settled(self, answers: bool) -> Self:
        """For a dataset of conversations or answers, or of other documents: with what differs between these."""
        return self

    def useless(self) -> tuple[str, str] | None:
        """A setting that means nothing beside the others: what is wrong, and what to write."""
        return None


def usual_chain(conversations: bool = False) -> tuple[Link, ...]:
    """The links of a spec that does not say what `collate` is. conversations: these or answers are trained on."""
    return tuple(link.usually(conversations) for link in LINKS.values() if link.usual)


def row_link(chain: tuple[Link, ...]) -> RowLink:
    """The link of a chain that lays samples into rows, as it is written or by default."""
    return next(link for link in (*chain, *usual_chain()) if isinstance(link, RowLink))
