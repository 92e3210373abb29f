"""`--set every.eval.web='200 steps'`: the period of a tick, and settings of what ticks and events do."""

from collections.abc import Mapping

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.evaluation.evaluate import Evaluator, Names
from xtrain.dsl.evaluation.includes import ReadStatements
from xtrain.dsl.evaluation.sections import Section, Tree, TriggerSection
from xtrain.dsl.evaluation.values import Value, Word
from xtrain.dsl.overrides.addresses import Addresses, Done
from xtrain.dsl.overrides.paths import Override, Parts, descend, value_of
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.actions import Action, by_default
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.syntax import tree as s

Actions = Mapping[str, type[Action]]
"""By their names, those of the user's own among them."""


def set_tick(
    override: Override, tree: Tree, actions: Actions, reading: ReadStatements, evaluator: Evaluator,
    diagnostics: Diagnostics,
) -> None:  # fmt: skip
    """`every.ADDRESS`, the period of a tick, or `every.ADDRESS.SETTING`, of what it does."""
    ticks = [each for each in tree.triggers if each.event is None]
    rest, addresses = override.parts[1:], _addresses(ticks, actions)
    name = ".".join(part for part, _ in rest)
    usual = [kind.kind for kind in by_default()]  # ticks that a run has even if nobody writes them may be set too
    places = addresses.places(name)
    if len(rest) == 1 and not places and name in usual:
        tick = TriggerSection(override.span, Names(reading.params), [(s.Name(_path(override), name), Section(name))])
        tree.triggers.append(tick)
        ticks, places = [tick], [(0, 0)]
    if len(places) == 1:
        every_step = Value(Quantity(1, "steps"), override.value) if override.value.text == "step" else None
        ticks[places[0][0]].override = every_step or value_of(override.value, reading, evaluator, diagnostics)
    elif len(places) > 1:
        _ambiguous("every", ticks, addresses, places, override, diagnostics)
    elif not _set_action(ticks, addresses, rest, override, actions, reading, evaluator, diagnostics):
        defaults = (each for each in usual if not addresses.places(each))
        known = [f"every.{each}" for each in (*addresses.all(), *defaults)]
        given = f"every.{name}" if rest else ""
        meant = closest(given, known)
        message = f"there is no tick called `{given}`" if rest else "`every` needs the name of a tick"
        hint = f"did you mean `{meant}`?" if meant else f"write one of {', '.join(known)}"
        diagnostics.error("X217", message, _path(override), hint=hint)


def set_event(
    override: Override, tree: Tree, actions: Actions, reading: ReadStatements, evaluator: Evaluator,
    diagnostics: Diagnostics,
) -> None:  # fmt: skip
    """`on.EVENT.ADDRESS.SETTING`, of what is done on an event, or `on.nan`, the number behind it."""
    events = [each for each in tree.triggers if each.event is not None]
    head, *path = override.parts
    name, place = path[0] if path else ("", head[1])
    triggers = [each for each in events if each.event is not None and each.event.text == name]
    if not triggers:
        known = list(dict.fromkeys(each.event.text for each in events if each.event is not None))
        meant = closest(name, known)
        hint = f"did you mean `{meant}`?" if meant else None
        notes = [] if meant else [(f"the spec has {', '.join(f'`on {each}`' for each in known) or 'none'}", None)]
        message = f"the spec has no `on {name}`" if name else "`on` needs the name of an event"
        diagnostics.error("X217", message, place, hint=hint, notes=notes)
        return
    rest, addresses = tuple(path[1:]), _addresses(triggers, actions)
    if name == "nan" and not rest and len(triggers) == 1:
        triggers[0].override = value_of(override.value, reading, evaluator, diagnostics)
        return
    if not _set_action(triggers, addresses, rest, override, actions, reading, evaluator, diagnostics):
        listed = ", ".join(f"`on.{name}.{each}.SETTING`" for each in addresses.all())
        message = f"`{_path(override).text}` is not a setting of an action of this event"
        diagnostics.error("X217", message, _path(override), hint=f"the spec has {listed}")


def _set_action(
    triggers: list[TriggerSection], addresses: Addresses, rest: Parts, override: Override, actions: Actions,
    reading: ReadStatements, evaluator: Evaluator, diagnostics: Diagnostics,
) -> bool:  # fmt: skip
    """Give an action a setting, by the end of a path. False if the path before its last part means no action."""
    numbered = bool(rest) and rest[-1][0].isdecimal()  # one tick more than there are
    places = [] if numbered else addresses.places(".".join(part for part, _ in rest[:-1]))
    kinds = [actions.get(addresses.triggers[trigger][place][0]) for trigger, place in places]
    known = [name for kind in kinds if kind is not None for name in settings_of(kind)]
    if places and rest[-1][0] not in known and closest(rest[-1][0], known) is None:
        return False
    if len(places) > 1:
        prefix = ".".join(part for part, _ in override.parts[: len(override.parts) - len(rest)])
        _ambiguous(prefix, triggers, addresses, places, override, diagnostics, rest[-1][0])
    elif places:
        trigger, place = places[0]
        name, section = triggers[trigger].actions[place]
        if name.text in actions:  # else that is reported
            descend(actions[name.text], section, override, rest[-1:], reading, evaluator, diagnostics)
    return bool(places)


def _addresses(triggers: list[TriggerSection], actions: Actions) -> Addresses:
    return Addresses([[_done(name, section, actions) for name, section in each.actions] for each in triggers])


def _done(name: s.Name, section: Section, actions: Actions) -> Done:
    kind = actions.get(name.text)
    label = section.labels[0].value.data if section.labels and not (kind and kind.called) else ""
    return name.text, label.text if isinstance(label, Word) else label if isinstance(label, str) else ""


def _ambiguous(
    prefix: str, triggers: list[TriggerSection], addresses: Addresses, places: list[tuple[int, int]],
    override: Override, diagnostics: Diagnostics, setting: str = "",
) -> None:  # fmt: skip
    """Report a path that may mean several ticks, and the paths that mean one."""
    names = [".".join(filter(None, (prefix, addresses.name(*place), setting))) for place in places]
    hint = f"write {' or '.join(f'`{name}`' for name in names)}"
    notes = [(f"`{name}`", triggers[number].span) for name, (number, _) in zip(names, places, strict=True)]
    path = _path(override)
    diagnostics.error("X217", f"`{path.text}` is ambiguous: {len(places)} actions match", path, hint=hint, notes=notes)


def _path(override: Override) -> Span:
    return override.parts[0][1].to(override.parts[-1][1])
