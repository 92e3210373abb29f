"""`fill_in_middle`: fill-in-the-middle training documents."""

from typing import TYPE_CHECKING, Any

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LINKS, TOKEN_SAMPLES
from xtrain.dsl.schema.setting import setting, share
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


NAMES = ("prefix", "suffix", "middle")


@LINKS.register()
@frozen
class FillInMiddle(PlannedLink):
    """`fill_in_middle(rate = 50%)`: documents become beginning, end, then the missing middle.

    Bavarian et al. 2022, on tokens: two positions of a document are drawn with the seed, and a special token precedes
    each of the three parts. The last three tokens of the end are dropped to make room, so a document keeps its length.
    Documents with a partial loss mask or with numbers that the loss reads are unchanged, as are all documents in
    evaluation.
    """

    rate: Quantity = setting("share of documents that are cut", default=Quantity(50, "%"), units=("%",), check=share)
    suffix_first: Quantity = setting(
        "share of the cut documents with the suffix before the prefix",
        default=Quantity(50, "%"),
        units=("%",),
        check=share,
    )
    prefix: str = setting("special token before the prefix", default="<|fim_prefix|>")
    suffix: str = setting("special token before the suffix", default="<|fim_suffix|>")
    middle: str = setting("special token before the middle", default="<|fim_middle|>")

    kind = "fill_in_middle"
    takes = TOKEN_SAMPLES
    gives = TOKEN_SAMPLES
    changes = True

    def args(self, resolved: "Resolved") -> dict[str, Any]:
        return self._arguments

    @property
    def _arguments(self) -> dict[str, Any]:
        return {
            "rate": self.rate.fraction,
            "suffix_first": self.suffix_first.fraction,
            "tokens": [getattr(self, name) for name in NAMES],
        }

    def does(self, resolved: "Resolved") -> str:
        order = f"{self.prefix}, {self.suffix}, {self.middle}"
        return f"cut {self.rate} of the plain documents at two places drawn from the seed; put the parts after {order}"

    def identity(self, align: int) -> list[Any]:
        return [type(self).__name__, self._arguments]
