"""`xtrain check --fix`: apply certain fixes, check again, and repeat until nothing changes.

A pass applies every fix that does not touch another. If the number of mistakes drops by the number of fixes, all fixes
were right; else each is tried alone and kept only if it helped. A result that is worse than the original is never kept.
"""

from collections.abc import Callable, Mapping
from typing import Final

from attrs import field

from xtrain.dsl.checking.overrides import PATH
from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics
from xtrain.lazy_attrs import frozen

TRIALS: Final = 200  # fixes tried alone; beyond that, all are kept while they help
PASSES: Final = 20  # most specs need two or three: a fixed name reveals mistakes of its value
Check = Callable[[Mapping[str, str]], Diagnostics]
_Cost = tuple[int, ...]


@frozen
class FixedTexts:
    """Result of `apply_fixes`. texts: path → new content of each changed file. fixed: the diagnostics whose fixes were
    applied, in order. diagnostics: the remaining ones."""

    texts: Mapping[str, str]
    fixed: tuple[Diagnostic, ...]
    diagnostics: Diagnostics


def apply_fixes(check: Check) -> FixedTexts:
    """Apply all fixes. check: returns the diagnostics of the spec with some files replaced by other texts."""
    first, trials = _State({}, (), check({})), TRIALS
    state, refused, seen = first, set[_Key](), {_frozen(first.texts)}
    for _ in range(PASSES):
        fixes = _disjoint([d for d in state.diagnostics if _is_fixable(d) and _key(d) not in refused])
        if not fixes:
            break
        candidate = _applied(state, fixes, check)
        if not _as_promised(state, candidate, len(fixes)):
            if trials >= len(fixes):
                trials -= len(fixes)
                candidate = _one_by_one(state, fixes, check, refused)
            elif candidate.cost >= state.cost:
                break
        if candidate is not state and _frozen(candidate.texts) in seen:
            break  # fixes that undo each other
        state = candidate
        seen.add(_frozen(state.texts))
    state = state if state.cost < first.cost else first
    return FixedTexts(state.texts, state.fixed, state.diagnostics)


def fixable(diagnostics: Diagnostics) -> int:
    """Return how many diagnostics have a fix."""
    return sum(_is_fixable(diagnostic) for diagnostic in diagnostics)


def _is_fixable(diagnostic: Diagnostic) -> bool:
    return diagnostic.fix is not None and diagnostic.fix.span.source.path != PATH


# Passes ---------------------------------------------------------------------------------------------------------------


@frozen
class _State:
    """Search state. texts: of the changed files. fixed: applied fixes. diagnostics: of the result."""

    texts: dict[str, str]
    fixed: tuple[Diagnostic, ...]
    diagnostics: Diagnostics = field(repr=False)

    @property
    def cost(self) -> _Cost:
        """Count of mistakes by kind, most fundamental first: unreadable text hides unknown names, unknown names hide
        wrong values, wrong values hide their consequences."""
        codes = [diagnostic.code for diagnostic in self.diagnostics]
        return *(sum(code.startswith(kind) for code in codes) for kind in ("X1", "X2", "X3", "X")), len(codes)


def _as_promised(before: _State, after: _State, fixes: int) -> bool:
    """Return True if each fix removed at least one mistake and no new kind appeared."""
    no_more = all(new <= old for new, old in zip(after.cost, before.cost, strict=True))
    return no_more and after.cost[-1] <= before.cost[-1] - fixes


def _one_by_one(state: _State, fixes: list[Diagnostic], check: Check, refused: set["_Key"]) -> _State:
    """Try each fix alone, last in the text first, so that the positions of the others stay valid."""
    before = state.fixed
    for diagnostic in reversed(fixes):
        alone = _applied(state, [diagnostic], check)
        here = (diagnostic.code, _place(diagnostic))
        gone = all(other.fix is None or (other.code, _place(other)) != here for other in alone.diagnostics)
        if alone.cost < state.cost or (alone.cost == state.cost and gone):
            state = alone
        else:
            refused.add(_key(diagnostic))
    applied = state.fixed[len(before) :]
    return _State(state.texts, (*before, *sorted(applied, key=_place)), state.diagnostics) if applied else state


def _applied(state: _State, fixes: list[Diagnostic], check: Check) -> _State:
    texts = dict(state.texts)
    for diagnostic in reversed(fixes):
        assert diagnostic.fix is not None
        span, text = diagnostic.fix
        whole = texts.get(span.source.path, span.source.text)
        texts[span.source.path] = whole[: span.start] + text + whole[span.end :]
    return _State(texts, (*state.fixed, *fixes), check(texts))


def _disjoint(found: list[Diagnostic]) -> list[Diagnostic]:
    """Return the fixes that neither overlap nor touch, in text order; of two that do, the first.

    Closing brackets missing at one place go together: the bracket opened last is closed first.
    """
    chosen: list[Diagnostic] = []
    for diagnostic in sorted(found, key=_place):
        assert diagnostic.fix is not None
        before = chosen[-1] if chosen else None
        if before is None or _is_apart(before, diagnostic) or _is_pair(before, diagnostic):
            chosen.append(diagnostic)
    return chosen


def _is_apart(one: Diagnostic, other: Diagnostic) -> bool:
    assert one.fix is not None and other.fix is not None
    first, second = one.fix.span, other.fix.span
    return first.source is not second.source or second.start > first.end


def _is_pair(one: Diagnostic, other: Diagnostic) -> bool:
    """Return True if both insert a closing bracket at the same place."""
    assert one.fix is not None and other.fix is not None
    return one.code == other.code == "X103" and one.fix.span == other.fix.span


def _place(diagnostic: Diagnostic) -> tuple[int, int, int]:
    assert diagnostic.fix is not None and diagnostic.span is not None
    span = diagnostic.fix.span
    return span.source.order, span.start, -diagnostic.span.start if diagnostic.code == "X103" else 0


# Identity of a fix after the text around it changed: its content, not its position
_Key = tuple[str, str, str, str, str]


def _key(diagnostic: Diagnostic) -> _Key:
    assert diagnostic.fix is not None
    span, text = diagnostic.fix
    return diagnostic.code, diagnostic.message, span.source.path, span.source.line(span.line), text


def _frozen(texts: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(texts.items())
