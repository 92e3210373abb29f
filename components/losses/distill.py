"""`loss distill { … }`: knowledge distillation from a teacher's distribution (Hinton et al. 2015, arXiv 1503.02531), by
forward or reverse KL or the divergence between them (Agarwal et al. 2024, arXiv 2306.13649), or by policy gradient
(Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation)."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.losses import (
    LOSSES,
    OLD,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    Loss,
    Teacher,
    WideColumn,
    logits_chunk,
    z_weight,
)
from xtrain.dsl.schema.policy import POLICY
from xtrain.dsl.schema.setting import Conflict, Range, at_least, file_path, positive, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen

HALF = 0.5
POLICY_GRADIENT: Final = "policy_gradient"
RATIO: Final = "policy/ratio"
TAKEN: Final = "the divergence is taken by it from here on"
METRICS: Final = {
    "distill/divergence": (
        "divergence of student and teacher, in the `form` of the loss, of logits / temperature; with policy_gradient "
        "the log-probability of the sampler minus the teacher's; mean over the valid tokens of the step",
        "nats a token",
    ),
    "distill/agreement": (
        "share of valid tokens with the same most probable next token as the teacher's",
        "share, 0 to 1",
    ),
}


def measured_by(form: str) -> tuple[str, ...]:
    """Return the metrics of a form."""
    return ("distill/divergence", RATIO) if form == POLICY_GRADIENT else tuple(METRICS)


@LOSSES.register()
@frozen
class Distill(Loss):
    """`loss distill { … }`: brings each next-token distribution close to a teacher's."""

    kind: str = named("distill")
    teacher: str = setting(
        "folder of the teacher: a model of any family with the vocabulary and the tokenizer of the trained model",
        check=file_path,
        example='"models/teacher"',
        resuming=TAKEN,
    )
    form: Literal["forward_kl", "reverse_kl", "jsd", "policy_gradient"] = setting(
        "divergence of the distributions P of the teacher and S of the model: forward_kl: Σ P log P/S; reverse_kl: Σ "
        "S log S/P; jsd: β KL(P‖M) + (1 − β) KL(S‖M), M = β P + (1 − β) S (arXiv 2306.13649); policy_gradient: −ρA of "
        "sampled tokens, A = log P − `logprobs`, ρ = S / e^`logprobs`, with the expected gradient of reverse_kl",
        default="forward_kl",
        resuming=TAKEN,
    )
    beta: float = setting(
        "β of `form = jsd`",
        default=HALF,
        check=Range(above=0, below=1),
        resuming=TAKEN,
    )
    temperature: float = setting(
        "logits of both are divided by it, and the divergence is multiplied by its square",
        default=1.0,
        check=positive,
        resuming=TAKEN,
    )
    mix: float = setting(
        "weight of the cross-entropy of labels; the divergence has weight 1 − mix",
        default=0.0,
        check=Range(low=0, below=1),
        resuming=TAKEN,
    )
    top: int = setting(
        "number of most probable tokens that `xtrain data teach` stores of each distribution of the teacher; the rest "
        "count as one",
        default=64,
        check=at_least(1),
        resuming=TAKEN,
    )
    live: bool = setting(
        "run the teacher on each microbatch, on the same ranks, and use whole distributions; false: read the "
        "probabilities that `xtrain data teach` stored",
        default=False,
        added=True,
        resuming=TAKEN,
    )
    z_loss: float = z_weight()
    chunk: Quantity = logits_chunk()

    metrics: ClassVar[Mapping[str, tuple[str, str]]] = METRICS | {RATIO: POLICY[RATIO]}

    @property
    def columns(self) -> tuple[str, ...]:
        return (OLD,) if self.form == POLICY_GRADIENT else ()

    @property
    def measured(self) -> tuple[str, ...]:
        return measured_by(self.form)

    @property
    def wide(self) -> Mapping[str, WideColumn]:
        if self.live:
            return {}
        return {TEACHER_IDS: WideColumn(self.top, "int32"), TEACHER_LOGPROBS: WideColumn(self.top + 1, "float32")}

    @property
    def learns_from(self) -> Teacher:
        return Teacher(self.teacher, self.top, self.temperature, self.live, self.mix > 0)

    def idle(self) -> Iterator[tuple[str, str]]:
        if self.live:
            yield "top", "nothing is stored with a live teacher"

    def conflicts(self) -> Iterator[Conflict]:
        if self.form != "jsd" and self.beta != HALF:
            yield Conflict("beta", f"`beta` is for jsd, and form is {self.form}", "remove it, or write `form = jsd`")
        if self.form != POLICY_GRADIENT:
            return
        if not self.live:
            message = "what a teacher stores may lack the token that was sampled"
            yield Conflict("live", f"policy_gradient needs a live teacher: {message}", "write `live = true`")
        if self.temperature != 1:
            message = "both models use the temperature of the rollout with policy_gradient"
            yield Conflict("temperature", message, "remove it, or write `form = reverse_kl`")
        if self.mix:
            message = "labels are samples with policy_gradient, whose cross-entropy teaches nothing"
            yield Conflict("mix", message, "remove it")

    def args(self) -> dict[str, Any]:
        left_out = ("teacher", "top") if self.live else ("teacher", "top", "live")
        return {name: value for name, value in super().args().items() if name not in left_out}

    def does(self) -> str:
        if self.form == POLICY_GRADIENT:
            text = f"minimize −ρA of each sampled token, ρ = π / e^`{OLD}`, A = log-probability of {self.teacher} "
            return f"{text}− `{OLD}`, without clipping; mean over all tokens of the step"
        form = f"{self.form} of β {self.beta:g}" if self.form == "jsd" else self.form
        tempered = "" if self.temperature == 1 else f", of logits / {self.temperature:g}, times {self.temperature**2:g}"
        text = f"minimize the {form} of each token between the model and {self.teacher}: "
        text += "all tokens" if self.live else f"its {self.top} most probable tokens, and the rest as one"
        text += tempered
        mixed = f"; {self.mix:g} of the loss is cross-entropy" if self.mix else ""
        return f"{text}{mixed}; mean over all tokens of the step"
