"""`setup.loss` of distill."""

from attrs import evolve

from xtrain.components.losses.distill import POLICY_GRADIENT, measured_by
from xtrain.dsl.schema.losses import OLD
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.distillation import Distillation
from xtrain.runtime.nn.transformer import ModelParts


@op("setup.loss.distill")
def distil(model: ModelParts, form: str, beta: float, temperature: float, mix: float, live: bool = False) -> None:
    """Set a divergence from a teacher, with cross-entropy."""
    term = Distillation(form=form, beta=beta, temperature=temperature, mix=mix, live=live, metrics=measured_by(form))
    model.minimise(evolve(term, columns=(OLD,) if form == POLICY_GRADIENT else ()) if live else term)
