"""`model gemma4 { … }`: the text part of Gemma 4 (Gemma Team 2026), without experts."""

from typing import ClassVar

from xtrain.components.families._gemma4 import NAMES, Gemma4Family, config_of
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import ModelConfig
from xtrain.lazy_attrs import frozen
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Gemma4(Gemma4Family):
    """`model gemma4 { … }`: gemma3 with norms of values, and other heads in blocks without a window."""

    family: str = named("gemma4")
    config: ClassVar[ModelConfig | None] = config_of(experts=False)
    stored: ClassVar[StoredNames | None] = NAMES
