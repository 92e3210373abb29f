"""`loss NAME { … }` with user code: a function with `@loss` in a module named by `use`."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from xtrain.dsl.schema.component import UserComponent, named
from xtrain.dsl.schema.losses import LOSSES, Reference, ReferredLoss, Unit, logits_chunk, reference_setting, z_weight
from xtrain.dsl.schema.setting import Conflict
from xtrain.dsl.user_parts.kinds import COUNTS, STATISTICS
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


class OwnLoss(UserComponent, ReferredLoss):
    """Common base of user-defined losses."""

    @property
    def unit(self) -> Unit:
        return self.declared.get("unit") or "token"

    @property
    def columns(self) -> tuple[str, ...]:
        return self.declared.get("columns", ())

    @property
    def values(self) -> tuple[str, ...]:
        return self.declared.get("values", ())

    def args(self) -> dict[str, Any]:
        given = {"unit": self.unit if self.across else None, "columns": list(self.columns), "values": list(self.values)}
        read = [name for name in self.filled if name in STATISTICS]
        return {"user": self.call(), "reads": read, **{name: value for name, value in given.items() if value}}

    def does(self) -> str:
        what = "the sum of log-probabilities of its labels" if self.across else "the log-probability of its label"
        read = " and ".join((what, *(f"`{name}`" for name in self.filled)))
        ends = "; the head is computed twice" if self.across else ""
        text = f"minimize {self.kind} of {self.module}, for each {self.unit} by {read}"
        return f"{text}; `loss` is the cross-entropy{ends}"

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(args["reads"])


@LOSSES.user
@frozen
class UserLoss(OwnLoss):
    """`loss NAME { … }`: a function of your own, from log-probabilities of labels to losses of tokens."""

    kind: str = named("")
    z_loss: float = z_weight()
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    @classmethod
    def base_of(cls, declared: Any) -> type:
        return UserLoss if declared.options["unit"] in (None, "token") else UserUnitLoss

    def conflicts(self) -> Iterator[Conflict]:
        wrong = [*self.values, *((COUNTS,) if COUNTS in self.filled else ())]
        if wrong:
            hint = 'write `@loss(unit="sequence")` or `"pair"` above it'
            yield Conflict("kind", f"a loss of tokens has no `{wrong[0]}`, which belongs to a sequence", hint)


@frozen
class UserUnitLoss(OwnLoss):
    """`loss NAME { … }`: a function of your own, from sums over tokens to losses of sequences or pairs."""

    kind: str = named("")
    reference: Reference = reference_setting()
    chunk: Quantity = logits_chunk()

    across: ClassVar[bool] = True
