"""What `xtrain check --fix` would write, as changes of an editor: one for each diagnostic, and all that are certain."""

from attrs import frozen

from xtrain.dsl.autofix import apply_fixes
from xtrain.dsl.diagnostics.diagnostic import Diagnostic
from xtrain.dsl.diagnostics.source import Span
from xtrain.lsp.analysis import Analysis
from xtrain.planner.load import check_from_spec


@frozen
class Correction:
    """A code action. title: for people. edits: replacements of spans. of: the corrected diagnostic; None: several."""

    title: str
    edits: tuple[tuple[Span, str], ...]
    of: Diagnostic | None = None


def corrections(analysis: Analysis, path: str, start: int, end: int) -> list[Correction]:
    """Return the corrections of diagnostics between two offsets."""
    found = []
    for diagnostic in analysis.diagnostics:
        span, fix = diagnostic.span, diagnostic.fix
        if span is None or fix is None or span.source.path != path or span.start > end or span.end < start:
            continue
        found.append(Correction(_title(fix.span.text, fix.text), ((fix.span, fix.text),), diagnostic))
    return found


def all_corrections(analysis: Analysis) -> Correction | None:
    """Return all safe corrections of `--fix` in all files; None if there are none."""
    if not any(diagnostic.fix for diagnostic in analysis.diagnostics):
        return None
    texts = {source.path: source.text for source in analysis.loaded.sources}
    fixed = apply_fixes(lambda changed: check_from_spec(analysis.root, (), {**texts, **changed}))
    edits = []
    for source in analysis.loaded.sources:
        text = fixed.texts.get(source.path, source.text)
        if text != source.text:
            edits.append((Span(source, 0, len(source.text)), text))
    return Correction("Correct all that is certain", tuple(edits)) if edits else None


def _title(old: str, new: str) -> str:
    old, new = (" ".join(text.split()) for text in (old, new))
    if not old:
        return f"Add `{new}`"
    return f"Write `{new}` in place of `{old}`" if new else f"Remove `{old}`"
