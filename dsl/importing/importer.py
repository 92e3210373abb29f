"""`Importer`: what a format of configurations implements for `xtrain import`, and the choice of a format."""

from collections.abc import Iterator
from typing import ClassVar, Final

from xtrain.dsl.importing.config_file import ConfigFile, flat
from xtrain.dsl.importing.draft import Draft
from xtrain.dsl.schema.component import Component, Registry
from xtrain.lazy_attrs import frozen

IMPORTERS: Final = Registry["Importer"]("importer", "importers")


@IMPORTERS.base
@frozen
class Importer(Component):
    """A format of configurations.

    title: name of the trainer. whole: its files name model and data. marks: keys that distinguish its files from files
    of other formats; `a|b` is either, `!a` must not be there. settings: block → keys whose meaning the table of other
    trainers' settings has. without_meaning: reason → keys that nothing here corresponds to. lacking: reason → keys of
    features that xtrain does not have; off, they ask for what xtrain does anyway.
    """

    kind: str
    title: ClassVar[str]
    whole: ClassVar[bool] = True
    marks: ClassVar[tuple[str, ...]]
    settings: ClassVar[dict[str, str]] = {}
    without_meaning: ClassVar[dict[str, str]] = {}
    lacking: ClassVar[dict[str, str]] = {}

    def write(self, draft: Draft) -> None:
        """Write the settings that depend on several keys; called before the tables above are applied."""
        raise NotImplementedError

    def imported(self, config: ConfigFile) -> Draft:
        """Return the draft of a configuration."""
        draft = Draft(config, self.title)
        self.write(draft)
        for path, keys in self.settings.items():
            for key in keys.split():
                draft.known(path, key)
        for why, keys in self.without_meaning.items():
            draft.meaningless(keys, why)
        for why, keys in self.lacking.items():
            draft.unless_off(keys, why)
        return draft


def candidates(config: ConfigFile) -> list[str]:
    """Return the formats of a configuration: those with the largest share of their marks, the likeliest first."""
    present = {key for key, _ in flat(config.root)}
    shares = dict(_shares(present))
    best = max(shares.values(), default=0.0)
    return [name for name, share in shares.items() if share == best and best > 0]


def _shares(present: set[str]) -> Iterator[tuple[str, float]]:
    for name, kind in IMPORTERS.items():
        wanted = [mark for mark in kind.marks if not mark.startswith("!")]
        hits = sum(any(word in present for word in mark.split("|")) for mark in wanted)
        foreign = any(mark[1:] in present for mark in kind.marks if mark.startswith("!"))
        yield name, 0.0 if foreign else hits / len(wanted)
