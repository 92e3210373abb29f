"""`xtrain import FILE`: a configuration of another trainer as a spec."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.cli.verb import Refused, ranks, report

if TYPE_CHECKING:
    from xtrain.dsl.importing.config_file import ConfigFile
    from xtrain.dsl.importing.draft import Draft

HELP = "turn a configuration of another trainer into a spec"
DESCRIPTION = (
    "Read a configuration of another trainer and write the spec that computes the same. Every key is translated, the "
    "same as xtrain's default, without meaning here, or not expressible; the spec's comments say which, and why."
)
EPILOG = """\
examples:
  xtrain import lora.yml                         prints the spec
  xtrain import lora.yml --to lora.xtrain
  xtrain import lora.yml --partial --to lora.xtrain   (also if some keys are not expressible)
exit status: 0 every key has a place, 2 the file cannot be read or the spec has mistakes, 3 the spec cannot be written,
4 some keys are not expressible; without --partial no spec is then written
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("file", metavar="FILE", help="a configuration: YAML, JSON or TOML")
    parser.add_argument("--to", metavar="SPEC", help="write the spec here; default: standard output")
    parser.add_argument("--from", dest="format", metavar="FORMAT", help="the format; default: as its keys say")
    parser.add_argument(
        "--partial", action="store_true", help="write the spec without the keys that xtrain cannot express"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing spec")
    parser.add_argument("--world", type=ranks, metavar="N", help="plan for N ranks")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain import`. Exit status: see EPILOG."""
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText
    from xtrain.dsl.importing.config_file import UnreadableConfig, read_config
    from xtrain.dsl.importing.importer import IMPORTERS
    from xtrain.dsl.syntax.format import format_source

    diagnostics = Diagnostics()
    try:
        config = read_config(arguments.file)
    except UnreadableConfig as problem:
        diagnostics.error("X750", str(problem), problem.span, hint=problem.hint)
        report(diagnostics)
        return 2
    importer = IMPORTERS[_format(arguments, config)]
    draft = importer().imported(config)  # pyright: ignore[reportCallIssue]
    text = format_source(SourceText("imported.xtrain", draft.spec()))
    missing = _report_missing(draft, partial=arguments.partial)
    if missing and not arguments.partial:
        return 4
    target = arguments.to or f"{config.path.stem}.xtrain"
    if arguments.to is None:
        print(text, end="")
    else:
        _write(Path(arguments.to), text, force=arguments.force)
    return _planned(target, text, draft, arguments.world, _ABSENT if importer.whole else (*_ABSENT, *_LEFT_OUT))


def _format(arguments: argparse.Namespace, config: "ConfigFile") -> str:
    from xtrain.dsl.diagnostics.suggest import did_you_mean
    from xtrain.dsl.importing.importer import IMPORTERS, candidates

    known = ", ".join(IMPORTERS)
    if arguments.format is not None:
        if arguments.format not in IMPORTERS:
            hint = did_you_mean(arguments.format, IMPORTERS) or f"existing formats: {known}"
            raise Refused(2, f"xtrain import: there is no format `{arguments.format}`; {hint}")
        return arguments.format
    found = candidates(config)
    if not found:
        raise Refused(
            2, f"error[X751]: {config.path} is not a configuration of a known trainer; name one: --from {known}"
        )
    if len(found) > 1:
        raise Refused(2, f"error[X751]: {config.path} may be of {' or '.join(found)}; name one: --from {found[0]}")
    return found[0]


def _report_missing(draft: "Draft", *, partial: bool) -> int:
    """Report the keys that xtrain cannot express, and how many keys each class has; return the number of the former."""
    from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics
    from xtrain.dsl.importing.accounts import Fate

    diagnostics = Diagnostics()
    missing = [account for account in draft.accounts() if account.fate is Fate.MISSING]
    for account in missing:
        message = f"`{account.key} = {account.value}` of {draft.trainer} is not expressible: {account.why}"
        code, severity = ("W752", "warning") if partial else ("X752", "error")
        diagnostics.add(Diagnostic(severity=severity, code=code, message=message, span=account.span))
    report(diagnostics)
    counts = draft.counts()
    said = ", ".join(f"{counts[fate]} {fate}" for fate in Fate if counts[fate])
    print(f"{draft.config.path} ({draft.trainer}): {said}", file=sys.stderr)
    if missing and not partial:
        print("no spec is written; `--partial` writes one without these keys", file=sys.stderr)
    return len(missing)


def _write(path: Path, text: str, *, force: bool) -> None:
    from xtrain.cli.rewrite import write_new

    write_new(path, text, "import", force=force)
    print(f"Wrote {path}", file=sys.stderr)


# Folders and files that may be on other machines.
_ABSENT = ("X520", "X505", "W505", "W501")
# Blocks and settings that a file without model and data leaves to the user.
_LEFT_OUT = ("X204", "X205", "X502")


def _planned(target: str, text: str, draft: "Draft", world: int | None, expected: tuple[str, ...]) -> int:
    """Check and plan the spec; report mistakes. What is not on this machine is reported, and is no failure."""
    from xtrain.dsl.diagnostics.diagnostic import printable
    from xtrain.planner.load import plan_from_text

    compiled = plan_from_text(text, target, (), world or (draft.ranks if draft.ranks > 1 else None))
    report(compiled.diagnostics)
    wrong = [error for error in compiled.diagnostics.errors if error.code not in expected]
    shown = shlex.quote(target)
    if compiled.plan is not None:
        print(f"The spec has a plan for {compiled.plan.mesh.world_size} ranks: `xtrain plan {shown}`", file=sys.stderr)
    elif not wrong:
        print(f"The rest is checked once the model and the tokenizer are there: `xtrain plan {shown}`", file=sys.stderr)
        for command in dict.fromkeys(draft.downloads):
            print(f"  {printable(command)}", file=sys.stderr)
    return 2 if wrong else 0
