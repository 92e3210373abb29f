"""Merging of statements into one tree: blocks are merged field by field, later ones win, expressions become values."""

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, Fix, Span
from xtrain.dsl.diagnostics.suggest import without
from xtrain.dsl.evaluation.evaluate import Evaluator, Names
from xtrain.dsl.evaluation.statements import Label, ReadStatements, Section, SectionEntry, Tree, TriggerSection
from xtrain.dsl.evaluation.values import Value, Word
from xtrain.dsl.schema.blocks import NAMED
from xtrain.dsl.syntax import tree as s

_STATEMENT_WORDS = {
    s.Include: "include", s.Use: "use", s.Let: "let", s.Param: "param", s.Every: "every", s.On: "on"
}  # fmt: skip


def resolve(reading: ReadStatements, evaluator: Evaluator, diagnostics: Diagnostics) -> Tree:
    """Merge all statements of a reading; report statements that are invalid together."""
    tree = Tree(Section("spec", broken=reading.broken), unread=reading.unread)
    resolver = _Resolver(tree, evaluator, diagnostics)
    for item, names in reading.statements:
        resolver.take(item, names)
    return tree


class _Resolver:
    def __init__(self, tree: Tree, evaluator: Evaluator, diagnostics: Diagnostics) -> None:
        self.tree, self.evaluator, self.diagnostics = tree, evaluator, diagnostics
        # Per file and section: the settings that the file sets, and their places.
        self.written: dict[tuple[int, int], dict[str, Span]] = {}

    def take(self, item: s.Item, names: Names) -> None:
        """Apply a statement of the top level."""
        match item:
            case s.Block(kind=kind, labels=labels) if kind.text in NAMED and labels:
                self._merge(self.tree.named_section(kind.text, _label_text(labels[0])), item, names)
            case s.Block(kind=kind):
                self._merge(self.tree.root.block(kind.text), item, names)
            case s.Assign():
                self._assign(self.tree.root, item, names, item.span)
                if item.body is not None:
                    self.tree.root.settled.append(item)
            case s.Vary():
                self._out_of_place(item)
            case s.Every(period=period, actions=actions):
                self._react(TriggerSection(item.span, names, self._actions(actions, names), period=period))
            case s.On(event=event, arguments=arguments, actions=actions):
                found = self._actions(actions, names)
                self._react(TriggerSection(item.span, names, found, event=event, arguments=arguments))
            case s.Use():
                self.tree.uses.append(item)
            case s.Broken():
                self._broken(self.tree.root, item)
            case _:
                raise AssertionError(item)  # includes and definitions are gone

    def _react(self, trigger: TriggerSection) -> None:
        self.tree.triggers.append(trigger)

    def _actions(self, actions: tuple[s.Block, ...], names: Names) -> list[tuple[s.Name, Section]]:
        found = []
        for action in actions:
            section = Section(action.kind.text, arguments=action.arguments)
            self._merge(section, action, names)
            found.append((action.kind, section))
        return found

    def _merge(
        self, section: Section, block: s.Block, names: Names, depth: int = 0, *, around: Span | None = None
    ) -> None:
        """Merge a block over the previous content of its section. depth: number of enclosing blocks; around: the
        innermost."""
        end = block.labels[-1].span if block.labels else block.kind.span
        head = block.kind.span.to(end)
        if block.labels:
            labels = [self._label(label, names) for label in block.labels]
            self._check_label(section, labels, head, around)
            section.labels = labels
        section.heads.append(head)
        if block.body is None:
            section.bare += [] if block.labels else [block.kind.span]
            return
        section.broken |= block.body.broken
        written = self._written(section, block.span)
        for item in block.body.items:
            match item:
                case s.Assign(value=value, body=body):
                    self._assign(section, item, names, block.span)
                    if body is not None:
                        section.settled.append(item)
                        inner = s.Block(value.span.to(body.span), s.Name(value.span, value.span.text), (), body)
                        self._merge(section.block(inner.kind.text), inner, names, depth + 1, around=block.span)
                case s.Vary(span=span, name=name, value=value) if section.kind == "sweep" and depth == 0:
                    self._assign(section, s.Assign(span, name, value), names, block.span)
                    section.varied.add(name.text)
                case s.Vary():
                    self._out_of_place(item)
                    section.lost.add(item.name.text)
                case s.Block(kind=kind):
                    first = written.get(kind.text)
                    if first is not None and item.labels and _inside(first, block.span):
                        self._twice(kind.text, kind.span, first)
                        section.lost.add(kind.text)
                    written[kind.text] = kind.span
                    self._merge(section.block(kind.text), item, names, depth + 1, around=block.span)
                case s.Broken():
                    self._broken(section, item)
                case _:
                    self.tree.unread |= isinstance(item, s.Include)
                    word = _STATEMENT_WORDS[type(item)]
                    self.diagnostics.error(
                        "X216", f"`{word}` is not allowed inside a block", item.span,
                        hint="move it to the top level of the file",
                        notes=[(f"the block `{section.kind}` begins here", block.kind.span)],
                    )  # fmt: skip

    def _out_of_place(self, item: s.Vary) -> None:
        name = item.name.text
        hint = f"write `sweep {{ {item.span.text} }}`, or `=` and one value" if "\n" not in item.span.text else None
        self.diagnostics.error("X216", f"only `sweep` accepts several values of `{name}`", item.span, hint=hint)

    def _written(self, section: Section, around: Span) -> dict[str, Span]:
        return self.written.setdefault((id(around.source), id(section)), {})

    def _check_label(self, section: Section, labels: list[Label], head: Span, around: Span | None) -> None:
        """Warn if the same file gave the block another label before. Twice in the enclosing block is X206."""
        before = [each for each in section.heads if each.source is head.source]
        old, new = ([label.value.data for label in each] for each in (section.labels, labels))
        if before and old and old != new and not (around is not None and _inside(before[-1], around)):
            self._again(section, f"the label of `{section.kind}`", head, before[-1])

    def _assign(self, section: Section, item: s.Assign, names: Names, around: Span) -> None:
        """Set a setting of a section. around: the enclosing block."""
        name = item.name.text
        value = self.evaluator.value(item.value, names)
        if isinstance(item.value, s.Unread) and "\n" in item.value.span.text:
            section.broken = True  # an unclosed bracket has swallowed lines
        written = self._written(section, around)
        if name in written and self._refused(section, name, item, value, around):
            section.lost.add(name)
            return
        written[name] = item.name.span
        section.lost.discard(name)
        section.entries[name] = SectionEntry(item.name.span, value)

    def _refused(self, section: Section, name: str, item: s.Assign, value: Value, around: Span) -> bool:
        """Report a setting that the same file gave the section before; return True if it is a mistake."""
        first, span, top = self._written(section, around)[name], item.name.span, section is self.tree.root
        if top or _inside(first, around):
            same = value.span.text == section.entries[name].value.span.text if name in section.entries else False
            self._twice(name, span, first, "file" if top else "block", fix=without(item.span) if same else None)
            return True
        if section.kind not in NAMED or not section.labels:
            self._again(section, f"`{name}` of `{section.kind}`", span, first)
            return False
        what = f"{section.kind} {section.labels[0].value.span.text}"
        hint = f"keep one, or rename one {section.kind}"
        self._twice(f"{name}` of `{what}", span, first, "file", hint)
        return True

    def _again(self, section: Section, what: str, span: Span, first: Span) -> None:
        message, notes = (
            f"{what} is given twice in one file, and the later value counts",
            (("the first is here", first),),
        )
        warning = Diagnostic(severity="warning", code="W205", message=message, span=span, hint="keep one", notes=notes)
        section.repeated.append(warning)

    def _twice(
        self, name: str, span: Span, first: Span, where: str = "block", hint: str = "keep one", fix: Fix | None = None
    ) -> None:
        message = f"`{name}` is given twice in one {where}"
        self.diagnostics.error("X206", message, span, hint=hint, notes=[("the first is here", first)], fix=fix)

    def _broken(self, section: Section, item: s.Broken) -> None:
        if section is self.tree.root:
            text = item.span.text
            trigger = text.partition(" ")[0] in ("every", "on")
            lines = "\n" in text and (self.tree.root.broken or item.name is None)
            self.tree.unread |= lines or (item.name is None and not trigger)
        if item.name is None:
            section.broken = True
        else:
            section.lost.add(item.name)

    def _label(self, label: s.Label, names: Names) -> Label:
        match label:
            case s.Name(span=span, text=text):
                return Label(Value(Word(text), span), names)
            case _:
                return Label(self.evaluator.value(label, names))


def _inside(span: Span, around: Span) -> bool:
    return span.source is around.source and around.start <= span.start < around.end


def _label_text(label: s.Label) -> str:
    match label:
        case s.Name(text=text) | s.String(value=text):
            return text
        case s.Number(span=span) | s.FixedWord(span=span) | s.Call(span=span) | s.Unread(span=span):
            return span.text
