"""`xtrain docs`: the language reference, generated from the schema, and the pages of the documentation."""

import argparse
import re
import shutil
import sys

from xtrain.cli.verb import Refused, colored

HELP = "look up settings and words, and search the documentation"
DESCRIPTION = "Print the reference of the language or the part for a word, or search the pages of the documentation."
EPILOG = """\
examples:
  xtrain docs                             what there is
  xtrain docs parallel                    a block
  xtrain docs parallel.fsdp.reduce        a setting; `reduce` alone finds it too
  xtrain docs eval                        an action; also functions, units, events and fixed words
  xtrain docs learning rate               the sections of all pages that are about these words
  xtrain docs data.md#reading             a page, or a section of it
  xtrain docs parts.py                    your own functions in a file that `use` names
  xtrain docs X401                        the page of a code, as `xtrain explain` prints it
  xtrain docs --capabilities              which stack, axis and format each component works with
  xtrain docs --markdown > docs/reference.md
a program reads `xtrain schema`
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "topic",
        nargs="*",
        metavar="TOPIC",
        help="a block, a setting by its path, a code, a file, or words to search for",
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
    if (arguments.markdown or arguments.capabilities) and arguments.topic:
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

    width, color = shutil.get_terminal_size().columns, colored()
    text = ReferenceText(width=width, color=color)
    if not arguments.topic:
        sys.stdout.write(text.overview())
        return 0
    topic = " ".join(arguments.topic)
    if re.fullmatch(r"[XWxw][0-9oO]{3}", topic):
        from xtrain.cli.explain import explain

        return explain(topic)
    if topic.endswith(".py"):
        return _own_functions(topic)
    from xtrain.dsl.reference.guides import listing, page, search
    from xtrain.dsl.reference.text import find, near

    if re.search(r"\.md(#|$)", topic):
        if (written := page(topic)) is None:
            raise Refused(2, f"xtrain docs: there is no page `{topic}`; `xtrain docs index.md` lists all pages")
        sys.stdout.write(written)
        return 0
    sections = search(topic)
    if found := find(topic):
        sys.stdout.write(text.topics(found))
        if more := [section for section in sections if section.path != "docs/reference.md"][:3]:
            sys.stdout.write("\n" + listing(more, width=max(40, width), color=color))
        return 0
    if sections:
        sys.stdout.write(listing(sections, width=max(40, width), color=color))
        return 0
    meant = near(topic)
    hint = f"did you mean `xtrain docs {meant}`?" if meant else "`xtrain docs` lists all topics"
    raise Refused(2, f"xtrain docs: there is no topic `{topic}`; {hint}")


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
