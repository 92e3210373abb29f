"""Trials that learn from their own samples: sums, scored by a function that also rewards what is half right."""

from attrs import evolve
from topologies import Topology
from trials import Laboratory, Trial

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
reward {reward}
on finish eval sums {{ batches = none, answers = sampled }}
"""
REWARD = "half_right { each = 0.25 }"
LOSS = "grpo { chunk = 8 KiB, kl = k3, kl_weight = 0.3 }"
CHAIN = "collate=to_tensor -> flatten -> shift_tokens -> pack(single, align = 4)"


def sampled_trial(
    lab: Laboratory, topology: Topology, *, loss: str = LOSS, more: str = "", reward: str = REWARD
) -> Trial:
    """What one process computes for comparison with a layout."""
    (lab.folder / "sampled.py").write_text(PARTS)
    trial = topology.trial("fp64", shallow=True)
    settings = (*trial.settings, CHAIN, "batch.sequence=128")
    return evolve(trial, align=1, more=BLOCKS.format(loss=loss, more=more, reward=reward), settings=settings)
