"""Common parts of pair losses."""

# shapes: U pairs, K = 2 sides: the preferred one and the other

import torch
import torch.nn.functional as F
from torch import Tensor


def compared(form: str, beta: float, difference_U: Tensor, smoothing: float) -> Tensor:
    """Return the loss of each pair by the difference of its sides: of log-ratios, or of log-probabilities.

    sigmoid: −(1 − ε) log σ(βd) − ε log σ(−βd), ε = `smoothing`; robust: ((1 − ε) −log σ(βd) + ε log σ(−βd)) / (1 − 2ε);
    hinge: max(0, 1 − βd); ipo: (d − 1/(2β))².
    """
    if form == "hinge":
        return torch.relu(1 - beta * difference_U)
    if form == "ipo":
        return (difference_U - 1 / (2 * beta)).square()
    right_U, wrong_U = F.logsigmoid(beta * difference_U), F.logsigmoid(-beta * difference_U)
    if form == "robust":
        return (smoothing * wrong_U - (1 - smoothing) * right_U) / (1 - 2 * smoothing)
    assert form == "sigmoid"
    return -(1 - smoothing) * right_U - smoothing * wrong_U


def rewards_of(rewards_KU: Tensor) -> dict[str, Tensor]:
    """Return the metrics of pairs whose sides have these rewards."""
    chosen_U, rejected_U = rewards_KU.detach()
    return {
        "rewards/chosen": chosen_U,
        "rewards/rejected": rejected_U,
        "rewards/margin": chosen_U - rejected_U,
        "rewards/accuracy": (chosen_U > rejected_U).double(),
    }
