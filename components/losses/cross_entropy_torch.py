"""`setup.loss` of cross_entropy, where labels are smoothed."""

from torch import Tensor

from ...runtime.models.loss import Term
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op


@op("setup.loss.cross_entropy")
def smooth_labels(model: ModelParts, label_smoothing: float) -> None:
    """Minimise cross-entropy against smoothed labels."""
    model.minimise(smoothed(label_smoothing))


def smoothed(share: float) -> Term:
    """(1 − s) · −log p(label) + s · the mean of −log p over the vocabulary; s: `share`, as torch has it."""

    def loss(logprob_T: Tensor, mean_logprob_T: Tensor) -> Tensor:
        return (share - 1) * logprob_T - share * mean_logprob_T

    return Term(loss, reads=("mean_logprob_T",))
