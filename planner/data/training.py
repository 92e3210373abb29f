"""Rules on training data: mixtures and phases, the documents that a loss reads, and rollouts."""

from collections.abc import Iterator, Set
from functools import partial

from attrs import NOTHING, fields

from xtrain.dsl.diagnostics.suggest import did_you_mean, renamed
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data import Dataset, Phase, Weight
from xtrain.dsl.schema.data_components import LABELLED_SAMPLES, PACKINGS, RowLink, row_link, usual_chain
from xtrain.dsl.schema.losses import ADAPTER_OFF, ADVANTAGES, INITIAL, LOSSES, OLD, REF, WEIGHTS, Loss, Teacher
from xtrain.dsl.schema.policy import MADE, PolicyLoss, Rollout
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import is_plain
from xtrain.dsl.values import Quantity
from xtrain.plan.amounts import amount, amounts, in_epochs, shares, trainable, trains, weight_text, weights
from xtrain.plan.architecture import Architecture
from xtrain.plan.findings import Findings, checks
from xtrain.text.units import amount_in_epochs


@checks("data.mixture", reads="{datasets} mixture.*")
@checks("data.mix.*", reads="{datasets} phase.{}.mix")
@checks("idle.mixture", reads="{datasets} mixture.* phase")
def check_training(spec: Spec, found: Findings) -> None:
    """Check that there is training data, that every name is a trainable dataset, and that every phase has one."""
    written = "mixture" in spec.origins and spec.origins["mixture"].kind != "default"
    _check_training(spec, written, found)
    _check_names(spec, "data.mixture", "mixture", spec.mixture.weights, found)
    for phase in spec.phases.values():
        _check_names(spec, f"data.mix.{phase.name}", f"phase.{phase.name}.mix", phase.mix, found)
    settings = (name for name in settings_of(type(spec.mixture)) if name in spec.datasets)
    if spec.mixture.weights and (name := next(settings, None)) is not None:
        message = f"a dataset named `{name}` cannot have a weight: in `mixture` this is the name of a setting"
        found.fail("data.mixture", "X513", f"dataset.{name}", message, "rename the dataset")
    if spec.mixture.weights or spec.phases:
        _check_weights(spec, found)
        _check_epochs(spec, found)
    if len(spec.mixture.weights) == 1 and not spec.phases:
        name, weight = next(iter(spec.mixture.weights.items()))
        message = f"mixture changes nothing, because {name} is its only dataset"
        longer = isinstance(weight, Quantity) and weight.value != 1  # an epoch of the run is counted differently
        if [each.name for each in trainable(spec)] == [name] and not longer:
            found.warn("idle.mixture", "W401", "mixture", message, "leave it out, or give another dataset a weight")
    _check_temperature(spec, found)


@checks("idle.mixture.temperature", reads="{datasets} mixture.* phase phase.*.mix")
def _check_temperature(spec: Spec, found: Findings) -> None:
    """Warn of a temperature that does not make weights more alike."""
    origin, temperature = spec.origins.get("mixture.temperature"), spec.mixture.temperature
    stretches = [weights(spec), *(weights(spec, phase) for phase in spec.phases.values())]
    if temperature == 1 or origin is None or origin.kind == "default" or any(map(in_epochs, stretches)):
        return
    numbers = [{name: amount(weight) for name, weight in each.items()} for each in stretches]
    if all(shares(each, temperature) == shares(each, 1.0) for each in numbers):
        message = "temperature changes nothing, because all datasets of a mixture have the same weight"
        found.warn("idle.mixture.temperature", "W401", "mixture.temperature", message, "remove it")


@checks("data.training", reads="dataset dataset.*.holdout mixture.*")
def _check_training(spec: Spec, written: bool, found: Findings) -> None:
    training = trainable(spec)
    names = [dataset.name for dataset in training]
    if written and not spec.mixture.weights:
        example = ", ".join(f"{name} = 1" for name in filter(is_plain, names)) or "web = 1"
        hint = f"write `mixture {{ {example} }}`, or remove it"
        found.fail("data.training", "X502", "mixture", "nothing to train on: the mixture has no dataset", hint)
    elif not training:
        message = "every dataset has `holdout = 100%`" if spec.datasets else "there is no dataset"
        path = f"dataset.{next(iter(spec.datasets))}.holdout" if spec.datasets else "dataset"
        hint = "lower its holdout" if spec.datasets else "add one, such as `dataset web { source = python_stdlib() }`"
        found.fail("data.training", "X502", path, f"nothing to train on: {message}", hint)
    elif len(training) > 1 and not spec.mixture.weights:
        example = ", ".join(f"{name} = 1" for name in names)
        hint = f"give a weight to each:  `mixture {{ {example} }}`, or set `holdout = 100%` on what is only evaluated"
        if quoted := [name for name in names if not is_plain(name)]:
            hint = f"call `{quoted[0]}` by a name of letters, digits and `_`, and give each a weight in `mixture`"
        path, shown = f"dataset.{names[1]}", ", ".join(names)
        found.fail("data.training", "X503", path, f"several datasets to train on: {shown}", hint)
    elif spec.mixture.weights:
        found.passed("data.training", "`mixture` says what is trained on")
    else:
        found.passed("data.training", f"`{names[0]}` is trained on")


def _check_names(spec: Spec, rule: str, path: str, given: dict[str, Weight], found: Findings) -> None:
    """Check that every weight belongs to a dataset that is not held out whole."""
    settings = tuple(settings_of(type(spec.mixture))) if path == "mixture" else ()
    good = True
    for name, weight in given.items():
        place = f"{path}.{name}.name"
        dataset = spec.datasets.get(name)
        if dataset is None:
            known = (*spec.datasets, *settings)
            hint = did_you_mean(name, known) or f"datasets of this spec: {', '.join(spec.datasets) or 'none'}"
            fix_at = partial(renamed, word=name, candidates=known, taken=given)
            found.fail(rule, "X513", place, f"a weight of unknown dataset `{name}`", hint, fix_at)
        elif amount(weight) > 0 and not trains(dataset):
            message = f"`{name}` has a weight of {weight_text(weight)}, and `holdout = 100%`"
            hint = f"lower the holdout of `dataset {name}`, or set its weight to 0"
            found.fail(rule, "X515", place, message, hint)
        good = good and dataset is not None and (not amount(weight) or trains(dataset))
    if given and good:
        found.passed(rule, ", ".join(f"{name} {weight_text(weight)}" for name, weight in given.items()))


@checks("data.weights", reads="{datasets} mixture.* phase phase.*.from")
@checks("data.weights.*", reads="{datasets} mixture.* phase.{}.mix")
def _check_weights(spec: Spec, found: Findings) -> None:
    """Check that some dataset has a share in every phase, and that weights are comparable."""
    begins = any(not phase.from_.value for phase in spec.phases.values())
    stretches: list[Phase | None] = [*([] if begins else [None]), *spec.phases.values()]
    for phase in stretches:
        rule = f"data.weights.{phase.name}" if phase is not None else "data.weights"
        path = f"phase.{phase.name}.mix" if phase is not None else "mixture"
        given, mixed = weights(spec, phase), amounts(spec, phase)
        if any(mixed.values()):
            shown = given if in_epochs(given) else {name: f"{share:.1%}" for name, share in mixed.items()}
            texts = {name: each if isinstance(each, str) else weight_text(each) for name, each in shown.items()}
            found.passed(rule, ", ".join(f"{name} {texts[name]}" for name, share in mixed.items() if share))
        elif phase is not None or spec.mixture.weights:
            where = f"in phase {phase.name} every weight is 0" if phase is not None else "every weight is 0"
            hint = "give one of them a weight above 0"
            found.fail(rule, "X514", path, f"nothing to train on: {where}", hint)


@checks("data.epochs", reads="{datasets} mixture.*")
@checks("data.epochs.*", reads="{datasets} mixture.* phase.{}.mix")
def _check_epochs(spec: Spec, found: Findings) -> None:
    """Check that the weights of one mixture are all epochs, or all shares."""
    given, rule, temperature = spec.mixture.weights, "data.epochs", spec.mixture.temperature
    if not any(in_epochs(each) for each in (given, *(phase.mix for phase in spec.phases.values()))):
        return
    if (pair := _unlike(given, given)) is not None:
        name, other = pair
        message = f"weights of two kinds: {_named_weight(name, given)}, {_named_weight(other, given)}"
        hint = f"give all of them in epochs, as `{name} = {amount_in_epochs(amount(given[name]))}`, or none"
        if isinstance(given[name], Quantity):
            hint = f"give all of them as shares, as `{name} = {amount(given[name]):g}`, or in epochs"
        found.fail(rule, "X518", f"mixture.{name}", message, hint)
        return
    if given and in_epochs(given) and temperature != 1:
        message = f"a temperature of {temperature:g} needs weights as shares, and these are in epochs"
        found.fail(rule, "X519", "mixture.temperature", message, "leave it out, or give weights without `epochs`")
    elif given:
        found.passed(rule, "all weights are epochs" if in_epochs(given) else "all weights are shares of rows")
    for phase in spec.phases.values():
        rule, whole = f"data.epochs.{phase.name}", weights(spec, phase)
        if (pair := _unlike(phase.mix, whole)) is not None:
            name, other = pair
            source = "" if other in phase.mix else " of `mixture`"
            pair_text = f"{_named_weight(name, whole)}, {_named_weight(other, whole)}{source}"
            message = f"weights of two kinds in phase {phase.name}: {pair_text}"
            kind = "in epochs" if isinstance(whole[name], Quantity) else "as a share of rows"
            every = ", ".join(f"{each}: …" for each, weight in whole.items() if amount(weight))
            hint = f"give every dataset a weight {kind}, `mix = {{ {every} }}`, or all as in `mixture`"
            found.fail(rule, "X518", f"phase.{phase.name}.mix.{name}", message, hint)
        elif phase.mix:
            found.passed(rule, "its weights are of one kind")


def _unlike(named: dict[str, Weight], whole: dict[str, Weight]) -> tuple[str, str] | None:
    """Return a named dataset whose weight differs in kind from another's, and the other; None if all are alike."""
    kinds = {name: isinstance(weight, Quantity) for name, weight in whole.items() if amount(weight)}
    if len({*kinds.values()}) < 2:
        return None
    all_kinds = list(kinds.values())
    # The rarer kind is the odd one; of equally rare kinds, the later one.
    odd = [name for name in named if name in kinds]
    name = min(odd, key=lambda name: (all_kinds.count(kinds[name]), kinds[name] == all_kinds[0]), default=None)
    return None if name is None else (name, next(other for other in kinds if kinds[other] != kinds[name]))


def _named_weight(name: str, given: dict[str, Weight]) -> str:
    kind = "" if isinstance(given[name], Quantity) else ", a share of rows"
    return f"`{name}` is {weight_text(given[name])}{kind}"


LOSS_CODE = "X527"
IDLE = "W401"
LossProblem = tuple[str, str, str]


@checks("data.loss.*", reads="{records} dataset mixture.* phase phase.*.mix loss.* rollout.* collate {evaluated}")
def check_reads(spec: Spec, trained: set[str], evaluated: set[str], found: Findings) -> None:
    """Check that every training dataset has the fields that the loss reads. Evaluations of other datasets only need the
    cross-entropy, which a reward model does not have. Numbers that the loss does not read are reported as unused."""
    rewards = not spec.loss.of_logits
    if rewards:
        _check_rewards(spec, evaluated, found)
    if spec.loss.mismatched:
        _check_mismatched(spec, found)
    if _is_remade(spec):
        return
    for name in (each for each in spec.datasets if each in trained | evaluated and spec.datasets[each].choices is None):
        for setting, message, hint in _missing(spec.loss, spec.datasets[name]) if name in trained or rewards else ():
            whole = f"the loss {spec.loss.kind} {message}"
            found.fail(f"data.loss.{name}", LOSS_CODE, f"dataset.{name}.{setting}", f"dataset {name}: {whole}", hint)
        for setting, number in _unread(spec.loss, spec.datasets[name]):
            path = f"dataset.{name}.{setting}"
            message = f"dataset {name}: the loss {spec.loss.kind} does not read `{number}`"
            hint = _readers(spec.loss, number)
            if number in spec.loss.computed:
                message = f"dataset {name}: `{number}` has no effect: the run computes it (loss.reference)"
                hint = "remove it, or write `reference = precomputed` in `loss`"
            found.warn(f"idle.{path}", IDLE, path, message, hint)


@checks("data.rewards", reads="loss.kind evaluation_step.*")
def _check_rewards(spec: Spec, evaluated: set[str], found: Findings) -> None:
    """Report settings that need token probabilities of a model that gives rewards."""
    for name in (each for each in spec.datasets if each in evaluated and spec.datasets[each].choices is not None):
        message = f"dataset {name}: its questions ask for the likeliest choice, and with the loss {spec.loss.kind} "
        message += "the model gives rewards instead of probabilities"
        hint = "remove the evaluation, or choose a loss of tokens"
        found.fail(f"data.loss.{name}", "X442", f"dataset.{name}.choices", message, hint)
    if spec.evaluation_step is not None:
        message = f"an evaluation of your own adds up losses of tokens, and with the loss {spec.loss.kind} the model "
        hint = "remove it: evaluations measure the training loss"
        found.fail("data.rewards", "X442", "evaluation_step", f"{message}gives rewards", hint)


@checks("loss.mismatched", reads="loss.* collate dataset.* task task.*")
def _check_mismatched(spec: Spec, found: Findings) -> None:
    """Check the packing: answers are exchanged between the documents of a row, and compared over all rows of a step."""
    hint = "write a number for `reference_point`"
    message = f"the loss {spec.loss.kind} compares with answers to other prompts of a row, and "
    if row_link(spec.collate).packing.single:
        found.fail(
            "loss.mismatched", LOSS_CODE, "collate", f"{message}with pack(single) it holds one", f"{hint}, or pack"
        )
    elif spec.tasks:
        path = f"task.{next(iter(spec.tasks))}"
        found.fail("loss.mismatched", LOSS_CODE, path, f"{message}the rows of a step are of several tasks", hint)


def is_measured(spec: Spec, name: str) -> bool:
    """Return True if evaluations of a dataset also measure the training loss: it differs from the cross-entropy, and
    the dataset has the fields that it reads, which no dataset has if a rollout makes them. A user's function that
    replaces the forward gives only one loss."""
    dataset = spec.datasets[name]
    if not spec.loss.recorded or spec.evaluation_step is not None or dataset.choices is not None:
        return False
    if spec.rollout is not None:
        return False
    return _is_remade(spec) or not any(_missing(spec.loss, dataset))


def _is_remade(spec: Spec) -> bool:
    """Return True if a user's collator gets documents before they are packed; its output is known only in the run."""
    behind = next((place for place, link in enumerate(spec.collate) if link.takes == LABELLED_SAMPLES and link.usual),
                  len(spec.collate))  # fmt: skip
    return any(isinstance(link, UserComponent) for link in spec.collate[:behind])


def _unread(loss: Loss, dataset: Dataset) -> Iterator[tuple[str, str]]:
    """Yield (setting, number) for numbers of tokens or documents that nothing reads."""
    for setting, named, gives, reads in (
        ("columns", dataset.columns, dataset.gives_columns, loss.columns),
        ("values", dataset.values, dataset.gives_values, loss.values),
    ):
        for name in (each for each in gives if each not in reads or each in loss.computed):
            own = {WEIGHTS: "message_weight", "label": "label"}
            yield (f"{setting}.{name}" if name in named else own[name]), name


def _readers(loss: Loss, name: str) -> str:
    """Return the remedy for a number that the loss does not read."""
    if name in loss.may_read:
        return f"write `loss {loss.kind} {{ {loss.may_read[name]} }}`, or remove it"
    usual = [each() for each in LOSSES.values() if all(field.default is not NOTHING for field in fields(each))]
    known = [each.kind for each in usual if name in (*each.columns, *each.values)]
    return f"remove it, or choose a loss that reads it: {', '.join(known)}" if known else "remove it"


def _missing(loss: Loss, dataset: Dataset) -> Iterator[LossProblem]:
    """Yield (setting, message, hint) for everything that the loss reads and the dataset lacks."""
    if loss.unit == "pair" and not dataset.has_pairs:
        yield "source", "compares pairs of answers, and it has none", 'write `chosen = "…", rejected = "…"`, its fields'
    elif loss.unit == "sequence" and dataset.has_pairs:
        yield "chosen", "is of single answers, and it has pairs", "choose a loss of pairs, such as dpo"
    elif loss.unit == "token" and dataset.has_pairs:
        hint = "choose a loss of pairs, such as dpo"
        yield "chosen", "is of tokens, and would learn rejected answers like chosen ones", hint
    elif loss.unit == "sequence" and dataset.long_documents == "split":
        hint = "write `oversized = skip` or `oversized = truncate`"
        yield "oversized", "is of whole documents, and those longer than a row are split", hint
    for name in (each for each in loss.columns if each not in loss.computed):
        if name not in dataset.gives_columns:
            hint = f'name the field that has them: `columns = {{ {name}: "{name}" }}`'
            yield "source", f"reads `{name}`, numbers along the tokens, and it has none", hint
    for name in loss.values:
        if name not in dataset.gives_values:
            hint = f'name the field that has it: `values = {{ {name}: "{name}" }}`'
            hint = f'write `{name} = "{name}"`, its field' if hasattr(dataset, name) else hint
            yield "source", f"reads `{name}`, a number of each document, and it has none", hint


ROLLOUT_CODE = "X528"
RolloutProblem = tuple[str, str, str, str]
"""(rule, path, message, hint)."""


@checks(
    "rollout.*",
    reads="rollout.* reward.* engine engine.* precision.base environment environment.* loss.* dataset dataset.* "
    "mixture.* phase.*.mix collate "
    "optimizer.kind batch.sequence batch.ramp_from adapter adapter.* {evaluated} every.*.actions.*.answers "
    "on.*.actions.*.answers every.*.actions.*.environment on.*.actions.*.environment task step.* tokenizer.source",
)
def check_rollout(spec: Spec, trained: Set[str], found: Findings) -> None:
    """Report everything that a rollout cannot be combined with. trained: the training datasets."""
    problems = list(_problems(spec, trained))
    for rule, path, message, hint in problems:
        found.fail(f"rollout.{rule}", ROLLOUT_CODE, path, message, hint)
    if spec.rollout is not None and not problems:
        found.passed("rollout", f"groups of {spec.rollout.group} completions fit into rows of {spec.batch.sequence:,}")


def _problems(spec: Spec, trained: Set[str]) -> Iterator[RolloutProblem]:
    if spec.rollout is not None:
        asked = {action.asks() for _, action in spec.actions}
        prompting = [name for name in spec.datasets if name in trained | asked]
        from xtrain.planner.data.episodes import problems_of_episodes  # only rollouts have episodes
        from xtrain.planner.data.sampling import problems_of_engine, problems_of_logprobs, problems_of_replay

        yield from (*_own(spec, spec.rollout), *problems_of_episodes(spec, spec.rollout, prompting))
        for problems in (problems_of_engine, problems_of_logprobs, problems_of_replay):
            yield from problems(spec, spec.rollout)
        yield from (*_loss(spec), *_around(spec))
        for name in prompting:
            yield from _dataset(name, spec.datasets[name])
        if spec.rollout.updates > 1:
            yield from _repeated(spec, trained)
        return
    if spec.reward is not None:
        message = "`reward` scores the completions of a rollout, and there is none"
        yield "reward", "reward", message, "add `rollout { group = 8 }`, or remove `reward`"
    if spec.engine is not None:
        message = "an engine samples the completions of a rollout, and there is none"
        yield "engine", "engine", message, "add `rollout { group = 8 }`, or remove `engine`"
    for name in spec.environments:
        message = f"rollouts have conversations with `{name}`, and there are none"
        hint = f"add `rollout {{ environment = {name} }}`, or remove it"
        yield f"environment.{name}", f"environment.{name}", message, hint


@checks("rollout.replay", reads="rollout.* model.* tokenizer.source")
def check_replay(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Check that a model whose routing is replayed has experts."""
    if spec.rollout is not None and spec.rollout.replay_routing and not arch.is_moe:
        message = f"{arch.title} has no experts that tokens could be sent to"
        found.fail("rollout.replay", ROLLOUT_CODE, "rollout.replay_routing", message, "remove it")


def _own(spec: Spec, rollout: Rollout) -> Iterator[RolloutProblem]:
    compares, unscored = ADVANTAGES in spec.loss.columns, spec.reward is None and rollout.environment is None
    if unscored and compares:
        yield "reward", "rollout", "nothing says how good a completion is", "add `reward exact_answer { }`"
    if unscored and any(action.asks() for _, action in spec.actions):
        yield "answers", "rollout", "a `reward` scores the `answers` of an evaluation", "add `reward exact_answer { }`"
    if unscored and rollout.scale_rewards != Rollout().scale_rewards:
        yield "scale", "rollout.scale_rewards", "there are no rewards to scale", "remove it, or add a `reward`"
    if rollout.group == 1 and compares:
        message = "a single completion has nothing to be compared with: its advantage would be 0"
        yield "group", "rollout.group", message, "write `group = 8`"
    yield from _shaped(spec, rollout, compares)
    # A prompt has at least one token; the last token of a completion takes no position.
    needed = rollout.group * rollout.max_tokens
    if rollout.group > 1 and rollout.environment is None and needed > spec.batch.sequence:
        message = (
            f"{rollout.group} completions of {rollout.max_tokens:,} tokens take {needed:,} positions without their "
        )
        message += f"prompt, and the row that holds them has {spec.batch.sequence:,}"
        yield "room", "rollout.max_tokens", message, f"write `sequence = {2 * needed}`, or lower max_tokens or group"


def _shaped(spec: Spec, rollout: Rollout, compares: bool) -> Iterator[RolloutProblem]:
    """Yield problems of what changes rewards by length, and replaces groups."""
    for name in ("overlong", "attempts"):
        if getattr(rollout, name) != getattr(Rollout(), name) and not compares:
            message = f"the loss {spec.loss.kind} learns from no rewards"
            yield name, f"rollout.{name}", message, f"remove `{name}`, or write `loss grpo {{ }}`"
    if rollout.overlong is not None and rollout.environment is not None:
        message = "episodes have turns, each with up to `max_tokens` tokens, and their environment rewards them"
        yield "overlong.episodes", "rollout.overlong", message, "remove it, and count tokens in `finish`"
    elif rollout.overlong is not None and rollout.overlong > rollout.max_tokens:
        message = f"a completion has at most {rollout.max_tokens:,} tokens"
        yield "overlong.room", "rollout.overlong", message, f"write `overlong = {max(1, rollout.max_tokens // 4)}`"
    if rollout.attempts == 1:
        return
    path, hint = "rollout.attempts", "write `attempts = 1`"
    for name in (each for each in ("steps", "updates") if getattr(rollout, each) > 1):
        message = f"with `{name}` rewards are known when the weights that sampled are gone: they would be replaced by "
        yield f"attempts.{name}", path, f"{message}completions of other weights", f"{hint}, or `{name} = 1`"
    if spec.phases:
        message = "other prompts are those after the end of the run, which are of its last phase alone"
        yield "attempts.phases", path, message, hint


def _loss(spec: Spec) -> Iterator[RolloutProblem]:
    loss = spec.loss
    made = " and ".join(f"`{each}`" for each in MADE)
    if loss.learns_from is not None:
        yield from _distillation(spec, loss.learns_from)
        return
    if ADVANTAGES not in loss.columns:
        message = f"the loss {loss.kind} does not read `{ADVANTAGES}`, and a rollout makes {made}"
        yield "loss", "loss.kind", message, "write `loss grpo { }`"
        return
    if isinstance(loss, PolicyLoss) and REF in loss.columns and loss.reference not in (INITIAL, ADAPTER_OFF):
        message = "completions are compared with the model under the adapter or the weights that the run starts from: "
        message += "no data has numbers of them, and a folder would be a second model on each rank"
        hint = f'write `reference = {INITIAL}`; a run starts from a folder with `model "FOLDER"`'
        yield "loss.reference", "loss.reference", message, hint
    elif REF in loss.columns and spec.adapter is not None and spec.adapter.decomposes:
        message = "the first values of the adapter are computed from the weights of the model, which are others from "
        message += "there on: a resumed run could not restore its reference"
        yield "loss.reference", "loss.kl", message, "write `kl = none`, or another `init` of the adapter"
    several = [name for name in ("steps", "updates") if getattr(spec.rollout, name) > 1]
    if several and OLD not in loss.columns:
        message = (
            f"the loss {loss.kind} does not read `{OLD}`: it cannot know by how much the weights have moved since "
        )
        message += "the completions were sampled that several steps learn from"
        hint = f"write `{several[0]} = 1`, or choose a loss such as `grpo`"
        yield several[0], f"rollout.{several[0]}", message, hint
    for name in (each for each in loss.columns if each not in (*MADE, REF)):
        message = f"the loss {loss.kind} reads `{name}`, and a rollout makes {made}"
        yield f"loss.{name}", "loss.kind", message, "choose a loss without it"


def _distillation(spec: Spec, teacher: Teacher) -> Iterator[RolloutProblem]:
    """Yield problems of a loss that compares the completions' distributions with a teacher's."""
    if not teacher.live:
        message = f"nothing that {teacher.folder} holds probable is stored for completions that the run samples itself"
        yield "loss", "loss.live", message, "write `live = true`"
    if teacher.labels:
        message = "its labels are samples of the model itself, whose cross-entropy teaches it nothing"
        yield "loss.mix", "loss.mix", message, "remove it"
    for name in (each for each in ("steps", "updates") if getattr(spec.rollout, each) > 1 and not spec.loss.columns):
        message = "a divergence is taken of what the current model samples, not of completions sampled earlier"
        yield name, f"rollout.{name}", message, f"write `{name} = 1`, or `form = policy_gradient`"


def _around(spec: Spec) -> Iterator[RolloutProblem]:
    if not row_link(spec.collate).packing.single:
        message = "each prompt needs a row of its own, which its completions then fill"
        yield "collate", "collate", message, f"write `{rows_of_prompts()}`"
    if any(link.changes for link in spec.collate):
        name = next(link.name for link in spec.collate if link.changes)
        yield "changes", "collate", f"`{name}` changes documents, and completions stay as they are", f"remove `{name}`"
    if spec.optimizer.before_forward:
        message = f"{spec.optimizer.kind} takes gradients at weights other than the sampled ones"
        yield "optimizer", "optimizer.kind", message, "choose another optimizer, such as adamw"
    if spec.tasks:
        path = f"task.{next(iter(spec.tasks))}"
        yield "tasks", path, "tasks learn from documents, not from rollouts", "remove `rollout`"
    if spec.step is not None:
        message = "your own step does not report the log-probabilities that it computed"
        yield "step", "step.name", message, "remove `step` or `rollout`"


def _dataset(name: str, dataset: Dataset) -> Iterator[RolloutProblem]:
    path, who = f"dataset.{name}", f"dataset {name}"
    answers = dataset.messages is not None or dataset.response is not None or dataset.mask is not None
    if dataset.has_pairs or dataset.choices is not None or not answers:
        hint = 'name their fields: `prompt = "prompt", response = "answer"`'
        yield f"data.{name}", f"{path}.source", f"{who}: rollouts need records with a prompt and an answer", hint
    elif dataset.train_on == "all":
        message = f"{who}: `train_on = all` does not tell the answer from the prompt"
        yield f"data.{name}", f"{path}.train_on", message, "remove `train_on`"
    elif dataset.long_documents in ("split", "truncate"):
        message = f"{who}: a document that is cut has no whole prompt and answer"
        yield f"oversized.{name}", f"{path}.oversized", message, "write `oversized = skip`"


def _repeated(spec: Spec, trained: Set[str]) -> Iterator[RolloutProblem]:
    """Yield problems of repeated prompts, which must be the rows of equal steps."""
    path, hint = "rollout.updates", "write `updates = 1`"
    if len(trained) > 1:
        names = ", ".join(sorted(trained))
        message = f"steps draw their prompts from several datasets ({names}), but only one can be repeated"
        yield "updates.datasets", path, message, f"{hint}, or put all prompts into one dataset"
    if spec.batch.ramp_from is not None:
        message = "the steps of a ramp have unequal numbers of prompts, which cannot be repeated"
        yield "updates.ramp", path, message, f"{hint}, or remove `ramp_from`"


def rows_of_prompts() -> str:
    """Return the collate chain of a run with rollouts, as a spec writes it."""
    single = next(name for name, each in PACKINGS.items() if each.single)
    links = (f"{link.name}({single})" if isinstance(link, RowLink) else link.name for link in usual_chain())
    return f"collate = {' -> '.join(links)}"
