"""Sweeps without training: trials that write at once what a run would have written."""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

from attrs import define, evolve, field
from topologies import Topology
from trials import Laboratory, Trial

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.sweep import Point
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import load_plan
from xtrain.planner.compile import Compiled
from xtrain.planner.compile_sweep import SweepPlan, Trials, compile_sweep
from xtrain.records.events import FailureEvent
from xtrain.records.lines import Event
from xtrain.runtime.base.json_lines import JsonLinesFile
from xtrain.runtime.jobs.sweep import SweepDriver
from xtrain.runtime.jobs.trials import TrialStart

# Sweeps without training ----------------------------------------------------------------------------------------------


SPEC = """
experiment tiny {{ budget = {steps} steps }}
model qwen3 {{ dim = 16, layers = 1, heads = 2, ffn = 32 }}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl"), holdout = 10% }}
batch {{ sequence = 32, rows = 4, micro = 4 }}
optimizer adamw {{ lr = 3e-3 }}
launch {{ device = cpu, threads = 1 }}
parallel {{ fsdp 1 }}
every 1 step log
every 1 step eval lines {{ batches = 2 }}
every {save} steps checkpoint
sweep {{
  optimizer.lr in log(1e-4, 1e-1)
  model.ffn in [32, 64]
  objective = eval.lines.loss
  {more}
}}
"""
KEY = "eval/lines/loss"


def write_spec(folder: Path, more: str, *, steps: int = 18, save: int = 100) -> str:
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} " + "abc " * (i % 7)}) + "\n" for i in range(200))
    )
    (folder / "sweep.xtrain").write_text(SPEC.format(more=more, steps=steps, save=save))
    return "sweep.xtrain"


def loss_of(plan, step: int) -> float:
    """A loss that falls with the steps, towards an end that is lowest for lr 0.01."""
    lr = plan.node("setup.optimizer").args["lr"]
    return 1.0 + abs(math.log10(lr) + 2) + 0.001 * (plan.architecture.ffn == 32) + 3.0 / step


@define
class WrittenTrial:
    """A run that has taken place; it is seen to have ended after so many looks. died: it was killed halfway."""

    code: int
    looks: int

    def poll(self) -> int | None:
        self.looks -= 1
        return None if self.looks >= 0 else self.code

    def stop(self) -> None:
        self.looks = 0


def directory_of(found: Plan) -> Path:
    return Path(found.workspace["root"]) / found.workspace["lineage"] / found.workspace["run"]


@define
class WrittenTrials:
    """A `TrialLauncher`. chance: of a trial to die without getting further; steps: all that were trained, by trial."""

    random: Random
    chance: float = 0.0
    steps: dict[str, int] = field(factory=dict)
    slots: list[int] = field(factory=list)

    def start(self, trials: Sequence[TrialStart]) -> list[WrittenTrial]:
        return [self.written(load_plan(each.file), each.slot) for each in trials]

    def still_going(self, directories: Sequence[Path]) -> list[None]:
        return [None] * len(directories)

    def written(self, found: Plan, slot: int) -> WrittenTrial:
        looks = self.random.randrange(6)
        self.slots.append(slot)
        if self.random.random() < self.chance:
            return WrittenTrial(-9, looks)
        directory = directory_of(found)
        directory.mkdir(parents=True, exist_ok=True)
        metrics, events = directory / "metrics.jsonl", directory / "events.jsonl"
        before = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        last = found.timeline.stop_at or found.timeline.steps
        with metrics.open("a") as file:
            for step in range(before + 1, last + 1):
                row = {"step": step, "time": 0.0, "tokens": step * 128, KEY: loss_of(found, step)}
                file.write(json.dumps(row) + "\n")
        self.steps[directory.name] = self.steps.get(directory.name, 0) + max(last - before, 0)
        whole = last == found.timeline.steps
        end = {"step": last, "time": 0.0, "event": "run_end", "status": "done" if whole else "stopped"}
        with events.open("a") as file:
            file.write(json.dumps(end) + "\n")
        return WrittenTrial(0 if whole else 75, looks)


@define
class FailingTrials(WrittenTrials):
    """A `TrialLauncher` whose trials all fail. agreed: over something that all ranks found alike."""

    agreed: bool = False

    def written(self, found: Plan, slot: int) -> WrittenTrial:
        self.slots.append(slot)
        lines = JsonLinesFile(directory_of(found) / "events.jsonl")
        lines.write(
            FailureEvent(step=3, rank=0, error="loss nan", exit_code=1, traceback="", agreed=self.agreed, lost=False)
        )
        lines.close()
        return WrittenTrial(1, 0)


class CachedTrials(Trials):
    """Compiles a point once, however often a driver is started."""

    plans: ClassVar[dict[tuple, Compiled]] = {}

    def compiled(self, number: int, point: Point, stop_at: str | None = None) -> Compiled:
        key = (Path.cwd(), self.id, self.sets_of(number, point, stop_at))
        if key not in self.plans:
            self.plans[key] = super().compiled(number, point, stop_at)
        return self.plans[key]


@cache
def _planned(folder: Path, text: str, path: str, sets: tuple[str, ...]) -> SweepPlan:
    compiled = compile_sweep(path, sets)
    assert compiled is not None and compiled.plan is not None, compiled and compiled.diagnostics.render(color=False)
    return compiled.plan


def driver(path: str, launcher, sets: tuple[str, ...] = (), show=lambda event: None) -> SweepDriver:
    plan = _planned(Path.cwd(), Path(path).read_text(), path, sets)
    sweep = load_spec(path, sets).require().sweep
    assert sweep is not None
    return SweepDriver(plan, CachedTrials(sweep, plan.base, path, sets, None, None), launcher, show)


class Killed(BaseException):
    """A driver that ends at once, without a word."""


@define
class DiesAfter:
    """Ends the driver behind so many of its events."""

    events: int

    def __call__(self, event: Event) -> None:
        self.events -= 1
        if self.events < 0:
            raise Killed


# Trials that learn from their own samples -----------------------------------------------------------------------------


PARTS = '''
from xtrain import reward, source

@source
def made_sums():
    """Prompts of unequal lengths."""
    for a in range(12):
        for b in (0, 3, 17, 105):
            yield {"question": f"{a}+{b}", "answer": str(a + b), "weight": 1 + b % 3}

@reward
def half_right(prompt, completion, record, each: float = 0.5):
    """Something for every letter that says nothing of ranks."""
    assert prompt.startswith("User: ") and record["answer"].isdigit() and record["weight"] >= 1
    return each * sum(ord(letter) % 3 for letter in completion) - len(completion) * record["weight"]
'''
BLOCKS = """
use "sampled.py"
dataset sums {{
  source = made_sums(), prompt = "question", response = "answer", values = {{ weight: "weight" }}, template = "plain"
  holdout = 10%, oversized = skip
}}
mixture {{ sums = 1 }}
loss {loss}
rollout {{ group = 3, max_tokens = 5, temperature = 0.9, top_k = 200, top_p = 0.99, show = 1 step{more} }}
{reward}
on finish eval sums {{ batches = none{answers} }}
"""
REWARD = "half_right { each = 0.25 }"
LOSS = "grpo { chunk = 8 KiB, kl = k3, kl_weight = 0.3 }"
CHAIN = "collate=to_tensor -> flatten -> shift_tokens -> pack(single, align = 4)"


def sampled_trial(
    lab: Laboratory, topology: Topology, *, loss: str = LOSS, more: str = "", reward: str = REWARD
) -> Trial:
    """What one process computes for comparison with a layout. reward: none if empty."""
    scored = (
        {"reward": f"reward {reward}", "answers": ", answers = sampled"} if reward else {"reward": "", "answers": ""}
    )
    (lab.folder / "sampled.py").write_text(PARTS)
    trial = topology.trial("fp64", shallow=True)
    settings = (*trial.settings, CHAIN, "batch.sequence=128")
    return evolve(trial, align=1, more=BLOCKS.format(loss=loss, more=more, **scored), settings=settings)


WORLD = """
import os
from xtrain import environment, tool

@environment
class echo:
    def reset(self, task, random, each: float = 0.5):
        self.each, self.turns, self.begun = each, 0, random.randint(0, 9)
        return f"{task['prompt']} {self.begun}"

    @tool
    def add(self, a: int) -> int:
        \"\"\"Add one.\"\"\"
        return a + 1

    def step(self, text):
        self.turns += 1
        letters = sum(map(ord, text)) + self.begun
        if letters % 7 == 3:
            os._exit(1)
        return (None if letters % 5 == 0 else "ab"[letters % 2]), self.each * (letters % 3)

    def finish(self):
        return self.turns
"""
EPISODES = """
use "sampled.py"
use "world.py"
dataset sums {{
  source = made_sums(), prompt = "question", response = "answer", holdout = 10%, oversized = skip
  template = "{template}"
}}
mixture {{ sums = 1 }}
loss grpo {{ chunk = 8 KiB }}
environment echo {{ each = 0.25 }}
rollout {{ group = 2, turns = 3, max_tokens = 60, environment = echo, show = 1 step{more} }}
on finish eval sums {{ batches = none, answers = sampled }}
"""
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '!' }}{{ c.function | tojson }}{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}>{% endif %}{% endfor %}"
)


def episodes_trial(lab: Laboratory, topology: Topology, *, more: str = "") -> Trial:
    """What one process computes of episodes for comparison with a layout."""
    (lab.folder / "sampled.py").write_text(PARTS)
    (lab.folder / "world.py").write_text(WORLD)
    trial = topology.trial("fp64", shallow=True)
    settings = (*trial.settings, CHAIN, "batch.sequence=512")
    return evolve(trial, align=1, more=EPISODES.format(template=TEMPLATE, more=more), settings=settings)
