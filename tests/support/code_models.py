"""Tiny models of every type of transformers, as folders, and what xtrain computes of them against transformers itself.

python tests/support/code_models.py TYPE…     a line for each type (all types without arguments)
python tests/support/code_models.py --write [TYPE…]   the page of all types (docs/model_types.md), or their rows of it
python tests/support/code_models.py --fsdp TYPE…   a line for each type: two ranks with FSDP against one process
python tests/support/code_models.py --from FILE   the page, or rows of it, from lines of either kind that were printed
"""

import json
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from code_table import MARKS, PAGE, ROUNDING, page, printed
from one_rank import one_rank
from safetensors.torch import load_file
from small_runs import make_run, plan_of, read, save

from xtrain.dsl.checking import model_code
from xtrain.plan.architecture import Architecture
from xtrain.plan.plan import Plan
from xtrain.runtime.feed.microbatch import IGNORE_INDEX
from xtrain.runtime.inspect import code_costs, mixers
from xtrain.runtime.inspect import model_code as model_code_description
from xtrain.runtime.inspect.code_costs import EXPERTS, counted
from xtrain.runtime.inspect.code_layouts import call_order
from xtrain.runtime.inspect.code_ranks import plans_of, tensor_cuts
from xtrain.runtime.inspect.model_code import describe, language_names
from xtrain.runtime.inspect.small_model import SMALL, layer_kind, small, smaller_configs
from xtrain.runtime.nn.batch import DocumentLayout, ModelBatch
from xtrain.runtime.nn.build import build_model
from xtrain.runtime.nn.model_code import (
    CodeModel,
    UnknownCode,
    build,
    build_class,
    config_of,
    execute_files,
    whole_class_of,
    whole_config_of,
)
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import initialise, quantise, store
from xtrain.runtime.sampling.text_generator import Prompts
from xtrain.runtime.store.adapter_export import export_of

LENGTHS = (20, 27, 17)  # documents of a row
ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "xmod",
)  # fmt: skip
# Keys without which the default config of a type cannot be built.
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 5e5}},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 16},  # layers of a cache follow from these
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 320,
    },
    "xmod": {"default_language": "en_XX"},
}
# Divided by 64: even numbers are left, and whole blocks of codes.
SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"intermediate_size": 12288, "moe_intermediate_size": 2048},
    "granitemoe": {"intermediate_size": 8192},
}
SINGLE = "collate = to_tensor -> flatten -> shift_tokens -> pack(single)"
ROLLOUT = """experiment small {{ budget = 2 steps }}
model "{}" {{ code = transformers }}
tokenizer bytes
dataset asked {{ source = jsonl("*.jsonl"), prompt = "q", response = "a", template = "plain", oversized = skip }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
collate = to_tensor -> flatten -> shift_tokens -> pack(single)
rollout {{ group = 2, max_tokens = 8{} }}
reward exact_answer {{ }}
loss grpo {{ }}
"""


def content_of(kind: str) -> dict[str, Any]:
    """Return the default config of a type, with what it needs to be a decoder that can be built."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = CONFIG_MAPPING[kind]().to_dict()
    if content.get("is_encoder_decoder"):
        content |= {"is_encoder_decoder": False, "is_decoder": True}
    elif "is_decoder" in content or kind in ENCODERS:
        content["is_decoder"] = True
    return content | OWN.get(kind, {})


def make(kind: str, folder: Path, **keys: Any) -> Any:
    """Save a random model of a type, with the default config made small. keys: of the config."""
    content = {**content_of(kind), **keys}
    whole = whole_class_of(content)
    with torch.device("meta"):
        model = build(config_of(content))
    if whole is None:
        code = small(content, model)
        assert code is not None, "no small model"
        code.model.save_pretrained(folder)
        return code.model
    reference = _small_whole(whole, content, model)
    reference.save_pretrained(folder)
    return reference


def _small_whole(cls: type[Any], content: dict[str, Any], language: Any) -> Any:
    """Return a small random model of several parts."""
    kinds = [layer_kind(layer) for layer in CodeModel(language).layers]
    problem: Exception = AssertionError("no small model")
    for smaller in smaller_configs(content, kinds):
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in build_class(cls, whole_config_of(smaller)).parameters())
            if count > 4 * SMALL:
                continue
            torch.manual_seed(0)
            model = build_class(cls, whole_config_of(smaller)).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 0.3 if parameter.ndim == 1 else 0.1)
            model(input_ids=torch.arange(8)[None] + 4)
        except Exception as error:  # sizes that do not fit each other
            problem = error
            continue
        return model
    raise problem


def built(plan: Plan) -> ModelParts:
    """The model of a plan on one rank, with the weights of its folder."""
    args = plan.node("setup.build_model").args
    rank = one_rank()
    model = build_model(plan, rank, **{**args, "architecture": Architecture.from_values(args["architecture"])})
    if stored := plan.args("setup.quantise"):
        quantise(plan, model, **stored)
    initialise(plan, model, rank, offload=False)
    values = read(plan)
    for each in model.quantised():
        store(each, values.pop(each.name))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in values:
                tensor.copy_(values[name])
    return model


def rows(vocab: int, documents: tuple[int, ...] = LENGTHS) -> ModelBatch:
    """A microbatch of one row."""
    count = sum(documents)
    ids_BS = (torch.arange(count)[None] * 37 + 11) % min(vocab, 250)
    labels = ids_BS.roll(-1, 1).clone()
    bounds = torch.tensor([0, *torch.tensor(documents).cumsum(0)], dtype=torch.int32)
    labels[0, bounds[1:].long() - 1] = IGNORE_INDEX
    places = torch.cat([torch.arange(each) for each in documents])[None]
    packing = DocumentLayout.from_lengths(bounds, 1, count, torch.device("cpu"))
    real = torch.ones_like(ids_BS, dtype=torch.bool)
    return ModelBatch(input_ids_BS=ids_BS, labels_BS=labels, positions_BS=places, real_BS=real, packing=packing)


def theirs(reference: Any, batch: ModelBatch) -> torch.Tensor:
    """The sum of the cross-entropies as transformers computes them, each document alone."""
    total = torch.zeros(())
    for _, first, length in batch.packing.segments:
        assert batch.input_ids_BS is not None and batch.labels_BS is not None
        ids, labels = (each[:, first : first + length] for each in (batch.input_ids_BS, batch.labels_BS))
        logits = reference(input_ids=ids, use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, labels[0], ignore_index=IGNORE_INDEX, reduction="sum")
    return total


def plan_for(folder: Path, **more: Any) -> Plan:
    """The plan of a folder, without losses of routers; with one document a row where its code needs that."""
    model = f'"{folder}" {{ code = transformers, router_aux_loss = 0 }}'
    try:
        return plan_of(model, **more)
    except AssertionError as error:
        if "pack(single)" not in str(error):
            raise
        return plan_of(model, **{**more, "more": SINGLE})


def differences(folder: Path, reference: Any, format: str = "fp32") -> dict[str, float]:
    """The largest differences of loss and gradients, relative to the largest gradient. format: fp32 or fp64."""
    plan = plan_for(folder, params=format)
    model = built(plan)
    reference = reference.double() if format == "fp64" else reference
    code = plan.architecture.own["code"]
    batch = rows(plan.architecture.vocab, LENGTHS if code["packs"] else LENGTHS[:1])
    reference.eval().zero_grad()
    loss = theirs(reference, batch)
    loss.backward()
    ours = model.whole(None, batch)
    ours.sum().backward()
    with torch.device("meta"):
        own = CodeModel(build(config_of(code["config"])))
    names = language_names(reference, own) if code["whole"] else own.names
    parameters = {name: p for name, p in reference.named_parameters(remove_duplicate=False) if p.grad is not None}
    gradients = {ours: parameters[name].grad for name, ours in names.items() if name in parameters}
    largest = max(float(each.abs().max()) for each in gradients.values())
    apart = 0.0
    for name, parameter in model.named_parameters():
        mine, other = parameter.grad, gradients.get(name)
        mine = torch.zeros_like(parameter) if mine is None else mine
        other = torch.zeros_like(parameter) if other is None else other
        apart = max(apart, float((mine - other).abs().max()))
    return {"loss": abs(float((ours.sum() - loss).detach())) / abs(float(loss.detach())), "gradients": apart / largest}


def round_trip(folder: Path, base: Path) -> list[str]:
    """Tensors that an export without training changes."""
    plan = plan_for(folder)
    directory = make_run(plan, base / "run", base)
    save(plan, directory, read(plan))
    export_of(plan, directory, checkpoint=None, averaged=None, dtype=None, most=10**9).write(
        base / "out", lambda *_: None
    )
    before, after = (
        {n: t for f in path.glob("*.safetensors") for n, t in load_file(f).items()} for path in (folder, base / "out")
    )
    return [
        n
        for n in before.keys() | after.keys()
        if n not in before or n not in after or not torch.equal(before[n], after[n])
    ]


class _Warned(logging.Handler):
    """Keeps the messages of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.add(re.sub(r"/tmp/\S+", "", record.getMessage()))


def loaded(folder: Path, cls: Any) -> tuple[Any, set[str]]:
    """A model of a folder, read by transformers, and what it warns of."""
    handler = _Warned()
    logging.getLogger("transformers").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, found = cls.from_pretrained(folder, output_loading_info=True)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products need sizes that small models have not
    keys = {f"{kind} {key}" for kind, each in found.items() for key in each}
    return model.eval(), handler.messages | {str(each.message) for each in caught} | keys


def generated(model: Any, prompt: list[int], count: int) -> list[int] | None:
    """The likeliest tokens after a prompt, by the generation of transformers with its cache; None where it has none, as
    of encoders."""
    from transformers import GenerationConfig

    ids = torch.tensor([prompt])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    try:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :]
    except Exception:  # code of any model
        return None
    return found.tolist() if len(found) == count else None


@torch.no_grad()
def by_forwards(model: Any, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt, each computed from all positions before it."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@torch.no_grad()
def own_continued(plan: Plan, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt, as xtrain generates them."""
    model, running = built(plan).whole, Prompts.of([prompt], len(prompt) + count - 1, torch.device("cpu"))
    batch, found = running.first(), list[int]()
    for _ in range(count):
        logits_BV = model(None, batch)
        running.cache.filled += batch.shape[1]
        found.append(int(logits_BV[0].argmax()))
        if len(found) < count:
            batch = running.next(found[-1:])
    return found


def same_texts(model: Any, plan: Plan, count: int = 32) -> str:
    """How texts of xtrain are those of transformers: `generate` with its cache, `forwards` of whole texts; or not."""
    prompt = [5, 9, 30, 7, 8]
    ours = own_continued(plan, prompt, count)
    if ours == generated(model, prompt, count):
        return "generate"
    return "forwards" if ours == by_forwards(model, prompt, count) else ""


def reasons(content: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Why a model does not pack, or does not take a layout."""
    content = found["text"] or content
    with torch.device("meta"):
        code = CodeModel(build(config_of(content)))
    tiny, said = small(config_of(content).to_dict(), code.model), dict[str, str]()
    assert tiny is not None
    ops = [kind["costs"]["float32"] for kind in found["kinds"]]
    calls = [sum("attention" in op for op in each) for each in ops]
    if not found["packs"]:
        said["packs"] = "own attention" if not found["attention"] else "restart" if all(calls) else "mixers"
    if not found["tensor"]:
        cuts = [(tensor_cuts(code, found["experts"], each) or {}).get(0, {}) for each in plans_of(code)]
        cut = any("cut" in way and name.endswith(".weight") for each in cuts for name, way in each.items())
        said["tensor"] = "other on ranks" if cut else "not linear"
    if not found["stages"]:
        before, items = call_order(tiny)
        said["stages"] = "around" if before is None else "results" if items is None else "cut"
    if not found["spread"]:
        said["spread"] = "own attention" if not found["attention"] else "order" if all(calls) else "mixers"
    if not found["spread_experts"]:
        several = counted(code.model.config, EXPERTS) > 1 or any("expert" in n for n in code.names)
        said["spread_experts"] = (
            "dense" if not several else "other experts" if found["experts"] is None else "other on ranks"
        )
    return said


def inspected(config: str, versions: Any, remote: str = "") -> dict[str, Any]:
    """Inspect a model in this process, which has imported transformers, instead of in a child process."""
    content = json.loads(config)
    # Each turn of a loop over positions is traced: of shorter rows.
    lengths = (4, 8, 12, 16) if content["model_type"] == "mamba" else code_costs.LENGTHS
    try:
        if remote:
            execute_files(content, Path(remote))
        with patch.object(code_costs, "LENGTHS", lengths), patch.object(model_code_description, "LENGTHS", lengths):
            found = json.loads(json.dumps(describe(content)))
        return {**found, "source": remote or found["source"]}
    except UnknownCode as problem:
        raise model_code.CodeUnusable(str(problem), problem.hint) from problem


def measured(module: str, content: str, *_: str, executes: bool) -> dict[str, Any]:
    """Measure a layer that mixes positions in this process instead of in a child process (`inspections.run_child`)."""
    assert module == "mixers" and executes
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "given.json", Path(folder) / "description.json"
        given.write_text(content)
        mixers.main(str(given), str(result))
        return json.loads(result.read_text())


def table(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each type."""
    for kind in kinds:
        row: dict[str, Any] = {"type": kind}
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path) / "model"
            os.environ["XDG_CACHE_HOME"] = path
            try:
                reference = make(kind, folder)
                plan = plan_for(folder)
                row |= {name: plan.architecture.own["code"][name] for name in MARKS}
                row["changed"] = round_trip(folder, Path(path))
                again, warned = loaded(Path(path) / "out", type(reference))
                row["warned"] = sorted(warned - loaded(folder, type(reference))[1])
                row["texts"] = same_texts(again, plan)
                row["reasons"] = reasons(content_of(kind), plan.architecture.own["code"])
                row |= differences(folder, reference)
                if row["gradients"] > ROUNDING:  # a router that nearly ties
                    row |= {f"{name} in fp64": each for name, each in differences(folder, reference, "fp64").items()}
            except AssertionError as error:
                row["refused"] = str(error).strip()[:600]
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                row["at"] = traceback.format_exc().splitlines()[-3].strip()
        yield row


if __name__ == "__main__":
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_code._inspected = inspected  # type: ignore[assignment]
    every, seen = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), []
    if "--from" in sys.argv:
        chosen, seen = [], printed(sys.argv[-1])
    else:
        chosen = [each for each in sys.argv[1:] if not each.startswith("--")] or every
    if "--fsdp" in sys.argv:
        from code_shards import sharded as table
    for row in table(chosen):
        print(json.dumps(row), flush=True)
        seen.append(row)
    if {"--write", "--from"} & {*sys.argv}:
        whole = {row["type"] for row in seen if "fsdp" not in row} == {*every}
        before = "" if whole else PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page(seen, transformers.__version__, before), encoding="utf-8")
