"""Experiments that any layout must compute alike, and how far a layout is from one process.

A trial is a small experiment; a layout is a tuple of `--set` texts on top of it, such as `parallel.tp=2`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from forked_ranks import TIMEOUT, ForkedRanks, Mutation, Outcome

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.inspect.gaps import TOLERANCE, Gaps, gaps

__all__ = ["TOLERANCE", "Gaps", "gaps"]

# Initial deviations are large and the learning rate high, so that every part of the model counts and moves. A large eps
# keeps the optimizer smooth: with a tiny one an element whose gradient is all rounding error moves by the whole
# learning rate to one side or the other.
MODELS = {
    "dense": "llama { dim = 32, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, ffn = 48, init_std = 0.2 }",
    "qwen3": "qwen3 { dim = 32, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, ffn = 48, init_std = 0.2 }",
    "gemma3": "gemma3 { dim = 32, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, ffn = 48, init_std = 0.2, "
    "window = 5, full_layers = [2], rope_theta = 1e6, logit_cap = 3, tie_embeddings = true }",
    "moe": "qwen3_moe { dim = 32, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, experts = 8, "
    "experts_per_token = 2, expert_ffn = 24, init_std = 0.2, router { aux_loss = 0.1, z_loss = 0.01 } }",
    "oss": "gpt_oss { dim = 32, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, experts = 8, "
    "experts_per_token = 2, expert_ffn = 24, init_std = 0.2, attention_bias = true, window = 6, full_layers = [1, 3], "
    "swiglu_limit = 1, router { aux_loss = 0.1, z_loss = 0.01 } }",
    "latent": "deepseek_v3 { dim = 32, layers = 4, heads = 8, q_rank = 20, kv_rank = 16, nope_dim = 6, rope_dim = 4, "
    "value_dim = 8, experts = 8, experts_per_token = 2, expert_ffn = 24, init_std = 0.2 }",
    "indexed": "deepseek_v32 { dim = 32, layers = 4, heads = 8, q_rank = 20, kv_rank = 16, nope_dim = 6, rope_dim = 4, "
    "value_dim = 8, experts = 8, experts_per_token = 2, expert_ffn = 24, init_std = 0.2, index_heads = 6, "
    "index_dim = 8, index_topk = 9, index_loss = 0.5 }",
    "hybrid": "nemotron_h { dim = 32, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, mamba_state = 6, experts = 8, "
    "experts_per_token = 2, expert_ffn = 24, init_std = 0.2, router { aux_loss = 0.1, z_loss = 0.01 } }",
    "delta": "qwen3_5_moe { dim = 32, layers = 4, heads = 8, kv_heads = 4, head_dim = 8, attention_layers = [1], "
    "delta_key_heads = 4, delta_value_heads = 8, delta_key_dim = 8, delta_value_dim = 6, experts = 8, "
    "experts_per_token = 2, expert_ffn = 24, shared_ffn = 20, init_std = 0.2, "
    "router { aux_loss = 0.1, z_loss = 0.01 } }",
}
SPEC = """
experiment trial {{ seed = 3, budget = {steps} steps }}
model {model}
tokenizer bytes
dataset lines {{ source = jsonl("data.jsonl"), holdout = 10% }}
batch {{ sequence = 64, micro = 1, rows = {rows} }}
{collate}
optimizer {optimizer}, clip = {clip} }}
scheduler constant {{}}
cluster other {{ flops = 1e9 }}
every 1 step log
every 1000 steps checkpoint
on finish eval lines {{ batches = none }}
{more}
"""
FEWER = ("batch.micro=2",)  # half as many microbatches, where nothing depends on how many there are
CHAIN = "collate = to_tensor -> flatten -> shift_tokens -> pack(auto, align = {align})"


@frozen(kw_only=True)
class Trial:
    """What is computed, whatever the layout.

    optimizer: with its settings, without the closing bracket.
    clip: the first makes every step clip, gradient norms being above it; `none` leaves gradients alone.
    align: what one process must pad documents to where the layout does; 1: not at all.
    settings: `--set` texts that both sides share. more: lines of the spec.
    """

    model: str = "dense"
    params: str = "fp64"
    rows: int = 8
    steps: int = 3
    optimizer: str = "adamw { lr = 1e-2, eps = 1e-3"
    clip: str = "0.5"
    align: int = 1
    settings: tuple[str, ...] = ()
    more: str = ""

    def write(self, folder: Path, *, alone: bool) -> Path:
        """The spec, as a file of `folder`."""
        path = folder / "trial.xtrain"
        path.write_text(self.text(alone=alone))
        return path

    def text(self, *, alone: bool) -> str:
        collate = CHAIN.format(align=self.align) if alone and self.align > 1 else ""
        return SPEC.format(
            steps=self.steps,
            model=MODELS[self.model],
            rows=self.rows,
            optimizer=self.optimizer,
            clip=self.clip,
            collate=collate,
            more=self.more,
        )


class NoPlan(Exception):
    """The spec of a layout has no plan, or one that cannot be executed; the message is the diagnostics."""


@frozen(kw_only=True, eq=False)
class Laboratory:
    """A folder with data, and ranks that are forked: runs trials, and keeps what one process computes of each."""

    folder: Path
    ranks: ForkedRanks
    _alone: dict[tuple[Trial, bool], Outcome] = field(factory=dict, init=False)
    _count: list[int] = field(factory=lambda: [0], init=False)

    @classmethod
    def open(cls, folder: Path, ranks: ForkedRanks) -> "Laboratory":
        ranks.start()
        # Up to 70 tokens, most rows with several documents and hardly one full: ranks differ in their valid tokens.
        words = [f"line {i} " + "abc def ghi "[: i % 13] * (1 + i % 5) for i in range(150)]
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
        # Long questions and short answers: of the rows that hold them many have nothing to be predicted.
        talks = [[("user", f"{word} " * (2 + i % 7)), ("assistant", word[:5])] for i, word in enumerate(words)]
        turns = [[{"role": role, "content": text} for role, text in talk] for talk in talks]
        (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
        return cls(folder=folder, ranks=ranks)

    def plan(self, trial: Trial, sets: tuple[str, ...], world: int | None = None, *, alone: bool = False) -> Plan:
        """The plan of a trial. alone: of one process that layouts are compared with, which takes a step in one part."""
        path = trial.write(self.folder, alone=alone)
        whole = (f"batch.micro={trial.rows}",) if alone else ()
        settings = (f"precision.params={trial.params}", "workspace.root=runs", *whole, *trial.settings, *sets)
        compiled = plan_from_spec(path, settings, world)
        if compiled.plan is None:
            raise NoPlan("\n".join(error.message for error in compiled.diagnostics.errors))
        return compiled.plan

    def run(
        self,
        trial: Trial,
        sets: tuple[str, ...],
        world: int | None = None,
        *,
        alone: bool = False,
        timeout: float = TIMEOUT,
        mutation: Mutation | None = None,
        saves: bool = True,
    ) -> Outcome:
        name, plan = self._next(trial, sets), self.plan(trial, sets, world, alone=alone)
        return self.ranks.run(plan, self.folder, name=name, timeout=timeout, mutation=mutation, saves=saves)

    def _next(self, trial: Trial, sets: tuple[str, ...]) -> str:
        """The name of a job."""
        self._count[0] += 1
        slug = re.sub(r"[^a-z0-9]+", "-", " ".join((trial.model, trial.params, *sets)).replace("parallel.", ""))[:60]
        return f"{self._count[0]:03d}-{slug.strip('-')}"

    def same_as_one_process(
        self, trial: Trial, sets: tuple[str, ...], *, saves: bool = False
    ) -> tuple[Plan, Outcome, Outcome]:
        """The plan and the outcome of a layout, and the outcome of one process.

        Asserts that they are the same within the tolerance of the format, and that each rank holds what is planned.
        """
        plan, alone = self.plan(trial, sets), self.alone(trial)
        outcome = self.ranks.run(plan, self.folder, name=self._next(trial, sets), saves=saves)
        assert not (beyond := gaps(outcome, alone).beyond(TOLERANCE[trial.params])), beyond
        assert not (stray := stray_shapes(plan, outcome)), stray
        return plan, outcome, alone

    def resumed(self, trial: Trial, sets: tuple[str, ...], job: str, *, step: int = 2) -> tuple[Outcome, Outcome]:
        """The trial with an evaluation and a checkpoint behind a step, and the same from that checkpoint on.

        Asserts that what follows is the same bit for bit: the curve, every tensor, the evaluation at the end.
        """
        more = f"every {step} steps eval lines {{ batches = 1 }} then checkpoint\n{trial.more}"
        plan = self.plan(evolve(trial, more=more), (*FEWER, *sets))
        whole = self.ranks.run(plan, self.folder, name=f"{job}-whole")
        self.take_checkpoint(whole, step, f"{job}-resumed")
        later = self.ranks.run(plan, self.folder, name=f"{job}-resumed")
        assert len(whole.curve) == trial.steps
        # The checkpoint has brought the record of its own step along.
        assert later.curve == whole.curve[step - 1 :]
        assert later.tensors.keys() == whole.tensors.keys()
        assert not [name for name in whole.tensors if not np.array_equal(later.tensors[name], whole.tensors[name])]
        assert later.evals[-1]["loss"] == whole.evals[-1]["loss"]
        return whole, later

    def take_checkpoint(self, outcome: Outcome, step: int, name: str) -> Path:
        """Let the job `name`, which has not run yet, begin with a checkpoint of another; where that one lies."""
        checkpoints, taken = self.folder / "jobs" / name / "checkpoints", f"ckpt-s{step:012d}"
        source = outcome.directory / "checkpoints" / taken
        shutil.copytree(source, checkpoints / taken)
        (checkpoints / "latest").write_text(f"{taken}\n")
        return source

    def alone(self, trial: Trial, *, saves: bool = False, timeout: float = TIMEOUT) -> Outcome:
        """The trial in one process; computed once."""
        if (trial, saves) not in self._alone:
            self._alone[trial, saves] = self.run(trial, (), alone=True, saves=saves, timeout=timeout)
        return self._alone[trial, saves]


def stray_shapes(plan: Plan, outcome: Outcome) -> list[str]:
    """What ranks hold otherwise than `planner.placement` says, in words."""
    from state_bytes import state_bytes

    from xtrain.plan.mesh import local_shapes

    found = []
    for rank, shapes in enumerate(outcome.shapes):
        planned: dict[str, Any] = local_shapes(plan, rank)
        for name in sorted(planned.keys() | shapes.keys()):
            ours, theirs = shapes.get(name), planned.get(name)
            if theirs is None or ours is None or tuple(theirs) != ours:
                found.append(f"rank {rank}: {name} is {ours}, planned {theirs}")
        total = sum(outcome.bytes[rank].values())
        if not found and total != state_bytes(plan, rank):
            found.append(f"rank {rank}: {total} bytes, planned {state_bytes(plan, rank)}")
    return found
