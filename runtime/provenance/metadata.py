"""What a run directory says of its last start: the plan, the settings, the code and the machine, and what earlier
starts had where that was something else.

    spec.xtrain  plan.json       as they were run
    metadata/
      config.full.yaml           every resolved setting
      config.canonical.yaml      what `config_id` is the hash of
      config.diff.yaml           what departs from the defaults, and from the start before
      git.yaml  git.diff         the commit of the spec's folder, and what was changed since
      environment.json           versions, folder and command; written last
      attempts/<attempt>/        of an earlier start, the files that a later one has replaced
"""

import json
import os
import platform
import re
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from xtrain.planner.compare.diff_values import changed_values
from xtrain.planner.compare.non_defaults import non_defaults
from xtrain.planner.compare.plan_origin import source_fingerprint
from xtrain.planner.plan import Plan
from xtrain.planner.serialise import PlanError, from_json, to_json
from xtrain.regular_files import read_json
from xtrain.runtime.files import durable
from xtrain.runtime.provenance.code import CodeUnread, CodeVersion
from xtrain.runtime.provenance.start import launcher_id

ENVIRONMENT: Final = "metadata/environment.json"
OF_GIT: Final = ("metadata/git.yaml", "metadata/git.diff")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# What YAML 1.1 takes for something else than a text.
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"))
_UNPRINTABLE = re.compile("[^\t\n -~\u00a0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?")


@frozen(kw_only=True)
class Before:
    """The last start of a run. plan: None where another version of xtrain has written it."""

    attempt: str
    environment: dict[str, Any]
    plan: Plan | None


def read_before(directory: Path) -> Before | None:
    """None if the run has never been started."""
    environment = _environment(directory)
    if not environment:
        return None
    try:
        plan = from_json(read_json(directory / "plan.json"))
    except (OSError, ValueError, PlanError):
        plan = None
    return Before(attempt=environment.get("attempt", "first"), environment=environment, plan=plan)


def _environment(directory: Path) -> dict[str, Any]:
    try:
        found = read_json(directory / ENVIRONMENT)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@cache
def versions() -> dict[str, str]:
    """Of what computes; `source` is a fingerprint of xtrain's own files."""
    return {
        "xtrain": version("xtrain"),
        "source": source_fingerprint(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def written_by(directory: Path) -> dict[str, Any]:
    """What a checkpoint of the run in a directory says of the code it was made by."""
    code_id = _environment(directory).get("code_id")
    return {**versions(), **({"code_id": code_id} if code_id else {})}


def started_in(directory: Path) -> Path:
    """The folder that the last start of the run in a directory had as its own, which the paths of its plan start at."""
    return Path(_environment(directory).get("folder", ""))


def launcher_before(directory: Path) -> str:
    """Which process has started the ranks of the last start, as `launcher_id` calls it; empty for `xtrain run`."""
    return str(_environment(directory).get("launcher", ""))


def describe(
    plan: Plan, resolved_spec: str, code: CodeVersion | CodeUnread | None, attempt: str, before: Before | None
) -> dict[str, bytes]:
    """Name in the run directory → content, in the order in which they are to be written."""
    environment = {
        **versions(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "plan_id": plan.id,
        "config_id": plan.config_id,
        "code_id": code.code_id if isinstance(code, CodeVersion) else None,
        **({"code_unread": code.reason} if isinstance(code, CodeUnread) else {}),
        "attempt": attempt,
        **({"launcher": launcher} if (launcher := launcher_id()) else {}),
    }
    texts = {
        "spec.xtrain": resolved_spec,
        "plan.json": json.dumps(to_json(plan), sort_keys=True),
        "metadata/config.full.yaml": to_yaml({entry.path: typed_value(entry.value) for entry in plan.provenance}),
        "metadata/config.canonical.yaml": to_yaml(plan.config),
        "metadata/config.diff.yaml": to_yaml(_differences(plan, before)),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    if isinstance(code, CodeVersion):
        dirty = None if code.diff is None else bool(code.diff)
        about = to_yaml({"sha": code.sha, "code_id": code.code_id, "dirty": dirty})
        contents |= {OF_GIT[0]: about.encode(), OF_GIT[1]: code.diff or b""}
    elif code is not None:
        contents[OF_GIT[0]] = to_yaml({"unread": code.reason}).encode()
    return {**contents, ENVIRONMENT: json.dumps(environment, indent=1).encode()}


def write(directory: Path, contents: dict[str, bytes], before: Before | None) -> None:
    """Replace what an earlier start has written, and keep that beside where it differs. Raises OSError.

    A start that is cut off in between leaves the environment of the one before, and all that this one had.
    """
    if before is not None:
        for name in (*contents, *(name for name in OF_GIT if name not in contents)):
            _set_aside(directory, name, contents.get(name), before.attempt)
    for name, content in contents.items():
        path = directory / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write(path, content)
    for name in OF_GIT:
        if name not in contents:
            durable.forget(directory / name)


def _set_aside(directory: Path, name: str, content: bytes | None, attempt: str) -> None:
    path, copy = directory / name, directory / "metadata" / "attempts" / attempt / name.removeprefix("metadata/")
    if not path.exists() or copy.exists() or (old := path.read_bytes()) == content:
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    durable.write(copy, old)


def _differences(plan: Plan, before: Before | None) -> dict[str, Any]:
    found: dict[str, Any] = {"from_defaults": {entry.path: typed_value(entry.value) for entry in non_defaults(plan)}}
    if before is not None:
        changes = changed_values(before.plan, plan) if before.plan is not None else ()
        values = {
            change.path: {
                "before": typed_value(change.before.value) if change.before else None,
                "now": typed_value(change.after.value) if change.after else None,
            }
            for change in changes
        }
        found["from_the_start_before"] = {"attempt": before.attempt, "values": values}
    return found


def typed_value(text: str) -> Any:
    """A value as a spec writes it: a number, a truth value or nothing, else the text."""
    words = {"true": True, "false": False, "none": None}
    return words[text] if text in words else json.loads(text) if _NUMBER.fullmatch(text) else text


def to_yaml(value: dict[str, Any]) -> str:
    """JSON values as YAML for people, and for programs of both versions of YAML: objects and lists as blocks,
    everything else as JSON has it."""
    return "".join(f"{line}\n" for line in _yaml_lines(value)) if value else "{}\n"


def _yaml_lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, item in value.items() for line in _yaml_entry(f"{_yaml_key(key)}:", item, "  ")]
    if isinstance(value, list | tuple) and value:
        return [line for item in value for line in _yaml_item(item)]
    return [_yaml_scalar(value)]


def _yaml_entry(head: str, item: Any, indent: str) -> list[str]:
    lines = _yaml_lines(item)
    if isinstance(item, dict | list | tuple) and item:
        return [head, *(f"{indent}{line}" for line in lines)]
    return [f"{head} {lines[0]}"]


def _yaml_item(item: Any) -> list[str]:
    first, *rest = _yaml_lines(item)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _yaml_key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _WORDS else _yaml_scalar(key)


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, str):
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    text = json.dumps(value)
    # Without a point YAML 1.1 reads 1e-08 as a text.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text
