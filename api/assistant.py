"""Tools of `xtrain mcp` for assistants (Model Context Protocol): look at specs and runs, and start approved plans.

Tools run commands of xtrain in a process of their own that executes no code of a spec's author. They take specs, plans
and runs below one folder, and read the files that a spec names, wherever they are. Only `run` starts something, and
only a plan that a person has approved.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from xtrain.api.runs import open_run
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.jobs.approvals import approved
from xtrain.tui.model.find import ROOT
from xtrain.version import __version__

INSTRUCTIONS: Final = (
    "xtrain trains language models from specs (*.xtrain). Write or edit a spec, `check` it, `plan` it, and show the "
    "plan to the person. `docs` searches the documentation, `explain` explains a code of a diagnostic. `run` starts a "
    "plan only after the person has run `xtrain approve` for it in a terminal: ask for that."
)
SECONDS: Final = 300
MOST_TEXT: Final = 60_000  # characters of an answer
MOST_RECORDS: Final = 1_000
# Runs one command without code of the author of a spec.
COMMAND: Final = (
    "import sys\n"
    "from xtrain.cli.main import main\n"
    "from xtrain.dsl.schema.model import executing_nothing\n"
    "with executing_nothing():\n"
    "    sys.exit(main(sys.argv[1:]))\n"
)


def make_server(folder: Path, signers: Path | None = None) -> MCPServer:
    """Return the server for the specs and runs below `folder`. signers: file of allowed signers of approvals; None:
    approvals without a signature count."""
    server = MCPServer("xtrain", instructions=INSTRUCTIONS, version=__version__)
    folder = folder.resolve()

    def inside(text: str) -> str:
        if "\0" in text or text.startswith("-") or not (folder / text).resolve().is_relative_to(folder):
            raise ToolError(f"{text} is not below {folder}; name a file or a run there")
        return text

    def xtrain(*arguments: str, accept: tuple[int, ...] = (0,), execute: bool = False) -> str:
        """Return the output of a command. Raises ToolError for an exit code that is not accepted."""
        if any("\0" in each for each in arguments):
            raise ToolError(f"an argument of xtrain {arguments[0]} has a NUL character; leave it out")
        start = ("-m", "xtrain") if execute else ("-c", COMMAND)
        environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *start, *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ToolError(f"xtrain {arguments[0]} took more than {SECONDS} s; ask for less") from None
        text = "\n".join(filter(None, (done.stdout.strip(), done.stderr.strip())))
        if done.returncode not in accept:
            raise ToolError(_cut(text) or f"xtrain {arguments[0]} ended with exit code {done.returncode}")
        return _cut(text)

    def chosen(settings: list[str], world: int | None) -> list[str]:
        return [f"--set={each}" for each in settings] + ([] if world is None else [f"--world={world}"])

    @server.tool()
    def check(spec: str, settings: list[str] | None = None) -> str:
        """Check a spec: every error and warning with code, place and correction. settings: `path.to.setting=value`."""
        return xtrain("check", *chosen(settings or [], None), inside(spec), accept=(0, 2))

    @server.tool()
    def plan(spec: str, settings: list[str] | None = None, world: int | None = None, part: str | None = None) -> str:
        """Plan a spec: its plan id, memory, time, mesh, checks. world: number of ranks. part: one part of the page in
        full, such as memory, values, training or checks."""
        parts = [] if part is None else [f"--part={part}"]
        return xtrain("plan", *chosen(settings or [], world), *parts, inside(spec))

    @server.tool()
    def diff(a: str, b: str, settings: list[str] | None = None) -> str:
        """Compare two specs, saved plans or runs: values, memory, time, and whether a run of a can be resumed as b."""
        return xtrain("diff", *chosen(settings or [], None), inside(a), inside(b))

    @server.tool()
    def explain(code: str) -> str:
        """Explain the code of a diagnostic, such as X401."""
        return xtrain("explain", "--", code)

    @server.tool()
    def docs(words: str) -> str:
        """Look up a setting (`optimizer.lr`), a block, a page (`data.md#reading`), or search for words."""
        return xtrain("docs", "--", *words.split())

    @server.tool()
    def runs(root: str = ROOT) -> str:
        """List runs as JSON lines, newest first: name, status, steps, loss."""
        return xtrain("runs", "--json", *([] if root == ROOT else [inside(root)]), accept=(0, 3))

    @server.tool()
    def metrics(run: str, keys: list[str] | None = None, last: int = 50) -> list[dict[str, Any]]:
        """Return the last logged steps of a run, oldest first. keys: such as loss or eval/NAME/loss; step is always
        there."""
        try:
            found = open_run(folder / inside(run)) if (folder / run).exists() else open_run(run)
        except FileNotFoundError as missing:
            raise ToolError(str(missing)) from None
        inside(str(found.directory.resolve()))
        records = found.metrics()[-min(max(last, 1), MOST_RECORDS) :]
        return [{key: each[key] for key in each if keys is None or key in ("step", *keys)} for each in records]

    @server.tool()
    def run(plan_id: str, root: str = ROOT) -> str:
        """Start a plan that a person has approved with `xtrain approve`, in the background or by its launcher. root: of
        the workspace."""
        try:
            _, file = approved(folder / inside(root), plan_id, signers)
        except EnvironmentFault as fault:
            raise ToolError(f"{fault.code}: {fault}") from None
        demand = "--approved" if signers is None else f"--approved={signers}"
        on = [] if _has_launcher(file) else ["--on=local"]
        return xtrain("launch", str(file.relative_to(folder)), *on, demand, execute=True)

    return server


def _has_launcher(plan_file: Path) -> bool:
    from xtrain.plan.serialise import load_plan

    return "launcher" in load_plan(plan_file).launch


def _cut(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]}\n… {len(text) - MOST_TEXT:,} characters more; ask for one part"
