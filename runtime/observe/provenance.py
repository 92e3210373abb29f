"""Provenance of a run in its directory: plan, settings, code and machine of the last start, and earlier starts.

The code is identified by the source files of the git checkout that holds the spec.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from hashlib import blake2b, sha1, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.plan.serialise import PlanError, load_plan, source_fingerprint, to_json
from xtrain.plan.views import changed_values, non_defaults
from xtrain.regular_files import read_json
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.process import launcher_id

# Endings of files that a Python program imports or builds its extensions from.
_ENDINGS: Final = (
    b".py", b".pyi", b".pyx", b".pxd", b".c", b".cc", b".cpp", b".cxx", b".h", b".hh", b".hpp", b".cu", b".cuh", b".rs",
)  # fmt: skip
_SECONDS: Final = 20
_OPTIONS: Final = (
    "--no-pager",
    "--no-optional-locks",
    *(
        word
        for setting in ("core.quotePath=false", "core.fsmonitor=false", "color.ui=false")
        for word in ("-c", setting)
    ),
)
# Options that make a patch the same for every user: no prefixes, colors, renames or external programs.
_PATCH: Final = (
    "-c", "diff.suppressBlankEmpty=false", "diff", "--patch", "--binary", "--full-index", "--no-color", "--no-ext-diff",
    "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3", "--inter-hunk-context=0",
    "--diff-algorithm=myers", "--indent-heuristic", "--ignore-submodules", "--no-relative", "-O/dev/null",
)  # fmt: skip


@frozen
class CodeVersion:
    """State of a checkout.

    sha: the commit, None before the first one. code_id: eight digits of the content of all source files. diff: of all
    tracked files but specs against the commit, None if it could not be read.
    """

    sha: str | None
    code_id: str
    diff: bytes | None


@frozen
class CodeUnread:
    """A checkout that git could not read. reason: in words, for people."""

    reason: str


class _GitFailed(Exception):
    """Git is missing, takes too long, or fails; the text says which."""


def read_code(folder: Path) -> CodeVersion | CodeUnread | None:
    """Return the code of the checkout that holds `folder`; None without a checkout."""
    folder = folder.resolve()
    root = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    if root is None:
        return None
    try:
        return CodeVersion(sha=_commit(root), code_id=_digest(root), diff=_diff(root))
    except _GitFailed as error:
        return CodeUnread(str(error))


def _commit(root: Path) -> str | None:
    sha = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", failing=1)
    return sha.decode("ascii", "replace").strip() or None


def _digest(root: Path) -> str:
    """Return eight digits of a digest of the source files' paths and contents. No filter of the checkout runs."""
    digest = blake2b(digest_size=4)
    changed = set(_git(root, "diff-files", "-z", "--name-only", "--no-ext-diff", "--ignore-submodules").split(b"\0"))
    for entry in _git(root, "ls-files", "-z", "--stage").split(b"\0"):
        about, _, path = entry.partition(b"\t")
        if not path.endswith(_ENDINGS):
            continue
        stored = about.split()[1]
        if path in changed:
            stored = _blob(root / os.fsdecode(path), len(stored))
        if stored:
            digest.update(b"%d %s %s\0" % (len(path), path, stored))
    return digest.hexdigest()


def _blob(path: Path, digits: int) -> bytes:
    """Return git's object name of a file's content, 40 or 64 digits; empty if there is no file."""
    try:
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
    except (OSError, ValueError):
        return b""
    kind = sha1 if digits == 40 else sha256
    return kind(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest().encode()


def _diff(root: Path) -> bytes | None:
    """Return the changes since the commit. Leaves out a checkout of another user, because its filters would run."""
    try:
        return _git(root, *_PATCH, "HEAD", "--", ".", ":(exclude,top,glob)**/*.xtrain", trusting=False)
    except _GitFailed:
        return None


def _git(root: Path, *arguments: str, failing: int = 0, trusting: bool = True) -> bytes:
    """Return the output of a git command. failing: an exit code that is a valid answer; trusting: read a checkout that
    belongs to another user. Raises _GitFailed."""
    trust = ("-c", f"safe.directory={root}") if trusting else ()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = {**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": str(root.parent)}
    if trusting:  # ignore the user's settings, which include the checkouts that the user trusts
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *_OPTIONS, *trust, "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, env=environment, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise _GitFailed("`git` is not installed") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitFailed(f"`git` cannot be run: {error}") from error
    if done.returncode not in (0, failing):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise _GitFailed(f"git {arguments[0]}: {lines[0]}")
    return done.stdout


ENVIRONMENT: Final = "metadata/environment.json"
OF_GIT: Final = ("metadata/git.yaml", "metadata/git.diff")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# Words that YAML 1.1 reads as other types than text.
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"))
_UNPRINTABLE = re.compile("[^\t\n -~\u00a0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?")


@frozen(kw_only=True)
class Before:
    """The last start of a run. plan: None if another version of xtrain wrote it."""

    attempt: str
    environment: dict[str, Any]
    plan: Plan | None


def read_before(directory: Path) -> Before | None:
    """Return the last start; None if the run has never been started."""
    environment = _environment(directory)
    if not environment:
        return None
    try:
        plan = plan_in(directory)
    except PlanError:
        plan = None
    return Before(attempt=environment.get("attempt", "first"), environment=environment, plan=plan)


def _environment(directory: Path) -> dict[str, Any]:
    try:
        content = read_json(directory / ENVIRONMENT)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@cache
def versions() -> dict[str, str]:
    """Return the versions that determine results; `source` is a fingerprint of xtrain's own files."""
    return {
        "xtrain": version("xtrain"),
        "source": source_fingerprint(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def written_by(directory: Path) -> dict[str, Any]:
    """Return the versions and the code identity that a checkpoint of this run directory records."""
    code_id = _environment(directory).get("code_id")
    return {**versions(), **({"code_id": code_id} if code_id else {})}


def started_in(directory: Path) -> Path:
    """Return the working folder of the last start, which the paths of its plan are relative to."""
    return Path(_environment(directory).get("folder", ""))


def launcher_before(directory: Path) -> str:
    """Return the `launcher_id` of the last start; empty for `xtrain run`."""
    return str(_environment(directory).get("launcher", ""))


def describe(
    plan: Plan, resolved_spec: str, code: CodeVersion | CodeUnread | None, attempt: str, before: Before | None
) -> dict[str, bytes]:
    """Return name in the run directory → content, in the order in which they must be written."""
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
    """Replace the files of an earlier start, keeping copies of those that differ. Raises OSError.

    The environment is written last: a start that is interrupted keeps the earlier one's.
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
    content: dict[str, Any] = {"from_defaults": {entry.path: typed_value(entry.value) for entry in non_defaults(plan)}}
    if before is not None:
        changes = changed_values(before.plan, plan) if before.plan is not None else ()
        values = {
            change.path: {
                "before": typed_value(change.before.value) if change.before else None,
                "now": typed_value(change.after.value) if change.after else None,
            }
            for change in changes
        }
        content["from_the_start_before"] = {"attempt": before.attempt, "values": values}
    return content


def typed_value(text: str) -> Any:
    """Return a value as a spec writes it: a number, a boolean or None, else the text."""
    words = {"true": True, "false": False, "none": None}
    return words[text] if text in words else json.loads(text) if _NUMBER.fullmatch(text) else text


def to_yaml(value: dict[str, Any]) -> str:
    """Return JSON values as YAML, valid in both versions of YAML: objects and lists as blocks, everything else as in
    JSON."""
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
        return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
    text = json.dumps(value)
    # Without a point, YAML 1.1 reads 1e-08 as text.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


PATIENCE: Final = 60.0  # seconds: file systems of several machines may show a new file late


def plan_in(directory: Path) -> Plan:
    """Return the plan that the launcher wrote to a run directory. Raises PlanError."""
    return load_plan(directory / "plan.json")


def planned(directory: Path, plan_id: str, patience: float | None = None) -> Plan:
    """Return the plan on any machine, as soon as its file system shows what the first rank wrote.

    Raises EnvironmentFault if it does not within `patience` seconds; None: PATIENCE.
    """
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    while True:
        with suppress(PlanError):
            if (plan := plan_in(directory)).id == plan_id:
                return plan
        if time.monotonic() > deadline:
            where = f"{directory}, seen from {Path.cwd()} on {socket.gethostname()},"
            raise EnvironmentFault(
                "X706", f"{where} does not contain the plan of this start: all machines need a shared run directory"
            )
        time.sleep(0.2)
