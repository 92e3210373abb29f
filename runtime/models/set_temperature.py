"""`setup.temperature`: losses of the distribution that completions are drawn from."""

from ..ops import op
from .parts import ModelParts


@op("setup.temperature")
def set_temperature(model: ModelParts, temperature: float) -> None:
    """Let the losses of training be those of logits / `temperature`."""
    for part in model.parts:
        part.temperature = temperature
