"""`pack`: rows of equal length."""

from typing import TYPE_CHECKING, Any, Literal, Self

from attrs import asdict, evolve

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, LINKS, MICROBATCH, PACKINGS, Packing, RowLink
from xtrain.dsl.schema.losses import WideColumn
from xtrain.dsl.schema.policy import EXPERTS, SHARES
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, setting
from xtrain.lazy_attrs import frozen
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

    Method = str
else:
    Method = Literal[tuple(PACKINGS)]

# Larger groups gain less than 0.01 % of the positions for documents of usual lengths.
GROUP = 100_000


@LINKS.register()
@frozen
class Pack(RowLink, PlannedLink):
    """`pack(sequential)`: documents packed into rows of equal length."""

    method: Method | Auto = setting(
        "packing method; auto, the default with conversations or answers: multipack for conversations and answers, "
        "sequential for other documents",
        default="sequential",
    )
    group: int | Auto = setting(
        "number of documents packed together; auto: 100,000; unused by sequential and single",
        default=AUTO,
        check=at_least(1),
    )
    align: int | Auto = setting(
        "pad documents to a length divisible by this; auto: 2 · ring with ring attention, else 1",
        default=AUTO,
        check=at_least(1),
    )

    kind = "pack"
    takes = LABELLED_SAMPLES
    gives = MICROBATCH
    usual = True

    @classmethod
    def usually(cls, conversations: bool) -> "Pack":
        return cls(method=AUTO) if conversations else cls()

    def settled(self, answers: bool) -> Self:
        if not isinstance(self.method, Auto):
            return self
        kinds = (name for name, each in PACKINGS.items() if each.for_conversations)
        return evolve(self, method=next(kinds) if answers else PACKINGS.default.kind)

    @property
    def packing(self) -> type[Packing]:
        return PACKINGS.default if isinstance(self.method, Auto) else PACKINGS[self.method]

    @property
    def grouped(self) -> int | None:
        if self.packing.in_order and not isinstance(self.method, Auto):
            return None
        return GROUP if isinstance(self.group, Auto) else self.group

    def useless(self) -> tuple[str, str] | None:
        """Return the problem of an unused `group`: only packings that reorder documents use groups."""
        if self.grouped is not None or isinstance(self.group, Auto):
            return None
        other = next(name for name, packing in PACKINGS.items() if not packing.in_order)
        message = f"pack({self.method}) keeps the order of documents, and has no group of {self.group:,}"
        return message, f"write `pack({other}, group = {self.group})`, or remove the group"

    @property
    def _method(self) -> str:
        return "auto" if isinstance(self.method, Auto) else self.method

    def args(self, resolved: "Resolved") -> dict[str, Any]:
        group = {} if self.grouped is None else {"group": self.grouped}
        loss = resolved.spec.loss
        read = {
            **({"unit": loss.unit} if loss.unit != "token" else {}),
            **({"columns": list(loss.columns)} if loss.columns else {}),
            **({"computed": list(loss.computed)} if loss.computed else {}),
            **({"values": list(loss.values)} if loss.values else {}),
            **({"wide": {name: asdict(each) for name, each in wide.items()}} if (wide := self._wide(resolved)) else {}),
            **({"later": resolved.architecture.mtp} if resolved.architecture.mtp else {}),
        }
        return {"method": self._method, "capacity": resolved.batch.sequence, "align": resolved.align, **group, **read}

    @staticmethod
    def _wide(resolved: "Resolved") -> dict[str, WideColumn]:
        """Return the columns with several numbers per token, which the loss or a sampler has."""
        from xtrain.planner.derive.further_models import replayed_width, sampler_widths

        width = replayed_width(resolved)
        recorded = {
            name: WideColumn(width, "float32" if name == SHARES else "int32")
            for name, width in sampler_widths(resolved).items()
        }
        return {**resolved.spec.loss.wide, **({EXPERTS: WideColumn(width, "int32")} if width else {}), **recorded}

    def does(self, resolved: "Resolved") -> str:
        how = "as chosen per dataset" if isinstance(self.method, Auto) else self.method
        text = f"{how}: pack samples into rows of {resolved.batch.sequence:,}, with attention within each sample"
        text += f", each padded to a length divisible by {resolved.align}" if resolved.align > 1 else ""
        loss = resolved.spec.loss
        text += f"; numbered by {loss.unit}" if loss.unit != "token" else ""
        read = [f"`{name}`" for name in (*loss.columns, *loss.values, *loss.wide)]
        text += f"; the loss reads {', '.join(read)}" if read else ""
        later = resolved.architecture.mtp
        return text + (f"; next to each token the {plural(later, 'token')} after it" if later else "")

    def identity(self, align: int) -> list[Any]:
        group = {} if self.grouped is None else {"group": self.grouped}
        return [type(self).__name__, {"method": self._method, "align": align, **group}]
