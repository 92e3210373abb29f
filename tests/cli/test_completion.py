"""What shells complete with the scripts of `xtrain completion`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from xtrain.cli.completion import SHELLS, script
from xtrain.cli.main import VERBS
from xtrain.dsl.diagnostics.codes import CODES

ROOT = Path(__file__).parents[2]
# Sources a script, completes the words behind it with its function, and prints what it offers, a line each.
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$(complete -p xtrain | sed 's/.*-F \\([^ ]*\\).*/\\1/')" xtrain "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        (folder / shell).write_text(script(shell), encoding="utf-8")
    return {shell: folder / shell for shell in SHELLS}


@pytest.mark.parametrize(("words", "expected"), [
    ("", set(VERBS)),
    ("ch", {"check", "checkpoint"}),
    ("check --", {"--fix", "--diff", "--json", "--set"}),
    ("check specs/qui", {"specs/quickstart.xtrain"}),
    ("run specs/qui", {"specs/quickstart.xtrain"}),
    ("serve specs/ser", {"specs/serve_cpu.xtrain"}),
    ("fit-law spe", {"specs"}),
    ("calibrate spe", {"specs"}),
    ("plan --why optimizer.cl", {"optimizer.clip"}),
    ("check --set optimizer.cl", {"optimizer.clip", "optimizer.clip_spikes", "optimizer.clip_value"}),
    ("plan --format ", {"text", "json", "dot"}),
    ("data ", {"build", "show", "stats", "teach"}),
    ("data build --", {"--dataset", "--set"}),
    ("explain X20", {code for code in CODES if code.startswith("X20")}),
    ("docs parallel.", {"parallel.fsdp", "parallel.tp.sequence"}),
    ("completion ", set(SHELLS)),
])  # fmt: skip
def test_bash_completes(scripts: dict[str, Path], words: str, expected: set[str]):
    command = ["bash", "-c", BASH, "bash", str(scripts["bash"]), "xtrain", *words.split(" ")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert expected <= found, (done.stdout, done.stderr)
    begun = words.rpartition(" ")[2]
    assert all(each.startswith(begun) for each in found)


def test_specs_are_offered_and_other_files_are_not(scripts: dict[str, Path]):
    command = ["bash", "-c", BASH, "bash", str(scripts["bash"]), "xtrain", "check", "specs/"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "specs/chat.xtrain" in found and not any(each.endswith(".py") for each in found)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_can_be_read_by_its_shell(scripts: dict[str, Path], shell: str):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(scripts[shell])], check=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_is_in_every_script(scripts: dict[str, Path], shell: str):
    text = scripts[shell].read_text(encoding="utf-8")
    assert [verb for verb in VERBS if not re.search(rf"(?<![\w-]){verb}(?![\w-])", text)] == []
    assert "optimizer.lr" in text and "*.xtrain" in text
