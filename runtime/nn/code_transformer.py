"""A model whose forward up to the head's input is transformers' own code; loss, head and everything after it is ours.

Its layers are modules of transformers, of a class of their own that adds recomputation. Parameters have the names of
the plan: layers by number, other modules by their path in the trunk.
"""

import copy
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor, nn

from xtrain.blocks.adapted import AdaptedBlock
from xtrain.blocks.block import block_of
from xtrain.dsl.checking.config_json import SnapshotMissing, find_snapshot
from xtrain.dsl.checking.model_code import source_digest
from xtrain.plan.architecture import Architecture
from xtrain.plan.hardware import BLOCK_MASKS, FLASH
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn.adapters import put_on, put_on_head
from xtrain.runtime.nn.attention import KERNELS, AttentionModule
from xtrain.runtime.nn.attention_blocks import PLAIN, Scores
from xtrain.runtime.nn.axes import Axes, local, start_of
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache, ModelBatch
from xtrain.runtime.nn.block import LayerBlock
from xtrain.runtime.nn.code_attention import NAME, attending
from xtrain.runtime.nn.code_experts import CodeExperts, repeating, set_router_loss, take_experts
from xtrain.runtime.nn.code_stage import CodeStage
from xtrain.runtime.nn.code_tensor import cut_embedding, cut_layer, local_parameters
from xtrain.runtime.nn.layers import Linear, generator_of
from xtrain.runtime.nn.loss import Head
from xtrain.runtime.nn.model_code import CodeModel, UnknownCode, build, code_digest, config_of, execute_files
from xtrain.runtime.nn.transformer import StageSpan, Transformer


@frozen(eq=False)
class _Rows:
    """The rows of a microbatch, as layers take them. keys_BS: of dropout. real_BS: the real tokens, in training."""

    packing: DocumentLayout
    cache: LayerCache | None
    keys_BS: Tensor | None
    real_BS: Tensor | None = None


class _CodeBlock(LayerBlock):
    """A layer of transformers that can be recomputed: a base of the classes that `_block_class` makes.

    Names of attributes are none that such layers have. kernel_module: with the kernel of its attention; None:
    transformers computes it. expert_modules: experts that xtrain computes. next_rows: of the next forward.
    """

    kernel_module: AttentionModule | None
    expert_modules: tuple[CodeExperts, ...]
    next_rows: _Rows | None
    rank_axes: Axes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own, attention, rows, tasks = super().forward, self.kernel_module, self.next_rows, self.rank_axes.tasks
        assert rows is not None

        def attend(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, scores: Scores, sink_H: Tensor | None) -> Tensor:
            assert attention is not None
            if rows.cache is not None:
                k_BKSA, v_BKSA = rows.cache.extended(attention, k_BKSA, v_BKSA, window=scores.window)
            return attention.kernel(q_BHSA, k_BKSA, v_BKSA, rows.packing, scores, sink_H)

        def compute(*given: Any) -> Any:
            # Also in a backward, which recomputes it after other microbatches.
            if tasks is not None:
                tasks.counts = rows.packing.task_rows
            for experts in self.expert_modules:
                experts.real_BS = rows.real_BS
            for module in self.dropping:
                module.keys_BS = rows.keys_BS
            with attending(attend), repeating(self.expert_modules), local_parameters(self.modules(), self.rank_axes):
                return own(*given, **kwargs)

        if self.recompute is None or not torch.is_grad_enabled():
            return compute(*args)
        return self.recompute(compute, *args)


@cache
def _block_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (_CodeBlock, own), {})


def _as_block(
    layer: nn.Module, number: int, attention: AttentionModule | None, axes: Axes, experts: str | None
) -> _CodeBlock:
    """Give a layer the class of a block, so that its parameters and submodules keep their names. experts: path of its
    experts that xtrain computes."""
    layer.__class__ = _block_class(type(layer))
    layer.number = number  # type: ignore[assignment]
    layer.dropping = []  # type: ignore[assignment]
    layer.kernel_module, layer.next_rows, layer.rank_axes = attention, None, axes  # type: ignore[assignment]
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear  # which takes adapters and codes
    assert isinstance(layer, _CodeBlock)
    layer.expert_modules = () if experts is None else (take_experts(layer.get_submodule(experts), axes),)
    layer.routes = experts is not None
    return layer


class CodeTransformer(Transformer):
    """A model that transformers computes, with the interface of `Transformer`."""

    def __init__(
        self,
        arch: Architecture,
        span: StageSpan,
        *,
        axes: Axes,
        kernel: str,
        head: Head,
        rows: int,
        base: Path | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._begin(arch, span, axes, head)
        self._described = described = arch.own["code"]
        own = described["attention"]  # computed by xtrain's kernels
        try:
            if (place := described.get("remote")) is not None:
                execute_files(described["config"], checked_files(described["digest"], **place))
            code = CodeModel(build(config_of(described["config"]), attention=NAME if own else "sdpa"))
        except UnknownCode as problem:
            raise EnvironmentFault("X529", f"{problem}; {problem.hint}") from problem
        if type(code.model).__name__ != described["class"]:
            raise PlanMismatch(f"transformers builds a {type(code.model).__name__}, not a {described['class']}")
        before = frozenset(described["before"])
        stage = CodeStage(code, span.first, span.last, described["items"], before)
        self._stage = (stage,)  # in a tuple, so that it is no submodule
        self.uses_flex, self.uses_bounds = own and kernel in BLOCK_MASKS, own and kernel in FLASH
        self.kernels = frozenset((Scores(**scores), sinks) for scores, sinks in described["scores"])
        if span.embeds or (span.predicts and arch.embeds_behind):
            self.embed_tokens = code.embedding
            cut_embedding(code.embedding, axes)
        self.layers = nn.ModuleDict()
        parameters = {i: kind["parameters"] for kind in described["kinds"] for i in kind["layers"]}
        experts = described["experts"]
        for i in range(span.first, span.last + 1):
            layer = code.layers[i]
            attention = AttentionModule(KERNELS[kernel], axes, PLAIN) if own else None
            path = experts["module"] if i in arch.expert_layers else None
            self.layers[str(i)] = block_module = _as_block(layer, i, attention, axes, path)
            for module in block_module.expert_modules:
                set_router_loss(layer, module, arch, rows, experts["router"])
            if isinstance(block := block_of(arch.kind_of(i)), AdaptedBlock):
                put_on(layer, block, arch, axes)
            cut_layer(layer, parameters[i], axes)
        bias = code.head.bias
        assert code.names  # computed before its second name is removed
        for module in code.around:
            for name in [name for name, parameter in module._parameters.items() if parameter is bias is not None]:
                module._parameters[name] = None  # it is the head's
            if module._parameters or module._buffers:
                _share(self, code.places[module], module)
        for module in code.outside:
            place = code.places[module]
            if not any(True for _ in module.parameters()) or (span.embeds if place in before else span.predicts):
                _put(self, place, module)
        code.model.eval()
        if span.predicts:
            self._add_head(code.head)
        self._formats = {
            (module, name): buffer.dtype
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        self._drawn: tuple[tuple[str, int], dict[str, Tensor]] = (("", 0), {})
        self._caches = WeakKeyDictionary[Any, Any]()

    def _add_head(self, head: nn.Linear) -> None:
        arch, bias = self.arch, head.bias
        if not arch.has_logits:
            self.score = Linear(arch.dim, 1)
            return
        if not arch.tie_embeddings:
            self.lm_head = head
            self.lm_head.__class__ = Linear
        elif arch.head_matrices or bias is not None:  # the embedding's weight; adapter and bias are here
            self.lm_head = Linear(arch.dim, arch.vocab)
            self.lm_head.register_parameter("weight", None)
            self.lm_head.register_parameter("bias", bias)
        put_on_head(self, arch, self.axes)

    @property
    def code(self) -> CodeModel:
        return self._stage[0].code

    def check_code(self, digest: str) -> None:
        if code_digest(type(self.code.model)) != digest:
            message = f"there is other code of {self.code.title} than when the plan was made; plan again"
            raise PlanMismatch(message)

    def last_norm(self, x: Tensor) -> Tensor:
        """Return x, because the trunk ends with its norm."""
        return x

    def _embedded(self, x_BSD: Tensor | None, batch: ModelBatch) -> Tensor:
        """Return the ids, which the trunk embeds, or the stage's input."""
        given = batch.input_ids_BS if self.span.embeds else x_BSD
        assert given is not None
        return given

    def _through_blocks(self, x_BSD: Tensor, batch: ModelBatch) -> tuple[Tensor, Callable[..., Tensor]]:
        cache, described = batch.cache, self._described
        keys_BS = self._keys(batch, x_BSD.device) if self.drops and batch.place_B is not None else None
        real_BS = batch.real_BS if self.training and cache is None and torch.is_grad_enabled() else None
        self._give(_Rows(self._packing(batch), cache, keys_BS, real_BS))
        layers = set(self.layers.modules())
        with local_parameters((each for each in self.modules() if each not in layers), self.axes):
            if cache is None or described["caches"] == "kernels":
                # Code that does not keep documents apart counts positions in its own way, such as from a padding id.
                hidden_BSD = self._stage[0](x_BSD, batch.positions_BS if described["packs"] else None)
            else:
                knows = described["caches"] == "own" and self.span.embeds and self.span.predicts
                with self._attention_of_transformers():
                    hidden_BSD = (self._with_cache if knows else self._again)(x_BSD, batch, cache)
        if not self.span.predicts:
            return hidden_BSD, _no_further
        if not self.arch.has_logits:
            return hidden_BSD, _no_further
        scale = self._described["logits"].get("scale", 1.0)
        hidden_BSD = hidden_BSD if scale == 1.0 else hidden_BSD * scale
        if self._bias is not None:
            hidden_BSD = torch.cat((hidden_BSD, hidden_BSD.new_ones(*hidden_BSD.shape[:-1], 1)), -1)
        return hidden_BSD, _no_further

    def _give(self, rows: _Rows) -> None:
        """Let the layers take these rows in the next forward."""
        for block in self.layers.values():
            assert isinstance(block, _CodeBlock)
            block.next_rows = rows

    @contextmanager
    def _attention_of_transformers(self) -> Iterator[None]:
        """Use the attention of transformers, which knows its cache, within the block."""
        config = self.code.model.config
        before = config._attn_implementation
        if before == NAME:
            config._attn_implementation = "sdpa" if getattr(type(self.code.model), "_supports_sdpa", False) else "eager"
        try:
            yield
        finally:
            config._attn_implementation = before

    @property
    def _bias(self) -> Tensor | None:
        """The head's bias."""
        return getattr(self, "lm_head", self.code.head).bias

    def head_weight(self) -> Tensor:
        """Return the head's weight [V, D]; [V, D + 1] with its bias, which multiplies a column of ones."""
        weight_VD = super().head_weight()
        if self._bias is None:
            return weight_VD
        bias_V = local(self._bias)
        if len(bias_V) != len(weight_VD):  # of a tied head, whose matrix alone is cut
            begin = start_of(self.embed_tokens.weight)[0]
            bias_V = local(self._bias, partial=True)[begin : begin + len(weight_VD)]
        return torch.cat((weight_VD, bias_V[:, None]), 1)

    def _with_cache(self, ids_BS: Tensor, batch: ModelBatch, cache: LayerCache) -> Tensor:
        """Return the hidden states of new positions; the model's own cache keeps the earlier ones."""
        from transformers import DynamicCache

        if cache.filled == 0:
            self._caches[cache] = DynamicCache(config=self.code.model.config)
        seen = getattr(cache, "seen_B11L", None)
        name = "cache" if "cache" in self.code.arguments else "past_key_values"
        more: dict[str, Any] = {name: self._caches[cache], "use_cache": True}
        if seen is not None:
            more["attention_mask"] = seen[:, 0, 0, : cache.filled + ids_BS.shape[1]].long()
        return self.code.hidden(ids_BS, batch.positions_BS, **more)

    def _again(self, given: Tensor, batch: ModelBatch, cache: LayerCache) -> Tensor:
        """Return the stage's output at new positions, computed with all earlier ones again and row by row: the caches
        of such models do not take rows of several lengths, or need all layers. given: [B, S], or [B, S, D]."""
        packing = self._packing(batch)
        task_of = [place for place, count in enumerate(packing.task_rows) for _ in range(count)]
        before = self._caches.get(cache) if cache.filled else None
        whole = given if before is None else torch.cat((before, given), 1)
        self._caches[cache] = whole
        seen, new, found = getattr(cache, "seen_B11L", None), given.shape[1], []
        for row, own in enumerate(whole):
            begin = 0 if seen is None else int((~seen[row, 0, 0]).sum())
            mine = tuple(int(place == task_of[row]) for place in range(len(packing.task_rows)))
            self._give(_Rows(evolve(packing, task_rows=mine), None, None))
            x_BSD = self._stage[0](own[None, begin:], None)[:, -new:]
            found.append(F.pad(x_BSD, (0, 0, new - x_BSD.shape[1], 0)))
        return torch.cat(found)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model alone: its modules stay in evaluation mode, without dropout and noise."""
        self.training = mode
        return self

    def fill_buffers(self) -> None:
        """Compute the buffers that no checkpoint has, in their own formats; set the others to 0."""
        super().fill_buffers()
        self.code.fill_buffers(self, self._formats)

    @property
    def drawable(self) -> Set[str]:
        """Names of the parameters and saved buffers that the class of the model draws."""
        return set(self._pattern.names.values())

    @torch.no_grad()
    def drawn(self, name: str, seed: int) -> Tensor:
        """Return the whole initial value of a parameter or saved buffer, as its class draws it, in fp32 on the host.

        Raises EnvironmentFault X529 if its class draws none.
        """
        start = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.rpartition(".")[0]
        if (start, seed) != self._drawn[0]:
            self._drawn = (start, seed), self._drawn_part(start, seed)
        value = self._drawn[1][name].detach()
        if value.isnan().any():
            raise EnvironmentFault("X529", f"{self.code.title} draws no values for `{name}`; start from its weights")
        return value

    def _drawn_part(self, start: str, seed: int) -> dict[str, Tensor]:
        """Draw a layer, or one module outside layers; values depend on the seed and the name alone."""
        inside = f"{start}." if start else ""
        names = {ours: theirs for theirs, ours in self._pattern.names.items() if ours.startswith(inside)}
        if not start:
            names = {ours: theirs for ours, theirs in names.items() if "." not in ours}
        path = names[min(names)].removesuffix(min(names).removeprefix(inside)).removesuffix(".")
        part = self._pattern.model.get_submodule(path)
        if part in self._pattern.around:  # its own parameters alone
            part = copy.copy(part)
            part._modules = {}
        part = copy.deepcopy(part)
        part.to_empty(device="cpu")
        for tensor in (*part.parameters(), *part.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_of(start, seed, torch.device("cpu")).initial_seed())
            part.apply(self._pattern.model._init_weights)
        tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        return {ours: tensors[theirs.removeprefix(path).lstrip(".")].float() for ours, theirs in names.items()}

    @cached_property
    def _pattern(self) -> CodeModel:
        """The model without weights, whose parts are copied to draw their values."""
        with torch.device("meta"):
            return CodeModel(build(config_of(self._described["config"])))


def checked_files(digest: str, folder: str = "", repo: str = "", revision: str = "") -> Path:
    """Return the folder of a model whose own modeling files compute it. Raises EnvironmentFault without it, and
    PlanMismatch if the files have changed since planning."""
    try:
        place = folder or find_snapshot(repo, revision)[0]
        if source_digest(place) == digest:
            return Path(place)
    except (OSError, SnapshotMissing) as error:
        raise EnvironmentFault("X529", f"the modeling files of the model cannot be read: {error}") from error
    raise PlanMismatch(f"{place} has other modeling files than when the plan was made; read them, and plan again")


def _no_further(*_: Any) -> Tensor:
    raise AssertionError("no block predicts further tokens")


def _share(to: nn.Module, path: str, module: nn.Module) -> None:
    """Give the module at a path the parameters and buffers of a module around the layers, without its submodules."""
    if path:
        if path not in dict(to.named_modules()):
            _put(to, path, nn.Module())
        to = to.get_submodule(path)
    assert not to._parameters and not to._buffers
    to._parameters, to._buffers = module._parameters, module._buffers
    to._non_persistent_buffers_set = module._non_persistent_buffers_set
    to.__dict__["shared"] = module  # no submodule


def _put(to: nn.Module, path: str, module: nn.Module) -> None:
    """Register a module at a path, with empty modules on the way."""
    *way, name = path.split(".")
    for part in way:
        if part not in to._modules:
            to.add_module(part, nn.Module())
        to = to.get_submodule(part)
    to.add_module(name, module)
