"""What commands and ranks load as they start, in counts: times depend on the machine, counts do not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
COUNT = '''
import json, sys
start = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names

def counts():
    """Counts of the loaded modules of xtrain and of the classes that attrs generates methods for; other packages."""
    roots = {name: name.partition(".")[0] for name in sys.modules}
    own = [sys.modules[name] for name, root in roots.items() if root == "xtrain"]
    classes = [c for m in own for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]
    return {
        "modules": len(own),
        "planner": sum(m.__name__.startswith("xtrain.planner") for m in own),
        "plan": sum(m.__name__.startswith("xtrain.plan.") for m in own),
        "classes": sum(isinstance(vars(c).get("__attrs_attrs__"), tuple) for c in classes),
        "packages": sorted(set(roots.values()) - start - {"xtrain"}),
    }
'''
COMMAND = f"""{COUNT}
from xtrain.cli.main import main
assert main(sys.argv[1:]) == 0
print(json.dumps(counts()), file=sys.stderr)
"""
HOOK = f"""{COUNT}
from xtrain import hook

@hook("at_end")
def loaded(run):
    with open("loaded.json", "w") as file:
        json.dump(counts(), file)
"""

TINY = """
use "probe.py"
experiment tiny { budget = 2 steps }
model qwen3 { dim = 32, layers = 1, heads = 2, kv_heads = 1, ffn = 64 }
tokenizer bytes
dataset web { source = synthetic(documents = 32, length = 64) }
batch { sequence = 32 }
optimizer adamw { lr = 1e-3 }
hook loaded
"""


PACKAGES = {"attr", "attrs", "cattrs", "typing_extensions"}


# The limits are what was loaded when they were written: they may only fall.
@pytest.mark.parametrize(("command", "spec", "limits"), [
    ("check", "quickstart", {"modules": 179, "classes": 137}),
    ("check", "moe_cpu", {"modules": 181, "classes": 132}),
    ("plan", "quickstart", {"modules": 228, "classes": 196}),
    ("plan", "llama_405b_16k", {"modules": 229, "classes": 200}),
    ("plan", "moe_16k", {"modules": 229, "classes": 202}),
])  # fmt: skip
def test_commands_load_what_the_spec_names(command, spec, limits):
    path = str(SPECS / f"{spec}.xtrain")
    done = subprocess.run([sys.executable, "-c", COMMAND, command, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stderr.splitlines()[-1])
    assert set(loaded.pop("packages")) <= PACKAGES
    assert not {name: loaded[name] for name, limit in limits.items() if loaded[name] > limit}


@pytest.mark.distributed
def test_a_rank_loads_what_the_plan_names(tmp_path):
    (tmp_path / "probe.py").write_text(HOOK)
    (tmp_path / "tiny.xtrain").write_text(TINY)
    command = [sys.executable, "-m", "xtrain", "run", "tiny.xtrain"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads((tmp_path / "loaded.json").read_text())
    limits = {"modules": 271, "planner": 1, "plan": 25, "classes": 511}
    assert not {name: loaded[name] for name, limit in limits.items() if loaded[name] > limit}
