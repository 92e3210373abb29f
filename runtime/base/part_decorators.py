"""Decorators that register functions of the user for a spec: `@source`, `@collator`, `@loss`, `@hook` and others.

A decorator returns the function unchanged, with a mark that `use "parts.py"` reads. This module imports neither torch
nor numpy, so that a file of sources stays light.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, Literal, Protocol, TypeVar, overload

from attrs import field, frozen

from xtrain.dsl.schema.data_components import KINDS, may_give
from xtrain.dsl.schema.losses import Unit
from xtrain.dsl.user_parts.kinds import CHANGES, PLACES, UNITS, Kind, Place, may_change, names_of

F = TypeVar("F", bound=Callable[..., Any])
MARK: Final = "__xtrain_part__"


@frozen
class Mark:
    """Kind of part that a function was registered as. options: arguments of its decorator."""

    kind: Kind
    options: dict[str, Any] = field(factory=dict)


# Choice of a spec → the kinds that a part works with: `{"optimizer": ["adamw", "muon"], "stack": "parallel"}`. Choices
# are `model`, `optimizer`, `scheduler`, `loss`, `adapter`, `reward` and `stack`. Planning reads and checks them.
GoesWith = Mapping[str, str | Sequence[str]] | None


class _Decorator(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *, goes_with: GoesWith = None) -> Callable[[F], F]: ...


def _bare_or_called(register: Callable[[F], F]) -> _Decorator:
    """Let a decorator without arguments of its own be written with and without parentheses."""

    @wraps(register)
    def decorate(function: Any = None, /, *, goes_with: GoesWith = None) -> Any:
        return register if function is None else register(function)

    return decorate


@_bare_or_called
def source(function: F) -> F:
    """Register a function as a source of documents: `dataset web { source = name(…) }`.

    It yields documents, in the same order each time: a text, or a dict whose fields the dataset's `text`, `messages`,
    or `prompt` and `response` name. Its parameters are the arguments that a spec gives.
    """
    return _marker(Mark("source"))(function)


def collator(takes: str, gives: str | None = None, *, goes_with: GoesWith = None) -> Callable[[F], F]:
    """Register a function as a link of the collate chain: `collate = to_tensor -> flatten -> name(…) -> …`.

    takes, gives: kinds of value, as `labelled samples`; without `gives` the function returns the kind it takes. The
    function is called once per row, with the row's values as its first argument. The other parameters are the arguments
    that a spec gives, except `generator`, which gets a numpy Generator of that row.

    Raises ValueError for an unknown kind, or one that cannot be made from the kind taken.
    """
    if takes not in KINDS:
        raise ValueError(f"a collator cannot take {takes!r}; it takes one of: {', '.join(KINDS)}")
    given = takes if gives is None else gives
    if given not in may_give(takes):
        raise ValueError(f"a collator of {takes} cannot give {gives!r}; it gives one of: {', '.join(may_give(takes))}")
    return _marker(Mark("collator", {"takes": takes, "gives": given}))


@overload
def loss(function: F) -> F: ...
@overload
def loss(
    *, unit: Unit = "token", columns: Sequence[str] = (), values: Sequence[str] = (), goes_with: GoesWith = None
) -> Callable[[F], F]: ...
def loss(
    function: F | None = None,
    *,
    unit: Unit = "token",
    columns: Sequence[str] = (),
    values: Sequence[str] = (),
    goes_with: GoesWith = None,
) -> F | Callable[[F], F]:
    """Register a function as the loss to minimize: `loss name { … }`.

    Its first parameter gets the log-probability of the label of each token, a tensor [T] in at least fp32 with values
    of at most 0. Parameters with these names get other tensors [T]: `mean_logprob_T` the mean log-probability over the
    whole vocabulary, `entropy_T` the entropy of the distribution, `lse_T` the log-sum-exp of the logits. The others are
    settings. The function returns the loss of each token, a tensor [T] of the same number format with its gradient; the
    loss of a token may depend on the values of that token only. The run adds up the losses of all valid tokens and
    divides by their number.

    columns: names of per-token numbers that the dataset has; parameters with these names get them, [T].

    unit: with `sequence` or `pair` the function returns the loss of each unit, [U] in fp64. All its tensors are then
    sums over the tokens of a sequence, [U], or of the two sides of a pair, [2, U], the preferred one first; `tokens_U`
    is the number of these tokens. values: names of per-document numbers; parameters with these names get them, [U].

    Raises ValueError for an unknown unit, and for invalid names.
    """
    for given in (columns, values):
        if names_of(given) is None:
            raise ValueError(f"`columns` and `values` of a loss must be distinct names, not {given!r}")
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r}; units of losses are: {', '.join(UNITS)}")
    mark = _marker(Mark("loss", {"unit": unit, "columns": names_of(columns), "values": names_of(values)}))
    return mark if function is None else mark(function)


@_bare_or_called
def reward(function: F) -> F:
    """Register a function as a reward, which rates a completion of a rollout: `reward name { … }`.

    Its first three parameters get the text of the prompt, the text of the completion without its end token, and the
    record: a dict with the text of the dataset's `answer`, and its `values`. The others are settings. It returns a
    number. One of the ranks that compute a row calls it, once for each completion.
    """
    return _marker(Mark("reward"))(function)


@_bare_or_called
def environment(kind: F) -> F:
    """Register a class as an environment that rollouts have conversations with: `environment name { … }`.

    One object is created for each episode, without arguments, in a process of its own with limits on time and memory.
    `reset(task, …)` comes first: `task` is a dict with the `prompt` and the `answer` of a document and its `values`;
    the other parameters are the settings, except `random`, which gets a `random.Random` that is the same for all
    episodes of a group. It returns the text of the first message, or a list of messages.

    `step(text)` gets the text of a turn of the model. It returns the reply; or (reply, reward), where a reply of None
    ends the episode; or a reward, which ends it; or None, which ends it without a reward. `finish()`, if the class has
    it, is called at the end and returns a further reward. The reward of an episode is the sum of all.

    Methods with `@tool` are functions that the model may call in a turn; `step` is not called for such a turn.
    """
    return _marker(Mark("environment"))(kind)


def tool(method: F) -> F:
    """Let the model call a method of an environment. Its parameters have annotated types, and the first line of its
    docstring says what it does. The result, a text or a value of JSON, is the reply."""
    return method


def optimizer(
    state: Sequence[str] = (), scalars: Sequence[str] = (), *, goes_with: GoesWith = None
) -> Callable[[F], F]:
    """Register a function as an optimizer: `optimizer name { lr = 3e-4, … }`.

    Its first parameter gets groups of parameters, as `torch.optim` does: dicts with `params`, `lr` and `weight_decay`.
    A parameter called `lr` gets the peak learning rate; one called `weight_decay` sets the decay of the groups whose
    parameters decay. The others are settings. It returns a `torch.optim.Optimizer`, whose `lr` of each group is set
    before each step.

    state: names of the tensors that it keeps for each parameter, with the parameter's shape and format. scalars: names
    of the 0-dimensional tensors that it keeps, in fp32. Memory and checkpoints are computed from these.

    Raises ValueError for invalid names.
    """
    for given in (state, scalars):
        if names_of(given) is None:
            raise ValueError(f"`state` and `scalars` of an optimizer must be distinct names, not {given!r}")
    return _marker(Mark("optimizer", {"state": names_of(state), "scalars": names_of(scalars)}))


@_bare_or_called
def schedule(function: F) -> F:
    """Register a function as a learning-rate schedule: `scheduler name { … }`.

    It is called with the number of a step, from 0 (as torch's `LambdaLR` counts), and the number of all steps, and
    returns the factor of the peak learning rate in that step: finite and not negative. The other parameters are
    settings. It must depend on nothing else, because a resumed run calls it again.
    """
    return _marker(Mark("schedule"))(function)


def hook(
    place: Place, changes: Literal["nothing", "gradients", "parameters"] = "nothing", *, goes_with: GoesWith = None
) -> Callable[[F], F]:
    """Register a function as a hook, called at a place of the run: `hook name { … }`.

    Its first parameter gets an `xtrain.RunContext`; the others are settings. It is called on all ranks, after the hooks
    of the same place that come before it in the spec. It may return metrics, a dict of numbers: the first rank's are
    recorded as `hook/NAME/KEY`.

    changes: the part of the model that it changes; its place must allow this.

    Raises ValueError for an unknown place, or a change that is not allowed there.
    """
    if place not in PLACES:
        raise ValueError(f"unknown place {place!r}; places of hooks are: {', '.join(PLACES)}")
    if changes not in CHANGES or not may_change(place, changes):
        raise ValueError(f"a hook cannot change {changes!r} {place}")
    return _marker(Mark("hook", {"place": place, "changes": changes}))


@_bare_or_called
def action(function: F) -> F:
    """Register a function as an action: `every 100 steps name { … }`, `on finish name`.

    Its first parameter gets an `xtrain.RunContext`; the others are settings. It is called on all ranks, between steps,
    and must not change the model. It may return metrics, a dict of numbers: the first rank's are recorded as
    `action/NAME/KEY`.
    """
    return _marker(Mark("action"))(function)


@_bare_or_called
def step(function: F) -> F:
    """Register a function as the forward and backward of a step: `step name { … }`.

    Its first parameter gets an `xtrain.StepContext`; the others are settings. When it returns, every microbatch has
    been taken, and the gradients are those of the sum of losses times `context.scale`.
    """
    return _marker(Mark("step"))(function)


@_bare_or_called
def evaluation_step(function: F) -> F:
    """Register a function as the forward of evaluations: `evaluation_step name { … }`.

    Its first parameter gets an `xtrain.StepContext`; the others are settings. It takes every microbatch and returns the
    sum of losses over their valid tokens; the evaluation divides the sum over all ranks by the number of these tokens.
    """
    return _marker(Mark("evaluation_step"))(function)


@_bare_or_called
def train(function: F) -> F:
    """Register a function as the loop of a run: `train name { … }`.

    Its first parameter gets an `xtrain.TrainContext`; the others are settings. It is called once in each start, on all
    ranks, and runs epochs or steps with `context.run_epoch()` or `context.step()` until these return False. If it
    returns before, the run saves and stops.
    """
    return _marker(Mark("train"))(function)


@_bare_or_called
def epoch(function: F) -> F:
    """Register a function as the loop of each epoch: `epoch name { … }`.

    Its first parameter gets an `xtrain.EpochContext`; the others are settings. It is called on all ranks for each epoch
    of the data, and runs its steps with `context.step()` until this returns False. If it returns before, the run saves
    and stops.
    """
    return _marker(Mark("epoch"))(function)


@_bare_or_called
def tracker(kind: F) -> F:
    """Register a class as a tracker, which gets the records of a run: `log { Name { … } }`.

    One object is created, without arguments, in a thread of the first rank when the run begins, and all its methods are
    called there. `open(context, …)` comes first, with an `xtrain.TrackerContext`; its other parameters are the
    settings. The class has at least one of these methods as well: `metrics(record)` gets the record of a step as a
    dict, as in `metrics.jsonl`; `event(record)` gets an event, as in `events.jsonl`; `close(exit_code)` is called last.
    If a method raises, the run records a warning, stops calling the tracker and continues training.
    """
    return _marker(Mark("tracker"))(kind)


@_bare_or_called
def family(function: F) -> F:
    """Register a function as a model family: `model name { dim = 64, … }`.

    Its first parameter stands for the settings that every family has; the others are settings of its own. It returns
    the decoder block, composed of pieces (`pre_norm`, `AttentionLayer`, …) and of functions with `@layer`. It is read
    from its source text and never called.
    """
    return _marker(Mark("family"))(function)


@overload
def layer(function: Callable[..., Any]) -> Callable[..., Any]: ...
@overload
def layer(
    *, mixes: Literal["causal"] | None = None, goes_with: GoesWith = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def layer(function: Any = None, *, mixes: Literal["causal"] | None = None, goes_with: GoesWith = None) -> Any:
    """Register a function as a layer, which a function with `@family` calls with a name and its settings.

    Its first parameter gets activations [B, S, D] and the function returns activations of the same shape; each position
    is computed independently. Parameters whose default is a `weight` are parameters of the model; the others are
    settings. Its computation, saved activations and costs are derived from its source text.

    mixes: `causal` for a layer whose positions depend on earlier ones of their document, by its states: parameters
    whose default is a `state`. It gets the positions of a document, or those after `state`, and returns activations
    and the states after them. `xtrain plan` calls it in a process of its own, to check this and to trace its costs.
    """
    mark = _marker(Mark("layer", {"mixes": mixes}))
    return mark if function is None else mark(function)


def state(*shape: int | str, initial: Literal["zeros", "ones"] = "zeros") -> Any:
    """Declare a state of a layer that mixes positions, as a default: `memory=state("heads", "dim")`.

    shape: of one document, as numbers or as expressions of settings; the function gets [B, *shape]. initial: value at
    the first position of each document.
    """


def weight(
    *shape: int | str,
    cut: Literal["column", "row"] | None = None,
    initial: Literal["normal", "residual", "ones", "zeros"] | None = None,
) -> Any:
    """Declare a parameter of a layer, as a default: `up=weight("ffn", "dim", cut="column")`.

    shape: of a matrix [output, input], or of a vector, as numbers or as expressions of settings. cut: the dimension
    that tensor parallelism cuts, output features or input features; None: each rank has the whole parameter. initial:
    initial values; `residual`: normal and scaled down, for matrices whose output is added to the residual stream. By
    default vectors are ones, and matrices normal.
    """


def _marker(mark: Mark) -> Callable[[F], F]:
    def set_mark(function: F) -> F:
        setattr(function, MARK, mark)
        return function

    return set_mark
