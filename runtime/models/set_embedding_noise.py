"""`setup.embedding_noise`: noise on what is embedded."""

from xtrain.runtime.models.embedding_noise import EmbeddingNoise
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op


@op("setup.embedding_noise")
def set_embedding_noise(model: ModelParts, seed: int, most: float) -> None:
    """Let the stage that embeds add noise in training."""
    for part in model.parts:
        if part.span.embeds:
            part.noise = EmbeddingNoise.of(most, seed)
