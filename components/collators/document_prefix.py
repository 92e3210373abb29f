"""`document_prefix`: loss mask without the beginnings of documents."""

from typing import TYPE_CHECKING, Any

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.data_components import LINKS, TOKEN_SAMPLES
from xtrain.dsl.schema.setting import setting, share
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@LINKS.register()
@frozen
class DocumentPrefix(PlannedLink):
    """`document_prefix(most = 50%)`: the beginning of each document is context only; the rest is predicted.

    The length of the beginning is drawn uniformly from 0 to `most` with the seed: prefix language modeling (Raffel et
    al. 2020) with causal attention. Evaluation predicts all tokens.
    """

    most: Quantity = setting(
        "maximum length of the beginning, as a share of the document",
        default=Quantity(50, "%"),
        units=("%",),
        check=share,
    )

    kind = "document_prefix"
    takes = TOKEN_SAMPLES
    gives = TOKEN_SAMPLES
    changes = True

    def args(self, resolved: "Resolved") -> dict[str, Any]:
        return self._arguments

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"most": self.most.fraction}

    def does(self, resolved: "Resolved") -> str:
        return f"mask the beginning of each document, at most {self.most} drawn from the seed: read, not trained on"

    def identity(self, align: int) -> list[Any]:
        return [type(self).__name__, self._arguments]
