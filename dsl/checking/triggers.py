"""`every` and `on`: their period or event, and the actions they call."""

from collections.abc import Collection
from typing import Any

import attrs

from xtrain.dsl.checking.context import BlockConverter, Context, stand_in
from xtrain.dsl.checking.convert import convert
from xtrain.dsl.diagnostics.diagnostic import Fix
from xtrain.dsl.diagnostics.suggest import closest, renamed
from xtrain.dsl.evaluation.evaluate import Names
from xtrain.dsl.evaluation.statements import Label, Section, TriggerSection
from xtrain.dsl.evaluation.values import FAILED, Value, describe
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import Action, OnEvent, Tick
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.spec import Origin
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.lexer import UNIT_WORDS, certain_unit, near_unit
from xtrain.dsl.values import Quantity


def structure_triggers(
    triggers: list[TriggerSection], around: BlockConverter
) -> tuple[tuple[Tick, ...], tuple[OnEvent, ...]]:
    """Return all valid ticks and events with their valid actions; report mistakes."""
    ticks: list[Tick] = []
    events: list[OnEvent] = []
    for trigger in triggers:
        if trigger.event is None:
            path = f"every.{len(ticks)}"
            tick = _tick(trigger, path, around)
            ticks += [tick] if tick is not None else around.leave_out(path)
        else:
            events.append(_event(trigger, f"on.{len(events)}", around))
    return tuple(ticks), tuple(events)


def _tick(trigger: TriggerSection, path: str, around: BlockConverter) -> Tick | None:
    if _misspelt_unit(trigger, around):
        return None
    value, period = trigger.override, trigger.period
    if isinstance(period, s.Reference) and period.text == "step":
        value = value or Value(Quantity(1, "steps"), period.span)
    elif period is not None:
        # evaluated even if `--set` overrides it, to report its mistakes
        written = around.evaluator.value(period, trigger.names)
        value = value or written
    if value is None:
        return None  # the text of `--set` was unreadable
    head = trigger.span if period is None else attrs.evolve(trigger.span, end=period.span.end)
    around.origins[path] = Origin("set" if period is None else "text", head)
    around.origins[f"{path}.every"] = Origin.of(value)
    attribute, meta = settings_of(Tick)["every"]
    every = convert(attribute.type, value, Context("every", "every", Tick, meta), around)
    actions = _actions(trigger, path, around)
    if every is FAILED:
        around.unknown.setting(f"{path}.every", attribute)
        every = stand_in(attribute, meta)
    return Tick(every=every, actions=actions)


def _misspelt_unit(trigger: TriggerSection, around: BlockConverter) -> bool:
    """Report `every 10 stpes log`, which reads as the action `stpes` with the label `log`."""
    name, section = trigger.actions[0]
    period = trigger.period
    if not isinstance(period, s.Number) or name.text in around.parts.actions():
        return False
    if isinstance(period.value, Quantity):
        if name.text not in UNIT_WORDS or not period.span.text.endswith("B"):
            return False
        both = period.span.to(name.span)
        meant = f"{period.span.text.split()[0].rstrip('B')}B {name.text}"
        message = "`B` after a space means bytes; a multiplier follows its number without a space"
        around.diagnostics.error("X107", message, both, hint=f"write `{meant}`", fix=Fix(both, meant))
        return True
    meant = near_unit(name.text)
    follows = section.labels and section.labels[0].value.span.text in around.parts.actions()
    if meant is None and not follows:
        return False
    hint = f"did you mean `{meant}`?" if meant else "units: steps tokens, s min h d, %"
    sure = certain_unit(name.text)
    around.diagnostics.error(
        "X107", f"`{name.text}` is not a unit", name.span, hint=hint, fix=Fix(name.span, sure) if sure else None
    )
    return True


def _event(trigger: TriggerSection, path: str, around: BlockConverter) -> OnEvent:
    assert trigger.event is not None
    name = trigger.event
    around.origins[path] = Origin("text", attrs.evolve(trigger.span, end=name.span.end))
    around.origins[f"{path}.event"] = Origin("text", name.span)
    actions = _actions(trigger, path, around)
    if _known(name, "event", blocks.EVENTS, around):
        count = _count(trigger, name, path, around)
        return OnEvent(event=name.text, actions=actions, count=count)  # type: ignore[arg-type]
    around.unknown.paths.add(f"{path}.event")
    return OnEvent(event="finish", actions=actions)  # the actions can still be checked


def _known(name: s.Name, kind: str, words: Collection[str], around: BlockConverter) -> bool:
    """Check that a name is an existing event or action; report it otherwise."""
    if name.text in words:
        return True
    meant = closest(name.text, words)
    around.diagnostics.error(
        "X214", f"there is no {kind} `{name.text}`", name.span,
        hint=f"did you mean `{meant}`?" if meant else None,
        notes=[(f"{kind}s: {', '.join(words)}", None)], fix=renamed(name.span, name.text, words),
    )  # fmt: skip
    return False


def _count(trigger: TriggerSection, name: s.Name, path: str, around: BlockConverter) -> int | None:
    """Return the n of `nan(n)`; None if it is absent, or invalid and reported."""
    given = trigger.arguments
    if trigger.override is not None:
        return _number(trigger.override, path, around)
    if len(given) == 0:
        return None
    if name.text != "nan" or len(given) > 1 or given[0].name is not None:
        span = given[0].span.to(given[-1].span)
        if name.text == "nan":
            message, hint = "`nan` takes one number: the count of consecutive steps", "write `on nan(3) …`"
        else:
            message, hint = f"`{name.text}` takes no number; only `nan` does", f"write `on {name.text} …`"
        around.diagnostics.error("X225", message, span, hint=hint)
        return None
    return _number(around.evaluator.value(given[0].value, trigger.names), path, around)


def _number(value: Value, path: str, around: BlockConverter) -> int | None:
    around.origins[f"{path}.count"] = Origin.of(value)
    attribute, meta = settings_of(OnEvent)["count"]
    count = convert(int, value, Context("n", "nan", OnEvent, meta), around)
    if count is FAILED:
        around.unknown.setting(f"{path}.count", attribute)
        return None
    return count


def _actions(trigger: TriggerSection, path: str, around: BlockConverter) -> tuple[Any, ...]:
    found: list[Any] = []
    for name, section in trigger.actions:
        place = f"{path}.actions.{len(found)}"
        action = _action(name, section, place, trigger.names, around)
        if action is FAILED or section.broken:  # `checkpoint { stop`: it may have swallowed `then …`
            around.unknown.paths.add(f"{path}.actions")
        found += [action] if action is not FAILED else around.leave_out(place)
    return tuple(found)


def _action(name: s.Name, section: Section, path: str, names: Names, around: BlockConverter) -> Any:
    known = around.parts.actions()
    if name.text not in known and around.parts.unread:
        return FAILED  # it may be in an unreadable module, which is reported
    if not _known(name, "action", known, around):
        return FAILED
    block = known[name.text]
    if name.text in around.parts:
        around.parts[name.text].used = True
    if not _bracketed(name, block, section, names, around):
        return FAILED
    most = 1 if blocks.label_of(block) else 0
    for label in section.labels[most:]:
        if label.value.span.text in known:
            span = label.value.span
            around.diagnostics.error(
                "X207", "join actions with `then`", span, hint=f"write `then {span.text}`",
                fix=Fix(span, f"then {span.text}"),
            )  # fmt: skip
            return FAILED
    action = around.block(block, section, path)
    label = blocks.label_of(block)
    return FAILED if label is not None and f"{path}.{label.name}" in around.unknown.paths else action


def _bracketed(name: s.Name, block: type[Action], section: Section, names: Names, around: BlockConverter) -> bool:
    """Use the text in the brackets of `notify("…")` as its label. Return False, with a report, if it is missing or
    another action has brackets."""
    given, word, errors = section.arguments, name.text, around.diagnostics
    if not block.called:
        if given is None:
            return True
        label = blocks.label_of(block)
        form = word if label is None else f"{word} {label.name.upper()}"
        errors.error("X226", f"`{word}` takes no parentheses", name.span, hint=f"write `{form}`")
        return False
    if given is None:
        text = section.labels[0].value.span.text if section.labels else '"…"'
        message, form = f"`{word}` takes a command in parentheses", f"{word}({text})"
        fix = Fix(section.heads[-1], form) if text.startswith('"') and len(section.labels) == 1 else None
        errors.error("X226", message, name.span, hint=f"write `{form}`", fix=fix)
        return False
    if len(given) != 1 or given[0].name is not None:
        span = given[0].span.to(given[-1].span) if given else name.span
        errors.error("X226", f"`{word}` takes one command, as a string", span, hint=f'write `{word}("…")`')
        return False
    value = around.evaluator.value(given[0].value, names)
    if value.data is FAILED:
        return False
    if not isinstance(value.data, str):
        message = f"`{word}` takes a string, not {describe(value.data)}"
        errors.error("X301", message, value.span, hint=f'write `{word}("…")`', notes=value.notes)
        return False
    if not value.data.strip():
        errors.error("X304", "a command cannot be empty", value.span, hint=f'write `{word}("…")`', notes=value.notes)
        return False
    section.labels = [Label(value)]
    return True
