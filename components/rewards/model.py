"""`reward model { … }`: completions scored by a reward model."""

from typing import Any

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.policy import REWARDS, Reward
from xtrain.dsl.schema.setting import file_path, setting
from xtrain.lazy_attrs import frozen


@REWARDS.register()
@frozen
class RewardModel(Reward):
    """`reward model { … }`: a reward model's number for a prompt and its completion."""

    kind: str = named("model")
    folder: str = setting(
        "folder of a reward model: an export of a run with a reward loss, or an AutoModelForSequenceClassification of "
        "transformers with one label",
        check=file_path,
        example='"models/reward"',
    )

    @property
    def model_folder(self) -> str:
        return self.folder

    def args(self) -> dict[str, Any]:
        return {}  # the node that loads the model has them

    def does(self) -> str:
        return f"score of the model {self.folder} for prompt and completion, at the last token"
