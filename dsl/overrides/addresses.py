"""What `--set` calls a tick or a trigger: by what it does, as `every.eval.web` or `on.finish.generate`.

The address of a tick is that of any of its actions, with the action's label where it is needed. Ticks that do the same
are told apart by a number, in the order of the spec: `every.log.1`, `every.log.2`.
"""

from collections.abc import Sequence

from attrs import define, field

from xtrain.dsl import blocks
from xtrain.dsl.schema.actions import Action
from xtrain.dsl.spec import Spec

# An action and its label, empty where it has none that a path could hold.
Done = tuple[str, str]


@define
class Addresses:
    """found: for each name of an action, the places (trigger, action) that it names."""

    triggers: Sequence[Sequence[Done]]
    found: dict[str, list[tuple[int, int]]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for number, actions in enumerate(self.triggers):
            for place, (action, label) in enumerate(actions):
                for name in (action, f"{action}.{label}") if label else (action,):
                    self.found.setdefault(name, []).append((number, place))

    def places(self, name: str) -> list[tuple[int, int]]:
        """What a name may mean, one place for each trigger: several if it is not enough."""
        places = self._first_of_each(name)
        base, _, number = name.rpartition(".")
        if not places and number.isdecimal():
            numbered = self._first_of_each(base)
            places = numbered[int(number) - 1 : int(number)] if int(number) else []
        return places

    def name(self, trigger: int, place: int) -> str:
        """The name that means this action of this trigger and no other."""
        action, label = self.triggers[trigger][place]
        full = f"{action}.{label}" if label else action
        same = self._first_of_each(full)
        alone = len(self._first_of_each(action)) == 1
        if len(same) == 1:
            return action if alone and not label else full
        return f"{full}.{[number for number, _ in same].index(trigger) + 1}"

    def all(self) -> list[str]:
        """Every name that means one trigger."""
        names = [self.name(i, j) for i, actions in enumerate(self.triggers) for j in range(len(actions))]
        return list(dict.fromkeys(names))

    def _first_of_each(self, name: str) -> list[tuple[int, int]]:
        first: dict[int, int] = {}
        for trigger, place in self.found.get(name, ()):
            first.setdefault(trigger, place)
        return list(first.items())


def of_ticks(spec: Spec) -> Addresses:
    """The addresses of a spec's ticks, without `every.` before them."""
    return Addresses([[_done(action) for action in tick.actions] for tick in spec.ticks])


def _done(action: Action) -> Done:
    label = blocks.label_of(type(action))
    return action.kind, "" if label is None or action.called else str(getattr(action, label.name))
