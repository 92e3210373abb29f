"""Contracts of data components: sources, tokenizers, links of `collate`, and packings."""

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, get_args, get_origin

import attrs
from attrs import frozen

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import AUTO, Auto, file_path, label, settings_of

PACKINGS: Final = Registry["Packing"]("packing", "packings", call="{}", order=lambda packing: packing.balances)


@PACKINGS.base
class Packing(Component):
    """`pack(NAME)`: which documents share a row.

    The module `…_run` beside a packing has a function `fill`, see `runtime/feed/packing/rows.py`.
    """

    in_order: ClassVar[bool] = False
    """Whether documents keep their order; else they are packed together in groups of consecutive ones."""
    for_conversations: ClassVar[bool] = False
    """Whether `auto` means it for conversations and answers."""
    single: ClassVar[bool] = False
    """Whether each document has a row of its own."""
    balances: ClassVar[bool] = False
    """Whether the rows of a step are dealt to data ranks so that attention costs them alike."""
    rows_of: ClassVar[str] = ""
    """Another packing that makes the same rows."""

    @classmethod
    def rows(cls) -> str:
        """The packing that its rows are those of."""
        return cls.rows_of or cls.kind

    @classmethod
    def names_rows(cls, group: int) -> dict[str, Any]:
        """What tells its rows from those of other packings, as JSON. group: documents that are packed together."""
        return {"packing": cls.rows(), "group": group}


def packing_of(method: str | None) -> type[Packing]:
    """The packing of a name in a plan; where there is none, that of a spec that names none."""
    return PACKINGS.default if method is None else PACKINGS[method]


SOURCES: Final = Registry["Source"]("source", "sources", call="{}()")


@SOURCES.base
class Source(Component):
    """`NAME(…)`: where the documents of a dataset come from.

    The module `…_run` beside a source has a function `open_source`, which takes a `SourceRequest` and gives an
    `OpenedSource`; see `runtime/feed/sources/source.py`.
    """

    sample: ClassVar[str] = ""
    """What it is given in examples, if it cannot do without."""
    ends: ClassVar[tuple[str, ...]] = ()
    """How the names of files end that are read by it; "" of any file that no other source reads."""
    beginnings: ClassVar[tuple[tuple[bytes, str], ...]] = ()
    """How files begin that are read by it and hold no text, each with what such a file is."""
    records: ClassVar[Literal["fields", "documents", "tokens"]] = "documents"
    """What it gives: records with fields, whole documents, or documents that are tokenised already."""
    has_lists: ClassVar[bool] = False
    """Its fields may be lists of texts: records may be questions with choices."""
    beside_spec: ClassVar[bool] = False
    """Whether its paths start at the folder of the spec; those of others start at the working folder."""
    may_agree: ClassVar[tuple[str, ...]] = ()
    """Options of which different values may give the same records."""
    former_options: ClassVar[tuple[str, ...]] = ()
    """The order in which earlier versions took its options into the names of token stores, where they had one."""

    def patterns_read(self) -> list[str]:
        """The patterns of the files that it reads, as a plan has them."""
        return []

    def options(self, seed: int) -> dict[str, Any]:
        """The JSON options of its node: what decides its records beside files. seed: of the experiment."""
        return {}

    def does(self) -> str:
        """Where documents come from, in words for people."""
        raise NotImplementedError

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        """The same from the arguments of its node."""
        raise NotImplementedError

    def check(self, dataset: str, vocabulary: Callable[[], int | None], found: Any) -> None:
        """Rules about the files that it reads. vocabulary: how many tokens there are; None if that cannot be known
        here. found: takes the findings, see `plan/findings.py`."""

    def identity(self, seed: int) -> Any:
        """What identifies it in that of an experiment, as JSON: its class, and what it is given."""
        given = [getattr(self, attribute.name) for attribute in attrs.fields(type(self))]
        return [type(self).__name__, [str(AUTO) if value is AUTO else value for value in given]]

    @classmethod
    def placed(cls, given: Any, place: Callable[[str], str]) -> Any:
        """What is given in an identity, with every path in it as `place` has it."""
        return given


TOKENIZERS: Final = Registry["TokenizerKind"]("tokenizer", "tokenizers", call="{}")


@frozen
class Tokenizer:
    """`tokenizer bytes` or `tokenizer "folder"`: turns text into token ids."""

    source: str = label(check=file_path)


@TOKENIZERS.base
class TokenizerKind(Component):
    """`tokenizer NAME`, or `tokenizer "path"`: turns text into token ids.

    The module `…_run` beside a tokenizer has a function `open_tokenizer`, which takes what the spec names and the
    folder that paths start at, and gives a `TextTokenizer`; see `runtime/feed/tokenizers.py`. `source`, in
    what follows, is what the spec names.
    """

    of_files: ClassVar[bool] = False
    """Whether it is read from files, whose path the spec names."""

    @classmethod
    def place(cls, source: str) -> str:
        """What it is called in a plan."""
        return source

    @classmethod
    def does(cls, source: str) -> str:
        """What it does, in words."""
        raise NotImplementedError

    @classmethod
    def size(cls, source: str) -> int:
        """One more than the largest id. Raises TokenizerUnreadable, see `plan/data.py`."""
        raise NotImplementedError

    @classmethod
    def files(cls, source: str, base: Path) -> dict[str, bytes]:
        """What transformers needs to read it from a folder: name → content. base: the folder that paths start at.
        Raises OSError."""
        raise NotImplementedError

    @classmethod
    def template(cls, source: str) -> str | None:
        """Return the template of conversations that comes with it, if one does. Raises TokenizerUnreadable."""
        return None

    @classmethod
    def whole(cls, source: str) -> Set[str] | None:
        """Return the texts that are one token wherever a template writes them; None if it has no such vocabulary.
        Raises TokenizerUnreadable."""
        return None


def tokenizer_kind(source: str) -> type[TokenizerKind]:
    """The kind of what a spec names: by its name, or that of files."""
    return TOKENIZERS.get(source) or TOKENIZERS.default


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
