"""`setup.loss` of distill."""

from attrs import evolve

from ...runtime.models.distillation import Distillation
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from .distill import Distill


@op("setup.loss.distill")
def distil(model: ModelParts, form: str, beta: float, temperature: float, mix: float, live: bool = False) -> None:
    """Minimise a divergence from a teacher, with cross-entropy."""
    term = Distillation(form=form, beta=beta, temperature=temperature, mix=mix, metrics=tuple(Distill.metrics))
    model.minimise(evolve(term, columns=()) if live else term)
