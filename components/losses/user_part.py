"""`loss NAME { … }` of the user's own: a function with `@loss` in a module that `use` names."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import UserComponent, named
from ...dsl.schema.training import LOSSES, Loss, logits_chunk, z_weight


@LOSSES.user
@frozen
class UserLoss(UserComponent, Loss):
    """`loss NAME { … }`: a function of your own, from log-probabilities of labels to losses of tokens."""

    kind: str = named("")
    z_loss: float = z_weight()
    chunk: Quantity = logits_chunk()

    resuming: ClassVar[Mapping[str, str]] = {"user": "the run calls other code, or the same with other arguments"}

    def args(self) -> dict[str, Any]:
        return {"user": self.call(), "reads": list(self.filled)}

    def does(self) -> str:
        read = " and ".join(("the log-probability of its label", *(f"`{name}`" for name in self.filled)))
        return f"minimise {self.kind} of {self.module}, for each token by {read}; `loss` stays the cross-entropy"

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(args["reads"])
