"""Conversion of checkpoints of DeepSpeed's engine (`xtrain checkpoint convert`): ZeRO 1 to 3 into a model folder."""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, frozen
from torch import Tensor

from xtrain.plan.weight_files import LOADED, PICKLES, StoredPart, WeightsUnreadable, read_weight_files
from xtrain.plan.weight_layout import WrittenTensor, in_files
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.store.export import FORMATS, SMALL_BYTES, Exported, check_room, formats_of
from xtrain.runtime.store.export_folder import exporting, new_folder
from xtrain.runtime.store.export_weights import Report, WeightsWriter
from xtrain.runtime.store.stored_weights import TYPES

LATEST: Final = "latest"
WHOLE: Final = "mp_rank_00_model_states.pt"


class _Inert:
    """Stand-in for a class of DeepSpeed."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class _Stage(int):
    """Stand-in for `ZeroStageEnum`."""


_CLASSES: Final = [
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@frozen
class _Span:
    """Place of a parameter in the concatenated pieces of a group; in stage 3, the same place in each rank's piece."""

    group: int
    begin: int
    each: int


@define(eq=False)
class ZeroFiles:
    """One checkpoint of DeepSpeed. shapes: of all weights, by their names in the trained module."""

    folder: Path
    stage: int
    ranks: int
    shapes: dict[str, tuple[int, ...]]
    _whole: dict[str, Tensor]
    _fragments: Sequence[Mapping[str, Tensor]]
    _pieces: list[list[Tensor]]
    _spans: dict[str, _Span]

    @classmethod
    def open(cls, folder: Path, *, trust: bool = False) -> "ZeroFiles":
        """Open the checkpoint in a folder, or the newest below it. trust: also load files with other pickled classes,
        which executes their code. Raises ExportFailed."""
        folder = _tagged(folder)
        models = sorted(folder.glob("*_model_states.pt"), key=_rank_of)
        if not models:
            raise ExportFailed(f"{folder} holds no *_model_states.pt: it is no checkpoint of DeepSpeed's engine")
        _check_layout(folder, models)
        states = [_load(path, trust=trust) for path in models]
        optimizers = [_load(path, trust=trust) for path in sorted(folder.glob("*_optim_states.pt"), key=_rank_of)]
        zero_states = [optimizer["optimizer_state_dict"] for optimizer in optimizers]
        if not zero_states or "zero_stage" not in zero_states[0]:
            module = _weights(states[0]["module"])
            return cls(folder, 0, 1, _shapes(module), module, [], [], {})
        stage, count = int(zero_states[0]["zero_stage"]), zero_states[0]["partition_count"]
        ranks = max(count) if isinstance(count, list) else int(count)
        if len(zero_states) != ranks or (stage == 3 and len(states) != ranks):
            missing = f"it has the files of {len(zero_states)} of {ranks} ranks"
            raise ExportFailed(f"{folder} is incomplete: {missing}; copy the files of all machines there")
        return cls._of_pieces(folder, stage, ranks, states, zero_states)

    @classmethod
    def _of_pieces(
        cls, folder: Path, stage: int, ranks: int, states: list[dict[str, Any]], zero_states: list[dict[str, Any]]
    ) -> "ZeroFiles":
        first = states[0]
        trained = [{name: tuple(shape) for name, shape in group.items()} for group in first["param_shapes"]]
        frozen = {name: tuple(shape) for name, shape in (first.get("frozen_param_shapes") or {}).items()}
        buffers = _weights({name: first["module"][name] for name in first["buffer_names"] if name in first["module"]})
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        paddings = zero_states[0].get("param_alignment_paddings")
        spans = _spans_of_three(trained, zero_states[0][key], ranks) if stage == 3 else _spans_of(trained, paddings)
        shapes = {_plain(name): shape for group in (*trained, frozen) for name, shape in group.items()}
        fragments = [
            {_plain(name): fragment for name, fragment in (s.get("frozen_param_fragments") or {}).items()}
            for s in states
        ]
        pieces = [zero_state[key] for zero_state in zero_states]
        return cls(folder, stage, ranks, shapes | _shapes(buffers), buffers, fragments, pieces, spans)

    def whole(self, name: str) -> Tensor:
        """Return a whole weight, in its stored number format."""
        shape = self.shapes[name]
        if name in self._whole:
            return self._whole[name]
        if name not in self._spans:  # frozen: whole, or in stage 3 a part on each rank
            fragments = [own[name].flatten() for own in (self._fragments if self.stage == 3 else self._fragments[:1])]
            return torch.cat(fragments)[: prod(shape)].view(shape)
        return torch.cat([*self._parts(self._spans[name], prod(shape))])[: prod(shape)].view(shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the number format in which a weight is stored."""
        if name in self._spans:
            return self._pieces[0][self._spans[name].group].dtype
        return (self._whole[name] if name in self._whole else self._fragments[0][name]).dtype

    def _parts(self, span: _Span, numbers: int) -> Iterator[Tensor]:
        begin = span.begin
        for groups in self._pieces:
            if self.stage == 3:
                yield _across(groups, span.begin, span.each)
                continue
            length = groups[span.group].numel()
            own = groups[span.group][max(begin, 0) : max(begin + numbers, 0)]
            begin -= length
            yield own


def _tagged(folder: Path) -> Path:
    """Return the folder of the checkpoint that `latest` names."""
    try:
        tag = (folder / LATEST).read_text().strip()
    except OSError:
        return folder
    return folder / tag


def _check_layout(folder: Path, models: list[Path]) -> None:
    """Raise ExportFailed for layouts of other parts of DeepSpeed."""
    for pattern, what in (
        ("layer_*-model_*", "layers of a pipeline (PipelineModule)"),
        ("*_expert_*", "experts of DeepSpeed's own layers"),
        ("*mp_rank_01_*", "pieces of tensor parallelism"),
    ):
        if any(folder.glob(pattern)):
            raise ExportFailed(f"{folder} holds {what}, which cannot be merged; export it where it was trained")


def _rank_of(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"rank_(\d+)", path.name)))


def _load(path: Path, *, trust: bool) -> dict[str, Any]:
    """Load a file; its tensors are read when they are used. Raises ExportFailed."""
    try:
        with torch.serialization.safe_globals(_CLASSES):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"`{named[1]}`" if named else "objects other than tensors"
        message = f"{path} holds {what}, and reading them executes code of the file"
        raise ExportFailed(f"{message}; if you trust its origin, add --trust-pickle") from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise ExportFailed(f"{path} cannot be read: {text}; copy the file again") from error


def _plain(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def _weights(module: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point tensors; of tensors that share memory only the first."""
    weights: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, value in module.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            place = value.data_ptr(), tuple(value.shape)
            if not value.numel() or place not in seen:
                weights[_plain(name)] = value
            seen.add(place)
    return weights


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _spans_of(groups: list[dict[str, tuple[int, ...]]], paddings: Any) -> dict[str, _Span]:
    """Return the spans of stages 1 and 2: a group's parameters lie in a row, possibly padded."""
    spans: dict[str, _Span] = {}
    for number, group in enumerate(groups):
        begin = 0
        for place, (name, shape) in enumerate(group.items()):
            spans[_plain(name)] = _Span(number, begin, prod(shape))
            begin += prod(shape) + (int(paddings[number][place]) if paddings is not None else 0)
    return spans


def _spans_of_three(groups: list[dict[str, tuple[int, ...]]], pieces: list[Tensor], ranks: int) -> dict[str, _Span]:
    """Return the spans of stage 3: each rank has an equal part of every parameter, in a row."""
    spans: dict[str, _Span] = {}
    begin = 0
    for group in groups:
        for name, shape in group.items():
            part_size = ceil(prod(shape) / ranks)
            spans[_plain(name)] = _Span(0, begin, part_size)
            begin += part_size
    return spans


def _across(groups: list[Tensor], begin: int, count: int) -> Tensor:
    """Return `count` numbers from `begin` of the concatenated tensors."""
    parts: list[Tensor] = []
    for tensor in groups:
        if count > 0 and begin < tensor.numel():
            parts.append(tensor[begin : begin + count])
            count -= parts[-1].numel()
            begin = 0
        else:
            begin = begin - tensor.numel() if count > 0 else begin
    return torch.cat(parts) if parts else torch.empty(0)


# Patterns of a model folder's weight files; all other files are copied.
WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin.index.json", *PICKLES)
_STORED: Final = {type: name for name, type in TYPES.items()}


def convert(files: ZeroFiles, like: Path | None, to: Path, dtype: str | None, most: int, report: Report) -> Exported:
    """Write the folder `to`. like: a folder with the config and tokenizer of the model. dtype: number format; None
    keeps the checkpoint's, fp32 under ZeRO. most: bytes of a file. Raises ExportFailed, and then leaves no folder."""
    with exporting(to):
        written = in_files(_tensors(files, dtype), most)
        formats = formats_of(written)
        beside = {path.name: path.read_bytes() for path in _beside(like)}
        check_room(to, sum(formats.values()) + sum(map(len, beside.values())) + SMALL_BYTES)
        with new_folder(to) as folder:
            for name, content in beside.items():
                durable.write(folder / name, content)
            writer = WeightsWriter(written, files.whole, folder, report)
            writer.write()
            writer.verify()
        remarks = tuple(_remarks(files, like))
    count = sum(len(file.tensors) for file in written)
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
    return [path for path in sorted(like.iterdir()) if path.is_file() and not any(map(path.match, WEIGHTS))]


def _remarks(files: ZeroFiles, like: Path | None) -> Iterator[str]:
    """Yield remarks about missing or unexpected parts of the folder."""
    if like is None:
        yield "the folder has no config.json and no tokenizer: copy the model's files there, or use --like FOLDER"
        return
    try:
        there = read_weight_files(str(like)).tensors
    except WeightsUnreadable:
        return  # no weights to compare with
    other = [name for name in files.shapes.keys() | there.keys() if (name in files.shapes) != (name in there)]
    shaped = [n for n in files.shapes.keys() & there.keys() if files.shapes[n] != tuple(there[n].shape)]
    if wrong := sorted([*other, *shaped]):
        yield f"{len(wrong)} tensors differ from {like}, such as `{wrong[0]}`; `xtrain check` says if they fit"
