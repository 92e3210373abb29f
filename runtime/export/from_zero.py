"""`xtrain checkpoint convert`: the weights of a checkpoint of DeepSpeed's engine as a folder that `model "folder"` and
transformers read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xtrain.planner.weights.files import LOADED, PICKLES, WeightsUnreadable, read_weight_files
from xtrain.planner.weights.stored import StoredPart
from xtrain.planner.weights.written import WrittenTensor, in_files
from xtrain.runtime.checkpoint.stored_weights import TYPES
from xtrain.runtime.errors import ExportFailed
from xtrain.runtime.export.export import FORMATS, SMALL_BYTES, Exported, check_room, formats_of
from xtrain.runtime.export.new_folder import exporting, new_folder
from xtrain.runtime.export.weights import Report, WeightsWriter
from xtrain.runtime.export.zero_files import ZeroFiles
from xtrain.runtime.files import durable

# Of the folder of a model these hold weights; all else is taken along.
WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin.index.json", *PICKLES)
_STORED: Final = {type: name for name, type in TYPES.items()}


def convert(files: ZeroFiles, like: Path | None, to: Path, dtype: str | None, most: int, report: Report) -> Exported:
    """Write the folder `to`. like: a folder with the config and the tokenizer of the model. dtype: number format; None:
    that of the checkpoint, which is fp32 under ZeRO. most: bytes of a file. Raises ExportFailed; then there is none."""
    with exporting(to):
        written = in_files(_tensors(files, dtype), most)
        formats = formats_of(written)
        beside = {each.name: each.read_bytes() for each in _beside(like)}
        check_room(to, sum(formats.values()) + sum(map(len, beside.values())) + SMALL_BYTES)
        with new_folder(to) as folder:
            for name, content in beside.items():
                durable.write(folder / name, content)
            writer = WeightsWriter(written, files.whole, folder, report)
            writer.write()
            writer.verify()
        remarks = tuple(_remarks(files, like))
    count = sum(len(each.tensors) for each in written)
    return Exported(folder=to, tensors=count, files=len(written), formats=formats, remarks=remarks)


def _tensors(files: ZeroFiles, dtype: str | None) -> Iterator[WrittenTensor]:
    for name, shape in files.shapes.items():
        format = FORMATS[dtype] if dtype is not None else _STORED.get(files.dtype(name))
        if format not in LOADED:
            raise ExportFailed(f"`{name}` of {files.folder} is no bf16, fp16, fp32 or fp64: it is no weight of a model")
        yield WrittenTensor(((name, StoredPart(name, shape)),), format)


def _beside(like: Path | None) -> list[Path]:
    if like is None:
        return []
    return [each for each in sorted(like.iterdir()) if each.is_file() and not any(map(each.match, WEIGHTS))]


def _remarks(files: ZeroFiles, like: Path | None) -> Iterator[str]:
    """What the folder lacks."""
    if like is None:
        yield "the folder has no config.json and no tokenizer: copy those of the model there, or say --like FOLDER"
        return
    try:
        there = read_weight_files(str(like)).tensors
    except WeightsUnreadable:
        return  # it has no weights of its own, or none that are compared
    other = [name for name in files.shapes.keys() | there.keys() if (name in files.shapes) != (name in there)]
    shaped = [n for n in files.shapes.keys() & there.keys() if files.shapes[n] != tuple(there[n].shape)]
    if wrong := sorted([*other, *shaped]):
        yield f"{len(wrong)} tensors are not those of {like}, such as `{wrong[0]}`; `xtrain check` says if they fit"
