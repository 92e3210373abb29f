"""How the model learns: `loss`, `optimizer`, `scheduler`, `checkpoint`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from ..metric import Metric
from ..quantity import Quantity
from .component import Component, Registry
from .names import file_path, some_text
from .setting import Role, at_least, is_unspoken, label, not_negative, positive, setting, settings_of, share
from .state_tensors import StateTensor

LOSSES: Final = Registry["Loss"]("loss", "losses")
OPTIMIZERS: Final = Registry["Optimizer"]("optimizer", "optimizers")
SCHEDULERS: Final = Registry["Scheduler"]("scheduler", "schedules")


def z_weight() -> Any:
    """The setting `z_loss` that every loss has."""
    return setting("weight of the mean squared log-sum-exp of the logits", default=0.0, check=not_negative)


def logits_chunk() -> Any:
    """The setting `chunk` that every loss has."""
    return setting(
        "logits are computed in chunks of at most this size in fp32",
        default=Quantity(2**30, "bytes"),
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
    )


Unit = Literal["token", "sequence", "pair"]
TAKEN_ELSEWHERE: Final = ("z_loss", "chunk", "reference")
"""Settings of losses that nodes of the model and of the data take."""
HeadKind = Literal["vocabulary", "reward"]
"""What the head of a model gives: logits of the next token at each position, or one number at the last one of a
sequence."""


@frozen
class Misfit:
    """A setting that does not fit the rest of a spec. setting: its name. hint: what to write."""

    setting: str
    message: str
    hint: str


@frozen
class WideColumn:
    """Numbers of tokens of which each token has several. format: `int32` or `float32`."""

    width: int
    format: Literal["int32", "float32"]


@frozen
class Teacher:
    """A model that a loss learns from: by what `xtrain data teach` has stored of it, or live, as it computes each
    microbatch beside the model. folder: of the model. top: tokens whose log-probabilities are stored of each
    distribution. temperature: what its logits are divided by before."""

    folder: str
    top: int
    temperature: float
    live: bool = False


@LOSSES.base
class Loss(Component):
    """`loss NAME { … }`: what is minimised: its mean over all valid tokens of the step, or its sequences or pairs, on
    all ranks together."""

    z_loss: float = 0.0
    chunk: Quantity
    across: ClassVar[bool] = False
    """Whether it is computed from sums over the tokens of each sequence: what is left of the head's product is then one
    number a token, and the backward computes the product a second time."""
    head: ClassVar[HeadKind] = "vocabulary"
    """The head that the model has for it."""
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """What it measures at each step → what that is, and its unit. Means over tokens, or over units if it is `across`
    these."""
    resuming: ClassVar[Mapping[str, str]] = {}
    """Argument of its node → what becomes of a run that is resumed with another value, as a clause."""
    may_read: ClassVar[Mapping[str, str]] = {}
    """Column that it reads only with certain settings → these settings, as a spec has them."""

    @property
    def plain(self) -> bool:
        """Whether it is the cross-entropy of each token, which the model gives by itself: a plan has no node for it."""
        return False

    @property
    def unit(self) -> Unit:
        """What it is divided by the number of."""
        return "token"

    @property
    def columns(self) -> tuple[str, ...]:
        """Numbers of tokens that it reads, by the names that datasets give them."""
        return ()

    @property
    def computed(self) -> tuple[str, ...]:
        """Those of its columns that the run computes before the first step, whatever datasets have."""
        return ()

    @property
    def values(self) -> tuple[str, ...]:
        """The same of numbers of documents."""
        return ()

    @property
    def wide(self) -> Mapping[str, WideColumn]:
        """Columns that it reads beside those, which no dataset has but its teacher gives, by name."""
        return {}

    @property
    def learns_from(self) -> Teacher | None:
        """The model that it learns from, if there is one."""
        return None

    def of_data(self) -> tuple[str, ...]:
        """Settings of a dataset whose records have fields, as a spec has them, that give what it reads; none where any
        dataset does."""
        found = ('chosen = "chosen"', 'rejected = "rejected"') if self.unit == "pair" else ()
        found += ("oversized = skip",) if self.unit == "sequence" else ()
        given = tuple(name for name in self.columns if name not in self.computed)
        for name, read in (("columns", given), ("values", self.values)):
            fields = ", ".join(f'{each}: "{each}"' for each in read)
            found += (f"{name} = {{ {fields} }}",) if read else ()
        return found

    @property
    def measured(self) -> tuple[str, ...]:
        """Those of its metrics that it has with these settings."""
        return tuple(self.metrics)

    @property
    def summed(self) -> int:
        """If it is `across` tokens, how many numbers of each of them are summed: log-probabilities, and what it
        reads."""
        return 1 + len(self.columns) + len(self.reads(self.args()))

    def misfits(self) -> Iterator[Misfit]:
        """Settings that do not fit the others."""
        return iter(())

    def idle(self) -> Iterator[tuple[str, str]]:
        """The settings that change nothing beside the others, and why."""
        return iter(())

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node beside `kind`: all of its settings but those that other nodes take."""
        values = {name: getattr(self, attribute.name) for name, (attribute, _) in settings_of(type(self)).items()}
        return {name: value for name, value in values.items() if name not in TAKEN_ELSEWHERE}

    def does(self) -> str:
        """What its node does, in words."""
        raise NotImplementedError

    @classmethod
    def reads(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """What it is computed from beside the log-probability of each label, of `user_parts.kinds.STATISTICS`. args: of
        its node."""
        return ()


def learning_rate() -> Any:
    """The setting `lr` that every optimizer has."""
    return setting("peak learning rate, reached after warm-up", check=positive, example="3e-4")


def clip_norm() -> Any:
    """The setting `clip` that every optimizer has."""
    return setting("gradients are clipped to this global norm; none: no clipping", default=1.0, check=positive)


def clip_spikes() -> Any:
    """The setting `clip_spikes` that every optimizer of xtrain has."""
    return setting(
        "gradients whose norm lies more than so many standard deviations above the mean of those before are scaled "
        "down (ZClip, arXiv 2504.02507); none: not",
        default=None,
        check=positive,
        example="2.5",
        added=True,
    )


def clip_value() -> Any:
    """The setting `clip_value` that every optimizer of xtrain has."""
    return setting(
        "every element of the gradients is limited to this size, after the norm; none: not",
        default=None,
        check=positive,
        added=True,
    )


# Those of ZClip (Kumar et al. 2025, arXiv 2504.02507): what stays of mean and variance in a step, and of how many steps
# both are taken first.
SPIKE_DECAY: Final = 0.97
SPIKE_STEPS: Final = 25
OF_STEP: Final = ("clip", "clip_spikes", "clip_value", "scheduled_decay")
"""What is done for all parameters together before the optimizer is called, by nodes of their own."""
OF_OTHER_NODES: Final = ("lr", *OF_STEP)


def decoupled_decay(default: float) -> Any:
    """The setting `weight_decay` of optimizers that decay weights beside the gradient."""
    return setting("decoupled weight decay of matrices", default=default, check=not_negative)


def scheduled_decay() -> Any:
    """The setting `scheduled_decay` of optimizers that decay weights."""
    return setting(
        "weight decay, which the learning rate multiplies anyway, is also multiplied by that rate as a share of its "
        "peak (AdamC, arXiv 2506.02285)",
        default=False,
        added=True,
    )


def cautious_decay() -> Any:
    """The setting `cautious_decay` of optimizers that decay weights beside the gradient."""
    return setting(
        "only weights that the update brings nearer to 0 decay (cautious weight decay, arXiv 2510.12402)",
        default=False,
        added=True,
    )


States = Literal["auto", "bf16"]


def state_format() -> Any:
    """The setting `states` of optimizers whose moments may be stored in another format than the parameters."""
    return setting(
        "number format in which moments are stored; auto: that of the parameters. Arithmetic is in fp32 or finer",
        default="auto",
        added=True,
    )


def random_rounding() -> Any:
    """The setting `stochastic_rounding` of optimizers that may round new weights at random."""
    return setting(
        "new weights in bf16 are rounded up or down at random, by how near each is, so that small updates count; what "
        "is drawn depends on seed, step, name and element alone",
        default=False,
        added=True,
    )


@cache
def _state_tensors(names: tuple[str, ...], number_format: str) -> tuple[StateTensor, ...]:
    """Of thousands of parameters they are the same."""
    return tuple(StateTensor(name, number_format) for name in names)


@OPTIMIZERS.base
class Optimizer(Component):
    """`optimizer NAME { … }`: the optimizer."""

    lr: float
    clip: float | None
    clip_spikes: float | None = None
    clip_value: float | None = None
    cautious_decay: bool = False
    scheduled_decay: bool = False
    states: States = "auto"
    stochastic_rounding: bool = False
    counts: ClassVar[bool] = False
    """Whether it counts the updates of each parameter, as `step` of its state."""
    before_forward: ClassVar[str] = ""
    """What it does to the weights before a step computes with them, in words; empty: nothing."""
    temporaries: ClassVar[int] = 0
    """Numbers for each element that is updated at once, in the format of the update, beside weight, gradient and
    moments."""
    resuming: ClassVar[Mapping[str, str]] = {}
    """Argument of its node → what becomes of a run that goes on with another value, as a clause. Of those that are not
    here: the optimizer takes the value from the plan."""

    def arguments(self, run: Any) -> dict[str, Any]:
        """The JSON arguments of its node. run: the planner's `Resolved`."""
        found = {"kind": self.kind, "lr": self.lr, **self.args()}
        if found.get("states") == run.formats.params:
            del found["states"]
        return found

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node beside `kind` and `lr`: all of its settings but those that
        other nodes take, and those of which plans are silent."""
        values = {
            name: getattr(self, attribute.name)
            for name, (attribute, meta) in settings_of(type(self)).items()
            if not is_unspoken(attribute, meta, getattr(self, attribute.name))
        }
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if name not in OF_OTHER_NODES
        }

    def clip_args(self) -> dict[str, Any]:
        """The JSON arguments of the node that scales gradients by their norm; empty where that is only measured."""
        args: dict[str, Any] = {} if self.clip is None else {"max_norm": self.clip}
        if self.clip_spikes is not None:
            args |= {"deviations": self.clip_spikes, "decay": SPIKE_DECAY, "first": SPIKE_STEPS}
        return args

    def stored(self, number_format: str) -> str:
        """In which format its moments are, and how weights are rounded, in words. number_format: of the parameters."""
        form = number_format if self.states == "auto" else self.states
        return f"{form}, weights rounded at random" if self.stochastic_rounding else form

    def decayed(self, weight_decay: float) -> str:
        """By how much matrices decay, in words."""
        return f"decay by {weight_decay:g}" + (" where the update makes them smaller" if self.cautious_decay else "")

    def misfits(self, spec: Any, architecture: Any, layout: Any) -> Iterator[Misfit]:
        """Settings that do not fit the rest of the spec. architecture, layout: of its model and its ranks, as the
        planner has them."""
        if self.stochastic_rounding and (params := spec.precision.params) != "bf16":
            message = f"weights are in {params}, which has room for small updates, and only bf16 is rounded at random"
            yield Misfit("stochastic_rounding", message, "use precision.params bf16, or remove stochastic_rounding")

    def idle(self, spec: Any) -> Iterator[tuple[str, str]]:
        """The settings that change nothing beside the others, and why."""
        if self.states == spec.precision.params:
            yield "states", f"parameters are in {self.states} already"

    def does(self, number_format: str) -> str:
        """What its node does, in words. number_format: of the parameters."""
        raise NotImplementedError

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        """Its name, and what tells its state from that of others of the name. args: of its node."""
        return f"{args['kind']} with moments in {args['states']}" if "states" in args else args["kind"]

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        """The tensors that it keeps for a parameter. args: of its node."""
        raise NotImplementedError

    @classmethod
    def moments(cls, args: Mapping[str, Any], *names: str) -> tuple[StateTensor, ...]:
        """Tensors of the parameter's shape, in the format that moments are stored in. args: of its node."""
        return _state_tensors(names, args.get("states", ""))

    @classmethod
    def scalars(cls, args: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """The names of the single numbers that it keeps for a parameter, in fp32. args: of its node."""
        return ("step",) if cls.counts else ()

    @classmethod
    def decays(cls, args: Mapping[str, Any]) -> bool:
        """Whether it decays the weights of a group of parameters by the group's `weight_decay`. args: of its node."""
        return "weight_decay" in args

    def work(self, run: Any, parameters: Iterable[Any]) -> Any:
        """What an update of a rank's own pieces does not show: an `UpdateWork` of the planner; None where a rank
        updates its pieces by themselves. parameters: those of a pipeline coordinate that are trained."""
        return None

    @classmethod
    def converts(cls, args: Mapping[str, Any]) -> bool:
        """Whether an update brings numbers into another format than the one they are stored in, some at a time. args:
        of its node."""
        return "states" in args or args.get("stochastic_rounding", False)


@frozen
class ParameterGroup:
    """`group NAME { … }`: parameters that are updated in a way of their own; NAME is a module or parameter, as in
    `model { frozen }`."""

    name: str = label(check=some_text)
    lr_scale: float = setting("factor on the learning rate of its optimizer", default=1.0, check=positive)
    weight_decay: float | None = setting(
        "weight decay of all of its parameters, vectors among them; none: as its optimizer has it",
        default=None,
        check=not_negative,
    )
    optimizer: Optimizer = setting(
        "an optimizer of its own; without it that of the other parameters", default=None, added=True, without=OF_STEP
    )


def warm_up() -> Any:
    """The setting `warmup` that every schedule has."""
    return setting(
        "length of the linear warm-up", default=Quantity(0, "steps"), units=("steps", "epochs", "%"), check=share
    )


def floor_of_peak() -> Any:
    """The setting `floor` of schedules that fall."""
    return setting("learning rate at the end, as a share of `lr`", default=Quantity(0, "%"), units=("%",), check=share)


Rate = Callable[[int], float]
"""Index of a step, from 0 → learning rate."""


@SCHEDULERS.base
class Scheduler(Component):
    """`scheduler NAME { … }`: the learning-rate schedule; without this block the rate is constant."""

    warmup: Quantity

    def lengths(self) -> dict[str, Quantity]:
        """The settings that are lengths, which have to fit into the budget together."""
        return {"warmup": self.warmup}

    at_end: ClassVar[tuple[str, ...]] = ()
    """Those of them that are counted back from the end of the run, not from its beginning."""

    def idle(self) -> dict[str, str]:
        """The settings that change nothing beside the others, whatever the budget, and why."""
        return {}

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node beside `kind`, `lr`, `steps` and those that `lengths` names."""
        return {}

    def falls(self, peak: float) -> bool:
        """Whether rates get smaller on the way. peak: the learning rate of the optimizer."""
        return True

    computed: ClassVar[bool] = True
    """Whether its rates can be computed without a run."""

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: int) -> Rate:
        """The learning rate of every step of `total`. args: of its node, with lengths in steps or as shares."""
        raise NotImplementedError

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        """Where the rate turns, behind the warm-up, in words. length: an amount among the arguments in words."""
        raise NotImplementedError


@frozen
class Checkpoint:
    """`checkpoint { … }`: what a run starts from, how checkpoints are saved, and how many are kept."""

    from_: str | None = setting(
        "start from the full state of this checkpoint, or of the latest checkpoint of this other run",
        default=None, check=file_path, example='"runs/a/b"',
    )  # fmt: skip
    resume: bool = setting("resume from the latest checkpoint of this run", default=True, role=Role.EXECUTION)
    pretrained: str | None = setting(
        "start from the weights alone of this checkpoint or run", default=None, check=file_path,
        example='"runs/a/b"',
    )  # fmt: skip
    verify: Literal["content", "sizes"] = setting(
        "what is compared before a checkpoint is loaded: checksums of all files, or their sizes",
        default="content",
        role=Role.EXECUTION,
    )
    enabled: bool = setting("false: no checkpoints are saved; loading still works", default=True, role=Role.CADENCE)
    backend: Literal["dcp", "file"] = setting(
        "dcp: every rank writes its part; file: one process writes one file, which torch.load reads",
        default="dcp",
        role=Role.EXECUTION,
    )
    mode: Literal["sync", "async", "async_pinned"] = setting(
        "sync: training waits; async: a copy in host memory is written in the background, pinned with async_pinned",
        default="sync",
        role=Role.EXECUTION,
    )
    overlap: Literal["wait", "latest"] = setting(
        "a save that is due during another: wait for the other, or put the save off until the other is done",
        default="wait",
        role=Role.CADENCE,
    )
    keep: int | None = setting(
        "number of newest checkpoints to keep, besides the best; none: all",
        default=3,
        check=at_least(1),
        role=Role.CADENCE,
    )
    best: Metric | None = setting(
        "the checkpoint with the lowest value of this metric is the best", default=None, role=Role.CADENCE,
        example="eval.web.loss",
    )  # fmt: skip
    model: bool = setting(
        "also save the weights alone when the run has ended, for publishing", default=True, role=Role.CADENCE
    )
    failures: int | None = setting(
        "failed saves in a row after which the run ends; none: never", default=3, check=at_least(1), role=Role.EXECUTION
    )
