"""Recipes: specs that fine-tune or train published models, and the page that shows what they cost.

python tests/support/recipes.py            # whether recipes/ and docs/recipes.md are as they are said now
python tests/support/recipes.py --write    # write both anew
"""

import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import chdir, contextmanager
from math import prod
from os import environ
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from model_folders import shapes
from published_models import PUBLISHED

from xtrain.dsl.diagnostics.diagnostic import SourceText
from xtrain.dsl.syntax.format import format_source
from xtrain.plan.plan import Plan
from xtrain.plan.views import headroom
from xtrain.planner.compile import Compiled
from xtrain.planner.load import plan_from_text
from xtrain.text.units import count_text

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "recipes.md"
COMMIT: Final = "0" * 40
# Published model → repository of the hub.
REPOSITORIES: Final = {
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B", "Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B", "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
    "Mistral-7B-v0.3": "mistralai/Mistral-7B-v0.3", "Mixtral-8x7B-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B", "Qwen3-0.6B": "Qwen/Qwen3-0.6B", "Qwen3-4B": "Qwen/Qwen3-4B",
    "Qwen3-8B": "Qwen/Qwen3-8B", "Qwen3-14B": "Qwen/Qwen3-14B", "Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B", "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "OLMo-2-0325-32B": "allenai/OLMo-2-0325-32B", "SmolLM3-3B": "HuggingFaceTB/SmolLM3-3B",
    "Gemma-3-1B": "google/gemma-3-1b-it", "Gemma-3-4B, text": "google/gemma-3-4b-it",
    "Gemma-3-27B, text": "google/gemma-3-27b-it",
    # Those of openai have mxfp4 weights.
    "gpt-oss-20b": "unsloth/gpt-oss-20b-BF16", "gpt-oss-120b": "unsloth/gpt-oss-120b-BF16",
    "DeepSeek-V3": "unsloth/DeepSeek-V3-bf16",
}  # fmt: skip
# Name → words, blocks, devices, and an assumed price of a device per hour, in dollars.
MACHINES: Final = {
    "24gb": ("one GPU of 24 GB", "# An RTX 4090; write the figures of your card.\n"
             "cluster other { devices = 1, memory = 24 GiB, flops = 165e12 }", 1, 0.5),
    "1xh100": ("one H100", "cluster h100 { devices = 1 }", 1, 2.5),
    **{
        f"{8 * nodes}xh100": (
            "8 H100" if nodes == 1 else f"{8 * nodes} H100 on {nodes} machines",
            f"launch {{ {f'nodes = {nodes}, ' if nodes > 1 else ''}ranks_per_node = 8 }}\ncluster h100",
            8 * nodes, 2.5,
        )
        for nodes in (1, 2, 4, 8, 16, 32, 48, 128)
    },
}  # fmt: skip
CHAT: Final = """# A record is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}.
dataset talks {
  source = jsonl("data/talks/*.jsonl")
  messages = "messages"
  holdout = 1%
}"""
TEXTS: Final = """dataset web {
  source = parquet("data/web/**/*.parquet")
  text = "text"
  holdout = 0.1%
}"""
PAIRS: Final = """# A record has a prompt, the better answer and another.
dataset pairs {
  source = jsonl("data/pairs/*.jsonl")
  prompt = "prompt", chosen = "chosen", rejected = "rejected"
  holdout = 1%
}"""
ASKED: Final = """# The number after #### in the answer is compared.
dataset asked {
  source = jsonl("data/gsm8k/*.jsonl")
  prompt = "question", response = "answer"
  oversized = skip
}"""


@frozen
class Kind:
    """A job. budget, rate, weight_decay: the usual ones. data: the dataset. lines: further blocks."""

    words: str
    budget: str
    rate: str
    data: str
    lines: str = ""
    adapter: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    "sft": Kind("Fine-tune all parameters of", "2 epochs", "1e-5", CHAT),
    "lora": Kind("Fine-tune a LoRA adapter on", "2 epochs", "2e-4", CHAT,
                 "adapter lora { rank = 16, alpha = 32 }", adapter=True),
    "qlora": Kind("Fine-tune a LoRA adapter on 4-bit weights of", "2 epochs", "2e-4", CHAT,
                  "adapter lora { rank = 16, alpha = 32 }", adapter=True),
    "dpo": Kind("Learn preferences with DPO, from", "1 epoch", "5e-7", PAIRS,
                "loss dpo { beta = 0.1, reference = initial }"),
    "grpo": Kind("Learn from checked answers with GRPO, from", "500 steps", "1e-6", ASKED,
                 'rollout { group = 8, max_tokens = 512 }\n'
                 'reward exact_answer { pattern = "#### (.+)", compare = number }\nloss grpo {}\n'
                 "collate = to_tensor -> flatten -> shift_tokens -> pack(single)"),
    "distill": Kind("Distil into", "1 epoch", "1e-5", CHAT,
                    'loss distill { teacher = "models/Qwen3-8B", live = true, form = forward_kl }'),
    "long": Kind("Fine-tune for long contexts", "1 epoch", "1e-5", TEXTS),
    "pretrain": Kind("Train from scratch a model of the shape of", "", "3e-4", TEXTS),
}  # fmt: skip


@frozen
class Recipe:
    """A row. axes: of `parallel`; empty: fsdp over all ranks. budget, rate: other than the usual ones. optimizer:
    further settings."""

    model: str
    kind: str
    machine: str
    sequence: str
    rows: int
    axes: str = ""
    micro: int = 1
    budget: str = ""
    rate: str = ""
    params: str = "fp32"
    activation: str = "full"
    optimizer: str = ""

    @property
    def name(self) -> str:
        model = self.model.removesuffix(", text").lower().replace("-0325", "").replace("-v0.3", "").replace("-v0.1", "")
        return f"{model}_{self.kind}_{self.machine}".replace(".", "p").replace("-", "_")

    def text(self) -> str:
        kind, (words, cluster, ranks, _) = KINDS[self.kind], MACHINES[self.machine]
        repository = REPOSITORIES[self.model]
        new = self.kind == "pretrain"
        base = "\n  base nf4 { double = true }" if self.kind == "qlora" else ""
        evaluated = [
            f"every 5% eval {name} {{ batches = 16 }}"
            for name in ("talks", "web", "pairs")
            if f"dataset {name}" in kind.data
        ]
        axes = _parallel(self.axes or (FSDP if ranks > 1 else "fsdp auto"))
        micro = f", micro = {self.micro}" if self.micro > 1 else ""
        decay, warmup = (0.1, "1%") if new else (0, "5%")
        to = f'"{"adapters" if kind.adapter else "models"}/{self.name}"'
        blocks = [
            f"# {kind.words} {self.model.removesuffix(', text')} on {words}.\n#\n"
            f"#     xtrain fetch {repository}{' --tokenizer' if new else ''}\n"
            f"#     xtrain plan recipes/{self.name}.xtrain\n#     xtrain run recipes/{self.name}.xtrain",
            f"experiment {self.name} {{ seed = 1, budget = {self.budget or kind.budget} }}",
            cluster,
            f'model hub("{repository}") {"{ weights = none }" if new else "{}"}',
            *([kind.lines] if kind.lines else []),
            f"precision {{\n  params = {self.params}\n  compute = bf16{base}\n}}",
            "\n".join([axes, f"activation {self.activation}", "compile"]),
            kind.data,
            f"batch {{ sequence = {self.sequence}, rows = {self.rows}{micro} }}",
            f"optimizer adamw {{ lr = {self.rate or kind.rate}, betas = [0.9, 0.95], weight_decay = {decay}, clip = 1.0"
            f"{self.optimizer} }}\nscheduler cosine {{ warmup = {warmup}, floor = 10% }}",
            "\n".join([
                "every 10 steps log" if self.kind != "grpo" else "every 1 step log", *evaluated,
                "every 1k steps checkpoint" if new else "every 10% checkpoint",
                f"on finish export {{ to = {to}{', adapter = true' * kind.adapter} }}",
            ]),
        ]  # fmt: skip
        return format_source(SourceText(self.name, "\n\n".join(blocks) + "\n"))


FSDP: Final = "fsdp auto { reduce = fp32 }"
EXPERTS: Final = f"ep 8\n{FSDP}"


def _parallel(axes: str) -> str:
    return f"parallel {{ {axes} }}" if "\n" not in axes else "\n  ".join(["parallel {", *axes.splitlines()]) + "\n}"


RECIPES: Final = tuple(sorted((
    Recipe("Qwen3-0.6B", "sft", "24gb", "2Ki", 32, micro=4),
    Recipe("Qwen3-4B", "lora", "24gb", "2Ki", 32, params="bf16"),
    Recipe("Qwen3-8B", "lora", "24gb", "2Ki", 32, params="bf16"),
    Recipe("Qwen3-14B", "qlora", "24gb", "2Ki", 32, params="bf16"),
    Recipe("Qwen3-32B", "qlora", "1xh100", "4Ki", 32, params="bf16"),
    Recipe("Qwen3-8B", "sft", "8xh100", "4Ki", 64, micro=2),
    Recipe("Qwen3-14B", "sft", "8xh100", "4Ki", 64),
    Recipe("Qwen3-32B", "lora", "8xh100", "4Ki", 64, params="bf16"),
    Recipe("Qwen3-32B", "sft", "64xh100", "8Ki", 128),
    Recipe("Qwen3-30B-A3B", "sft", "16xh100", "4Ki", 64, axes=EXPERTS),
    Recipe("Qwen3-30B-A3B", "lora", "8xh100", "4Ki", 64, params="bf16", axes=EXPERTS),
    Recipe("Qwen3-235B-A22B", "sft", "128xh100", "4Ki", 256, axes=EXPERTS),
    Recipe("Qwen3-8B", "dpo", "8xh100", "4Ki", 64),
    Recipe("Qwen3-4B", "grpo", "8xh100", "8Ki", 64),
    Recipe("Qwen3-0.6B", "distill", "8xh100", "4Ki", 64, micro=2),
    Recipe("Qwen3-8B", "long", "8xh100", "32Ki", 16, axes=f"cp 4\n{FSDP}"),
    Recipe("Llama-3.2-1B", "sft", "24gb", "2Ki", 32, params="bf16", optimizer=", stochastic_rounding = true"),
    Recipe("Llama-3.2-3B", "lora", "24gb", "4Ki", 32, params="bf16"),
    Recipe("Llama-3.1-8B", "lora", "24gb", "2Ki", 32, params="bf16"),
    Recipe("Llama-3.1-8B", "qlora", "24gb", "4Ki", 32, params="bf16"),
    Recipe("Llama-3.1-8B", "sft", "8xh100", "4Ki", 64, micro=2),
    Recipe("Llama-3.1-8B", "dpo", "8xh100", "4Ki", 64),
    Recipe("Llama-3.1-8B", "long", "16xh100", "128Ki", 16, axes=f"cp 8\n{FSDP}"),
    Recipe("Llama-3.1-8B", "pretrain", "64xh100", "8Ki", 512, budget="160B tokens"),
    Recipe("Llama-3.1-70B", "qlora", "1xh100", "4Ki", 32, params="bf16"),
    Recipe("Llama-3.1-70B", "lora", "8xh100", "4Ki", 32, params="bf16"),
    Recipe("Llama-3.1-70B", "sft", "64xh100", "4Ki", 128),
    Recipe("Llama-3.1-70B", "pretrain", "1024xh100", "8Ki", 1024, budget="1.4T tokens", rate="1.5e-4"),
    Recipe("Gemma-3-1B", "sft", "24gb", "2Ki", 32),
    Recipe("Gemma-3-4B, text", "lora", "24gb", "2Ki", 32, params="bf16"),
    Recipe("Gemma-3-27B, text", "lora", "8xh100", "4Ki", 64, params="bf16"),
    Recipe("Gemma-3-27B, text", "sft", "64xh100", "4Ki", 128),
    Recipe("gpt-oss-20b", "lora", "1xh100", "4Ki", 32, params="bf16"),
    Recipe("gpt-oss-20b", "sft", "8xh100", "4Ki", 64, axes=EXPERTS),
    Recipe("gpt-oss-120b", "lora", "8xh100", "4Ki", 64, params="bf16", axes=EXPERTS),
    Recipe("Mistral-7B-v0.3", "lora", "24gb", "4Ki", 32, params="bf16"),
    Recipe("Mistral-7B-v0.3", "sft", "8xh100", "8Ki", 64),
    Recipe("Mixtral-8x7B-v0.1", "sft", "32xh100", "4Ki", 128, axes=EXPERTS),
    Recipe("DeepSeek-V3", "sft", "256xh100", "4Ki", 256, axes=f"ep 32\n{FSDP}"),
    Recipe("DeepSeek-V3", "lora", "32xh100", "4Ki", 64, params="bf16", axes=f"ep 32\n{FSDP}"),
    Recipe("OLMo-2-0325-32B", "sft", "64xh100", "4Ki", 128),
    Recipe("OLMo-2-0325-32B", "pretrain", "1024xh100", "4Ki", 2048, budget="6T tokens", rate="6e-4"),
    Recipe("SmolLM3-3B", "sft", "8xh100", "8Ki", 64),
    Recipe("SmolLM3-3B", "grpo", "8xh100", "8Ki", 64),
    Recipe("SmolLM3-3B", "pretrain", "384xh100", "4Ki", 768, budget="11T tokens", rate="2e-4", activation="selective"),
    Recipe("Qwen2.5-7B", "grpo", "8xh100", "8Ki", 64),
), key=lambda row: row.name))  # fmt: skip


# Sizes of a small model of a published type. Numbers of experts stay, as ranks share them.
SMALL: Final = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 320, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1, "max_window_layers": 4,
}  # fmt: skip


def small_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write the weights and config.json of a small model of the same type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config.get("text_config", config)  # of a model with images, the text
    small = {name: SMALL.get(name, value[:4] if name in ("layer_types", "no_rope_layers") else value)
             for name, value in config.items()}  # fmt: skip
    small |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    if "kv_lora_rank" in small:  # its heads are not shared
        small["num_key_value_heads"] = small["num_attention_heads"]
    built = AutoConfig.for_model(small.pop("model_type"), **small)
    AutoModelForCausalLM.from_config(built).save_pretrained(folder)


@contextmanager
def published_folders(small: Collection[str] = ()) -> Iterator[None]:
    """A working folder and a cache of the hub with what the publishers' `config.json` say, without weights. small:
    models that have weights and other sizes."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        before = environ.get("HF_HUB_CACHE")
        environ["HF_HUB_CACHE"] = f"{folder}/cache"
        for model, repository in REPOSITORIES.items():
            kept = Path("cache", f"models--{repository.replace('/', '--')}")
            _model(kept / "snapshots" / COMMIT, model)
            if model in small:
                small_weights(kept / "snapshots" / COMMIT, PUBLISHED[model][0])
            (kept / "refs").mkdir()
            (kept / "refs" / "main").write_text(COMMIT)
        _model(Path("models/Qwen3-8B"), "Qwen3-8B")
        write_weights = small_weights if "Qwen3-8B" in small else _empty_weights
        write_weights(Path("models/Qwen3-8B"), PUBLISHED["Qwen3-8B"][0])
        for file in ("talks/a.jsonl", "pairs/a.jsonl", "gsm8k/a.jsonl", "web/a.parquet"):
            Path("data", file).parent.mkdir(parents=True, exist_ok=True)
            Path("data", file).touch()
        try:
            yield
        finally:
            if before is None:
                del environ["HF_HUB_CACHE"]
            else:
                environ["HF_HUB_CACHE"] = before


def _model(folder: Path, model: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[model][0]))
    end = {
        "id": 0,
        "content": "</s>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    words = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [end], "model": words}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")


def _empty_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write the weights of a qwen3 as a file without content."""
    norms = {f"model.layers.{layer}.self_attn.{name}_norm.weight": [config["head_dim"]]
             for layer in range(config["num_hidden_layers"]) for name in "qk"}  # fmt: skip
    header, end = {}, 0
    for name, shape in (shapes(config) | norms).items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def planned(recipe: Recipe, *, drawn: bool = True) -> Compiled:
    """The plan of a recipe. drawn: as if its weights were drawn, where the folders have none."""
    sets = ["model.weights=none"] if drawn else []
    return plan_from_text(recipe.text(), f"recipes/{recipe.name}.xtrain", sets=sets)


def page(plans: Mapping[str, Plan]) -> str:
    """docs/recipes.md."""
    lines = []
    for recipe in RECIPES:
        plan = plans[recipe.name]
        times, (words, _, ranks, price) = plan.estimates.times, MACHINES[recipe.machine]
        assert times is not None
        hours = 1e9 / times.tokens_per_second / 3600
        repository = REPOSITORIES[recipe.model]
        lines.append((
            f"`{recipe.name}`",
            f"`{repository}`", recipe.kind, words, headroom(plan).text.partition(" (")[0],
            count_text(times.tokens_per_second), f"{hours:,.0f} h" if hours >= 10 else f"{hours:.2g} h",
            f"${hours * ranks * price:,.0f}",
        ))  # fmt: skip
    head = ("recipe", "model", "job", "machines", "memory", "tokens/s", "1B tokens take", "and cost")
    return TEXT + "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *lines))


TEXT: Final = """# Recipes

Specs for published models, in `recipes/`. Copy one, name your data, and run it:

<!-- not run: downloads -->
```
cp recipes/qwen3_8b_lora_24gb.xtrain mine.xtrain
xtrain fetch Qwen/Qwen3-8B
xtrain plan mine.xtrain
xtrain run mine.xtrain
```

`xtrain init lora --model … --data …` writes a spec for another model. `--set launch.nodes=2` takes more machines, and
the plan says whether the rows of a step can be divided.

None of the recipes was run. Each is planned with the model's configuration as published, without weights and data.
Memory is that of the fullest rank. Speed is the plan's one likely value, half of the peak of the data sheet while a
step computes; of 23 published runs of other trainers, 11 are within the range from 40 % to 60 %
([accuracy.md](accuracy.md)). Time and cost follow from it. The cost assumes $2.50 for an hour of an H100 and $0.50 for
one of a card of 24 GB; `cluster { price }` sets yours.

"""


def main(*, write: bool) -> None:
    plans, folder = {}, ROOT / "recipes"
    with published_folders():
        for recipe in RECIPES:
            found = planned(recipe)
            assert found.plan is not None and not found.diagnostics, f"{recipe.name}: {found.diagnostics.render()}"
            plans[recipe.name] = found.plan
    texts = {folder / f"{recipe.name}.xtrain": recipe.text() for recipe in RECIPES} | {PAGE: page(plans)}
    if write:
        for path, text in texts.items():
            path.write_text(text)
    elif stale := [path.name for path, text in texts.items() if path.read_text() != text]:
        sys.exit(f"{', '.join(stale)}: python tests/support/recipes.py --write")


if __name__ == "__main__":
    main(write="--write" in sys.argv)
