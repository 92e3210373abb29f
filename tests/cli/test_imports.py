"""What the light verbs load, the drawing of who imports whom, and names of classes."""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from rooms import ROOMS
from structure import PAGE, drawing, page_with

from xtrain.cli.main import VERBS

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numba", "textual", "tokenizers")
# What only reads specs and makes plans needs even less.
HEAVIER = (*HEAVY, "numpy", "msgspec")

# Forks once for each command line, so that each finds nothing loaded but what is common to all; answers in JSON.
PROBE = """
import io, json, os, sys, traceback
import xtrain.dsl.load, xtrain.planner.compile
from xtrain.cli.main import main

common = sorted(sys.modules)
answers = []
for arguments in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        sys.stdout = sys.stderr = said = io.StringIO()
        try:
            main(arguments)
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc(file=said)
        with os.fdopen(writing, "w") as answer:
            json.dump([sorted(sys.modules), said.getvalue()], answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        answers.append(json.load(answer))
    os.wait()
json.dump([common, answers], sys.stdout)
"""
COMMANDS = [
    *[(verb, "--help") for verb in VERBS],
    ("--help",),
    ("check", "specs/quickstart.xtrain"),
    ("plan", "specs/quickstart.xtrain"),
    ("plan", "specs/chat.xtrain"),  # reads Python of the user, and imports none
    ("plan", "specs/llama_405b_16k.xtrain", "--json"),
    ("fmt", "--check", "specs/quickstart.xtrain"),
    ("explain", "X203"),
    ("check", "--fix", "--diff", "tests/dsl/gallery/five_mistakes.xtrain"),
    ("docs", "parallel.fsdp.reduce"),
    ("docs", "--markdown"),
    ("schema",),
    ("schema", "specs/quickstart.xtrain"),
    ("init", "--list"),
    ("watch", "nowhere"),
    ("control", "nowhere", "save"),
    ("run", "specs/qwen3_moe_plan.xtrain"),  # refused before anything heavy is loaded
]


def test_light_verbs_load_nothing_heavy():
    command = [sys.executable, "-c", PROBE, json.dumps(COMMANDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    common, answers = json.loads(done.stdout)
    assert not {*HEAVIER} & {*common}
    wrong = {}
    for arguments, (loaded, said) in zip(COMMANDS, answers, strict=True):
        assert "Traceback" not in said, said
        assert said or arguments[0] == "fmt", arguments  # which says nothing of what is formatted
        heavy = HEAVIER if arguments[0] in ("check", "fmt", "plan") else HEAVY
        if found := {*heavy} & {*loaded}:
            wrong[" ".join(arguments)] = found
    assert not wrong


def test_the_page_draws_the_folders_as_they_are():
    assert page_with(drawing()) == PAGE.read_text(), "run `python tests/support/structure.py --write`"


def test_no_two_classes_share_a_name():
    names = Counter[str]()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            names.update(re.findall(r"^ *class (\w+)[(:\[]", path.read_text(), re.MULTILINE))
    assert len(names) > 800 and [name for name, count in names.items() if count > 1] == []


def test_the_linter_lists_every_module_on_the_http_side_of_the_server():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (listed,) = (each["source_modules"] for each in contracts if each["name"].startswith("The HTTP side"))
    there = [f"xtrain.server.{path.stem}" for path in sorted((ROOT / "server").glob("*.py")) if path.stem != "__init__"]
    assert sorted(listed) == there
