"""Native blocks beside transformers' code of the same model: processor time of a forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/native_and_code.py            # twelve families
    OMP_NUM_THREADS=1 python benchmarks/native_and_code.py llama --turns 9

The models are those of the tests, `WIDER` times as wide and with four times as many positions: a row of two documents
in fp32. Both sides are xtrain's (`code = transformers` is the other one), with the same loss. Of each side the least
of several turns, which alternate. Prints a row of the table in docs/performance.md for each family.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import reference_models
from code_models import built, inspected, rows
from small_runs import plan_of

from xtrain.dsl.checking import model_code
from xtrain.dsl.schema.model import expert_families

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3", "gemma3",
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss",
)  # fmt: skip
WIDER = 8
LENGTHS = (300, 212)  # documents of the row
WIDTH = re.compile(r"(hidden|intermediate)_size$|head_dim$|_rank$")


def wide(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a small config, with larger widths, and positions for the row."""
    wider = {name: value * WIDER for name, value in keys.items() if type(value) is int and WIDTH.search(name)}
    return {**keys, **wider, "max_position_embeddings": 512}


def seconds(model: Any, batch: Any) -> float:
    """Processor time of a forward and backward."""
    model.zero_grad(set_to_none=True)
    begin = time.process_time()
    model(None, batch).sum().backward()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    print("| family | native, s | transformers' code, s | native / code |\n| --- | --: | --: | --: |")
    for family in args.families:
        keys = {family: {"plain": wide(reference_models.CONFIGS[family]["plain"])}}
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(reference_models, "CONFIGS", keys),
            patch.object(model_code, "_inspected", inspected),
        ):
            reference_models.make(family, "plain", Path(folder))
            routed = family in expert_families()
            settings = ("router { aux_loss = 0 }" * routed, "code = transformers" + ", router_aux_loss = 0" * routed)
            more = "batch { sequence = 512 }"
            models = [built(plan_of(f'"{folder}" {{ {each} }}', more=more)).whole for each in settings]
        batch = rows(263, LENGTHS)
        losses = [float(model(None, batch).sum().detach()) for model in models]
        assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], losses
        turns = [[seconds(model, batch) for model in models] for _ in range(1 + args.turns)][1:]
        native, code = (min(each) for each in zip(*turns, strict=True))
        print(f"| {family} | {native:.3f} | {code:.3f} | {native / code:.2f} |", flush=True)


if __name__ == "__main__":
    main()
