"""`optimizer NAME { … }` with user code: a function with `@optimizer` in a module named by `use`."""

from collections.abc import Mapping
from typing import Any

from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.dsl.schema.component import UserComponent, named
from xtrain.dsl.schema.optimizers import OPTIMIZERS, StateTensor, clip_norm, learning_rate
from xtrain.lazy_attrs import frozen


@OPTIMIZERS.user
@frozen
class UserOptimizer(UserComponent, PlannedOptimizer):
    """`optimizer NAME { … }`: a function of your own that builds an optimizer from parameter groups."""

    kind: str = named("")
    lr: float = learning_rate(None)
    clip: float | None = clip_norm()

    def args(self) -> dict[str, Any]:
        return {"user": self.call(), "state": list(self.declared["state"]), "scalars": list(self.declared["scalars"])}

    def does(self, number_format: str) -> str:
        tensors = f"{', '.join(self.declared['state'])} in {number_format}" if self.declared["state"] else "no tensors"
        scalars = f", {' and '.join(self.declared['scalars'])}" if self.declared["scalars"] else ""
        decay = self.call()["arguments"].get("weight_decay", 0)
        decays = isinstance(decay, int | float) and decay
        decay_text = f"weight decay {decay:g} on matrices" if decays else "no weight decay"
        return f"{self.kind} of {self.module} ({tensors}{scalars} for each parameter), {decay_text}"

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        own = [*args["state"], *args["scalars"]]
        return f"{args['kind']} with {', '.join(own)}" if own else args["kind"]

    @classmethod
    def decays(cls, args: Mapping[str, Any]) -> bool:
        return "weight_decay" in args["user"]["arguments"]

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        return tuple(map(StateTensor, args["state"]))

    @classmethod
    def scalars(cls, args: Mapping[str, Any], name: str) -> tuple[str, ...]:
        return tuple(args["scalars"])
