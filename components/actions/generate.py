"""`generate { prompts = […] }`: texts of the model."""

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from ...dsl.schema.actions import ACTIONS, Action
from ...dsl.schema.setting import Role, at_least, between, not_negative, setting
from ...dsl.spec import Spec
from ...planner.graph.action_node import ActionNode, ActionPlace, averaged_weights
from ...planner.units import plural

if TYPE_CHECKING:
    from ...planner.resolved import Resolved


@ACTIONS.register()
@frozen
class Generate(Action):
    """`generate { prompts = […] }`: continue prompts, to look at what the model has learned."""

    kind: ClassVar[str] = "generate"
    records = True
    uses_averages = True

    prompts: tuple[str, ...] = setting(
        "texts to continue; special tokens may be written by name", role=Role.CADENCE, example='["def "]'
    )
    tokens: int = setting("tokens to add to each prompt", default=64, check=at_least(1), role=Role.CADENCE)
    temperature: float = setting(
        "sampling temperature; 0 takes the most likely token", default=0.8, check=not_negative, role=Role.CADENCE
    )
    top_p: float = setting(
        "nucleus sampling: share of the probability to sample from",
        default=0.95,
        check=between(0.01, 1),
        role=Role.CADENCE,
    )

    def node(self, run: "Resolved", place: ActionPlace) -> ActionNode:
        averaged, of = averaged_weights(run)
        args = {
            "prompts": list(self.prompts),
            "tokens": self.tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": run.spec.experiment.seed,
            **averaged,
        }
        return ActionNode(
            "tick.generate", args, f"continue {plural(len(self.prompts), 'prompt')} by {self.tokens} tokens{of}"
        )

    def idle(self, spec: Spec, ranks: int) -> dict[str, tuple[str, str]]:
        if self.temperature:
            return {}
        why = "at temperature 0 the most likely token is always chosen"
        return {"top_p": (why, "leave it out, or raise the temperature")}
