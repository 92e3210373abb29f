"""Settings of other trainers in a spec: what to write instead, and in which block."""

from collections.abc import Iterable
from typing import Any

from attrs import frozen

from xtrain.dsl import blocks
from xtrain.dsl.diagnostics.diagnostic import Fix
from xtrain.dsl.diagnostics.synonyms import Given, ours, synonym_of
from xtrain.dsl.evaluation.sections import Section, SectionEntry
from xtrain.dsl.evaluation.values import Items, Value, Word
from xtrain.dsl.schema.setting import AUTO, settings_of


@frozen
class PeerSettings:
    """Other trainers' settings, converted with values of this spec. root: the blocks of the spec."""

    root: Section

    def meant(self, name: str, meant: str, entry: SectionEntry | None) -> tuple[str, Fix | None]:
        """The hint for a name that was meant for the setting `meant`, and a fix if the value is written differently."""
        synonym = synonym_of(name)
        if synonym is None or synonym.is_same or meant not in synonym.names:
            return f"did you mean `{meant}`?", None
        text = self._converted(name, entry)
        if text is None or entry is None:
            hint = synonym.hint_with(self._number)
            return f"did you mean `{meant}`? {hint}" if synonym.convert else hint, None
        whole = entry.name_span.to(entry.value.span)
        return f"write `{meant} = {text}`", Fix(whole, f"{meant} = {text}")

    def _converted(self, name: str, entry: SectionEntry | None) -> str | None:
        """The value of another trainer's setting as xtrain writes it; None if the value is no literal or not enough."""
        synonym = synonym_of(name)
        if synonym is None or synonym.convert is None or entry is None:
            return None
        value = entry.value
        if value.via or not value.span.text or value.span.source is not entry.name_span.source:
            return None
        return synonym.convert(Given(_plain(value), value.span.text, self._setting))

    def _setting(self, path: str) -> Any:
        """The value that the spec gives a setting of a block; None without one."""
        kind, _, name = path.partition(".")
        section = self.root.blocks.get(kind)
        entry = section.entries.get(name) if section is not None else None
        return entry.value.data if entry is not None else None

    def _number(self, name: str) -> str | None:
        """The text of a setting of another trainer in any block, if it is a plain positive number."""
        for section in (self.root, *self.root.blocks.values()):
            if (entry := section.entries.get(name)) is not None:
                data = entry.value.data
                plain = isinstance(data, int | float) and not isinstance(data, bool) and not entry.value.via
                return entry.value.span.text if plain and data > 0 else None
        return None

    def elsewhere(self, name: str, entry: SectionEntry | None) -> str | None:
        """The hint for another trainer's name of a setting that stands in other blocks."""
        synonym, settings = synonym_of(name), _all_settings()
        other = ours(name, settings)
        if synonym is None or other is None:
            return synonym.hint_with(self._number) or None if synonym else None
        text = self._converted(name, entry)
        shown = f"{other} = {text}" if text else other
        more = f"; {synonym.hint_with(self._number)}" if synonym.hint and text is None else ""
        return f"xtrain calls this `{shown}`, in {listed(owners(other))}{more}"


def _plain(value: Value) -> Any:
    """A value for a conversion: names as strings, lists as tuples."""
    data = value.data
    if isinstance(data, Items):
        return tuple(_plain(item) for item in data.values)
    return data.text if isinstance(data, Word) else "auto" if data is AUTO else data


def _all_settings() -> set[str]:
    found = {name for block in blocks.KINDS.values() for name in settings_of(block)}
    nested = [inner for block in blocks.KINDS.values() for inner in blocks.nested(block).values()]
    return found | {name for block in nested for name in settings_of(block)}


def owners(name: str) -> list[str]:
    """The blocks that have a setting of this name."""
    found = []
    for kind, block in blocks.KINDS.items():
        if name in settings_of(block):
            found.append(f"`{kind}`")
        for inner, nested in blocks.nested(block).items():
            if inner not in blocks.KINDS and name in settings_of(nested):
                found.append(f"`{inner}` of `{kind}`")
    return found


def listed(names: Iterable[str], word: str = "and") -> str:
    quoted = [name if name.startswith("`") else f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} {word} {quoted[-1]}"
