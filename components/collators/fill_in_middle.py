"""`fill_in_middle`: documents of which a part is to be filled in."""

from typing import Any

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.collators import LINKS, TOKEN_SAMPLES, Link
from xtrain.dsl.schema.setting import setting, share

NAMES = ("prefix", "suffix", "middle")


@LINKS.register()
@frozen
class FillInMiddle(Link):
    """`fill_in_middle(rate = 50%)`: documents become their beginning, their end, and then what is missing between.

    Bavarian et al. 2022, on tokens: two places of a document are drawn from the seed, and a special token of the
    tokenizer stands before each of the three parts. The last three tokens of the end give way to them, so that a
    document keeps its length. Documents of which only some tokens are predicted, or of which the loss reads numbers,
    stay as they are, and so do all in evaluation.
    """

    rate: Quantity = setting("share of the documents", default=Quantity(50, "%"), units=("%",), check=share)
    suffix_first: Quantity = setting(
        "share of these with the end before the beginning", default=Quantity(50, "%"), units=("%",), check=share
    )
    prefix: str = setting("special token before the beginning", default="<|fim_prefix|>")
    suffix: str = setting("special token before the end", default="<|fim_suffix|>")
    middle: str = setting("special token before what is missing", default="<|fim_middle|>")

    kind = "fill_in_middle"
    takes = TOKEN_SAMPLES
    gives = TOKEN_SAMPLES
    changes = True

    def args(self, run: Any) -> dict[str, Any]:
        return {
            "rate": self.rate.fraction,
            "suffix_first": self.suffix_first.fraction,
            "tokens": [getattr(self, name) for name in NAMES],
        }

    def does(self, run: Any) -> str:
        order = f"{self.prefix}, {self.suffix}, {self.middle}"
        return f"{self.rate} of the plain documents cut at two places drawn from the seed, and reordered behind {order}"

    def identity(self, align: int) -> list[Any]:
        return [type(self).__name__, self.args(None)]
