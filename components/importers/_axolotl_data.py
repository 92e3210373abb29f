"""Datasets of axolotl's configurations: sources, prompt formats, conversations, and what is trained on."""

import re
from typing import Any, Final

from xtrain.components.importers._prompt_formats import ALPACA, prompt_template
from xtrain.components.importers._transformers_trainer import write_source
from xtrain.dsl.importing.accounts import is_off
from xtrain.dsl.importing.draft import Draft, identifier

_TEMPLATE: Final = (
    "it has a copy of the template `{}`; here the tokenizer's own is used: compare with `xtrain data show`"
)
_APART: Final = "prompt and answer are tokenized apart there, here as one text: the tokens where they meet may differ"
# Prompt format → fields of instruction, input and answer.
_PROMPTS: Final = {
    "alpaca": ("instruction", "input", "output"),
    "alpaca_instruct.load": ("instruction", "input", "output"),
    "gpteacher": ("instruction", "input", "response"),
    "oasst": ("INSTRUCTION", "", "RESPONSE"),
}
# Method of a preference format → fields of the prompt and of both answers.
_PAIRS: Final = {
    "ultra": ("prompt", "chosen", "rejected"),
    "argilla": ("", "chosen", "rejected"),
    "argilla_chat": ("", "chosen", "rejected"),
    "intel": ("question", "chosen", "rejected"),
    "prompt_pairs": ("prompt", "chosen", "rejected"),
}
_ASSISTANTS: Final = {"assistant", "gpt"}
_ROLES: Final = {
    "user": {"user", "human"}, "assistant": {"assistant", "gpt", "model", "chatgpt"}, "system": {"system"},
    "tool": {"tool"},
}  # fmt: skip


def is_preference(draft: Draft) -> bool:
    """Return True if the configuration trains on pairs of answers, rewards or labels."""
    return bool(draft.get("rl") or draft.get("reward_model"))


def write_data(draft: Draft) -> None:
    """Write every dataset, the mixture and the held-out share."""
    taken: list[str] = []
    for base in ("pretraining_dataset", "datasets", "test_datasets"):
        entries = draft.get(base, [])
        if not isinstance(entries, list):
            draft.missing(base, "a list of datasets is expected")
            continue
        for number, entry in enumerate(entries):
            key = f"{base}.{number}"
            if not isinstance(entry, dict):
                draft.missing(key, "a mapping is expected")
                continue
            name = identifier(str(entry.get("path") or base), "data")
            name = name if name not in taken else f"{name}_{len(taken) + 1}"
            taken.append(name)
            _write_dataset(draft, name, key, entry)
            if base == "test_datasets":
                draft.set(f"dataset.{name}.holdout", None, "", "test_datasets", text="100%")
    trained = [name for name in taken if draft.setting(f"dataset.{name}.holdout") != "100%"]
    for name in trained if len(trained) > 1 else ():
        draft.set(f"mixture.{name}", None, "", "every document once an epoch", text="1 epoch")
    _write_holdout(draft, trained)
    if draft.get("shuffle_merged_datasets", True):
        draft.same("shuffle_merged_datasets", "rows are drawn in random order")
    if draft.get("train_on_inputs") is False:
        draft.same("train_on_inputs", "answers alone are trained on")
    draft.translated("train_on_inputs chat_template chat_template_jinja excess_length_strategy")
    draft.missing("shuffle_merged_datasets", "rows are drawn in random order")
    if draft.get("dataset_exact_deduplication"):
        for name in taken:
            draft.set(f"dataset.{name}.deduplicate", None, "dataset_exact_deduplication", text="exact")
        draft.note("duplicates are found among all datasets there, here in each dataset") if len(taken) > 1 else None
    draft.same("dataset_exact_deduplication", "off")
    if least := draft.number("min_sample_len", 0):
        for name in taken:
            draft.set(f"dataset.{name}.min_tokens", least, "min_sample_len")
    draft.same("min_sample_len", "no limit")
    draft.unless_off("chat_template_kwargs", "write `template_arguments = { … }`")


def _write_holdout(draft: Draft, trained: list[str]) -> None:
    share = draft.number("val_set_size", 0.0)
    if share >= 1:
        draft.missing("val_set_size", "a number of documents; `holdout` is a share, such as 2%")
        return
    for name in trained if share else ():
        draft.set(f"dataset.{name}.holdout", None, "val_set_size", text=f"{100 * share:.10g}%")
        draft.note("it holds out a share of the documents, here it is a share of the tokens: other documents")
    draft.same("val_set_size", "nothing is held out")


def _write_dataset(draft: Draft, name: str, key: str, entry: dict[str, Any]) -> None:
    address = f"dataset.{name}"
    write_source(
        draft, address, f"{key}.path", files=f"{key}.data_files", config=f"{key}.name", split=f"{key}.split",
        kind=f"{key}.ds_type",
    )  # fmt: skip
    form = entry.get("type") or ("pretrain" if key.startswith("pretraining") else "")
    strategy = draft.text("excess_length_strategy", "drop").lower()
    longer = {"drop": "skip", "truncate": "truncate", "raise": "error"}.get(strategy, "skip")
    if isinstance(form, dict):
        _write_own_prompt(draft, address, f"{key}.type", form)
    elif not isinstance(form, str):
        draft.missing(f"{key}.type", "it is not a text")
    elif not form:
        draft.set(f"{address}.tokens", "input_ids", "", "without a type the data is tokenized")
        draft.set(f"{address}.mask", "labels", "", "labels, -100 where nothing is predicted")
    elif form in ("pretrain", "completion"):
        field = draft.text(f"{key}.field") or draft.text(f"{key}.text_column", "text")
        draft.set(f"{address}.text", field, f"{key}.field {key}.text_column")
        draft.translated(f"{key}.type")
        longer = "split"
        if form == "pretrain":
            draft.note("pieces of a document longer than a row overlap by 256 tokens there; here they do not")
    elif form.partition(".")[0] in ("chat_template", "bradley_terry", "sharegpt", "chatml", "llama3"):
        _write_conversations(draft, address, key, form)
    elif form.partition(":")[0] in _PROMPTS and (form.partition(":")[2] or "instruct") in ALPACA:
        base, _, style = form.partition(":")
        _write_prompt(draft, address, f"{key}.type", _PROMPTS[base], ALPACA[style or "instruct"])
    else:
        draft.missing(f"{key}.type", "this prompt format is not there; write the records as conversations")
    longer = "skip" if is_preference(draft) else longer
    note = "longer ones are left out" if longer == "skip" else "pieces of its length" if longer == "split" else ""
    draft.set(f"{address}.oversized", None, "excess_length_strategy", note, text=longer)
    draft.unless_off(f"{key}.shards {key}.shards_idx", "write the part of the data into files")
    draft.meaningless(f"{key}.preprocess_shards {key}.trust_remote_code", "how axolotl reads the data")
    draft.unless_off(
        f"{key}.skip {key}.input_transform {key}.revision {key}.split_thinking", "there is no such setting"
    )


# Prompts --------------------------------------------------------------------------------------------------------------


def _write_own_prompt(draft: Draft, address: str, key: str, form: dict[str, Any]) -> None:
    """Write a prompt format that the configuration itself describes."""
    instruction, more, answer = (
        draft.text(f"{key}.field_{name}", name) for name in ("instruction", "input", "output")
    )  # fmt: skip
    text = draft.text(f"{key}.format", "{instruction} {input}")
    without = draft.text(f"{key}.no_input_format") or text.replace("{input}", "")
    if system := draft.text(f"{key}.system_prompt"):
        before = draft.text(f"{key}.system_format", "{system}").replace("{system}", system)
        text, without = before + text, before + without
    unknown = re.sub(r"\{(instruction|input)\}", "", text + without)
    if draft.has(f"{key}.field_system") or "{" in unknown:
        draft.missing(key, "this prompt format has further fields; write the records as conversations")
        return
    fields = (instruction, more if "{input}" in text else "", answer)
    _write_prompt(draft, address, key, fields, (text, without))
    draft.translated(" ".join(f"{key}.{word}" for word in form))


def _write_prompt(draft: Draft, address: str, key: str, fields: tuple[str, str, str], formats: tuple[str, str]) -> None:
    """Write a dataset of prompts and answers. fields: instruction, input ("": none) and answer; formats: the prompt
    with and without input."""
    draft.set(f"{address}.prompt", fields[0], key)
    draft.set(f"{address}.response", fields[2], key)
    if fields[1]:
        draft.set(f"{address}.system", fields[1], key, "the template writes it as the input")
    draft.set(f"{address}.template", prompt_template(*formats), key)
    if draft.get("train_on_inputs"):
        draft.set(f"{address}.train_on", None, "train_on_inputs", text="all")
    draft.note(_APART)


# Conversations --------------------------------------------------------------------------------------------------------


def _write_conversations(draft: Draft, address: str, key: str, form: str) -> None:
    base, _, method = form.partition(".")
    if draft.get("rl") == "kto" and base in ("chatml", "llama3") and method in ("ultra", "argilla"):
        prompt = "prompt" if method == "ultra" else "instruction"
        for setting, field in (("prompt", prompt), ("response", "completion"), ("label", "label")):
            draft.set(f"{address}.{setting}", field, f"{key}.type")
        draft.set(f"{address}.template", base, f"{key}.type")
        return
    if is_preference(draft):
        if not _write_pairs(draft, address, key, base, method):
            draft.missing(f"{key}.type", "this form of records is not there")
            return
    elif method or base in ("chatml", "llama3"):
        draft.missing(f"{key}.type", "this form of records is not there")
        return
    else:
        messages = draft.text(f"{key}.field_messages", "conversations" if base == "sharegpt" else "messages")
        draft.set(f"{address}.messages", messages, f"{key}.field_messages {key}.type")
        _write_trained(draft, address, key)
    _write_roles(draft, key)
    _write_template(draft, address, key, base)
    if draft.has(f"{key}.field_tools"):
        draft.set(f"{address}.tools", draft.text(f"{key}.field_tools"), f"{key}.field_tools")
    marked = f"{key}.message_field_training"
    if draft.has(marked):
        draft.set(f"{address}.message_train", draft.text(marked), marked)
    if draft.get(f"{key}.drop_system_message"):
        draft.set(f"{address}.drop_system", True, f"{key}.drop_system_message")
    draft.same(f"{key}.drop_system_message", "off")
    draft.unless_off(f"{marked}_detail", "messages are used whole")
    if draft.get(f"{key}.field_thinking", "reasoning_content") in ("reasoning_content", "thinking", "reasoning"):
        draft.same(f"{key}.field_thinking {key}.template_thinking_key", "reasoning goes by each of its usual names")
    draft.meaningless(f"{key}.conversation", "the template says how turns are written")


def _write_pairs(draft: Draft, address: str, key: str, base: str, method: str) -> bool:
    """Write the fields of preference pairs; return False for a form that xtrain does not read."""
    if base == "bradley_terry":
        prompt, chosen, rejected = "input", "chosen", "rejected"
        if method != "chat_template":
            return False
    elif method in _PAIRS:
        prompt, chosen, rejected = _PAIRS[method]
    elif method in ("default", "") and base == "chat_template":
        prompt, chosen, rejected = "messages", "chosen", "rejected"
    else:
        return False
    prompt = draft.text(f"{key}.field_messages") or draft.text(f"{key}.field_prompt") or prompt
    if prompt:
        draft.set(f"{address}.prompt", prompt, f"{key}.field_messages {key}.field_prompt {key}.type")
    draft.set(f"{address}.chosen", draft.text(f"{key}.field_chosen", chosen), f"{key}.field_chosen {key}.type")
    draft.set(f"{address}.rejected", draft.text(f"{key}.field_rejected", rejected), f"{key}.field_rejected {key}.type")
    return True


def _write_roles(draft: Draft, key: str) -> None:
    """Account for the names of roles and of the parts of a message."""
    mapped = [
        draft.text(f"{key}.message_property_mappings.{part}") or draft.text(f"{key}.message_field_{part}") or part
        for part in ("role", "content")
    ]
    keys = f"{key}.message_property_mappings.role {key}.message_property_mappings.content {key}.message_field_*"
    draft.translated(f"{key}.message_field_training")
    if tuple(mapped) in (("role", "content"), ("from", "value")):
        draft.same(keys, "both usual forms of messages are read")
    else:
        draft.missing(keys, "messages have `role` and `content`, or `from` and `value`")
    roles = draft.get(f"{key}.roles", {})
    for role, sources in roles.items() if isinstance(roles, dict) else ():
        if isinstance(sources, list) and {str(source) for source in sources} <= _ROLES.get(role, set()):
            draft.same(f"{key}.roles.{role}", "usual names of roles")
        else:
            draft.missing(f"{key}.roles.{role}", "roles with other names")


def _write_trained(draft: Draft, address: str, key: str) -> None:
    """Write which turns are trained on, as axolotl labels them."""
    roles = draft.get(f"{key}.roles_to_train", ["assistant"])
    ends = {draft.text(f"{key}.train_on_eos", "turn"), draft.text(f"{key}.train_on_eot", "turn")}
    if draft.get("train_on_inputs"):
        draft.set(f"{address}.train_on", None, "train_on_inputs", "headers of turns too", text="all")
        draft.note("with train_on_inputs it trains the contents of all turns, here also their headers")
    elif not roles and all(is_off(end) or end == "turn" for end in ends):
        draft.set(f"{address}.train_on", None, f"{key}.roles_to_train", text="last")
    elif not (isinstance(roles, list) and {str(role) for role in roles} <= _ASSISTANTS):
        draft.missing(f"{key}.roles_to_train", "trained are the assistant's turns, its last turn, or all tokens")
    draft.same(f"{key}.roles_to_train", "the assistant's turns")
    if ends == {"turn"}:
        draft.same(f"{key}.train_on_eos {key}.train_on_eot", "the end of every trained turn")
    else:
        draft.missing(f"{key}.train_on_eos {key}.train_on_eot", "the end of each trained turn is trained, and no other")


def _write_template(draft: Draft, address: str, key: str, base: str) -> None:
    own = f"{key}.chat_template" if draft.has(f"{key}.chat_template") else "chat_template"
    name = draft.text(own, "tokenizer_default")
    jinja = next((found for found in (f"{key}.chat_template_jinja", "chat_template_jinja") if draft.has(found)), "")
    if base in ("chatml", "llama3"):
        draft.set(f"{address}.template", base, f"{key}.type")
    elif jinja and name in ("jinja", "tokenizer_default"):
        draft.set(f"{address}.template", draft.text(jinja), f"{jinja} {own}")
    elif name in ("chatml", "llama3"):
        draft.set(f"{address}.template", name, own)
    elif name == "tokenizer_default":
        draft.set(f"{address}.template", None, own, text="auto")
    elif name.startswith("tokenizer_default_fallback_"):
        draft.set(f"{address}.template", None, own, "the fallback counts only if the tokenizer has none", text="auto")
    else:
        draft.set(f"{address}.template", None, own, f"its {name}", text="auto")
        draft.note(_TEMPLATE.format(name))
    draft.meaningless(f"{key}.chat_template", "the type says the template")
