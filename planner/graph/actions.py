"""Actions of `every` and `on` → nodes; the same action with the same arguments is one node, however often named."""

from collections import Counter
from typing import Any

from xtrain.dsl.schema.actions import Action
from xtrain.planner.canonical import DATA, text, whole_numbers
from xtrain.planner.graph.action_node import ActionPlace
from xtrain.planner.graph.builder import Builder
from xtrain.planner.model.inventory import weight_bytes
from xtrain.planner.plan import NodeKind
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import bytes_text


class ActionNodes:
    """Adds a node at the first mention of an action, and gives its id again at each further one."""

    def __init__(self, graph: Builder, run: Resolved, after: str) -> None:
        self._graph = graph
        self._run = run
        self._after = after
        self._known: dict[tuple[str, str], str] = {}  # name without a number and arguments → id
        self._numbers = Counter[str]()
        self._ids: set[str] = set()

    def add(self, action: Action, event: str = "", *, stops: bool = False) -> str:
        """The id of the node of an action that has one: `tick.eval.web`, or on an event `event.finish.eval.web`.

        stops: the run stops behind it.
        """
        node = action.node(self._run, ActionPlace(event=event, stops=stops))
        name = node.name or node.op
        if event:
            name = f"event.{event}.{name.partition('.')[2]}"
        same = (name, text(whole_numbers(node.args), DATA))
        if same not in self._known:
            id = name
            while id in self._ids:
                self._numbers[name] += 1
                id = f"{name}.{self._numbers[name] + 1}"
            self._ids.add(id)
            self._known[same] = id
            kind: NodeKind = "event" if event else "tick"
            self._graph.add(kind, node.op, node.does, id=id, args=node.args, after=(self._after, *node.after))
        return self._known[same]

    def add_own(self, name: str, event: str, does: str, args: dict[str, Any] | None = None) -> str:
        """A node that no action of the language stands for."""
        id = f"event.{event}.{name}"
        return self._graph.add("event", f"event.{name}", does, id=id, args=args, after=(self._after,))

    def add_model(self, event: str) -> str:
        """The node that saves weights alone."""
        run, ema = self._run, self._run.spec.ema
        averaged = ema is not None and ema.publish
        form = run.formats.averages if averaged else run.formats.params
        size = weight_bytes(run.inventory, form, run.formats.frozen, run.cuts.base)
        does = f"save the {'averaged ' if averaged else ''}weights alone, for publishing: {bytes_text(size)}"
        return self._graph.add("event", "tick.model", does, id=f"event.{event}.model", after=(self._after,))
