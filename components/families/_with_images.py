"""Parts of models with images that are language models of their own: names in files, and Mistral 3."""

from typing import Final

from xtrain.dsl.schema.model_config import HARMLESS, WholeModel
from xtrain.plan.weight_files import StoredNames


def language_model(*others: str) -> StoredNames:
    """Return the names of a language model, alone or inside a model with these other parts."""
    return StoredNames(
        enclosed={"language_model.": "", "model.language_model.": "model."},
        beside=tuple(f"{start}{part}." for start in ("", "model.") for part in others),
    )


VISION: Final = language_model("vision_tower", "multi_modal_projector")
MISTRAL3: Final = WholeModel(
    model_type="mistral3",
    architectures=("Mistral3ForConditionalGeneration",),
    part="text_config",
    replaces=("tie_word_embeddings",),
    harmless=HARMLESS
    | {"image_token_index", "image_token_id", "vision_config", "vision_feature_layer", "spatial_merge_size"}
    | {"projector_hidden_act", "multimodal_projector_bias"},
)
