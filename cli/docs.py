"""`xtrain docs`: the language reference, generated from the schema."""

import argparse
import re
import shutil
import sys

from xtrain.cli.verb import Refused, colored

HELP = "look up blocks, settings, units and words"
DESCRIPTION = "Print the reference of the language, or the part for a word."
EPILOG = """\
examples:
  xtrain docs                             what there is
  xtrain docs parallel                    a block
  xtrain docs parallel.fsdp.reduce        a setting; `reduce` alone finds it too
  xtrain docs eval                        an action; also functions, units, events and fixed words
  xtrain docs parts.py                    your own functions in a file that `use` names
  xtrain docs X401                        the page of a code, as `xtrain explain` prints it
  xtrain docs --capabilities              which stack, axis and format each component works with
  xtrain docs --markdown > docs/reference.md
a program reads `xtrain schema`
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "topic", nargs="?", metavar="TOPIC", help="a block, a setting by its path, a word, a code, or a file"
    )
    parser.add_argument("--markdown", action="store_true", help="print the whole reference as Markdown")
    parser.add_argument(
        "--capabilities",
        action="store_true",
        help="print a table: which stack, axis and number format each component and choice supports",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain docs`. Exit status: 0 done, 2 unknown topic."""
    whole = "--markdown" if arguments.markdown else "--capabilities"
    if (arguments.markdown or arguments.capabilities) and arguments.topic is not None:
        raise Refused(2, f"xtrain docs: {whole} prints the whole reference and takes no topic")
    if arguments.capabilities:
        from xtrain.planner.review.capabilities import text as capabilities

        sys.stdout.write(capabilities())
        return 0
    if arguments.markdown:
        from xtrain.dsl.reference.text import markdown

        sys.stdout.write(markdown())
        return 0
    from xtrain.dsl.reference.text import ReferenceText

    text = ReferenceText(width=shutil.get_terminal_size().columns, color=colored())
    if arguments.topic is None:
        sys.stdout.write(text.overview())
        return 0
    if re.fullmatch(r"[XWxw][0-9oO]{3}", arguments.topic):
        from xtrain.cli.explain import explain

        return explain(arguments.topic)
    if arguments.topic.endswith(".py"):
        return _own_functions(arguments.topic)
    from xtrain.dsl.reference.text import find, near

    found = find(arguments.topic)
    if not found:
        meant = near(arguments.topic)
        hint = f"did you mean `xtrain docs {meant}`?" if meant else "`xtrain docs` lists all topics"
        raise Refused(2, f"xtrain docs: there is no topic `{arguments.topic}`; {hint}")
    sys.stdout.write(text.topics(found))
    return 0


def _own_functions(path: str) -> int:
    from xtrain.dsl.diagnostics.diagnostic import Diagnostics
    from xtrain.dsl.reference.text import own_functions

    wrong = Diagnostics()
    try:
        sys.stdout.write(own_functions(path, wrong))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise Refused(2, f"xtrain docs: cannot read `{path}`: {reason}") from None
    if wrong.has_errors:
        raise Refused(2, wrong.render())
    return 0
