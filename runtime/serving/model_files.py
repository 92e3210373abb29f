"""A model that a client has trained as the folder that transformers reads, and from there into the ranks again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from xtrain.dsl.schema.tokenizers import tokenizer_kind
from xtrain.planner.architecture import Architecture, ParameterSpec, buffers
from xtrain.planner.mesh.placement import base_of_plan
from xtrain.planner.plan import Plan
from xtrain.planner.serving.graph import SETUP
from xtrain.planner.weights.config_file import ConfigValues, not_written
from xtrain.planner.weights.files import read_weight_files
from xtrain.planner.weights.fit import assign
from xtrain.planner.weights.written import lay_out
from xtrain.runtime.checkpoint.stored_weights import TYPES, WeightReader
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.export.export import FORMATS, configs, origin_of
from xtrain.runtime.export.new_folder import new_folder
from xtrain.runtime.export.weights import WeightsWriter
from xtrain.runtime.files import durable

KINDS: Final = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
MOST: Final = 5 * 2**30  # bytes of a file


@frozen(eq=False)
class ModelFiles:
    """Writes folders of the model of a plan."""

    plan: Plan
    tokenizer: TextTokenizer

    @classmethod
    def of(cls, plan: Plan, tokenizer: TextTokenizer) -> "ModelFiles | None":
        """None where transformers has no model that computes the same, or where matrices are stored in codes."""
        arch = plan.architecture
        unfit = not_written(arch) is not None or base_of_plan(plan) is not None or any(buffers(arch))
        return None if unfit else cls(plan, tokenizer)

    def write(self, folder: Path, values: Mapping[str, Tensor]) -> None:
        """values: all parameters of the model, whole. Raises ExportFailed if there is a folder, and OSError."""
        plan, tokens, arch = self.plan, self.tokenizer, self.plan.architecture
        format, source = KINDS[next(iter(values.values())).dtype], plan.node("setup.tokenizer").args["source"]
        context = plan.node(SETUP).args["max_tokens"]
        about = ConfigValues(format=format, context=context, begin=tokens.bos, end=tokens.eos)
        here = Path()
        contents = tokenizer_kind(source).files(source, here)
        contents |= configs(arch, origin_of(plan, here), about, [tokens.eos])
        with new_folder(folder) as to:
            for name, content in contents.items():
                (to / name).parent.mkdir(exist_ok=True)
                durable.write(to / name, content)
            files = lay_out(arch, lambda parameter, number: FORMATS[format], MOST)
            writer = WeightsWriter(files, values.__getitem__, to, lambda *progress: None)
            writer.write()
            writer.verify()


def read_model(folder: Path, arch: Architecture, specs: tuple[ParameterSpec, ...]) -> dict[str, Tensor]:
    """Some parameters of the model in a folder, whole. Raises OSError, ValueError or WeightsUnreadable."""
    files = read_weight_files(str(folder))
    kind = TYPES[next(iter(files.tensors.values())).format]
    found = {spec.name: torch.empty(spec.shape, dtype=kind) for spec in specs}
    with WeightReader(files, assign(arch, files), lambda done: None) as reader:
        reader.read(found.items())
    return found
