"""`setup.temperature`: losses of the distribution that completions are drawn from."""

from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op


@op("setup.temperature")
def set_temperature(model: ModelParts, temperature: float) -> None:
    """Let the losses of training be those of logits / `temperature`."""
    for part in model.parts:
        part.temperature = temperature
