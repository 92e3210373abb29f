"""`loss cispo { … }`: the policy gradient with clipped weights (MiniMax-M1, arXiv 2506.13585)."""

from collections.abc import Iterator
from typing import Literal

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import ADVANTAGES, LOSSES, OLD
from xtrain.dsl.schema.policy import TokenPolicyLoss
from xtrain.dsl.schema.setting import Conflict, not_negative, positive, setting
from xtrain.lazy_attrs import frozen


@LOSSES.register()
@frozen
class Cispo(TokenPolicyLoss):
    """`loss cispo { … }`: the log-probability of each token times its advantage and its clipped ratio as a weight."""

    kind: str = named("cispo")
    ratio_low: float = setting("lower limit of ratios", default=0.0, check=not_negative)
    ratio_high: float = setting(
        "upper limit of ratios", default=5.0, check=positive, resuming="ratios are clipped by it from here on"
    )

    outside: Literal["clip", "mask"] = setting(
        "tokens whose ratio is beyond a limit: clip: weighted by the limit (truncated importance sampling); mask: not "
        "learned from (masked importance sampling, IcePop)",
        default="clip",
        added=True,
        resuming="tokens beyond the limits count by it from here on",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.ratio_low >= self.ratio_high:
            message = f"it lies below `ratio_high`, which is {self.ratio_high:g}"
            yield Conflict("ratio_low", message, f"write less than {self.ratio_high:g}")

    def does(self) -> str:
        text = f"minimize −ρA · log π of each token, ρ = π / e^`{OLD}` a weight in {self.ratio_low:g} … "
        beyond = ", 0 beyond it" if self.outside == "mask" else ""
        return f"{text}{self.ratio_high:g}{beyond}, A = `{ADVANTAGES}`{self.penalty()}; {self.mean()}"
