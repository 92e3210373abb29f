"""`TrainingArguments` of transformers in a file: what is trained, and on what data, stands in a program."""

from typing import ClassVar

from xtrain.components.importers import _training_arguments as arguments
from xtrain.dsl.importing.draft import Draft
from xtrain.dsl.importing.importer import IMPORTERS, Importer
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen


@IMPORTERS.register()
@frozen
class TransformersImporter(Importer):
    """`TrainingArguments` of transformers."""

    title = "transformers"
    marks = (
        "!model_name_or_path",
        "!base_model",
        "per_device_train_batch_size|gradient_accumulation_steps|warmup_steps|warmup_ratio",
        "output_dir|num_train_epochs|max_steps|optim|lr_scheduler_type",
        "learning_rate|weight_decay|bf16|fp16|max_steps|num_train_epochs",
    )
    settings: ClassVar = arguments.SETTINGS
    without_meaning: ClassVar = arguments.WITHOUT_MEANING
    lacking: ClassVar = arguments.LACKING
    whole: ClassVar = False

    kind: str = named("transformers")

    def write(self, draft: Draft) -> None:
        draft.name_experiment()
        arguments.write_arguments(draft, arguments.Usual(), datasets=[], full=True)
        draft.note("model, tokenizer and data stand in the program, and not in this file: add them")
