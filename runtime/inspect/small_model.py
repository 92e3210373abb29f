"""Small random models of a config, and measurements of what a model of transformers computes.

Some decide whether a loss is right: whether logits are a product of the head, whether documents of a row stay apart,
and whether a position sees later ones. Others decide what else may be done with the model.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from xtrain.plan.architecture import HEAD
from xtrain.runtime.nn.attention import by_document
from xtrain.runtime.nn.attention_blocks import Scores
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.code_attention import NAME, Attend, attending, register
from xtrain.runtime.nn.model_code import CodeModel, UnknownCode, build, build_class, config_of

SMALL: Final = 2**23  # the largest number of parameters of a small model
TOLERANCE: Final = 1e-4
POSITIONS: Final = 64  # of measured rows

# A small model -------------------------------------------------------------------------------------------------------

# Sizes by the words of their names. Widths are divided by one number and numbers of heads by another, so that sizes fit
# each other as before; reaches are cut below the positions of measured rows.
VOCABULARY: Final = re.compile(r"vocab|n_words|num_embeddings")
POSITION_COUNT: Final = re.compile(r"max_(source_|target_)?position|n_positions|n_ctx|max_seq")
REACH: Final = re.compile(r"window|chunk_size|index_topk")
EXPERTS: Final = re.compile(r"^(num|n|moe_num)_.*experts$|^num_experts$|expert_num$")
CHOSEN: Final = re.compile(r"per_tok|top_?k|moe_k|groups?$")
HEADS: Final = re.compile(r"heads?$|n_head|head_num|query_groups|multi_query_group_num|num_kv_heads")
HEAD_WIDTH: Final = re.compile(r"head_?dim|dim_head|d_head|head_size|kv_channels|^d_kv$|rotary_dim|section")
WIDTH: Final = re.compile(
    r"hidden|embed|embd|intermediate|ffn|ff_|_ff$|inner|model|width|channels|rank|dim|state|ssm|size|rnn|lru|proj"
)
OTHER: Final = re.compile(
    r"^num_|^n_(?!embd|inner|embed)|kernel|conv|patch|image|batch|block|max|layer|position|expand"
)
LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
FACTORS: Final = (64, 32, 16, 8, 4, 2)


def small(content: Mapping[str, Any], model: nn.Module) -> CodeModel | None:
    """Return a small random model with all kinds of layers of a model, or the model itself if it is small; None if none
    can be built.

    model: with the config `content`, on the meta device.
    """
    if sum(p.numel() for p in model.parameters()) <= SMALL:
        with suppress(Exception):  # reaches that do not fit other sizes
            return _filled(_shortened(content))
        return _filled(content)
    kinds = [layer_kind(layer) for layer in CodeModel(model).layers]
    for smaller in smaller_configs(content, kinds):
        with suppress(Exception):  # sizes that do not fit each other fail in many ways
            code = _filled(smaller)
            if set(map(layer_kind, code.layers)) >= set(kinds) and code.hidden(ids_of(code, 8)).isfinite().all():
                return code
    return None


def _shortened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose windows and chunks are shorter than measured rows."""
    found = {}
    for name, value in content.items():
        short = type(value) is int and REACH.search(name)
        found[name] = _shortened(value) if isinstance(value, Mapping) else min(value, 16) if short else value
    return found


def layer_kind(layer: nn.Module) -> Any:
    """Return what distinguishes layers whatever their sizes are: classes of modules and switches."""

    def switches(module: nn.Module) -> Any:
        own = ((n, v) for n, v in vars(module).items() if n != "training" and not n.startswith("_"))
        return sorted((n, str(v)) for n, v in own if isinstance(v, bool | str))

    return repr(sorted({
        (re.sub(r"\d+", "", name), type(module).__name__, repr(switches(module)))
        for name, module in layer.named_modules()
    }))  # fmt: skip


def smaller_configs(content: Mapping[str, Any], kinds: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield smaller configs, the smallest first. kinds: of the layers."""
    before = len(kinds)
    needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=before)
    counts = dict.fromkeys((min(before, max(2, needed)), min(before, max(4, needed)), before))
    for reach in (16, None):
        for layers in counts:
            for width in FACTORS:
                for heads in (1, *(each for each in reversed(FACTORS) if each <= width)):
                    scales = _Scales(width, heads, reach, (before, layers))
                    yield scales.of(content)


class _Scales:
    """Divisors of sizes. reach: the most positions of windows and chunks; layers: their numbers before and after."""

    def __init__(self, width: int, heads: int, reach: int | None, layers: tuple[int, int]) -> None:
        self.width, self.heads, self.reach, self.layers = width, heads, reach, layers

    def of(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a config with smaller sizes."""
        counts = [v for n, v in content.items() if isinstance(v, int) and CHOSEN.search(n) and v < 64]
        experts = 2 * max((4, *counts))
        return {name: self._value(name, value, experts) for name, value in content.items()}

    def _value(self, name: str, value: Any, experts: int) -> Any:
        if isinstance(value, dict):
            return self.of(value)
        before, after = self.layers
        if name in LAYER_COUNTS:
            return min(value, after)
        if isinstance(value, str) and len(value) == before and "pattern" in name:  # a letter for each layer
            return value[:after]
        if isinstance(value, list | tuple):
            if len(value) == before and before > 3:
                value = value[:after]
            elif "layer" in name and all(type(each) is int for each in value):
                value = [each for each in value if each < after]
            elif value and all(type(each) is float for each in value) and len(value) % self._by == 0:
                return value[:: self._by]  # a factor for each pair of rotated numbers
            return [self._value(name, each, experts) for each in value]
        return self._size(name, value, experts) if type(value) is int else value

    @property
    def _by(self) -> int:
        return self.width // self.heads

    def _size(self, name: str, value: int, experts: int) -> int:
        if name.endswith(("token_id", "token_ids")):
            return min(value, 2)
        if VOCABULARY.search(name):
            return min(value, 320)
        if POSITION_COUNT.search(name):
            return min(value, 256)
        if REACH.search(name):
            return value if self.reach is None else min(value, self.reach)
        if EXPERTS.search(name) and "shared" not in name and not CHOSEN.search(name):
            while value % 4 == 0 and value // 2 >= experts:  # an even number is left for two ranks
                value //= 2
            return value
        if HEAD_WIDTH.search(name):
            return value if value % self._by or value // self._by < 2 else value // self._by
        if HEADS.search(name):
            return max(1, value // self.heads)
        if WIDTH.search(name) and not OTHER.search(name) and value // self.width >= 4:
            return value // self.width
        return value


def _filled(content: Mapping[str, Any]) -> CodeModel:
    with torch.device("meta"):
        count = sum(p.numel() for p in build(config_of(content)).parameters())
    if count > SMALL:
        raise UnknownCode(f"{count:,} parameters are not few", "use another model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        code = CodeModel(build(config_of(content)))
        for parameter in code.model.parameters():  # zeros that its class draws would hide what they multiply
            if parameter.is_floating_point():
                nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 else 0.1)
    code.model.eval()
    return code


# What decides whether losses are right -------------------------------------------------------------------------------


def ids_of(code: CodeModel, count: int) -> Tensor:
    """Return a row of `count` ids of the vocabulary, without the first three, which may have a meaning."""
    vocab = code.embedding.num_embeddings
    return (torch.arange(count)[None] * 37 + 11) % min(250, vocab - 3) + 3


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two results are finite and equal but for rounding."""
    largest = float(one.abs().max())
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * largest))


def shows(measure: Callable[..., bool], code: CodeModel, *given: Any, **more: Any) -> bool:
    """Return True if a small model shows what `measure` looks for, in fp32 or else in fp64: where routers nearly tie,
    rounding chooses other experts."""
    if measure(code, *given, **more):
        return True
    with suppress(Exception):  # code that computes in fp32 alone
        return measure(CodeModel(copy.deepcopy(code.model).double()), *given, **more)
    return False


@torch.no_grad()
def measured_logits(code: CodeModel) -> dict[str, Any] | None:
    """Return how logits follow from the head's product: {}, {"scale": x} or {"cap": x}; None if in no such way."""
    ids_BS = ids_of(code, POSITIONS)
    hidden_BSD = code.hidden(ids_BS)
    product = nn.functional.linear(hidden_BSD, code.head.weight, code.head.bias)
    logits = code.model(input_ids=ids_BS, use_cache=False).logits
    if product.shape != logits.shape:
        return None
    if same(logits, product):
        return {}
    if code.head.bias is not None:
        return None
    values = code.model.config.to_dict()
    for cap in (value for name, value in values.items() if "cap" in name and type(value) in (int, float) and value):
        if same(logits, torch.tanh(product / cap) * cap):
            return {"cap": float(cap)}
    scale = float((product * logits).sum() / (product * product).sum())
    if not same(logits, product * scale):
        return None
    for value in values.values():  # the exact number, not the measured one
        for exact in (value, 1 / value if value else value) if isinstance(value, int | float) and value else ():
            if abs(exact - scale) <= TOLERANCE * abs(scale):
                return {"scale": float(exact)}
    return None


@contextmanager
def by_kernels(code: CodeModel, attend: Attend) -> Iterator[None]:
    """Compute the attention of layers that use transformers' interface by `attend` within the block."""
    register()
    config = code.model.config
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        with attending(attend):
            yield
    finally:
        config._attn_implementation = before


def kernel_of(lengths: Sequence[int], used: list[Scores] | None = None) -> Attend:
    """Return attention of a row with documents of these lengths. used: filled with the scores of each call."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packing = DocumentLayout.from_lengths(bounds, 1, sum(lengths), torch.device("cpu"))

    def attend(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, scores: Scores, sink_H: Tensor | None) -> Tensor:
        if used is not None:
            used.append(scores)
        return by_document(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)

    return attend


@torch.no_grad()
def keeps_documents_apart(code: CodeModel, *, kernels: bool) -> bool:
    """Return True if documents of a row stay apart whose positions begin at 0 again.

    kernels: attention is computed by xtrain's kernels, which know the documents.
    """
    lengths = (20, 27, 1, 5, 11)  # the first are longer than the reaches of a small model
    ids_BS = ids_of(code, sum(lengths))
    try:
        alone = torch.cat([code.hidden(part) for part in ids_BS.split(lengths, 1)], 1)
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        with by_kernels(code, kernel_of(lengths)) if kernels else nullcontext():
            packed = code.hidden(ids_BS, places)
    except Exception:
        return False
    return same(alone, packed)


@torch.no_grad()
def wrong_buffer(code: CodeModel) -> str | None:
    """Return a buffer that no file has and that `fill_buffers` does not compute as the class of the model does."""
    copied = CodeModel(copy.deepcopy(code.model))
    before = dict(code.model.named_buffers())
    copied.fill_buffers(copied.model, {})
    return next((name for name, each in copied.model.named_buffers() if not torch.equal(each, before[name])), None)


@torch.no_grad()
def is_causal(code: CodeModel) -> bool:
    """Return True if no position's hidden state depends on later tokens."""
    ids_BS = ids_of(code, POSITIONS)
    other_BS = torch.cat((ids_BS[:, :32], ids_BS[:, 32:].flip(1)), 1)
    one, other = (code.hidden(each)[:, :32] for each in (ids_BS, other_BS))
    return same(one, other)


# What surrounds training ---------------------------------------------------------------------------------------------


def idle_parameters(code: CodeModel) -> frozenset[str]:
    """Return the parameters, by their names in a plan, that hidden states have no gradient of: attention to an encoder,
    poolers, or scores that only choose positions. An expert may have had no token."""
    code = CodeModel(copy.deepcopy(code.model))
    code.hidden(ids_of(code, POSITIONS)).sum().backward()
    idle = {code.names.get(name, "") for name, parameter in code.model.named_parameters() if parameter.grad is None}
    return frozenset(name for name in idle if name and not name.startswith(f"{HEAD}.") and "expert" not in name)


def of_layers(names: frozenset[str], code: CodeModel) -> dict[Any, frozenset[str]]:
    """Return kind of layers → the parameters that all of its layers have among `names`, by their names in a layer."""
    found: dict[Any, frozenset[str]] = {}
    for number, layer in enumerate(code.layers):
        start, kind = f"layers.{number}.", layer_kind(layer)
        own = frozenset(name.removeprefix(start) for name in names if name.startswith(start))
        found[kind] = own & found.get(kind, own)
    return found


@torch.no_grad()
def gathered_matrices(code: CodeModel) -> list[str]:
    """Return the matrices of layers that do not take all tokens of a microbatch, row by row: their names in a layer,
    without numbers. Rows of several adapters cannot be told apart there."""
    found = set[str]()

    def seen(name: str, _: nn.Module, given: tuple[Any, ...]) -> None:
        if not given or given[0].shape[:-1] not in ((2, 8), (16,)):
            found.add(re.sub(r"\d+", "", name))

    matrices = [each for layer in code.layers for each in layer.named_modules() if type(each[1]) is nn.Linear]
    hooks = [matrix.register_forward_pre_hook(partial(seen, name)) for name, matrix in matrices]
    code.hidden(ids_of(code, 16).view(2, 8))
    for hook in hooks:
        hook.remove()
    return sorted(found)


@torch.no_grad()
def reward_class(code: CodeModel) -> str:
    """Return the class of transformers that gives a text a reward: a matrix `score` times the head's input at the last
    token, with the tensors of the language model under the same names. Empty if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    config = copy.deepcopy(code.model.config)
    try:
        config.num_labels, config.pad_token_id = 1, None  # some configs need a padding token
        cls: Any = CLASSES[type(config)]
        model: Any = build_class(cls, config)
        missing, surplus = model.load_state_dict(code.model.state_dict(), strict=False)
        ids_BS = ids_of(code, POSITIONS)
        wanted = nn.functional.linear(code.hidden(ids_BS)[:, -1], model.score.weight)
        found = model.eval()(input_ids=ids_BS).logits
    except Exception:  # code of any model
        return ""
    ours = missing == ["score.weight"] and all(name.startswith(f"{code.paths[code.head]}.") for name in surplus)
    return cls.__name__ if ours and same(found, wanted) else ""
