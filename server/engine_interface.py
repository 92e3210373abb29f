"""Interface of the engine that computes for a server: models of one base, gradients, steps, samples and files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from attrs import field, frozen
from msgspec import Struct

Array = np.ndarray

# Losses, as the protocol names them.
CROSS_ENTROPY: Final = "cross_entropy"
IMPORTANCE_SAMPLING: Final = "importance_sampling"
PPO: Final = "ppo"
CISPO: Final = "cispo"
DRO: Final = "dro"
TARGETS: Final = "target_tokens"  # present in every loss

IGNORED: Final = -100  # a target without a loss


class UserError(Exception):
    """An invalid request; nothing was changed. The client reads its text."""


class EngineLost(Exception):
    """Loss of an engine's state: a rank ended, or failed half-way through a change.

    The server calls `start` again, restores every model from its last save, and repeats later work.
    """


# what an engine offers ------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class LossInput:
    """A tensor that a loss reads in addition to the tokens.

    integer: token ids, below the vocabulary (int64); otherwise finite numbers (float32).
    """

    name: str
    integer: bool = False
    required: bool = True


@frozen(kw_only=True)
class LossOffer:
    """A loss supported by `forward_backward`, by its name in the protocol. inputs: include `target_tokens`; all others
    have its shape, [T], or [T, K] if `wide`. settings: names allowed in `loss_fn_config`."""

    inputs: tuple[LossInput, ...]
    settings: frozenset[str] = frozenset()
    wide: bool = False


@frozen(kw_only=True)
class Capabilities:
    """Capabilities of an engine; constant while the engine runs.

    names: names of the base model for clients; the first is listed. context: tokens of a row, or of prompt and sample
    together. rank: highest adapter rank; 0: the model itself is trained, without an adapter. models: number of models
    at a time. matrices: kinds (`attn`, `mlp`, `unembed`) that an adapter can be limited to. targets: most targets of a
    row. text: whether stops may be texts, which needs a tokenizer. top: most candidates per token whose
    log-probabilities can be requested.
    """

    names: tuple[str, ...]
    architecture: str
    tokenizer: str | None
    vocabulary: int
    context: int
    rank: int
    models: int
    losses: Mapping[str, LossOffer]
    matrices: frozenset[str] = frozenset({"attn", "mlp", "unembed"})
    targets: int = 2**20
    text: bool = False
    top: int = 20

    @property
    def whole(self) -> bool:
        """True if the model itself is trained."""
        return self.rank == 0


# what it is asked for -------------------------------------------------------------------------------------------------


class AdapterSettings(Struct, frozen=True, kw_only=True):
    """The adapter of a model. seed: of its initial values. Other fields: which matrices have one."""

    rank: int
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = True


@frozen(kw_only=True, eq=False)
class Datum:
    """A row: tokens int32 [T], and the loss's other inputs, int64 or float32 [T] or [T, K].

    `target_tokens` may be IGNORED, where all other inputs are 0: loss and log-probability are 0 there.
    """

    tokens: Array
    inputs: Mapping[str, Array]

    @property
    def num_targets(self) -> int:
        """Number of targets with a loss."""
        return int((self.inputs[TARGETS] != IGNORED).sum())


@frozen(kw_only=True, eq=False)
class Pass:
    """A forward over the rows of one model, and unless `forward_only` a backward that adds to its gradient.

    The loss is an undivided sum over rows and tokens. Weights may be negative and fractional.
    """

    model: str
    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool

    @property
    def num_targets(self) -> int:
        """Number of targets with a loss."""
        return sum(datum.num_targets for datum in self.data)


@frozen(kw_only=True, eq=False)
class PassResult:
    """Result of a pass. outputs: of each row in order, by name, float32 [T] or [T, K]; all rows have the same names.
    metrics: by `name:reduction`, with exactly one colon; `loss:sum` is the loss."""

    outputs: Sequence[Mapping[str, Array]]
    metrics: Mapping[str, float]


@frozen(kw_only=True)
class Adam:
    """AdamW settings of one step (decoupled weight decay). clip: maximum norm of the gradient; 0: no clipping. divisor:
    of the accumulated gradient, before clipping; 1: gradients are sums, as in the SDK's protocol."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float
    divisor: float = 1.0


@frozen(kw_only=True, eq=False)
class SampleRequest:
    """Continuations of a prompt, int32 [P].

    id: of this request. weights: a folder written by `export`; None: the base model. temperature: 0 is greedy. top_k:
    None is all. seed: sample i is drawn with (seed, i), or with text i, independent of other work. stop_tokens,
    stop_texts: end a sample and are part of it. stop_at_end: whether the tokenizer's end of text ends a sample.
    prompt_top, sample_top: candidates per token whose log-probabilities are requested.
    """

    id: str
    weights: Path | None
    prompt: Array
    count: int
    most: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | list[str]
    stop_tokens: frozenset[int]
    stop_texts: tuple[str, ...]
    stop_at_end: bool
    prompt_logprobs: bool
    prompt_top: int
    sample_top: int


@frozen(kw_only=True, eq=False)
class Candidates:
    """The likeliest tokens, int32 [N, C], and their log-probabilities, float32 [N, C]."""

    tokens: Array
    logprobs: Array


@frozen(kw_only=True, eq=False)
class DrawnSample:
    """A sample. tokens: int32 [N]. logprobs: float32 [N], in the distribution that was drawn from. stopped: it ended
    for another reason than its length."""

    tokens: Array
    logprobs: Array
    stopped: bool
    top: Candidates | None = None


@frozen(kw_only=True, eq=False)
class SampleResult:
    """Result of a sample request. prompt_logprobs: float32 [P], the first is NaN; None: not requested. prompt_top: of
    all but the first token, [P - 1, C]."""

    samples: Sequence[DrawnSample]
    prompt_logprobs: Array | None = None
    prompt_top: Candidates | None = None


@frozen(kw_only=True, eq=False)
class SampleQueue:
    """Samples to draw, and the receiver of results. arrived: returns requests since the last call, which may join the
    batch at any token. It returns none while other work waits, so that this work waits for at most the longest
    sample. finished: called once per request, in any order, as soon as it is done."""

    requests: Sequence[SampleRequest]
    arrived: Callable[[], Sequence[SampleRequest]]
    finished: Callable[[SampleRequest, SampleResult | UserError], None] = field(repr=False)


class Engine(Protocol):
    """The computing side of the server. Every method may raise EngineLost; other exceptions except UserError count as
    EngineLost."""

    def start(self) -> Capabilities:
        """Start without any model; also after EngineLost. Called first."""
        ...

    def create_model(self, model: str, adapter: AdapterSettings | None) -> None:
        """Create a model with a new adapter; None: the whole base model. Its gradient and step are zero. Equal settings
        give equal models. Raises UserError if memory is insufficient."""
        ...

    def remove_model(self, model: str) -> None:
        """Free a model's memory."""
        ...

    def forward_backward(self, passes: Sequence[Pass]) -> Sequence[PassResult | UserError]:
        """Run passes of different models, batched where shapes allow; each has the same numbers as alone. A pass that
        returns UserError has changed nothing."""
        ...

    def optim_step(self, model: str, adam: Adam) -> Mapping[str, float]:
        """Take a step, set the gradient to zero, and return metrics, including `grad_norm` before clipping.

        Without an accumulated gradient, moments decay as with a gradient of zero. Raises UserError if the gradient is
        not finite; the gradient is then dropped and the model unchanged.
        """
        ...

    def save(self, model: str, folder: Path) -> None:
        """Write the trained weights, moments and step (no gradient) to a new folder; durable on return."""
        ...

    def load(self, model: str, folder: Path, *, optimizer: bool) -> None:
        """Load a folder written by `save` for a model of equal settings; without `optimizer`, moments and step start
        from zero.

        Raises UserError if the folder does not fit the model.
        """
        ...

    def export(self, model: str, folder: Path) -> None:
        """Write the trained weights alone, in PEFT's format, to a new folder for sampling; durable on return."""
        ...

    def forget(self, weights: Path) -> None:
        """Free sampling memory of an `export` folder that will be removed."""
        ...

    def sample(self, queue: SampleQueue) -> None:
        """Draw samples until none are left. Equal requests give equal samples."""
        ...

    def close(self) -> None:
        """Stop everything that was started."""
        ...
