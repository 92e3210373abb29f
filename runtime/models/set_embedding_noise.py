"""`setup.embedding_noise`: noise on what is embedded."""

from ..ops import op
from .embedding_noise import EmbeddingNoise
from .parts import ModelParts


@op("setup.embedding_noise")
def set_embedding_noise(model: ModelParts, seed: int, most: float) -> None:
    """Let the stage that embeds add noise in training."""
    for part in model.parts:
        if part.span.embeds:
            part.noise = EmbeddingNoise.of(most, seed)
