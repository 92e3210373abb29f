"""`model gemma4_unified { … }`: the text part of Gemma 4 12B (Gemma Team 2026)."""

from typing import ClassVar

from attrs import evolve

from xtrain.components.families._gemma4 import NAMES, UNIFIED, WHOLE, Gemma4Family, config_of
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import ModelConfig
from xtrain.lazy_attrs import frozen
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Gemma4Unified(Gemma4Family):
    """`model gemma4_unified { … }`: gemma4 with other defaults in its files."""

    family: str = named("gemma4_unified")
    config: ClassVar[ModelConfig | None] = evolve(
        config_of(experts=False, inputs=0),
        model_type=UNIFIED,
        architectures=("Gemma4UnifiedForCausalLM",),
        whole=evolve(WHOLE, model_type="gemma4_unified", architectures=("Gemma4UnifiedForConditionalGeneration",)),
    )
    stored: ClassVar[StoredNames | None] = evolve(NAMES, beside=(*NAMES.beside, "model.vision_embedder."))
