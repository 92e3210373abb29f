"""What EleutherAI's lm-evaluation-harness says of a small model, for tests/runtime/loop.

python tests/support/harness_numbers.py --write    # needs `pip install lm-eval accelerate`; compares without `--write`

The model is drawn with numpy, so that it is the same everywhere; what the harness evaluates is the export of a run that
has begun with it and has not changed it.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from dense import json_text

NUMBERS: Final = Path(__file__).parents[1] / "runtime" / "loop" / "harness_numbers.json"
# Positions of a row, and the longest context that the harness gives the model.
POSITIONS: Final = 48
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
TEXTS: Final = [
    "The river runs down to the sea, and the sea is blue.",
    "Ein Käse für drei €, häufig!",
    "def add(a, b):\n    return a + b\n",
    "日本の首都は東京です。",
    "one two three four five six seven",
    "x",
]
_LONG: Final = "Read this with care, for it is long, and the front of it is cut off: " + "red blue green " * 12
ITEMS: Final[list[dict[str, Any]]] = [
    {"question": "The sea is", "choices": ["blue", "a river that runs", "three", "red"], "answer": 0},
    {"question": "The sea is ", "choices": ["blue", "a river that runs", "three", "red"], "answer": 1},
    {"question": "The sea is  ", "choices": ["blue", "red"], "answer": 1},
    {"question": "The sea is\n", "choices": ["blue", "red", "häufig"], "answer": "häufig"},
    {"question": "Question: what is 17 + 25?\nAnswer:", "choices": ["42", "41", "forty-two", "7"], "answer": "42"},
    {"question": "Was kostet der Käse?", "choices": ["drei €", "für häufig", "日本", "one two three"], "answer": 0},
    {"question": "首都は", "choices": ["東京です。", "京", "Tokyo", "the sea is blue"], "answer": 3},
    {"question": "def add(a, b):\n    return", "choices": ["a + b", "a", "add(a, b)", " b"], "answer": 2},
    {"question": _LONG, "choices": ["red", "blue green red", "yellow"], "answer": 1},
    {"question": _LONG + "Answer:", "choices": ["five six seven", "sea", "six", "a b c d e f g"], "answer": 3},
    {"question": "one two three", "choices": ["four five", "seven", " six"], "answer": 2},
    {"question": "x", "choices": ["y", "x x x x", "äöü", "a"], "answer": 2},
    *(
        {
            "question": f"{'one two ' * (n % 5)}number {n} is",
            "choices": [f"{'seven ' * (n % 3)}{n}", "häufig" * (1 + n % 2), "€" * (1 + n % 4), "a river"],
            "answer": n % 4,
        }
        for n in range(24)
    ),
]


def make_model(folder: Path) -> None:
    """A model with its tokenizer, as transformers saves them; bos is put before texts."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    draws = np.random.Generator(np.random.PCG64(7))
    dim, ffn, heads, kv, vocab = 32, 48, 32, 16, CONFIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, dim), "lm_head.weight": (vocab, dim), "model.norm.weight": (dim,)}
    for layer in range(2):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
        for name, shape in {"q": (heads, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, heads)}.items():
            shapes[f"{block}self_attn.{name}_proj.weight"] = shape
        for name, shape in {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}.items():
            shapes[f"{block}mlp.{name}_proj.weight"] = shape
    tensors = {
        name: (draws.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *(item["question"] for item in ITEMS)] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def right(item: dict[str, Any]) -> int:
    """The number of the right choice."""
    answer = item["answer"]
    return item["choices"].index(answer) if isinstance(answer, str) else answer


def numbers_of(folder: Path) -> dict[str, Any]:
    """What the harness finds."""
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    def given(records: list[dict[str, Any]]):
        return lambda **_: {"test": datasets.Dataset.from_list(records)}

    def found(task: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", max_length=POSITIONS, **options)
        task = {"task": "fixture", "test_split": "test", **task}
        results = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
        assert results is not None
        return results["results"]["fixture"], sorted(results["samples"]["fixture"], key=lambda each: each["doc_id"])

    items = [{**item, "answer": right(item)} for item in ITEMS]
    results, samples = found(
        {"custom_dataset": given(items), "output_type": "multiple_choice", "doc_to_text": lambda doc: doc["question"],
            "doc_to_choice": lambda doc: doc["choices"], "doc_to_target": lambda doc: doc["answer"],
            "target_delimiter": " ",
            "metric_list": [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm", "acc_bytes")]},
    )  # fmt: skip
    texts, _ = found(
        {"custom_dataset": given([{"text": text} for text in TEXTS]), "output_type": "loglikelihood_rolling",
            "doc_to_text": lambda doc: "", "doc_to_target": lambda doc: doc["text"],
            "metric_list": [{"metric": "bits_per_byte"}]},
        add_bos_token=False,  # which the harness puts before texts by itself
    )  # fmt: skip
    return {
        "lm_eval": lm_eval.__version__,
        "log_likelihoods": [[round(each[0], 5) for each in sample["filtered_resps"]] for sample in samples],
        **{name: results[f"{name},none"] for name in ("acc", "acc_norm", "acc_bytes")},
        "bits_per_byte": texts["bits_per_byte,none"],
    }


def exported(folder: Path) -> Path:
    """The model as xtrain writes it, after a run that has read it."""
    from small_runs import make_run, plan_of, read, save

    from xtrain.cli.main import main

    plan = plan_of(f'"{folder}"', tokenizer=f'"{folder}"')
    directory = make_run(plan, folder.parent / "run", folder.parent)
    save(plan, directory, read(plan))
    to = folder.parent / "exported"
    assert main(["export", str(directory), "--to", str(to)]) == 0
    return to


def run() -> int:
    """Exit status: 1 if the numbers are others than those that are kept."""
    parser = argparse.ArgumentParser(description="what lm-evaluation-harness says of a small model")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        found = numbers_of(exported(Path(folder) / "model"))
    text = json_text(found)
    if arguments.write:
        NUMBERS.write_text(text)
    print(text)
    return 0 if json.loads(NUMBERS.read_text()) == found else 1


if __name__ == "__main__":
    sys.exit(run())
