"""Pages and fragments of HTML from the content of reports.

All texts come from files that others may have written: the templates escape each, and `printable` removes what HTML
does not allow.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from xtrain.text.units import printable
from xtrain.tui.curves.picture import STYLE
from xtrain.tui.report.content import Report
from xtrain.version import __version__

MARK: Final = "<!doctype html><!-- xtrain report -->"
"""Beginning of a page."""


def page(report: Report) -> str:
    """Return a report as a page that needs no other file and no network."""
    text = _environment().get_template("page.html").render(report=report)
    return MARK + text.removeprefix("<!doctype html>")


def fragment(report: Report) -> str:
    """Return the main parts of a report for a page of others, such as a notebook: without scripts."""
    return _environment().from_string(_FRAGMENT).render(report=report)


def titled(title: str, facts: Any, text: str) -> str:
    """Return a fragment with a title, facts as pairs, and a page of text."""
    return _environment().from_string(_TITLED).render(title=title, facts=facts, text=text)


_HEAD: Final = (
    '{% import "parts.html" as parts %}<div class="xtrain-report"><style>{{ plots }}{% include "report.css" %}</style>'
)
_FRAGMENT: Final = (
    _HEAD + "{{ parts.runs(report.runs, report.columns) }}{% for topic, charts in report.charts[:1] %}"
    "{{ parts.charts(charts[:6], false) }}{% endfor %}</div>"
)
_TITLED: Final = _HEAD + "<p><b>{{ title }}</b></p>{{ parts.facts(facts) }}<pre>{{ text }}</pre></div>"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain,
    )
    environment.globals |= {"plots": Markup(STYLE), "version": __version__}
    return environment


def _plain(value: Any) -> Any:
    """Return a text without control characters, and nothing for None."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else printable(value) if isinstance(value, str) else value
