"""docs/plan.md: its commands work, and it speaks of every part, category and option there is."""

import re
import shlex
from pathlib import Path

import attrs
import pytest

from xtrain.cli.main import main
from xtrain.plan.estimates import Memory
from xtrain.planner.review.costs import SHORT
from xtrain.planner.review.page import PARTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^xtrain (plan .*)$", PAGE, re.MULTILINE)


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("command", [each for each in COMMANDS if "--trace" not in each])
def test_its_commands_work(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out


def test_the_page_names_everything():
    assert len(COMMANDS) >= 8
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert [name for name in rows if name in PARTS] == list(PARTS)
    for field in attrs.fields(Memory):
        name = SHORT.get(field.name, field.name)
        assert name == "offloaded" or f"`{name}`" in PAGE, name
    for option in ("--full", "--part", "--rank", "--show", "--why", "--trace", "--out", "--json", "--format"):
        assert option in PAGE
