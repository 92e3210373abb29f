"""Export of a checkpoint as a folder that transformers reads: config, weights, tokenizer and model card."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen
from torch import Tensor

from xtrain.dsl.checking.config_json import snapshot_folder
from xtrain.dsl.checking.model_folder import settings_in_folder
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.dsl.schema.model import FAMILIES
from xtrain.plan.architecture import Architecture, ParameterSpec, buffers
from xtrain.plan.mesh import base_of_plan
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import CONFIG, EMBEDDING_WEIGHT, LOADED, WeightFiles, WeightsUnreadable, read_weight_files
from xtrain.plan.weight_layout import (
    FURTHER,
    ConfigValues,
    FormatOf,
    WrittenFile,
    assign,
    changed_config,
    lay_out,
    new_config,
    not_written,
    read_differences,
    with_tokens,
)
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.base.locks import HeldLock
from xtrain.runtime.feed.chat.template import load_template
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.nn.averages import Which
from xtrain.runtime.nn.texts import Chat, TextEnds, planned_arguments, planned_template
from xtrain.runtime.store.export_folder import exporting, last_loss, model_card, new_folder
from xtrain.runtime.store.export_weights import Dequantised, MergedMatrix, Merging, Report, WeightsWriter
from xtrain.runtime.store.reading import WholeTensors
from xtrain.text.units import bytes_text, plural

GENERATION: Final = "generation_config.json"
TEMPLATE: Final = "chat_template.jinja"
CARD: Final = "README.md"
MERGED: Final = "merge.json"
# Of everything that is written beside weights and tokenizer.
SMALL_BYTES: Final = 2**20
# Number format → what safetensors calls it.
FORMATS: Final = {ours: theirs for theirs, ours in LOADED.items()}


@frozen(kw_only=True)
class Exported:
    """formats: number format → bytes of weights in it. files: with weights. remarks: what a person should know. merged:
    matrices with an adapter in them."""

    folder: Path
    tensors: int
    files: int
    formats: dict[str, int]
    remarks: tuple[str, ...]
    merged: tuple[MergedMatrix, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.formats.values())


@frozen(kw_only=True)
class Export:
    """What is exported, and how.

    run: the directory of the run. base: the folder that its paths start at. tensors: the folder of the checkpoint;
    prefix: of the names of the weights in it; weights: which these are. state: what the checkpoint says of itself.
    dtype: number format, None: as `_formats` says. most: bytes of a file with weights. dequantise: matrices that the
    base stores have the values of their codes. merging: puts the adapter of the checkpoint into the matrices of the
    model under it; None for a checkpoint of a whole model. held: keeps the run from removing the checkpoint.
    """

    plan: Plan
    run: Path
    base: Path
    tensors: Path
    prefix: str
    weights: Which
    state: dict[str, Any]
    dtype: str | None
    most: int
    dequantise: bool = False
    merging: Merging | None = None
    held: HeldLock | None = None

    def write(self, to: Path, report: Report) -> Exported:
        """Write the folder `to`. Raises EnvironmentFault or DataError, and then there is none."""
        check_exportable(self.plan, dequantise=self.dequantise, merges=self.merging is not None)
        with exporting(to):
            return self._write(to, report)

    def _write(self, to: Path, report: Report) -> Exported:
        plan = self.plan
        if self.merging is not None:
            self.merging.check()
        tokenizer, ends, contents = self._tokenizer()
        origin = origin_of(plan, self.base)
        format_of = self._formats(origin)
        files = lay_out(self._arch, format_of, self.most)
        formats = formats_of(files)
        contents |= self._configs(origin, tokenizer, ends, next(iter(formats)))
        loss = last_loss(self.run, self.state)
        contents[CARD] = model_card(plan, self.state, self.weights, formats, loss).encode()
        total = sum(formats.values())
        check_room(to, total + sum(map(len, contents.values())) + SMALL_BYTES)
        with new_folder(to) as folder:
            for name, content in contents.items():
                (folder / name).parent.mkdir(exist_ok=True)
                durable.write(folder / name, content)
            self._verify(folder, contents, tokenizer)
            with self._whole(files) as whole:
                writer = WeightsWriter(files, whole, folder, report)
                writer.write()
            writer.verify()
            self._verify_weights(folder)
            merged = self.merging.matrices if self.merging is not None else []
            if merged:
                durable.write(folder / MERGED, _text({each.name: asdict(each) for each in merged}))
        tensors = sum(len(file.tensors) for file in files)
        remarks: tuple[str, ...] = ()
        if origin is not None and not (origin / CONFIG).is_file():
            message = f"{origin}, from which the run has read its model, is gone, and with it the rest of its {CONFIG}"
            remarks = (message,)
        remarks += tuple(self._left_out(origin))
        return Exported(
            folder=to, tensors=tensors, files=len(files), formats=formats, remarks=remarks, merged=tuple(merged)
        )

    def _left_out(self, origin: Path | None) -> Iterator[str]:
        """What is said of modules that predict further tokens and are not in the folder."""
        arch, stored = self._arch, FAMILIES[self._arch.family].stored
        if arch.mtp and not stored.further_tokens:
            one = arch.mtp == 1
            yield f"{plural(arch.mtp, 'module')} that {'predicts' if one else 'predict'} further tokens " + (
                f"{'stays' if one else 'stay'} in the checkpoint: files of {arch.family} have no place for them"
            )
        if (there := _modules(arch, origin)) > arch.mtp:
            yield f"{origin} has {plural(there, 'layer')} that predict further tokens, of which the run has read " + (
                f"{arch.mtp or 'none'} (`mtp`): the others are not written"
            )

    @property
    def _arch(self) -> Architecture:
        """The model that the folder has."""
        return self.plan.architecture.base

    @contextmanager
    def _whole(self, files: tuple[WrittenFile, ...]) -> Iterator[Callable[[str], Tensor]]:
        """What gives all of a parameter by its name."""
        tensors = WholeTensors(self.tensors)
        if self.merging is None:
            source = Dequantised.of(self.plan, tensors, self.prefix)
            yield lambda name: source.read(f"{self.prefix}{name}")
        else:
            with self.merging.into(lambda name: tensors.read(f"{self.prefix}{name}"), files) as merged:
                yield merged

    # What it is made of -----------------------------------------------------------------------------------------------

    def _formats(self, origin: Path | None) -> FormatOf:
        """The format of each tensor: what was asked for; else that which it had in the folder the run began with; else
        that of the run's parameters."""
        if self.dtype is not None or origin is None:
            one = FORMATS[self.dtype or self.plan.node("setup.build_model").args["params"]]
            beside = {each.name for each in buffers(self.plan.architecture)}  # which are fp32 whatever the model is
            return lambda parameter, number: FORMATS["fp32"] if parameter.name in beside else one
        try:
            files: WeightFiles = read_weight_files(str(origin))
            parts = assign(self._arch, files, grows=True).parts
        except (WeightsUnreadable, ValueError) as problem:
            message = f"the run has read its weights from {origin}, and their number formats are not known any more"
            raise ExportFailed(f"{message} ({problem}); say which one to write, as --dtype bf16") from problem

        def format_of(parameter: ParameterSpec, number: int) -> str:
            # Of experts that lie there in one tensor all have its format. A head of rewards that was drawn for the
            # model has that of the embedding.
            found = parts.get(parameter.name, parts[EMBEDDING_WEIGHT])
            return files.tensors[found[number if len(found) > 1 else 0].name].format

        return format_of

    def _configs(self, origin: Path | None, tokenizer: TextTokenizer, ends: list[int], format: str) -> dict[str, bytes]:
        """ends: the tokens that end what the model writes."""
        context = self.plan.node("setup.loader").args["sequence"]
        values = ConfigValues(format=format, context=context, begin=tokenizer.bos, end=tokenizer.eos)
        return configs(self._arch, origin, values, ends)

    def _tokenizer(self) -> tuple[TextTokenizer, list[int], dict[str, bytes]]:
        """What the run has encoded with; the tokens that end a text, of conversations also a turn; and its files, with
        the template of these conversations."""
        source = self.plan.node("setup.tokenizer").args["source"]
        tokenizer = load_tokenizer(source, self.base)
        files = tokenizer_kind(source).files(source, self.base)
        named = planned_template(self.plan)
        talks = any("template" in node.args["reads"] for node in self.plan.nodes if node.op == "setup.data")
        if not talks or (named == "auto" and tokenizer.chat_template is None):  # it may read by several templates
            return tokenizer, [tokenizer.eos], files
        template = load_template(named, tokenizer, self.base, planned_arguments(self.plan, named))
        if named != "auto":
            files[TEMPLATE] = template.text.encode()
        closing = Chat(template=template, tokenizer=tokenizer).closing
        ends = TextEnds.of(tokenizer, [closing] if closing else []).tokens - {tokenizer.eos}
        return tokenizer, [tokenizer.eos, *sorted(ends)], files

    # What was written -------------------------------------------------------------------------------------------------

    def _verify(self, folder: Path, contents: dict[str, bytes], tokenizer: TextTokenizer) -> None:
        """Read the files beside the weights, config and tokenizer as `model "folder"` and `tokenizer "folder"` do.
        Raises ExportFailed."""
        if changed := [name for name, content in contents.items() if (folder / name).read_bytes() != content]:
            raise ExportFailed(f"{changed[0]} is not what was written: the disk has changed it")
        means, diagnostics = settings_in_folder(str(folder))
        if wrong := [error.message for error in diagnostics.errors] or read_differences(self._arch, means):
            raise ExportFailed(f"{CONFIG} cannot say what this model is: {'; '.join(wrong[:3])}", "X525")
        again = load_tokenizer(str(folder), Path())
        if (again.bos, again.eos, again.vocab_size) != (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size):
            raise ExportFailed("the tokenizer that was written is not that of the run")

    def _verify_weights(self, folder: Path) -> None:
        """Hold the tensors of the folder against the model, as `model "folder"` does. Raises ExportFailed."""
        try:
            assign(self._arch, read_weight_files(str(folder)))
        except (WeightsUnreadable, ValueError) as problem:
            raise ExportFailed(f"what was written is not the model: {problem}") from problem


def origin_of(plan: Plan, base: Path) -> Path | None:
    """The folder that a plan reads its weights from, be it there or gone; None where they are drawn. base: the folder
    that its paths start at."""
    args = next((node.args for node in plan.nodes if node.op == "setup.read_weights"), None)
    if args is None:
        return None
    return base / args["folder"] if "folder" in args else snapshot_folder(args["repo"], args["revision"])


def configs(arch: Architecture, origin: Path | None, values: ConfigValues, ends: list[int]) -> dict[str, bytes]:
    """The files of a folder that say what its model is, by name. origin: the folder with what the model has begun as.
    ends: the tokens that end what the model writes."""
    begun = _json(origin / CONFIG) if origin is not None else None
    generation = _json(origin / GENERATION) if origin is not None else None
    if origin is not None and begun is not None:
        config = changed_config(arch, values, begun, settings_in_folder(str(origin))[0])
        if _modules(arch, origin) > arch.mtp:
            config[FURTHER] = arch.mtp
    else:
        config = new_config(arch, values)
    if arch.head == "reward":
        return {CONFIG: _text(config)}
    found = with_tokens(generation if generation is not None else {"_from_model_config": True}, values.begin, ends)
    return {CONFIG: _text(config), GENERATION: _text(found)}


def _modules(arch: Architecture, folder: Path | None) -> int:
    """How many modules that predict further tokens the folder has that a run has begun with."""
    stored = FAMILIES[arch.family].stored
    if folder is None or not stored.further_tokens:
        return 0
    try:
        files: WeightFiles = read_weight_files(str(folder))
    except WeightsUnreadable:
        return 0
    return stored.modules_in(arch, files.tensors)


def check_exportable(plan: Plan, *, dequantise: bool, merges: bool = False) -> None:
    """Raise ExportFailed if no folder can hold the model of a plan. merges: its adapter is put into the model."""
    if merges and plan.architecture.adapter is None:
        raise ExportFailed("the run trains no adapter; `xtrain export` writes its model", "X525")
    if merges and plan.architecture.tie_embeddings and plan.architecture.head_matrices:
        message = "the run has an adapter of its head, which is its embedding: no matrix can have it added"
        raise ExportFailed(f"{message}; `xtrain export --adapter` writes it beside the model", "X525")
    if (problem := not_written(plan.architecture.base if merges else plan.architecture)) is not None:
        raise ExportFailed("; ".join(problem), "X525")
    if (base := base_of_plan(plan)) is not None and not dequantise:
        message = f"matrices of the run are stored as {base.words()}, and transformers reads no such folder"
        raise ExportFailed(f"{message}; to have the values of the codes written, add --dequantise", "X525")


def formats_of(files: tuple[WrittenFile, ...]) -> dict[str, int]:
    """Number format → bytes, the most frequent first."""
    found: Counter[str] = Counter()
    for tensor in (tensor for file in files for tensor in file.tensors):
        found[LOADED[tensor.format]] += tensor.bytes
    return dict(found.most_common())


def check_room(to: Path, size: int) -> None:
    there = next(parent for parent in to.absolute().parents if parent.exists())
    if (free := shutil.disk_usage(there).free) < size:
        message = f"the export takes {bytes_text(size)}, and {bytes_text(free)} are free in {there}"
        raise ExportFailed(message)


def _json(path: Path) -> dict[str, Any] | None:
    """An object in a file; None where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
