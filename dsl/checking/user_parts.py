"""`use`: the functions of the user's own that a spec may name, read without running any of them."""

import os
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from xtrain.dsl import blocks
from xtrain.dsl.checking.part_calls import DeclaredPart
from xtrain.dsl.checking.user_components import names_taken
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Fix
from xtrain.dsl.diagnostics.fixes import renamed
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.diagnostics.suggest import certain, closest
from xtrain.dsl.evaluation import functions
from xtrain.dsl.evaluation.sections import Section
from xtrain.dsl.evaluation.values import Word
from xtrain.dsl.schema import later
from xtrain.dsl.schema.actions import ACTIONS, Action
from xtrain.dsl.schema.collators import LINKS
from xtrain.dsl.schema.component import Component, Registry, UserComponent, members_of, registry_of
from xtrain.dsl.schema.log import TRACKERS, Log
from xtrain.dsl.schema.sources import SOURCES
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.tokens import CONSTANTS
from xtrain.dsl.user_parts.files import ModuleMissing, PartModule, find_module, is_file, module_digest
from xtrain.dsl.user_parts.kinds import PART_KINDS
from xtrain.dsl.user_parts.reader import read_parts

# Words that a spec understands in another way, beside the names of components; nodes of a plan go by some of them.
_TAKEN: Final = frozenset((
    *later.SOURCES, *later.LINKS, *functions.FUNCTIONS, *CONSTANTS, "microbatches",
))  # fmt: skip


# Blocks whose label is always the name of a function of the user's own.
_OF_USERS: Final = tuple(block for block in blocks.KINDS.values() if issubclass(block, UserComponent))


class DeclaredParts(dict[str, DeclaredPart]):
    """Name → part. unread: something that a `use` names could not be read, so that a part may be missing here."""

    unread: bool = False

    def of_kind(self, kind: str) -> list[str]:
        """The names of those of one kind."""
        return [name for name, part in self.items() if part.declared.kind == kind]

    def block(self, block: type, section: Section) -> type:
        """The class of a block: one of the user's own where its label is the name of a function of that kind."""
        if members_of(block) is TRACKERS:
            return self._with_trackers(block, section)
        part = self.get(label_text(section)) if issubclass(block, Component) else None
        if part is None or blocks.KINDS.get(PART_KINDS[part.declared.kind].block) is not block:
            return block
        part.used = True
        return part.component()

    def actions(self) -> Mapping[str, type[Action]]:
        """Return all actions by name; reading one loads it."""
        return ChainMap(self._own(ACTIONS), ACTIONS)  # type: ignore[arg-type]

    def _with_trackers(self, block: type, section: Section) -> type:
        """The class of `log` with a setting for each tracker of the user's own, too."""
        own = self._own(TRACKERS)
        for name in own.keys() & {*section.blocks, *section.entries}:
            self[name].used = True
        return Log.of({**TRACKERS, **own}) if own else block

    def _own(self, registry: Registry[Any]) -> dict[str, Any]:
        """The components of a kind that are the user's own, by their names."""
        own = {name: part for name, part in self.items() if PART_KINDS[part.declared.kind].block == registry.word}
        return {name: part.component() for name, part in own.items()}

    def check_label(self, block: type, section: Section, diagnostics: Diagnostics) -> bool:
        """Whether the label of a block may be what it is; False after reporting a function of another kind."""
        registry, part = registry_of(block), self.get(label_text(section))
        if self.may_be_missing(block, section):
            return False
        if block in _OF_USERS and part is None:
            self._unknown(block, section, diagnostics)
            return False
        if not (registry or block in _OF_USERS) or part is None or part.declared.name in (registry or ()):
            return True
        own, span = PART_KINDS[part.declared.kind], section.labels[0].value.span
        message = f"`{part.declared.name}` is {own.noun}, and the label of `{section.kind}` names another kind"
        notes = [(f"`{part.declared.name}` is declared here", part.declared.span)]
        part.used = True
        diagnostics.error("X219", message, span, hint=f"{own.noun} {own.chosen}", notes=notes)
        return False

    def may_be_missing(self, block: type, section: Section) -> bool:
        """Whether the label may be a name that could not be read, so that nothing is known of its block."""
        registry, name = registry_of(block), label_text(section)
        choosable = block in _OF_USERS if registry is None else registry.takes_functions and name not in registry
        return self.unread and bool(name) and choosable and name not in self

    def _unknown(self, block: type, section: Section, diagnostics: Diagnostics) -> None:
        name, span = label_text(section), section.labels[0].value.span
        own = [each for each, part in self.items() if blocks.KINDS.get(PART_KINDS[part.declared.kind].block) is block]
        meant = closest(name, own)
        hint = f"did you mean `{meant}`?" if meant else f"`use` names the module of a function with `@{section.kind}`"
        message = f"no function with `@{section.kind}` is called `{span.text}`"
        notes = [(f"there are {', '.join(own)}", None)] if own else []
        diagnostics.error("X219", message, span, hint=hint, notes=notes, fix=renamed(span, name, own))

    def label(self, block: type, attribute: attrs.Attribute) -> attrs.Attribute:
        """The attribute that the label of a block fills, with the names of the user's own."""
        registry = registry_of(block)
        if registry is None:
            return attribute
        own = [name for name, part in self.items() if PART_KINDS[part.declared.kind].block == registry.word]
        return attribute.evolve(type=Literal[(*registry, *own)]) if own else attribute  # type: ignore[valid-type]


def label_text(section: Section) -> str:
    """The name that the label of a block is; empty where it is none."""
    data = section.labels[0].value.data if len(section.labels) == 1 else None
    return data.text if isinstance(data, Word) else data if isinstance(data, str) else ""


def read_uses(uses: Iterable[s.Use], spec: str, order: int, diagnostics: Diagnostics) -> DeclaredParts:
    """The parts that `use` statements of the spec at `spec` and of its includes make known.

    order: of the first of their files among all sources. What is wrong with a module is reported, with its place.
    """
    reader = _UseReader(Path(os.path.dirname(spec)), order, diagnostics)  # noqa: PTH120
    for use in uses:
        reader.take(use)
    return reader.parts


def check_unused(parts: DeclaredParts, uses: Iterable[s.Use], diagnostics: Diagnostics) -> None:
    """Warn of modules none of whose parts is used."""
    for use in uses:
        own = [part for part in parts.values() if part.use == use.target.span]
        if own and not any(part.used for part in own):
            names = ", ".join(part.declared.name for part in own)
            message = f"nothing that {use.target.span.text} declares is used"
            diagnostics.warning("W204", message, use.span, hint=f"remove it, or use {names}")


class _UseReader:
    def __init__(self, folder: Path, order: int, diagnostics: Diagnostics) -> None:
        self.folder, self.order, self.diagnostics = folder, order, diagnostics
        self.parts = DeclaredParts()
        self.seen: set[str] = set()

    def take(self, use: s.Use) -> None:
        """Read the module of one statement; one that has been read already adds nothing."""
        module = self._module(use)
        if module is None:
            self.parts.unread = True
            return
        try:
            found = find_module(module, self.folder)
            identity = os.path.realpath(found.path)
            if identity in self.seen:
                return
            self.seen.add(identity)
            data, digest = found.path.read_bytes(), module_digest(found)
        except ModuleMissing as missing:
            self._missing(use, module, str(missing))
            return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "this is not a file path"
            self._missing(use, module, f"cannot read `{module}`: {reason}")
            return
        self._read(use, module, found, data, digest)

    def _module(self, use: s.Use) -> str | None:
        """The module as a plan names it: a path relative to the folder of the spec, or a dotted name."""
        target, span = use.target, use.target.span
        if isinstance(target, s.Reference):
            if is_file(target.text):
                hint, fix = f'write `use "{target.text}"`', Fix(span, f'"{target.text}"')
                self.diagnostics.error("X221", "the path of a file is written in quotes", span, hint=hint, fix=fix)
                return None
            return target.text
        path = target.value
        if not is_file(path):
            is_there = os.path.isfile(self._beside(use) / f"{path}.py")  # noqa: PTH113 (any text is a name to it)
            hint = f'write `use "{path}.py"`' if path and is_there else None
            hint = hint or 'write `use "parts.py"`, or `use package.module`'
            self.diagnostics.error("X221", f"`{path}` is not a Python file: the name must end in .py", span, hint=hint)
            return None
        if not os.path.isabs(path):  # noqa: PTH117
            path = os.path.relpath(self._beside(use) / path, self.folder)
        return os.path.normpath(path).replace(os.sep, "/")

    @staticmethod
    def _beside(use: s.Use) -> Path:
        """The folder of the spec that says it."""
        return Path(os.path.dirname(use.span.source.path))  # noqa: PTH120

    def _missing(self, use: s.Use, module: str, message: str) -> None:
        hint, fix, span = None, None, use.target.span
        if is_file(module) and isinstance(use.target, s.String):
            path = self.folder / module
            files = {p.stem: p.name for p in sorted(path.parent.glob("*.py"))} if os.path.isdir(path.parent) else {}  # noqa: PTH112
            meant = closest(path.stem, files)
            if meant is not None:
                hint = f"did you mean `{files[meant]}`?"
                if certain(path.stem, files) == meant and "\\" not in span.text:
                    head, sign, _ = use.target.value.rpartition("/")
                    fix = Fix(span, f'"{head}{sign}{files[meant]}"')
        self.diagnostics.error("X221", message, span, hint=hint, fix=fix)
        self.parts.unread = True

    def _read(self, use: s.Use, module: str, found: PartModule, data: bytes, digest: str) -> None:
        span = use.target.span
        path = found.path.as_posix()
        order, self.order = self.order, self.order + 1
        try:
            source = SourceText.from_bytes(path, data, order=order, included_at=span)
        except UnicodeDecodeError:
            self.diagnostics.error("X221", f"`{path}` is not UTF-8 text", span, hint="save it as UTF-8")
            self.parts.unread = True
            return
        wrong = Diagnostics()
        declared = read_parts(source, wrong)
        self.diagnostics.extend(wrong)
        self.parts.unread |= wrong.has_errors
        if declared == [] and not wrong.has_errors:
            decorators = ", ".join(f"`@{kind}`" for kind in PART_KINDS)
            hint = f"put a decorator of `xtrain` above a function or class: {decorators}"
            self.diagnostics.error("X222", f"`{path}` declares nothing that a spec can use", span, hint=hint)
            self.parts.unread = True
        for each in declared or ():
            earlier = self.parts.get(each.name)
            block = PART_KINDS[each.kind].block
            taken = (*names_taken(block), *CONSTANTS) if block else (*_TAKEN, *SOURCES, *LINKS)
            if each.name in taken:
                message = f"`{each.name}` is already a word of the language"
                self.diagnostics.error("X224", message, each.span, hint="give the function another name")
                self.parts.unread = True
            elif earlier is not None:
                notes = [("the first is here", earlier.declared.span)]
                message, hint = f"two functions are called `{each.name}`", "give one another name"
                self.diagnostics.error("X224", message, each.span, hint=hint, notes=notes)
            else:
                self.parts[each.name] = DeclaredPart(each, module, digest, span)
