"""Configurations of DeepSpeed (JSON): batch, optimizer, precision and ranks of a program that has the rest."""

from typing import ClassVar

from xtrain.components.importers._deepspeed_json import write_deepspeed
from xtrain.dsl.importing.draft import Draft
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen


@IMPORTERS.register()
@frozen
class DeepspeedImporter(Importer):
    """Configurations of DeepSpeed."""

    title = "DeepSpeed"
    whole: ClassVar = False
    marks = (
        "!model_name_or_path",
        "!base_model",
        "zero_optimization.stage|train_micro_batch_size_per_gpu|train_batch_size",
        "zero_optimization|optimizer.type|gradient_clipping|bf16.enabled|fp16.enabled",
    )

    kind: str = named("deepspeed")

    def write(self, draft: Draft) -> None:
        draft.name_experiment()
        write_deepspeed(draft)
        draft.note("model, tokenizer and data stand in the program, and not in this file: add them")
