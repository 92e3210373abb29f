"""Reader and writer of `Plan` as JSON, its id, and the note of how it was made.

The text holds the plan once, followed by views for other programs, rank by rank. Only the plan itself is read back;
views are derived from it again. For the check of drift, a saved plan also holds the version, the source digest and the
`--set` texts that it was made with.
"""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Final

from attrs import evolve
from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from xtrain import version
from xtrain.dsl.schema.setting import file_name
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.canonical import fingerprint
from xtrain.plan.estimates import Estimates, Hardware, Memory, Parameters, RankClass, Times, Traffic, Work
from xtrain.plan.mesh import AXES, EXPERT_AXES, build_mesh
from xtrain.plan.plan import (
    FORMAT,
    Check,
    Counted,
    Edge,
    ElasticWorld,
    Mesh,
    Node,
    Plan,
    PlanOrigin,
    PlanPhase,
    PlanTick,
    Provenance,
    RefusedWorlds,
    Timeline,
    Traced,
)
from xtrain.regular_files import read_json
from xtrain.version import __version__

# Rooms that decide what a plan is and does; display and commands do not.
ROOMS: Final = ("blocks", "components", "contracts", "dsl", "plan", "planner", "runtime", "server", "text")
PACKAGE: Final = Path(version.__file__).parent


def signed(plan: Plan, sets: Sequence[str], world: int | None) -> Plan:
    """Return `plan` with a note of the `--set` texts and the `--world` that it was made with."""
    origin = PlanOrigin(sets=tuple(sets), world=world, version=__version__, source=source_fingerprint())
    return evolve(plan, origin=origin)


@cache
def source_fingerprint(package: Path = PACKAGE) -> str:
    """Return 16 hex digits over the names and contents of xtrain's source files in ROOMS (4 ms)."""
    digest = blake2b(digest_size=8)
    files = (path for room in ROOMS for path in (package / room).rglob("*") if path.suffix in (".py", ".lark", ".json"))
    for path in sorted(files):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


# Origins of values, the text of the spec and the files found during planning do not change what is executed.
OUTSIDE_ID = ("id", "format", "spec", "spec_text", "provenance", "checks", "traced", "made", "counted")


MOST_RANKS: Final = 2**20
_ID: Final = re.compile("[0-9a-f]{8,64}")

# Fields that are written only if set, so that plans from before these fields keep their ids.
LATER: dict[type, tuple[str, ...]] = {
    PlanTick: ("epochs", "fraction"),
    PlanPhase: ("passes", "epochs", "exact_rows", "mtp_weight", "tokens", "router"),
    Timeline: (
        "stop_at_amount",
        "stop_after_amount",
        "stretches",
        "budget_tokens",
        "stop_at_tokens",
        "stop_after_tokens",
    ),
    Traffic: ("meanwhile",),
    Work: ("windows", "position_fp8", "position_fp8_again"),
    ParameterSpec: ("trained", "adapter", "quantised", "task", "begun", "multiplied"),
    Memory: ("host",),
    RankClass: ("optimizer_flops", "unsaved", "fp8_flops"),
    Hardware: (
        "mtbf_seconds",
        "restart_seconds",
        "storage",
        "fp8_flops",
        "programs_seconds",
        "store_rate",
        "connect_seconds",
        "compile_seconds",
        "capability",
        "measured",
        "calibration",
    ),
    Times: ("label", "beyond"),
}

# Fields with another key in the file, so that older plans keep their ids.
KEYS: dict[type, dict[str, str]] = {Timeline: {"triggers": "reactions"}}

# Values that follow from the content, written for other programs.
VIEWS = ("world_size", "steps", "tokens_per_step", "memory", "ranks")


class PlanError(Exception):
    """Text that is not a plan of this version, or that was changed by hand. code: of the diagnostic."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.code = code
        self.message = message
        self.hint = hint


@cache
def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=False)
    # A plan has whole numbers of tokens; fractions appear only once its data is counted.
    converter.register_structure_hook(int | Fraction | None, lambda value, _: None if value is None else int(value))
    for kind, names in LATER.items():
        written: dict[str, Any] = {name: override(omit_if_default=True) for name in names}
        written |= {name: override(rename=key) for name, key in KEYS.get(kind, {}).items()}
        converter.register_unstructure_hook(kind, make_dict_unstructure_fn(kind, converter, **written))
    for kind, names in KEYS.items():
        read: dict[str, Any] = {name: override(rename=key) for name, key in names.items()}
        converter.register_structure_hook(kind, make_dict_structure_fn(kind, converter, **read))
    return converter


def plan_id(plan: Plan, *, with_reasons: bool = False) -> str:
    """Return the hash of everything a plan does: its content without OUTSIDE_ID.

    with_reasons: include the texts that refuse worlds; ids of older saved plans may contain them.
    """
    content = {key: value for key, value in _content(plan).items() if key not in OUTSIDE_ID}
    # Each world's plan names all worlds; an id that depended on theirs would be circular.
    content["elastic"] = [{**world, "id": ""} for world in content["elastic"]]
    # The set of refused worlds changes what a run does; the texts of the refusals do not.
    if not with_reasons:
        content["refused"] = [{**each, "reason": ""} for each in content["refused"]]
    if plan.cluster.measured is not None:
        content["cluster"] = {key: content["cluster"][key] for key in ("preset", "nodes", "devices")}
    if plan.cluster.measured is not None or plan.cluster.calibration is not None:
        _leave_out_measured(content)
    return fingerprint(content)


def _leave_out_measured(content: dict[str, Any]) -> None:
    """Remove measured step times, and what was computed from measured speeds: they decide nothing in a run."""
    content["cluster"].pop("calibration", None)
    estimates = content["estimates"]
    timeless = [
        {**each, "traffic": [{**call, "seconds": None} for call in each["traffic"]]} for each in estimates["classes"]
    ]
    content["estimates"] = {**estimates, "classes": timeless, "times": None, "remedies": []}
    content["elastic"] = [{**world, "seconds": None} for world in content["elastic"]]


def _content(plan: Plan) -> dict[str, Any]:
    """Return the plan, each part once, in the order in which it is written."""
    plain = _converter().unstructure
    return {
        "format": FORMAT,
        "id": plan.id,
        "config_id": plan.config_id,
        "name": plan.name,
        "spec": plan.spec,
        "seed": plan.seed,
        "mesh": _mesh_json(plan.mesh),
        "architecture": plan.architecture.to_json(),
        "parameters": plain(plan.parameters),
        "estimates": plain(plan.estimates),
        "timeline": plain(plan.timeline),
        "graph": {"nodes": plain(plan.nodes), "edges": plain(plan.edges)},
        "workspace": plan.workspace,
        "launch": plan.launch,
        "cluster": plain(plan.cluster),
        "config": plan.config,
        "elastic": plain(plan.elastic),
        "refused": plain(plan.refused),
        "traced": plain(plan.traced),
        "made": plain(plan.origin),
        **({"counted": plain(plan.counted)} if plan.counted is not None else {}),
        "checks": plain(plan.checks),
        "provenance": plain(plan.provenance),
        "spec_text": plan.spec_text,
    }


def _mesh_json(mesh: Mesh) -> dict[str, Any]:
    """Return axis sizes by name, outer to inner; strides and crossings follow from them and the ranks of a node."""
    return {
        "world_size": mesh.world_size,
        "ranks_per_node": mesh.ranks_per_node,
        "axes": {axis.name: axis.size for axis in mesh.axes},
        "expert_axes": {axis.name: axis.size for axis in mesh.expert_axes},
        "strides": {axis.name: axis.stride for axis in (*mesh.axes, *mesh.expert_axes)},
        "crosses_nodes": [axis.name for axis in (*mesh.axes, *mesh.expert_axes) if axis.crosses_nodes],
    }


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON object: its content, and views of it by rank."""
    mesh, memory = plan.mesh, _memory_by_stage(plan)
    # Spelled out instead of Mesh.coordinates: 16,384 ranks should not take longer than everything else.
    strides = [(axis.name, axis.stride, axis.size) for axis in mesh.axes]
    ranks = [
        {
            "rank": rank,
            "node": rank // mesh.ranks_per_node,
            "coordinates": {name: rank // stride % size for name, stride, size in strides},
        }
        for rank in range(mesh.world_size)
    ]
    return _viewed(plan, [{"rank": rank, "pp": pp, **memory[pp]} for rank, pp in enumerate(_stages(mesh))], ranks)


def dumps(plan: Plan) -> str:
    """Return the text of `to_json`, with a line for every entry of a list, so that plans can be compared line by
    line."""
    content = _viewed(plan, _lines_of_memory(plan), _lines_of_ranks(plan.mesh))
    parts = [f'"{key}": {_lines(value, 1)}' for key, value in content.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _viewed(plan: Plan, memory: Any, ranks: Any) -> dict[str, Any]:
    """Return the content of a plan with its views. memory, ranks: their entries, or the entries' texts."""
    content = _content(plan)
    return {
        **{key: content.pop(key) for key in ("format", "id", "config_id", "name", "spec", "seed")},
        "world_size": plan.mesh.world_size,
        "steps": plan.timeline.steps,
        "tokens_per_step": plan.estimates.tokens_per_step,
        **content,
        "memory": {"per_rank": memory},
        "ranks": ranks,
    }


def _stages(mesh: Mesh) -> list[int]:
    """Return the stage of every rank."""
    return [rank // mesh.axes[0].stride for rank in range(mesh.world_size)]


def _memory_by_stage(plan: Plan) -> list[dict[str, int]]:
    return [
        {
            "states_bytes": each.memory.states,
            "allocated_bytes": each.memory.allocated_bytes,
            "total_bytes": each.memory.total_bytes,
        }
        for each in plan.estimates.classes
    ]


def _lines_of_memory(plan: Plan) -> tuple[str, ...]:
    """Return memory entries as texts: objects for 16,384 ranks would take as long as everything else."""
    memory = [json.dumps(each)[1:-1] for each in _memory_by_stage(plan)]
    return tuple(f'{{"rank": {rank}, "pp": {pp}, {memory[pp]}}}' for rank, pp in enumerate(_stages(plan.mesh)))


def _lines_of_ranks(mesh: Mesh) -> tuple[str, ...]:
    """Return rank entries as texts, built axis by axis from the outermost, so that a rank's text extends the text of
    its outer coordinates."""
    places = [""]
    for axis in mesh.axes:
        own = [f'"{axis.name}": {place}' for place in range(axis.size)]
        places = [f"{outer}, {each}" if outer else each for outer in places for each in own]
    node = mesh.ranks_per_node
    return tuple(
        f'{{"rank": {rank}, "node": {rank // node}, "coordinates": {{{place}}}}}' for rank, place in enumerate(places)
    )


def _lines(value: Any, depth: int) -> str:
    margin = "\n" + "  " * depth
    end = margin[:-2]
    if isinstance(value, tuple):  # already texts
        return f"[{margin}{(',' + margin).join(value)}{end}]"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        body = ("," + margin).join(json.dumps(item, ensure_ascii=False) for item in value)
        return f"[{margin}{body}{end}]"
    if isinstance(value, dict) and any(isinstance(item, list | tuple | dict) for item in value.values()):
        body = ("," + margin).join(f'"{key}": {_lines(item, depth + 1)}' for key, item in value.items())
        return f"{{{margin}{body}{end}}}"
    return json.dumps(value, ensure_ascii=False)


def from_json(content: Any) -> Plan:
    """Return the plan in a JSON object.

    Raises PlanError for another format, for a value that is not a plan, and if the id does not match the content.
    """
    if not isinstance(content, dict) or "format" not in content:
        raise PlanError("X704", "this file is not a plan", "write one with `xtrain plan SPEC --out plan.json`")
    if content["format"] != FORMAT:
        message = f"the plan has format {content['format']}, this version reads {FORMAT}"
        raise PlanError("X704", message, "plan the spec again")
    hint = "change the spec and plan it again"
    try:
        _check_names(content)
        plan = _read(content)
        ids = (plan_id(plan), plan_id(plan, with_reasons=True))
        views = to_json(plan)
    except Exception as error:  # a value of the wrong type, detected in cattrs or here
        raise PlanError("X704", f"the plan cannot be read: {_reason(error)}", "plan the spec again") from error
    if plan.id not in ids:
        raise PlanError("X704", f"the content of the plan does not match its id {plan.id}", hint)
    if drifted := [key for key in VIEWS if content.get(key) != views[key]]:
        raise PlanError("X704", f"{', '.join(drifted)} of the plan do not match its content", hint)
    return plan


def _check_names(content: dict[str, Any]) -> None:
    """Raise ValueError unless names used for files and folders are valid and sizes are in bounds. The id only protects
    a plan from accidental changes."""
    for key in ("id", "config_id"):
        if not isinstance(content[key], str) or _ID.fullmatch(content[key]) is None:
            raise ValueError(f"its `{key}` is not an id")
    workspace = content["workspace"]
    named = {
        "name": content["name"],
        **{key: workspace[key] for key in ("lineage", "run") if workspace[key] is not None},
    }
    for key, name in named.items():
        if (problem := file_name(name) if isinstance(name, str) else "is no name") is not None:
            raise ValueError(f"its `{key}` {problem}")
    for key in ("spec", "spec_text"):
        if not isinstance(content[key], str):
            raise TypeError(f"its `{key}` is not a string")
    mesh = content["mesh"]
    sizes = [*mesh["axes"].values(), *mesh["expert_axes"].values(), mesh["ranks_per_node"]]
    if prod(map(int, mesh["axes"].values())) > MOST_RANKS or not all(0 < int(size) <= MOST_RANKS for size in sizes):
        raise ValueError(f"it is for more than {MOST_RANKS:,} ranks, or for none")


def _reason(error: Exception) -> str:
    """Return an error as one short line."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:200]


def _read(content: dict[str, Any]) -> Plan:
    convert = _converter().structure
    mesh = content["mesh"]
    group_sizes = {axis: int(mesh["axes"][axis]) for axis in AXES}
    return Plan(
        name=content["name"],
        spec=content["spec"],
        spec_text=content["spec_text"],
        seed=content["seed"],
        architecture=Architecture.from_values(content["architecture"]),
        mesh=build_mesh(
            group_sizes, ep=int(mesh["expert_axes"][EXPERT_AXES[-1]]), ranks_per_node=int(mesh["ranks_per_node"])
        ),
        nodes=convert(content["graph"]["nodes"], tuple[Node, ...]),
        edges=convert(content["graph"]["edges"], tuple[Edge, ...]),
        timeline=convert(content["timeline"], Timeline),
        parameters=convert(content["parameters"], Parameters),
        estimates=convert(content["estimates"], Estimates),
        provenance=convert(content["provenance"], tuple[Provenance, ...]),
        checks=convert(content["checks"], tuple[Check, ...]),
        workspace=content["workspace"],
        launch=content["launch"],
        cluster=convert(content["cluster"], Hardware),
        elastic=convert(content["elastic"], tuple[ElasticWorld, ...]),
        refused=convert(content["refused"], tuple[RefusedWorlds, ...]),
        traced=convert(content["traced"], tuple[Traced, ...]),
        origin=convert(content["made"], PlanOrigin) if content["made"] else None,
        counted=convert(content["counted"], Counted) if content.get("counted") else None,
        config=content["config"],
        config_id=content["config_id"],
        id=content["id"],
    )


def load_plan(path: str | Path) -> "Plan":
    """Read a saved plan. Raises PlanError, also for a file that is missing or is not JSON."""
    try:
        content = read_json(path)
    except OSError as error:
        raise PlanError("X704", f"{path}: {error.strerror}", "give the path of a plan or a spec") from error
    except ValueError as error:
        raise PlanError("X704", f"{path} is not JSON", "write one with `xtrain plan SPEC --out plan.json`") from error
    return from_json(content)
