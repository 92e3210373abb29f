"""Ids of a plan: `id` identifies the plan, `config_id` the experiment. Both hash resolved values, never text.

Comments, formatting, the names of `let` constants, written defaults and the working folder therefore change neither.
"""

from typing import Any

from attrs import evolve, fields_dict

from xtrain.dsl.schema.adapters import AdapterTask, TaskAdapters
from xtrain.dsl.schema.component import Component, UserComponent
from xtrain.dsl.schema.data import Batch, Dataset, Phase
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.dsl.schema.precision import Fp8, Fp16, Qat
from xtrain.dsl.schema.setting import Role, is_unspoken, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.user_parts.kinds import NOTHING
from xtrain.dsl.values import HiddenText, Quantity, digests_in
from xtrain.plan.amounts import amounts, in_epochs, weights
from xtrain.plan.canonical import fingerprint, portable, whole_numbers
from xtrain.plan.data import reads
from xtrain.plan.learning_rate import in_effect
from xtrain.plan.resolved import Resolved
from xtrain.plan.weight_files import WeightFiles
from xtrain.planner.derive.model import reference_files
from xtrain.planner.graph.saving import pretrained


def config_of(resolved: Resolved) -> dict[str, Any]:
    """Return the experiment as JSON, of which `config_id` is the fingerprint: everything that affects the learned
    weights, without length, location, ranks and speed.

    A setting belongs to it if its role is EXPERIMENT. Resolved values replace `auto`. The rows of a step replace micro
    and accumulate, so that another mesh with the same rows is the same experiment. Shares replace weights. Alignment
    and the group of packing are included because they decide which documents share a row.
    """
    spec = resolved.spec
    if spec.serve is not None:
        return _config_of_server(resolved)
    frozen = [tensor.name for tensor in resolved.inventory.tensors if not tensor.trained]
    content = {
        "name": spec.experiment.name,
        "experiment": experiment_settings(spec.experiment),
        "model": resolved.architecture.identity,
        **({"frozen": fingerprint(frozen)} if frozen else {}),
        "tokenizer": tokenizer_kind(spec.tokenizer.source).place(spec.tokenizer.source),
        "datasets": {name: _dataset(each, spec.experiment.seed) for name, each in spec.datasets.items()},
        "collate": [link.identity(resolved.align) for link in spec.collate if not link.by_layout],
        "batch": {**experiment_settings(_in_effect(spec.batch)), "rows": resolved.batch.rows},
        "loss": _json(spec.loss),
        **({"rollout": _rollout(spec)} if spec.rollout is not None else {}),
        "optimizer": _json(spec.optimizer),
        **({"groups": {name: experiment_settings(each) for name, each in spec.groups.items()}} if spec.groups else {}),
        **({"parametrization": experiment_settings(scaled)} if (scaled := spec.parametrization) is not None else {}),
        **({"tasks": {name: _task(each) for name, each in spec.tasks.items()}} if spec.tasks else {}),
        "scheduler": _json(in_effect(spec.scheduler)),
        **({"step": [spec.step.digest, spec.step.function, experiment_settings(spec.step)]} if spec.step else {}),
        **({"hooks": changing} if (changing := _changing_hooks(spec)) else {}),
        **({"ticks": changing} if (changing := _changing_ticks(spec)) else {}),
        **({"ema": experiment_settings(spec.ema)} if spec.ema is not None else {}),
        "precision": _precision(resolved),
        **_mixture(resolved),
    }
    beginning = {k: portable(v) for k, v in (("from", spec.checkpoint.from_), ("pretrained", pretrained(spec))) if v}
    known = {"weights": resolved.weights, "reference": reference_files(spec)}
    weights = {name: _weights(files) for name, files in known.items() if files is not None}
    return whole_numbers({**content, **({"checkpoint": beginning} if beginning else {}), **weights})


def _weights(files: WeightFiles) -> str:
    """Return the digest of a folder's weights without `config.json`, of which `Architecture.identity` has all that
    matters."""
    return fingerprint({name: [each.format, list(each.shape)] for name, each in files.tensors.items()})


def _config_of_server(resolved: Resolved) -> dict[str, Any]:
    """Return the served model and its adapters; without adapters, the model itself is trained."""
    spec = resolved.spec
    assert spec.serve is not None
    adapter = resolved.architecture.adapter
    tasks = list(adapter.tasks.values()) if isinstance(adapter, TaskAdapters) else []
    content = {
        "name": spec.experiment.name,
        "experiment": experiment_settings(spec.experiment),
        "model": resolved.architecture.base.identity,
        **({"adapter": tasks[0].to_json()} if tasks else {}),
        "tokenizer": tokenizer_kind(spec.tokenizer.source).place(spec.tokenizer.source),
        "serve": experiment_settings(spec.serve),
        "precision": _precision(resolved),
    }
    return whole_numbers({**content, **({"weights": _weights(resolved.weights)} if resolved.weights else {})})


def _precision(resolved: Resolved) -> dict[str, Any]:
    """Return the precision settings; settings of fp16, fp8 and `qat` are included only if they are used."""
    precision, formats = resolved.spec.precision, resolved.formats
    used = evolve(precision, fp16=precision.loss_scale or Fp16(), fp8=precision.scaled or Fp8(), qat=Qat())
    return {
        **experiment_settings(used),
        "params": formats.params,
        "compute": formats.compute,
        **({"scaled": experiment_settings(formats.fp8)} if formats.fp8 is not None else {}),
        **({"qat": experiment_settings(formats.qat)} if formats.qat is not None else {}),
    }


def _in_effect(batch: Batch) -> Batch:
    """Return the batch with the default length of a ramp if there is no ramp."""
    return batch if batch.ramp_from is not None else evolve(batch, ramp=fields_dict(Batch)["ramp"].default)


def _dataset(dataset: Dataset, seed: int) -> dict[str, Any]:
    """Return the source and how it is read; for conversations, the way they are read replaces the field of plain text.

    seed: of the experiment.
    """
    settings = experiment_settings(dataset)
    found = {name: settings[name] for name in ("text", "holdout", "oversized", "bad_records")}
    found = {"source": dataset.source.identity(seed), **found}
    form = reads(dataset)
    found["oversized"] = dataset.long_documents
    beside = {name: form[name] for name in ("columns", "values") if name in form}
    found |= {"deduplicate": dataset.deduplicate} if dataset.deduplicate != "none" else {}
    found |= {"decontaminate": [*map(portable, dataset.decontaminate)]} if dataset.decontaminate else {}
    found |= {"min_tokens": dataset.min_tokens} if dataset.min_tokens else {}
    found |= {"without": sorted(set(dataset.without))} if dataset.without else {}
    return {**found, **beside} if form["form"] == "text" else {**found, "text": form}


def _task(task: AdapterTask) -> dict[str, Any]:
    """Return the settings of a task without its adapter, which is part of the model."""
    return {**experiment_settings(evolve(task, adapter=None)), "datasets": list(task.reads)}


def _rollout(spec: Spec) -> dict[str, Any]:
    """Return how completions are sampled and scored."""
    assert spec.rollout is not None
    environment = spec.environment
    return {
        **experiment_settings(spec.rollout),
        **({} if spec.reward is None else {"reward": _json(spec.reward)}),
        **({} if environment is None else {"environment": [environment.digest, experiment_settings(environment)]}),
    }


def _changing_hooks(spec: Spec) -> list[Any]:
    """Return the hooks that affect the learned weights."""
    changing = (hook for hook in spec.hooks.values() if hook.declared["changes"] != NOTHING)
    return [[hook.declared["place"], hook.digest, hook.function, experiment_settings(hook)] for hook in changing]


def _changing_ticks(spec: Spec) -> list[Any]:
    """Return the ticks with actions that change the model."""
    actions = ((tick.every, action) for tick in spec.ticks for action in tick.actions if action.changes_base)
    return [[str(every), action.kind, experiment_settings(action)] for every, action in actions]


def _mixture(resolved: Resolved) -> dict[str, Any]:
    """Return shares and phases if there are several datasets or phases.

    Rows are drawn from the datasets in their order, and by the name of the phase.
    """
    spec = resolved.spec
    if len(resolved.training) == 1 and not spec.phases:
        return {}
    phases = {
        name: [
            _json(phase.from_),
            _mix(spec, phase),
            phase.lr_scale,
            *([phase.mtp_weight] if phase.mtp_weight is not None else []),
            *([phase.router] if phase.router else []),
        ]
        for name, phase in spec.phases.items()
    }
    return {"mixture": _mix(spec, None), "phases": phases, "drawn": list(resolved.training)}


def _mix(spec: Spec, phase: Phase | None) -> dict[str, Any]:
    found = amounts(spec, phase)
    if spec.mixture.exact:
        return {name: [each, "exact"] for name, each in found.items()}
    return {name: [each, "epochs"] for name, each in found.items()} if in_epochs(weights(spec, phase)) else found


def experiment_settings(block: Any) -> dict[str, Any]:
    """Return the settings of a block that belong to the experiment, as JSON."""
    return {
        name: _json(getattr(block, attribute.name))
        for name, (attribute, setting) in settings_of(type(block)).items()
        if setting.role is Role.EXPERIMENT and not is_unspoken(attribute, setting, getattr(block, attribute.name))
    }


def _json(value: Any) -> Any:
    match value:
        case Quantity():
            return [value.value, value.unit]
        case dict():
            return {name: _json(item) for name, item in value.items()}
        case tuple():
            return [_json(item) for item in value]
        case Component():
            code = {"code": value.digest} if isinstance(value, UserComponent) else {}
            return {"kind": value.kind, **experiment_settings(value), **code}
        case HiddenText():
            return [str(value), digests_in(value)]
        case None | bool() | int() | float() | str():
            return value
    return repr(value)
