"""Contracts of data components: sources, tokenizers, links of `collate`, and packings."""

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, get_args, get_origin

import attrs

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.model import snapshot_named
from xtrain.dsl.schema.setting import AUTO, Auto, file_path, label, settings_of
from xtrain.lazy_attrs import frozen

PACKINGS: Final = Registry["Packing"]("packing", "packings", call="{}", order=lambda packing: packing.balances)


@PACKINGS.base
class Packing(Component):
    """`pack(NAME)`: which documents share a row.

    The module `…_run` next to a packing has a function `fill`, see `runtime/feed/packing/rows.py`.
    """

    in_order: ClassVar[bool] = False
    """True if documents keep their order; else groups of consecutive documents are packed together."""
    for_conversations: ClassVar[bool] = False
    """True if `auto` selects it for conversations and answers."""
    single: ClassVar[bool] = False
    """True if each document has a row of its own."""
    balances: ClassVar[bool] = False
    """True if the rows of a step are distributed over data ranks to balance attention cost."""
    rows_of: ClassVar[str] = ""
    """Another packing that produces the same rows; empty: none."""

    @classmethod
    def rows(cls) -> str:
        """Return the packing that defines its rows."""
        return cls.rows_of or cls.kind

    @classmethod
    def names_rows(cls, group: int) -> dict[str, Any]:
        """Return what distinguishes its rows from the rows of other packings, as JSON. group: documents packed
        together."""
        return {"packing": cls.rows(), "group": group}


def packing_of(method: str | None) -> type[Packing]:
    """Return the packing with this name in a plan; for None, the default of a spec."""
    return PACKINGS.default if method is None else PACKINGS[method]


SOURCES: Final = Registry["Source"]("source", "sources", call="{}()", contract="xtrain.contracts.data.PlannedSource")


@SOURCES.base
class Source(Component):
    """`NAME(…)`: where the documents of a dataset come from.

    The module `…_run` next to a source has a function `open_source`, which takes a `SourceRequest` and returns an
    `OpenedSource`; see `runtime/feed/sources/source.py`.
    """

    sample: ClassVar[str] = ""
    """Arguments in examples, if it needs any."""
    ends: ClassVar[tuple[str, ...]] = ()
    """File name endings that it reads; "": any file that no other source reads."""
    beginnings: ClassVar[tuple[tuple[bytes, str], ...]] = ()
    """First bytes of files that it reads and that hold no text, each with a description of the format."""
    records: ClassVar[Literal["fields", "documents", "tokens"]] = "documents"
    """Kind of records: records with fields, whole documents, or tokenized documents."""
    has_lists: ClassVar[bool] = False
    """Fields may be lists of texts: records may be multiple-choice questions."""
    beside_spec: ClassVar[bool] = False
    """True if its paths start at the folder of the spec; otherwise they start at the working folder."""
    may_agree: ClassVar[tuple[str, ...]] = ()
    """Options of which different values may produce the same records."""
    former_options: ClassVar[tuple[str, ...]] = ()
    """Order in which earlier versions hashed its options into the names of token stores, if they did."""

    def patterns_read(self) -> list[str]:
        """Patterns of the files that it reads, in plan form."""
        return []

    def options(self, seed: int) -> dict[str, Any]:
        """Return the JSON options of its node: what determines its records apart from files. seed: seed of the
        experiment."""
        return {}

    def does(self) -> str:
        """Return a description of where documents come from."""
        raise NotImplementedError

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        """Return the same description, from the arguments of its node."""
        raise NotImplementedError

    def identity(self, seed: int) -> Any:
        """Return its part of an experiment's identity, as JSON: its class and its arguments."""
        given = [getattr(self, attribute.name) for attribute in attrs.fields(type(self))]
        return [type(self).__name__, [str(AUTO) if value is AUTO else value for value in given]]

    @classmethod
    def placed(cls, given: Any, place: Callable[[str], str]) -> Any:
        """Return its arguments in an identity with every path mapped by `place`."""
        return given


TOKENIZERS: Final = Registry["TokenizerKind"]("tokenizer", "tokenizers", call="{}", unlisted="hub")


@frozen
class Tokenizer:
    """`tokenizer bytes`, `tokenizer "folder"` or `tokenizer hub("org/name")`: turns text into token ids.

    Without the block, the tokenizer in the model's folder. source: the label; of the hub, with the exact commit.
    """

    source: str = label(check=file_path)


@TOKENIZERS.base
class TokenizerKind(Component):
    """`tokenizer NAME`, or `tokenizer "path"`: turns text into token ids.

    The module `…_run` next to a tokenizer has a function `open_tokenizer`, which takes the name in the spec and the
    base folder of paths, and returns a `TextTokenizer`; see `runtime/feed/tokenizers.py`. `source` below is the name in
    the spec.
    """

    of_files: ClassVar[bool] = False
    """True if it is read from files, whose path the spec names."""

    @classmethod
    def place(cls, source: str) -> str:
        """Return its name in a plan."""
        return source

    @classmethod
    def location(cls, source: str) -> str:
        """Return the path of its files; the name itself if it has none."""
        return source

    @classmethod
    def does(cls, source: str) -> str:
        """Return a description of it."""
        raise NotImplementedError

    @classmethod
    def size(cls, source: str) -> int:
        """Return the largest id plus 1. Raises TokenizerUnreadable, see `plan/data.py`."""
        raise NotImplementedError

    @classmethod
    def files(cls, source: str, base: Path) -> dict[str, bytes]:
        """Return the files that transformers needs to read it from a folder: name → content. base: base folder of
        paths. Raises OSError."""
        raise NotImplementedError

    @classmethod
    def template(cls, source: str) -> str | None:
        """Return the chat template that comes with it, or None. Raises TokenizerUnreadable."""
        return None

    @classmethod
    def whole(cls, source: str) -> Set[str] | None:
        """Return the texts that are always one token in a template; None if it has no such vocabulary. Raises
        TokenizerUnreadable."""
        return None


def source_of(path: str) -> str:
    """Return the name of the source that reads a file, by the end of its name."""
    return max((len(end), name) for name, source in SOURCES.items() for end in source.ends if end in path)[1]


def tokenizer_kind(source: str) -> type[TokenizerKind]:
    """Return the tokenizer kind of a name in a spec: a registered name, a snapshot, or a path of files."""
    if snapshot_named(source) is not None:
        return TOKENIZERS[TOKENIZERS.unlisted]
    return TOKENIZERS[source] if source in TOKENIZERS and source != TOKENIZERS.unlisted else TOKENIZERS.default


# Kinds of values, in the order of the chain.
RAW_ROWS: Final = "rows of token arrays"
TENSOR_ROWS: Final = "rows of token tensors"
TOKEN_SAMPLES: Final = "token samples"
LABELLED_SAMPLES: Final = "labelled samples"
MICROBATCH: Final = "microbatch"
LOCAL_MICROBATCH: Final = "part of a microbatch"

KINDS: Final = (RAW_ROWS, TENSOR_ROWS, TOKEN_SAMPLES, LABELLED_SAMPLES, MICROBATCH, LOCAL_MICROBATCH)
# Only `pack` and `shard` produce these: the plan must know how rows are laid out and cut.
_LAID_OUT: Final = (MICROBATCH, LOCAL_MICROBATCH)


def may_give(takes: str) -> tuple[str, ...]:
    """Return the kinds that a user collator may produce from a kind: the same kind or a later one before `pack`."""
    if takes in _LAID_OUT:
        return (takes,)
    return tuple(kind for kind in KINDS[KINDS.index(takes) :] if kind not in _LAID_OUT)


LINKS: Final = Registry["Link"](
    "collator",
    "collators",
    call="{}",
    contract="xtrain.contracts.data.PlannedLink",
    order=lambda link: KINDS.index(link.takes),
)


@LINKS.base
class Link(Component):
    """`NAME`: a link of `collate`, which takes one kind of value and produces another.

    Its node is called `collate.NAME`; the function with this op is in the module `…_torch` beside the link. Links
    subclass `PlannedLink` (`contracts/data.py`).
    """

    takes: str
    gives: str
    usual: ClassVar[bool] = False
    """True if the default `collate` contains it."""
    changes: ClassVar[bool] = False
    """True if it changes documents or the tokens to predict."""
    by_layout: ClassVar[bool] = False
    """True if the layout, not the spec, decides whether a plan contains it."""

    @classmethod
    def usually(cls, conversations: bool) -> "Link":
        """Return the link of the default `collate`. conversations: the training data has conversations or answers."""
        return cls()

    @property
    def name(self) -> str:
        """Its name in a chain."""
        return self.kind

    @property
    def written(self) -> str:
        """Return the link as written in a chain, with its non-default settings: `pack(multipack, group = 10)`."""
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
        """Op of its node."""
        return f"collate.{self.kind}"

    def identity(self, align: int) -> list[Any]:
        """Return its part of an experiment's identity, as JSON. align: alignment of documents in rows."""
        return [type(self).__name__, {}]


class RowLink(Link):
    """A link that lays out samples in rows; a chain has exactly one."""

    align: int | Auto
    group: int | Auto

    @property
    def packing(self) -> type[Packing]:
        """Packing of documents into rows; if it differs between datasets, the packing for everything except
        conversations."""
        raise NotImplementedError

    @property
    def grouped(self) -> int | None:
        """Documents packed together; None if documents keep their order."""
        raise NotImplementedError

    def settled(self, answers: bool) -> Self:
        """Return the link for a dataset of conversations or answers, or of other documents, with the settings that
        depend on it resolved."""
        return self

    def useless(self) -> tuple[str, str] | None:
        """Return (what is wrong, what to write) for a setting without effect."""
        return None


def usual_chain(conversations: bool = False) -> tuple[Link, ...]:
    """Return the links of the default `collate`. conversations: conversations or answers are trained on."""
    return tuple(link.usually(conversations) for link in LINKS.values() if link.usual)


def row_link(chain: tuple[Link, ...]) -> RowLink:
    """Return the row link of a chain, or of the default chain."""
    of_chain = next((link for link in chain if isinstance(link, RowLink)), None)
    return of_chain or next(link for link in usual_chain() if isinstance(link, RowLink))
