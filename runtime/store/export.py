"""Export of a checkpoint as a folder that transformers reads: config, weights, tokenizer and model card."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from xtrain.dsl.checking.config_json import snapshot_folder
from xtrain.dsl.checking.model_folder import settings_in_folder
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import QUANTISATION, LlamaCpp
from xtrain.dsl.schema.precision import FLOATS, ROW, Qat
from xtrain.plan.architecture import HEAD, Architecture, ParameterSpec, buffers
from xtrain.plan.exported_config import (
    FURTHER,
    ConfigValues,
    changed_config,
    new_config,
    not_written,
    read_differences,
    with_tokens,
)
from xtrain.plan.hardware import FP8
from xtrain.plan.mesh import base_of_plan
from xtrain.plan.parameters import name_of, product_matrices
from xtrain.plan.plan import Plan
from xtrain.plan.weight_files import (
    CONFIG,
    EMBEDDING_WEIGHT,
    LOADED,
    StoredTensor,
    WeightFiles,
    WeightsUnreadable,
    read_weight_files,
    stored_names,
)
from xtrain.plan.weight_layout import (
    FP8_BLOCK,
    FormatOf,
    InBlocks,
    Rounded,
    WrittenFile,
    WrittenTensor,
    assign,
    lay_out,
)
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ExportFailed
from xtrain.runtime.base.locks import HeldLock
from xtrain.runtime.feed.chat.template import load_template
from xtrain.runtime.feed.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.nn.averages import Which
from xtrain.runtime.nn.build import compute_format
from xtrain.runtime.nn.texts import Chat, TextEnds, planned_arguments, planned_template
from xtrain.runtime.store.export_folder import exporting, last_loss, model_card, new_folder
from xtrain.runtime.store.export_weights import Dequantised, MergedMatrix, Merging, Report, WeightsWriter
from xtrain.runtime.store.reading import WholeTensors
from xtrain.runtime.store.stored_weights import TYPES
from xtrain.text.units import bytes_text, plural

GENERATION: Final = "generation_config.json"
TEMPLATE: Final = "chat_template.jinja"
CARD: Final = "README.md"
MERGED: Final = "merge.json"
# Upper bound for all files except weights and tokenizer.
SMALL_BYTES: Final = 2**20
FP8_FORMAT: Final = "F8_E4M3"
# Number format → its name in safetensors.
FORMATS: Final = {ours: theirs for theirs, ours in LOADED.items()}


@frozen(kw_only=True)
class Exported:
    """Result of an export. formats: number format → bytes of weights in it. files: number of weight files. remarks: for
    the user. merged: matrices with the adapter merged into them."""

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
class WeightsExport:
    """Export of a checkpoint as a folder.

    run: the run's directory. base: the folder that its paths are relative to. tensors: the checkpoint's folder; prefix:
    of the weights' names in it; weights: their kind. state: the checkpoint's description. dtype: number format of the
    folder. held: keeps the run from removing the checkpoint.
    """

    plan: Plan
    run: Path
    base: Path
    tensors: Path
    prefix: str
    weights: Which
    state: dict[str, Any]
    dtype: str | None
    held: HeldLock | None = None

    def write(self, to: Path, report: Report) -> Exported:
        """Write the folder `to`. Raises EnvironmentFault or DataError, and then leaves no folder."""
        self._check()
        with exporting(to):
            return self._write(to, report)

    def _check(self) -> None:
        """Raise ExportFailed if the folder's readers have no form of the model."""
        raise NotImplementedError

    def _write(self, to: Path, report: Report) -> Exported:
        raise NotImplementedError


@frozen(kw_only=True)
class Export(WeightsExport):
    """Export of a checkpoint as a model folder.

    dtype: None: see `_formats`; fp8: matrices of blocks in fp8 with scales, all else in bf16. most: bytes of a weight
    file. dequantise: write quantized matrices of the base as the values of their codes. quantise: write the matrices
    that `precision { qat }` rounds as integers. merging: merges the checkpoint's adapter into the base; None for a
    checkpoint of a whole model. gguf: write one file, by way of a folder.
    """

    most: int
    gguf: bool = False
    dequantise: bool = False
    quantise: bool = False
    merging: Merging | None = None

    def _check(self) -> None:
        merges = self.merging is not None
        check_exportable(
            self.plan, dequantise=self.dequantise, merges=merges, quantise=self.quantise, fp8=self.dtype == FP8
        )

    def check_tokens(self) -> None:
        """Raise ExportFailed or EnvironmentFault if this machine writes no GGUF file with the run's tokenizer."""
        from xtrain.runtime.store.gguf_file import TOKENIZER, check_tokens

        *_, contents = self._tokenizer()
        check_tokens(json.loads(contents.get(TOKENIZER, b"{}")))

    def _write(self, to: Path, report: Report) -> Exported:
        if not self.gguf:
            return self._write_folder(to, report)
        folder = to.with_name(f".{to.name}.folder")
        from xtrain.runtime.store.gguf_file import write_gguf

        if folder.is_dir():  # left by an export that was killed
            durable.clear(folder)
        try:
            exported = self._write_folder(folder, report)

            def told(done: int, total: int) -> None:
                report("writing", done, total, 1, 1)

            formats, tensors = write_gguf(folder, to, self._llama_cpp, told)
        finally:
            if folder.is_dir():
                durable.clear(folder)
        return evolve(exported, folder=to, files=1, formats=formats, tensors=tensors)

    def _write_folder(self, to: Path, report: Report) -> Exported:
        plan = self.plan
        if self.merging is not None:
            self.merging.check()
        tokenizer, ends, contents = self._tokenizer()
        origin = origin_of(plan, self.base)
        format_of = self._formats(origin)
        copied = self._copied(origin)
        rounded = rounded_by(plan) if self.quantise else in_fp8(plan) if self.dtype == FP8 else None
        files = lay_out(self._arch, format_of, self.most, copied, rounded)
        formats = formats_of(files)
        if self.dtype == FP8 and FP8_FORMAT not in formats:
            message = f"blocks of {FP8_BLOCK} rows and columns divide no matrix of the model"
            raise ExportFailed(f"{message}; choose another format, such as --dtype bf16", "X525")
        usual = next(format for format in formats if format in FORMATS)
        contents |= self._configs(origin, tokenizer, ends, usual) | self._code()
        if self.gguf:
            from xtrain.runtime.store.gguf_file import TOKENIZER, check_form

            tokens = json.loads(contents.get(TOKENIZER, b"{}"))
            check_form(json.loads(contents[CONFIG]), tokens, self._llama_cpp)
        loss = last_loss(self.run, self.state)
        contents[CARD] = model_card(plan, self.state, self.weights, formats, loss).encode()
        total = sum(formats.values())
        check_room(to, (2 if self.gguf else 1) * total + sum(map(len, contents.values())) + SMALL_BYTES)
        with new_folder(to) as folder:
            for name, content in contents.items():
                (folder / name).parent.mkdir(exist_ok=True)
                durable.write(folder / name, content)
            self._verify(folder, contents, tokenizer)
            with self._whole(files) as whole:
                writer = WeightsWriter(files, whole, folder, report, origin, self._compute)
                writer.write()
            writer.verify()
            if rounded is not None:  # the config was compared without it
                tensors = [tensor for file in files for tensor in file.tensors]
                form = rounded.config(tensors) if isinstance(rounded, InBlocks) else _integers(rounded, tensors)
                durable.write(folder / CONFIG, _text(json.loads(contents[CONFIG]) | {QUANTISATION: form}))
            if not isinstance(rounded, Rounded):  # `model "folder"` reads no integers
                self._verify_weights(folder)
            merged = self.merging.matrices if self.merging is not None else []
            if merged:
                durable.write(folder / MERGED, _text({matrix.name: asdict(matrix) for matrix in merged}))
        tensors = sum(len(file.tensors) for file in files)
        remarks: tuple[str, ...] = ()
        if origin is not None and not (origin / CONFIG).is_file():
            message = f"{origin}, which the run read its model from, is gone, and so is the rest of its {CONFIG}"
            remarks = (message,)
        remarks += tuple(self._left_out(origin))
        return Exported(
            folder=to, tensors=tensors, files=len(files), formats=formats, remarks=remarks, merged=tuple(merged)
        )

    def _copied(self, origin: Path | None) -> dict[str, StoredTensor]:
        """Return the tensors of other parts of the model that the run began with, such as a vision tower. Raises
        ExportFailed if its folder is gone."""
        if not (others := stored_names(self._arch).others):
            return {}
        try:
            stored = read_weight_files(str(origin)).tensors
        except WeightsUnreadable as problem:
            message = f"{origin}, which the run read its model from, has {len(others):,} tensors of other parts"
            raise ExportFailed(f"{message}, which an export copies: {problem}") from problem
        return {name: tensor for name, tensor in stored.items() if name in others}

    def _code(self) -> dict[str, bytes]:
        """Return the modeling files of a model that its folder's own code computes."""
        code = self._arch.own.get("code", {})
        if (place := code.get("remote")) is None:
            return {}
        from xtrain.dsl.checking.model_code import code_files
        from xtrain.runtime.nn.code_transformer import checked_files

        folder = place.get("folder")
        place = place if folder is None else {"folder": str(self.base / folder)}
        return code_files(checked_files(code["digest"], **place))

    def _left_out(self, origin: Path | None) -> Iterator[str]:
        """Yield remarks about multi-token-prediction modules that the folder lacks."""
        arch, stored = self._arch, stored_names(self._arch)
        if arch.mtp and not stored.further_tokens:
            one = arch.mtp == 1
            yield f"{plural(arch.mtp, 'module')} that {'predicts' if one else 'predict'} further tokens " + (
                f"{'stays' if one else 'stay'} in the checkpoint: files of {arch.family} have no place for them"
            )
        if (there := _modules(arch, origin)) > arch.mtp:
            yield f"{origin} has {plural(there, 'layer')} that predict further tokens, and the run read " + (
                f"{arch.mtp or 'none'} (`mtp`): the others are not written"
            )

    @property
    def _compute(self) -> torch.dtype:
        """The number format in which products take matrices."""
        return TYPES[FORMATS[compute_format(self.plan)]]

    @property
    def _llama_cpp(self) -> LlamaCpp | None:
        arch = self._arch.core
        config = FAMILIES[arch.family].config if arch.family in FAMILIES and arch.has_logits else None
        return None if config is None else config.llama_cpp

    @property
    def _arch(self) -> Architecture:
        """The architecture of the exported model."""
        return self.plan.architecture.base

    @contextmanager
    def _whole(self, files: tuple[WrittenFile, ...]) -> Iterator[Callable[[str], Tensor]]:
        """Yield a function that reads a whole parameter by name."""
        tensors = WholeTensors(self.tensors)
        if self.merging is None:
            source = Dequantised.of(self.plan, tensors, self.prefix)
            yield lambda name: source.read(f"{self.prefix}{name}")
        else:
            with self.merging.into(lambda name: tensors.read(f"{self.prefix}{name}"), files) as merged:
                yield merged

    # What it is made of -----------------------------------------------------------------------------------------------

    def _formats(self, origin: Path | None) -> FormatOf:
        """Return the number format of each tensor: the requested one; else that of the folder that the run started
        from; else that of the run's parameters."""
        if self.dtype is not None or origin is None:
            dtype = "bf16" if self.dtype == FP8 else self.dtype
            one = FORMATS[dtype or self.plan.node("setup.build_model").args["params"]]
            beside = {buffer.name for buffer in buffers(self.plan.architecture)}  # fp32 whatever the model's format
            return lambda parameter, number: FORMATS["fp32"] if parameter.name in beside else one
        try:
            files: WeightFiles = read_weight_files(str(origin))
            parts = assign(self._arch, files, grows=True).parts
        except (WeightsUnreadable, ValueError) as problem:
            message = f"the run read its weights from {origin}, whose number formats are no longer known"
            raise ExportFailed(f"{message} ({problem}); choose one, such as --dtype bf16") from problem

        def format_of(parameter: ParameterSpec, number: int) -> str:
            # Stacked experts share one tensor's format. A newly drawn reward head takes the format of the embedding.
            stored_parts = parts.get(parameter.name, parts[EMBEDDING_WEIGHT])
            return files.tensors[stored_parts[number if len(stored_parts) > 1 else 0].name].format

        return format_of

    def _configs(self, origin: Path | None, tokenizer: TextTokenizer, ends: list[int], format: str) -> dict[str, bytes]:
        """Return the config files. ends: the tokens that end a generated text."""
        context = self.plan.node("setup.loader").args["sequence"]
        values = ConfigValues(format=format, context=context, begin=tokenizer.bos, end=tokenizer.eos)
        return configs(self._arch, origin, values, ends)

    def _tokenizer(self) -> tuple[TextTokenizer, list[int], dict[str, bytes]]:
        """Return the run's tokenizer; the tokens that end a text, for conversations also a turn; and the tokenizer's
        files, with the chat template."""
        source = self.plan.node("setup.tokenizer").args["source"]
        tokenizer = load_tokenizer(source, self.base)
        files = tokenizer_kind(source).files(source, self.base)
        named = planned_template(self.plan)
        talks = any("template" in node.args["reads"] for node in self.plan.nodes if node.op == "setup.data")
        if not talks or (named == "auto" and tokenizer.chat_template is None):  # the run may use several templates
            return tokenizer, [tokenizer.eos], files
        template = load_template(named, tokenizer, self.base, planned_arguments(self.plan, named))
        if named != "auto":
            files[TEMPLATE] = template.text.encode()
        closing = Chat(template=template, tokenizer=tokenizer).closing
        ends = TextEnds.of(tokenizer, [closing] if closing else []).tokens - {tokenizer.eos}
        return tokenizer, [tokenizer.eos, *sorted(ends)], files

    # What was written -------------------------------------------------------------------------------------------------

    def _verify(self, folder: Path, contents: dict[str, bytes], tokenizer: TextTokenizer) -> None:
        """Check all files except the weights: read config and tokenizer as `model "folder"` and `tokenizer "folder"`
        do. Raises ExportFailed."""
        if changed := [name for name, content in contents.items() if (folder / name).read_bytes() != content]:
            raise ExportFailed(f"{changed[0]} does not match what was written: the disk has changed it")
        wrong: list[str] = []
        if "code" not in self._arch.own:  # whose config is the folder's own
            means, diagnostics = settings_in_folder(str(folder))
            wrong = [error.message for error in diagnostics.errors] or read_differences(self._arch, means)
        if wrong:
            raise ExportFailed(f"{CONFIG} cannot describe this model: {'; '.join(wrong[:3])}", "X525")
        again = load_tokenizer(str(folder), Path())
        if (again.bos, again.eos, again.vocab_size) != (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size):
            raise ExportFailed("the written tokenizer differs from the run's")

    def _verify_weights(self, folder: Path) -> None:
        """Compare the folder's tensors with the model, as `model "folder"` does. Raises ExportFailed."""
        try:
            assign(self._arch, read_weight_files(str(folder)))
        except (WeightsUnreadable, ValueError) as problem:
            raise ExportFailed(f"the written folder does not match the model: {problem}") from problem


def origin_of(plan: Plan, base: Path) -> Path | None:
    """Return the folder that a plan reads its weights from, even if it no longer exists; None if they are drawn. base:
    the folder that relative paths start at."""
    args = plan.args("setup.read_weights")
    if not args:
        return None
    return base / args["folder"] if "folder" in args else snapshot_folder(args["repo"], args["revision"])


def configs(arch: Architecture, origin: Path | None, values: ConfigValues, ends: list[int]) -> dict[str, bytes]:
    """Return the config files of a folder by name. origin: the folder that the model started from. ends: the tokens
    that end a generated text."""
    begun = _json(origin / CONFIG) if origin is not None else None
    generation = _json(origin / GENERATION) if origin is not None else None
    if origin is not None and begun is not None:
        means = {} if "code" in arch.own else settings_in_folder(str(origin))[0]
        config = changed_config(arch, values, begun, means)
        if _modules(arch, origin) > arch.mtp:
            config[FURTHER] = arch.mtp
    else:
        config = new_config(arch, values)
    if not arch.has_logits:
        return {CONFIG: _text(config)}
    generation_config = with_tokens(
        generation if generation is not None else {"_from_model_config": True}, values.begin, ends
    )
    return {CONFIG: _text(config), GENERATION: _text(generation_config)}


def _modules(arch: Architecture, folder: Path | None) -> int:
    """Return the number of multi-token-prediction modules in the folder that a run started from."""
    stored = stored_names(arch)
    if folder is None or not stored.further_tokens:
        return 0
    try:
        files: WeightFiles = read_weight_files(str(folder))
    except WeightsUnreadable:
        return 0
    return stored.modules_in(arch, files.tensors)


def rounded_by(plan: Plan) -> Rounded | None:
    """Return the matrices that a run rounds for its products; None without."""
    args = plan.args("setup.qat")
    if not args:
        return None
    names = (f"layers.{layer}.{name}.weight" for name, layers in args["matrices"].items() for layer in layers)
    group = None if args["group"] == ROW else args["group"]
    bits, inputs = Qat(weights=args["weights"]).bits, args["activations"] != "none"
    return Rounded(names=frozenset(names), bits=bits, group=group, inputs=inputs)


def in_fp8(plan: Plan) -> InBlocks:
    """Return the matrices that an export in fp8 writes in blocks: of products, without routers and indexers."""
    arch = plan.architecture.base
    return InBlocks(
        frozenset(
            name_of(layer, matrix.name)
            for kind in arch.kinds
            for matrix in product_matrices(arch, kind)
            for layer in kind.layers
        )
    )


def _integers(rounded: Rounded, tensors: Sequence[WrittenTensor]) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors."""
    others = [each.name for each in tensors if each.form is None and len(each.shape) == 2]
    weights = {"num_bits": rounded.bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel" if rounded.group is None else "group", "group_size": rounded.group}
    inputs = {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": True, "strategy": "token"}
    form = "pack-quantized" if rounded.packs else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": inputs if rounded.inputs else None}},
        # A tied head has no tensor of its own, and is a module all the same.
        "ignore": sorted({HEAD, *(name.removesuffix(".weight") for name in others if name.endswith(".weight"))}),
    }


def check_exportable(
    plan: Plan, *, dequantise: bool, merges: bool = False, quantise: bool = False, fp8: bool = False
) -> None:
    """Raise ExportFailed if no folder can hold the model of a plan. merges: merge its adapter into the model. quantise:
    write rounded matrices as integers. fp8: write matrices in fp8."""
    if fp8 and (problem := _not_in_fp8(plan, merges=merges, quantise=quantise)):
        raise ExportFailed(f"--dtype fp8 {problem}; choose another format, such as --dtype bf16", "X525")
    weights = plan.args("setup.qat").get("weights")
    if quantise and weights in FLOATS:
        message = f"the run rounds to {weights}, and --quantise writes integers"
        raise ExportFailed(f"{message}; export without it, and let the engine that serves round the matrices", "X525")
    if quantise and weights is None:
        raise ExportFailed("the run rounds no matrices: `precision { qat { weights = int4 } }` does", "X525")
    if merges and plan.architecture.adapter is None:
        raise ExportFailed("the run trains no adapter; `xtrain export` writes its model", "X525")
    if merges and plan.architecture.tie_embeddings and plan.architecture.head_matrices:
        message = "the run has an adapter on its head, which is tied to the embedding: it cannot be merged"
        raise ExportFailed(f"{message}; `xtrain export --adapter` writes it separately", "X525")
    if (problem := not_written(plan.architecture.base if merges else plan.architecture)) is not None:
        raise ExportFailed("; ".join(problem), "X525")
    if (base := base_of_plan(plan)) is not None and not dequantise:
        message = f"matrices of the run are stored as {base.words()}, which transformers cannot read"
        raise ExportFailed(f"{message}; to write dequantized values, add --dequantise", "X525")


def _not_in_fp8(plan: Plan, *, merges: bool, quantise: bool) -> str:
    """Return why a model cannot be written in fp8; empty if it can."""
    if merges:
        return "is for models without an adapter: what merging loses is measured in other formats"
    if quantise:
        return "has fp8 numbers, and --quantise integers"
    if "code" in plan.architecture.own:
        return "is for xtrain's own families, and transformers' code computes this model"
    if stored_names(plan.architecture).others:
        return "is for language models alone, and this folder has tensors of other parts, which are copied"
    return ""


def formats_of(files: tuple[WrittenFile, ...]) -> dict[str, int]:
    """Return number format → bytes, largest count first."""
    sizes: Counter[str] = Counter()
    for tensor in (tensor for file in files for tensor in file.tensors):
        sizes[LOADED.get(tensor.format, tensor.format)] += tensor.bytes
    return dict(sizes.most_common())


def check_room(to: Path, size: int) -> None:
    there = next(parent for parent in to.absolute().parents if parent.exists())
    if (free := shutil.disk_usage(there).free) < size:
        message = f"the export takes {bytes_text(size)}, and {bytes_text(free)} are free in {there}"
        raise ExportFailed(message)


def _json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
