"""Errors of names: unknown, missing or misplaced kinds, labels and settings, and settings of other trainers."""

import re
from collections.abc import Collection, Iterable
from typing import Any, Final, get_args

import attrs

from xtrain.dsl.checking.context import Context
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Fix, Note, SourceText, Span
from xtrain.dsl.diagnostics.suggest import closest, renamed
from xtrain.dsl.diagnostics.synonyms import Given, ours, synonym_of
from xtrain.dsl.evaluation.statements import Section, SectionEntry, Tree
from xtrain.dsl.evaluation.values import FAILED, Items, Mapping, Value, Word
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.data_components import LINKS
from xtrain.dsl.schema.setting import AUTO, Auto, Setting, open_setting, settings_of
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.values import Dimension


def _plain(value: Value) -> Any:
    """Return a value for a conversion: names as strings, lists as tuples."""
    data = value.data
    if isinstance(data, Items):
        return tuple(_plain(item) for item in data.values)
    return data.text if isinstance(data, Word) else "auto" if data is AUTO else data


def _all_settings() -> set[str]:
    found = {name for block in blocks.KINDS.values() for name in settings_of(block)}
    nested = [inner for block in blocks.KINDS.values() for inner in blocks.nested(block).values()]
    return found | {name for block in nested for name in settings_of(block)}


def owners(name: str) -> list[str]:
    """Return the blocks that have a setting of this name."""
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


_SAMPLE_NAMES: Final = {"dataset": "web", "phase": "anneal", "group": "embed_tokens", "hook": "watch", "task": "sql"}
_LABEL: Final = re.compile(r'"[^"\\\n]*"|\w[\w.]*')


class NameErrors:
    """Reports mistakes of names; each method handles one kind of mistake."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.diagnostics = diagnostics
        self.root = Section("")  # the blocks of the spec, whose values convert settings of other trainers

    # The whole spec ---------------------------------------------------------------------------------------------------

    def top_level(self, tree: Tree) -> None:
        """Report unknown and unsupported kinds, and settings outside any block."""
        self.root = tree.root
        for kind, section in tree.root.blocks.items():
            if kind in blocks.NAMED:
                self._named_without_label(kind, section)
            elif kind not in blocks.KINDS:
                for head in section.heads:
                    self._unknown_kind(kind, section, head)
            elif kind in blocks.ACTIONS:  # a block of that name means nothing without a body
                for word in section.bare:
                    self._action_outside(kind, word)
        for name, entry in tree.root.entries.items():
            if name != "collate":
                self._outside(name, entry)

    def beside_server(self, tree: Tree) -> None:
        """Report blocks and settings that a spec with `serve` does not support."""
        for kind, section in tree.root.blocks.items():
            if kind not in blocks.KINDS:
                continue
            if not blocks.is_of_servers(kind):
                self._beside_server(f"`{kind}`", section.head)
                continue
            for name, entry in section.entries.items():
                if name in settings_of(blocks.KINDS[kind]) and not blocks.is_of_servers(f"{kind}.{name}"):
                    self._beside_server(f"`{name}` of `{kind}`", entry.name_span)
        for kind, sections in tree.named.items():
            for section in sections.values() if kind in blocks.KINDS else ():
                self._beside_server(f"`{kind}`", section.head)
        if "collate" in tree.root.entries:
            self._beside_server("`collate`", tree.root.entries["collate"].name_span)
        for trigger in tree.triggers:
            self._beside_server("`every`" if trigger.period is not None else "`on`", trigger.span)

    def _beside_server(self, what: str, span: Span | None) -> None:
        message = f"{what} cannot be combined with `serve`: clients decide what is trained, how and how long"
        self.diagnostics.error("X227", message, span, hint="remove it, or remove `serve` to train with this spec")

    def missing_blocks(self, kinds: list[str], tree: Tree, source: SourceText | None) -> None:
        missing = [kind for kind in kinds if kind not in tree.root.lost]
        if not missing or tree.root.broken or source is None:
            return
        # A misspelt kind has been reported; the block it was meant to be is not missing as well.
        misspelt = {closest(kind, blocks.KINDS) for kind in tree.root.blocks if kind not in blocks.KINDS}
        missing = [kind for kind in missing if kind not in misspelt]
        if not missing:
            return
        names = listed(missing)
        plural = "blocks are" if len(missing) > 1 else "block is"
        examples = [(f"write for instance `{blocks.REQUIRED[kind]}`", None) for kind in missing]
        if len(missing) == 1:
            self.diagnostics.error(
                "X205", f"the {names} block is missing", source.end, hint=f"add `{blocks.REQUIRED[missing[0]]}`"
            )
        else:
            self.diagnostics.error("X205", f"these {plural} missing: {names}", source.end, notes=examples)

    def _action_outside(self, kind: str, word: Span) -> None:
        """Report `every 10 steps eval web, log` where `then log` was meant."""
        hint = f"an action follows `every …`, `on …` or `then`; the block is written `{kind} {{ … }}`"
        self.diagnostics.error("X201", f"`{kind}` by itself is neither a block nor part of a tick", word, hint=hint)

    def _unknown_kind(self, kind: str, section: Section, head: Span) -> None:
        word = _word(head, kind)
        if kind in blocks.ACTIONS:
            hint = "an action follows `every …`, `on …` or `then`"
            if section.entries or kind == "profile":  # other trainers have it as a block
                label = " …" if section.labels else ""
                hint = f"write `every 1000 steps {kind}{label} {{ … }}`"
            self.diagnostics.error("X201", f"`{kind}` is an action, not a block", word, hint=hint)
            return
        if kind == "collate":
            self.diagnostics.error(
                "X210", "`collate` is a setting, not a block", word,
                hint="write `collate = to_tensor -> flatten -> shift_tokens -> pack(sequential)`",
            )  # fmt: skip
            return
        meant = closest(kind, blocks.KINDS)
        owner = owners(kind)
        notes: list[Note] = [(f"kinds of blocks: {', '.join(blocks.KINDS)}", None)]
        synonym = synonym_of(kind)
        hint = synonym.hint_with() if synonym and synonym.hint else f"did you mean `{meant}`?" if meant else None
        fix = renamed(word, kind, blocks.KINDS)
        if kind in LINKS:
            hint, notes = "links of `collate` are joined by `->`", []
        elif kind in ("if", "for", "while", "else"):
            hint, notes = "a spec has no conditions and no loops", []
        elif meant is None and owner:
            hint, notes = f"`{kind}` belongs in {listed(owner)}", []
        self.diagnostics.error("X201", f"there is no block `{kind}`", word, hint=hint, notes=notes, fix=fix)

    def _named_without_label(self, kind: str, section: Section) -> None:
        for head in section.heads:
            name = _SAMPLE_NAMES[kind]
            self.diagnostics.error("X207", f"a `{kind}` needs a name", head, hint=f"write `{kind} {name} {{ … }}`")

    def _outside(self, name: str, entry: SectionEntry) -> None:
        owner = owners(name)
        if name in blocks.KINDS:
            hint = f"write `{name} {{ … }}`"
            example = blocks.REQUIRED.get(name)
            hint = f"write `{example}`" if example else hint
            fix = _as_block(blocks.KINDS[name], entry)
            self.diagnostics.error("X210", f"`{name}` is a block and takes no `=`", entry.name_span, hint=hint, fix=fix)
            return
        meant = closest(name, ("collate",))
        hint = f"did you mean `{meant}`?" if meant else None
        if owner and not meant:
            hint = f"`{name}` belongs in {listed(owner)}"
        elif not meant:
            hint = self._elsewhere(name, entry)
        self.diagnostics.error(
            "X203", f"`{name}` is not a setting of the top level", entry.name_span, hint=hint,
            notes=[] if hint else [("the top level holds blocks and one setting, `collate`", None)],
            fix=renamed(entry.name_span, name, ("collate",)),
        )  # fmt: skip

    # Fields -----------------------------------------------------------------------------------------------------------

    def unknown_fields(self, block: type, own: Collection[str], section: Section) -> None:
        """Report settings that no component of a block has. own: settings of the chosen component, by name."""
        free = open_setting(block)
        if free is not None and get_args(free[0].type)[1] is not Dimension:
            return
        given = [(name, each.name_span) for name, each in section.entries.items() if name not in section.varied]
        given += [(name, _word(nested.heads[0], name)) for name, nested in section.blocks.items() if nested.heads]
        if section.written <= set(own):
            return
        known = settings_of(block)
        label = section.labels[0].value.span.text if section.labels else ""
        fields = [name for name, (_, meta) in known.items() if not meta.only or label in meta.only]
        order = {name: place for place, name in enumerate(own)}
        fields.sort(key=lambda name: order.get(name, len(order)))  # in the order of the component
        for name, span in given:
            if name not in known:
                self._unknown_field(block, section, name, fields, span)

    def _unknown_field(self, block: type, section: Section, name: str, known: list[str], span: Span) -> None:
        kind = section.kind
        meant = closest(name, known)
        owner = [] if f"`{kind}`" in owners(name) else owners(name)  # the user function instead of its owner
        label, entry = blocks.label_of(block), section.entries.get(name)
        fix = None
        if meant:
            hint, fix = self._meant(name, meant, entry)
            if fix is None or meant in _beside(section, span):
                fix = renamed(span, name, known, taken=_beside(section, span))
        elif label is not None and label.name == name:
            hint = f"the {name} is the label of the block: `{kind} {name}`"
        elif name in blocks.KINDS and name not in blocks.ACTIONS:
            hint = f"`{name}` is a separate block: write it next to `{kind}`, at the top level"
        elif owner:
            hint = f"`{name}` belongs in {listed(owner)}"
        else:
            hint = self._elsewhere(name, entry)
        fields = f"settings of `{kind}`: {', '.join(known)}" if known else f"`{kind}` has no settings"
        self.diagnostics.error(
            "X203", f"unknown setting `{name}` in `{kind}`", span, hint=hint, notes=[(fields, None)], fix=fix
        )

    def missing_fields(self, block: type, section: Section, names: list[str]) -> None:
        known = settings_of(block)
        assert section.head is not None
        examples = [f"{name} = {known[name][1].example}" for name in names]
        also = [(f"`{section.kind}` is also written here", head) for head in section.heads[:-1]]
        self.diagnostics.error(
            "X204", f"`{section.kind}` needs {listed(names)}", section.head,
            hint=f"add `{', '.join(examples)}`", notes=also,
        )  # fmt: skip

    def of_another_label(self, block: type, section: Section, name: str, meta: Setting, label: Any) -> None:
        span = section.entries[name].name_span if name in section.entries else section.blocks[name].heads[0]
        label_name = label_word(block)
        label_span = section.labels[0].value.span if section.labels else None
        elsewhere = label_span is not None and (label_span.source, label_span.line) != (span.source, span.line)
        where: list[Note] = [(f"this is `{section.kind} {label}`", label_span)] if elsewhere else []
        self.diagnostics.error(
            "X208", f"`{section.kind} {label}` has no `{name}`", _word(span, name),
            hint=f"it is a setting of the {label_name} {listed(meta.only, 'or')}", notes=where,
        )  # fmt: skip

    def not_in_there(self, outer: str, section: Section, name: str, entry: SectionEntry) -> None:
        """Report a setting that a nested block does not have, such as `clip` of the optimizer of a group."""
        self.diagnostics.error(
            "X208", f"the `{section.kind}` of a `{outer}` has no `{name}`", entry.name_span,
            hint=f"set it in the block `{section.kind}` of the spec, which applies to all parameters",
        )  # fmt: skip

    def block_for_value(self, section: Section, name: str, meta: Setting) -> None:
        """Report `lr 3e-4` where `lr = 3e-4` was meant."""
        label = section.labels[0].value if section.labels else None
        written = label.span.text if label is not None else meta.example or "value"
        one = label is not None and len(section.labels) == len(section.heads) == 1
        message, hint = f"`{name}` is a setting and needs `=`", f"write `{name} = {written}`"
        for head in section.heads:
            fix = Fix(head, f"{name} = {written}") if one and not (section.entries or section.blocks) else None
            self.diagnostics.error("X210", message, head, hint=hint, fix=fix)

    def value_with_body(self, item: s.Assign) -> None:
        """Report `model = qwen3 { … }` where `model qwen3 { … }` was meant."""
        assert item.body is not None
        between = Span(item.span.source, item.name.span.end, item.value.span.start)
        self.diagnostics.error(
            "X101", "a value has no body", Span(item.span.source, item.body.span.start, item.body.span.start + 1),
            hint="a block is written `kind label { … }`, without `=`", fix=Fix(between, " "),
        )  # fmt: skip

    def value_for_block(self, entry: SectionEntry, name: str, block: type) -> None:
        """Report `tp = 2` where `tp 2` was meant."""
        label = blocks.label_of(block)
        labelled = label is not None
        data = entry.value.data
        shown = entry.value.span.text
        if label is not None and not _may_be_label(label, data):
            shown = "auto" if Auto in get_args(label.type) else "2"
        simple = labelled and not isinstance(data, Mapping | Items) and data is not FAILED
        written = f"{name} {shown}" if simple else f"{name} {{ … }}"
        whole = entry.name_span.to(entry.value.span)
        self.diagnostics.error(
            "X210", f"`{name}` is a block and takes no `=`", whole, hint=f"write `{written}`",
            fix=_as_block(block, entry),
        )  # fmt: skip

    # Labels -----------------------------------------------------------------------------------------------------------

    def label_on_unlabelled(self, section: Section) -> None:
        value = section.labels[0].value
        self.diagnostics.error(
            "X207", f"`{section.kind}` takes no label", value.span, hint=f"write `{section.kind} {{ … }}`"
        )

    def missing_label(self, block: type, section: Section, attribute: attrs.Attribute) -> None:
        if section.head is None or section.broken:
            return
        choices = blocks.choices_of(attribute.type)
        samples = {"dataset": "web", "source": "bytes", "size": "2"}
        sample = choices[0] if choices else samples.get(attribute.name, "name")
        notes: list[Note] = [(f"one of {', '.join(choices)}", None)] if len(choices) > 1 else []
        only = len(choices) == 1 and section.head.text == section.kind
        self.diagnostics.error(
            "X207", f"`{section.kind}` needs a {label_word(block)}", section.head,
            hint=f"write `{section.kind} {sample}`", notes=notes,
            fix=Fix(section.head, f"{section.kind} {sample}") if only else None,
        )  # fmt: skip

    def too_many_labels(self, block: type, section: Section) -> None:
        extra = section.labels[1].value.span.to(section.labels[-1].value.span)
        self.diagnostics.error(
            "X207", f"`{section.kind}` takes one label, its {label_word(block)}", extra, hint="remove it"
        )

    def out_of_range(self, context: Context, value: Value, problem: str) -> None:
        self.diagnostics.error("X304", f"{context.subject} {problem}", value.span, notes=value.notes)

    # Settings of other trainers, converted with values of this spec ---------------------------------------------------

    def _meant(self, name: str, meant: str, entry: SectionEntry | None) -> tuple[str, Fix | None]:
        """Return the hint for a name that means the setting `meant`, and a fix if the value must change too."""
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
        """Return the value of another trainer's setting as xtrain writes it; None if the value is not a literal or is
        insufficient."""
        synonym = synonym_of(name)
        if synonym is None or synonym.convert is None or entry is None:
            return None
        value = entry.value
        if value.via or not value.span.text or value.span.source is not entry.name_span.source:
            return None
        return synonym.convert(Given(_plain(value), value.span.text, self._setting))

    def _setting(self, path: str) -> Any:
        """Return the value that the spec gives to a setting of a block, True for a block; None without one."""
        kind, _, name = path.partition(".")
        section = self.root.blocks.get(kind)
        if section is not None and not name:
            return True
        entry = section.entries.get(name) if section is not None else None
        return entry.value.data if entry is not None else None

    def _number(self, name: str) -> str | None:
        """Return the text of another trainer's setting in any block, if it is a plain positive number."""
        for section in (self.root, *self.root.blocks.values()):
            if (entry := section.entries.get(name)) is not None:
                data = entry.value.data
                plain = isinstance(data, int | float) and not isinstance(data, bool) and not entry.value.via
                return entry.value.span.text if plain and data > 0 else None
        return None

    def _elsewhere(self, name: str, entry: SectionEntry | None) -> str | None:
        """Return the hint for another trainer's name of a setting that belongs to other blocks."""
        synonym, settings = synonym_of(name), _all_settings()
        other = ours(name, settings)
        if synonym is None or other is None:
            return synonym.hint_with(self._number) or None if synonym else None
        if other in blocks.REQUIRED:
            return f"write for instance `{blocks.REQUIRED[other]}` at the top level"
        text = self._converted(name, entry)
        shown = f"{other} = {text}" if text else other
        more = f"; {synonym.hint_with(self._number)}" if synonym.hint and text is None else ""
        return f"xtrain calls this `{shown}`, in {listed(owners(other))}{more}"


def _as_block(block: type, entry: SectionEntry) -> Fix | None:
    """Return the fix from `tp = 2` to `tp 2`, and from `router = { … }` to `router { … }`."""
    data, value, label = entry.value.data, entry.value.span, blocks.label_of(block)
    if value.source is not entry.name_span.source or not value.text:
        return None
    if label is None and isinstance(data, Mapping) and value.text[0] == "{":
        return Fix(Span(value.source, entry.name_span.end, value.end), f" {_as_body(data, value)}")
    is_label = label is not None and _LABEL.fullmatch(value.text) is not None
    if label is None or not is_label or not _may_be_label(label, data):
        return None
    return Fix(Span(value.source, entry.name_span.end, value.start), " ")


def _may_be_label(label: attrs.Attribute, data: Any) -> bool:
    """Return False for a value that is not the number that a label is, such as `true`."""
    kinds = {label.type, *get_args(label.type)}
    return int not in kinds or type(data) is int or (data is AUTO and Auto in kinds)


def _as_body(data: Mapping, value: Span) -> str:
    """Return a map as the body of a block, with `=` instead of `:`."""
    text = value.text
    for each in reversed(data.entries.values()):
        start = each.span.start - value.start
        key = text[:start].rstrip()
        text = f"{key[:-1].rstrip()} = {text[start:]}" if key[-1:] in (":", "=") else text
    return text


def _beside(section: Section, span: Span) -> set[str]:
    """Return the names written in the same body as the text at `span`: each may occur only once there."""
    places = [(name, entry.name_span) for name, entry in section.entries.items()]
    places += [(name, head) for name, nested in section.blocks.items() for head in nested.heads]
    begun = [head.start for head in section.heads if head.source is span.source]

    def body(place: Span) -> int:
        return sum(start < place.start for start in begun)

    return {name for name, place in places if place.source is span.source and body(place) == body(span)}


def label_word(block: type) -> str:
    """Return what the label of a block is called: a family, a kind, a size."""
    label = blocks.label_of(block)
    return label.name if label is not None else "label"


def _word(head: Span, kind: str) -> Span:
    """Return the first word of a head."""
    return Span(head.source, head.start, min(head.end, head.start + len(kind)))
