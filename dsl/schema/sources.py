"""`source = NAME(…)`: what is asked of the components that documents come from."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal

import attrs

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import AUTO

SOURCES: Final = Registry["Source"]("source", "sources", call="{}()")


@SOURCES.base
class Source(Component):
    """`NAME(…)`: where the documents of a dataset come from.

    The module `…_run` beside a source has a function `open_source`, which takes a `SourceRequest` and gives an
    `OpenedSource`; see `runtime/data/sources/reader.py`.
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
        here. found: takes the findings, see `planner/findings.py`."""

    def identity(self, seed: int) -> Any:
        """What identifies it in that of an experiment, as JSON: its class, and what it is given."""
        given = [getattr(self, attribute.name) for attribute in attrs.fields(type(self))]
        return [type(self).__name__, [str(AUTO) if value is AUTO else value for value in given]]

    @classmethod
    def placed(cls, given: Any, place: Callable[[str], str]) -> Any:
        """What is given in an identity, with every path in it as `place` has it."""
        return given
