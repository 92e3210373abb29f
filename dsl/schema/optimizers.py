"""Optimizers, parameter groups, learning-rate schedules, and the running average of weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Final, Literal

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import (
    Role,
    UsualRange,
    at_least,
    is_unspoken,
    label,
    not_negative,
    positive,
    proper_fraction,
    setting,
    settings_of,
    share,
    some_text,
)
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@frozen
class StateTensor:
    """An optimizer tensor with the shape of a parameter, or derived from it; it is sharded over ranks like the
    parameter.

    format: number format; empty: that of the parameter. block: the tensor has one number per block of this many
    elements along the last dim. single: a dim, counted from the end, that has size 1; -1: the last. begins: initial
    value, 0 or a copy of the parameter.
    """

    name: str
    format: str = ""
    block: int = 1
    single: int = 0
    begins: Literal["zeros", "weights"] = "zeros"

    def shape(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """Return the tensor's shape. parameter: the shape of a parameter, or of a rank's shard of it."""
        shape = list(parameter)
        shape[-1] //= self.block
        if self.single:
            shape[self.single] = 1
        return tuple(shape)


OPTIMIZERS: Final = Registry["Optimizer"](
    "optimizer", "optimizers", op="setup.optimizer", contract="xtrain.contracts.optimizers.PlannedOptimizer"
)


ADAM_RATES: Final = UsualRange(
    1e-7,
    1e-2,
    "DPO 5e-7 (arXiv 2310.16944), pre-training 6e-5 to 6e-4 (arXiv 2005.14165), LoRA 2e-4 (arXiv 2305.14314)",
)


def learning_rate(usual: UsualRange | None = ADAM_RATES) -> Any:
    """Declare the setting `lr`, which every optimizer has. usual: usual rates."""
    return setting("peak learning rate, reached after warm-up", check=positive, example="3e-4", usual=usual)


def clip_norm() -> Any:
    """Declare the setting `clip`, which every optimizer has."""
    return setting("gradients are clipped to this global norm; none: no clipping", default=1.0, check=positive)


def clip_spikes() -> Any:
    """Declare the setting `clip_spikes`, which every optimizer of xtrain has."""
    return setting(
        "gradients whose norm is more than this many standard deviations above the mean of earlier ones are scaled "
        "down (ZClip, arXiv 2504.02507); none: no scaling",
        default=None,
        check=positive,
        example="2.5",
        added=True,
    )


def clip_value() -> Any:
    """Declare the setting `clip_value`, which every optimizer of xtrain has."""
    return setting(
        "limit of the absolute value of every gradient element, applied after the norm; none: no limit",
        default=None,
        check=positive,
        added=True,
    )


# Values of ZClip (Kumar et al. 2025, arXiv 2504.02507): decay of mean and variance per step, and the number of steps
# that initialize both.
SPIKE_DECAY: Final = 0.97
SPIKE_STEPS: Final = 25
OF_STEP: Final = ("clip", "clip_spikes", "clip_value", "scheduled_decay")
"""Settings applied to all parameters together before the optimizer, by nodes of their own."""
OF_OTHER_NODES: Final = ("lr", *OF_STEP)


ADAM_DECAY: Final = UsualRange(0.0, 0.5, "0.1 (arXiv 2005.14165), 0.3 in vision (arXiv 2010.11929)")


def decoupled_decay(default: float, usual: UsualRange = ADAM_DECAY) -> Any:
    """Declare the setting `weight_decay` of optimizers with decoupled weight decay. usual: usual values."""
    return setting("decoupled weight decay of matrices", default=default, check=not_negative, usual=usual)


def scheduled_decay() -> Any:
    """Declare the setting `scheduled_decay` of optimizers with weight decay."""
    return setting(
        "weight decay, already multiplied by the learning rate, is also multiplied by that rate's share of its "
        "peak (AdamC, arXiv 2506.02285)",
        default=False,
        added=True,
    )


def cautious_decay() -> Any:
    """Declare the setting `cautious_decay` of optimizers with decoupled weight decay."""
    return setting(
        "only weights that the update moves toward 0 decay (cautious weight decay, arXiv 2510.12402)",
        default=False,
        added=True,
    )


States = Literal["auto", "bf16"]
Compiled = Literal["never", "converted", "always"]


def state_format() -> Any:
    """Declare the setting `states` of optimizers whose moments may have another format than the parameters."""
    return setting(
        "number format of stored moments; auto: the parameters' format. Arithmetic is in fp32 or higher",
        default="auto",
        added=True,
    )


def random_rounding() -> Any:
    """Declare the setting `stochastic_rounding` of optimizers that can round new weights at random."""
    return setting(
        "round new bf16 weights up or down at random, in proportion to the distance, so that small updates count; "
        "random numbers depend only on seed, step, name and element",
        default=False,
        added=True,
    )


@cache
def _state_tensors(names: tuple[str, ...], number_format: str) -> tuple[StateTensor, ...]:
    """Build the state tensors once: thousands of parameters share them."""
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
    """True if it counts the updates of each parameter, as `step` of its state."""
    elementwise: ClassVar[bool] = False
    """True if the update of an element depends on that element alone, and moments start at 0."""
    scale_free: ClassVar[bool] = False
    """True if the size of an update does not depend on the size of gradients beyond `eps`, which each group may set:
    the rates of `parametrization` are derived for such updates."""
    before_forward: ClassVar[str] = ""
    """Change of the weights before a step computes with them, in words; empty: none."""
    compiled: ClassVar[Compiled] = "never"
    """When the update of a tensor is compiled on CUDA: if numbers are converted or decay is cautious, because torch has
    a fused kernel for everything else, or always."""
    temporaries: ClassVar[int] = 0
    """Temporary numbers per element updated at once, in the update's format, in addition to weight, gradient and
    moments."""

    def args(self) -> dict[str, Any]:
        """Return the JSON arguments of its node without `kind` and `lr`: all settings except those that other nodes
        take and those that plans omit."""
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
        """Return the JSON arguments of the node that scales gradients by their norm; empty if the norm is only
        measured."""
        args: dict[str, Any] = {} if self.clip is None else {"max_norm": self.clip}
        if self.clip_spikes is not None:
            args |= {"deviations": self.clip_spikes, "decay": SPIKE_DECAY, "first": SPIKE_STEPS}
        return args

    def stored(self, number_format: str) -> str:
        """Return a description of the moments' format and of weight rounding. number_format: format of the
        parameters."""
        form = number_format if self.states == "auto" else self.states
        return f"{form}, stochastically rounded weights" if self.stochastic_rounding else form

    def decayed(self, weight_decay: float) -> str:
        """Return a description of the weight decay."""
        cautious = " where the update shrinks them" if self.cautious_decay else ""
        return f"weight decay {weight_decay:g} on matrices{cautious}"

    def does(self, number_format: str) -> str:
        """Return the description of its node. number_format: format of the parameters."""
        raise NotImplementedError

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        """Return its name and the properties of its state that vary under this name. args: arguments of its node."""
        return f"{args['kind']} with moments in {args['states']}" if "states" in args else args["kind"]

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        """Return the state tensors of a parameter. args: arguments of its node."""
        raise NotImplementedError

    @classmethod
    def moments(cls, args: Mapping[str, Any], *names: str) -> tuple[StateTensor, ...]:
        """Return tensors of the parameter's shape in the moments' format. args: arguments of its node."""
        return _state_tensors(names, args.get("states", ""))

    @classmethod
    def scalars(cls, args: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """Return the names of its scalars per parameter, in fp32. args: arguments of its node."""
        return ("step",) if cls.counts else ()

    @classmethod
    def decays(cls, args: Mapping[str, Any]) -> bool:
        """Return True if it decays the weights of a group by the group's `weight_decay`. args: arguments of its
        node."""
        return "weight_decay" in args

    @classmethod
    def compiles(cls, args: Mapping[str, Any]) -> bool:
        """Return True if the update of a tensor is compiled on CUDA. args: arguments of its node."""
        converted = cls.converts(args) or args.get("cautious_decay", False)
        return cls.compiled == "always" or (cls.compiled == "converted" and converted)

    @classmethod
    def converts(cls, args: Mapping[str, Any]) -> bool:
        """Return True if an update converts numbers to another format than the stored one, a part at a time. args:
        arguments of its node."""
        return "states" in args or args.get("stochastic_rounding", False)


@frozen
class Parametrization:
    """`parametrization { … }`: initial values, rates and decays that follow from the size of the model, so that values
    found with a small model suit a large one; without this block they are the same for all sizes."""

    kind: Literal["mup", "complete_p"] = setting(
        "mup: by width (arXiv 2203.03466); complete_p: by width and depth (arXiv 2505.01618)", default="mup"
    )
    base_width: int = setting(
        "width, `dim`, of the model for which `lr`, `weight_decay`, `eps` and `init_std` were chosen",
        check=at_least(1),
        example="256",
    )
    base_depth: int | None = setting(
        "depth, `layers`, of that model, for `complete_p`",
        default=None,
        check=at_least(1),
        example="4",
    )


@frozen
class ParameterGroup:
    """`group NAME { … }`: parameters with their own update settings; NAME is a module or parameter, as in `model {
    frozen }`."""

    name: str = label(check=some_text)
    lr_scale: float = setting("factor on the learning rate of its optimizer", default=1.0, check=positive)
    weight_decay: float | None = setting(
        "weight decay of all of its parameters, including vectors; none: from its optimizer",
        default=None,
        check=not_negative,
    )
    optimizer: Optimizer = setting(
        ("separate optimizer; without it, the optimizer of the other parameters"),
        default=None,
        added=True,
        without=OF_STEP,
    )


SCHEDULERS: Final = Registry["Scheduler"]("scheduler", "schedules")


def warm_up() -> Any:
    """Declare the setting `warmup`, which every schedule has."""
    return setting(
        "length of the linear warm-up",
        default=Quantity(0, "steps"),
        units=("steps", "tokens", "epochs", "%"),
        check=share,
    )


def floor_of_peak() -> Any:
    """Declare the setting `floor` of decreasing schedules."""
    return setting("learning rate at the end, as a share of `lr`", default=Quantity(0, "%"), units=("%",), check=share)


Rate = Callable[[int], float]
"""Index of a step, from 0 → learning rate."""
Curve = Callable[[float], float]
"""The same at fractional steps: after a change of the batch, earlier training need not be a whole number of steps."""


@SCHEDULERS.base
class Scheduler(Component):
    """`scheduler NAME { … }`: the learning-rate schedule; without this block the rate is constant."""

    warmup: Quantity

    def lengths(self) -> dict[str, Quantity]:
        """Return the settings that are lengths, which together must fit into the budget."""
        return {"warmup": self.warmup}

    at_end: ClassVar[tuple[str, ...]] = ()
    """Lengths that are counted back from the end of the run."""

    searches: ClassVar[bool] = False
    """It tries rates, unusual ones on purpose."""

    def idle(self) -> dict[str, str]:
        """Return the settings without effect at any budget, each with the reason."""
        return {}

    def args(self) -> dict[str, Any]:
        """Return the JSON arguments of its node without `kind`, `lr`, `steps` and those that `lengths` names."""
        return {}

    def falls(self, peak: float) -> bool:
        """Return True if the rate decreases at some point. peak: learning rate of the optimizer."""
        return True

    computed: ClassVar[bool] = True
    """True if its rates can be computed without a run."""

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        """Return the learning rate of every step of `total`. args: arguments of its node, with lengths in steps, which
        may be fractional after a resume with another batch."""
        raise NotImplementedError

    @classmethod
    def in_steps(cls, args: Mapping[str, Any]) -> bool:
        """Return True if the rate depends on the number of steps even if the budget is in tokens or epochs."""
        return False

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        """Return descriptions of where the rate changes after the warm-up. length: formats an amount among the
        arguments."""
        raise NotImplementedError


@frozen
class Ema:
    """`ema { … }`: an exponential moving average of the weights; without this block there is none."""

    decay: float = setting(
        "share of the average kept at an update", default=0.999, check=proper_fraction, example="0.9999"
    )
    every: int = setting("steps between two updates of the average", default=1, check=at_least(1))
    eval: bool = setting(
        "evaluate and generate with the averaged weights instead of the trained ones", default=True, role=Role.CADENCE
    )
    publish: bool = setting(
        "the averaged weights are those saved alone or loaded by `checkpoint.pretrained`",
        default=True,
        role=Role.CADENCE,
    )
