"""`tick.generate`: continue prompts with the current model."""

import time
from pathlib import Path

import torch

from xtrain.plan.plan import Plan
from xtrain.records.training_events import GeneratedText, GenerateEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.chat.template import load_template
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.averages import WeightAverages, Weights
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import PipelineSchedule
from xtrain.runtime.nn.texts import Chat, Sampling, planned_arguments
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.text_generator import LogitsNotFinite, TextGenerator, continue_texts, tokens_and_ends
from xtrain.runtime.store.saver import Saver


@op("tick.generate")
def generate(
    plan: Plan,
    model: ModelParts,
    tokenizer: TextTokenizer,
    rank: Rank,
    records: Records,
    progress: Progress,
    node_id: str,
    prompts: list[str],
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    top_k: int | None = None,
    min_p: float = 0.0,
    stop: list[str] | None = None,
    chat: str | None = None,
    system: str = "",
    task: str | None = None,
    positions: int = 0,
    pipeline: PipelineSchedule | None = None,
    averaged: bool = False,
    ema: WeightAverages | None = None,
    saver: Saver | None = None,
    beat: HeartbeatWriter | None = None,
):
    """Generate continuations of the prompts. Every rank runs the model, one rank samples. Samples depend only on the
    seed and the prompt.

    chat: template that makes each prompt a user turn after a `system` turn. positions: minimum cache length. averaged:
    use the averaged weights once they exist. Warns if no token can be chosen.
    """
    author = TextGenerator(model=model, rank=rank, pipeline=pipeline, beat=beat)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    talk = None
    if chat is not None:
        template = load_template(chat, tokenizer, Path.cwd(), planned_arguments(plan, chat))
        talk = Chat(template=template, tokenizer=tokenizer, system=system)
    ids, ends = tokens_and_ends(tokenizer, prompts, stop or (), talk)
    weights = Weights(ema=ema if averaged else None, saver=saver)

    def run(step: Step) -> None:
        begin = time.perf_counter()
        model.train(False)
        # Rows of one token and of prompts have other shapes than the block compiled for a step.
        eager = torch.compiler.set_stance("force_eager")
        with weights.in_place() as which, eager, model.with_adapter_of(task):
            try:
                texts = continue_texts(author, tokenizer, ids, ends, tokens, sampling, positions)
            except LogitsNotFinite as problem:
                records.warn(f"no text is generated: {problem}", step=progress.step)
                return
            finally:
                reshard(model)
                model.train()
        seconds = time.perf_counter() - begin
        samples = [GeneratedText(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        records.event(GenerateEvent(step=progress.step, node=node_id, weights=which, samples=samples, seconds=seconds))

    return run
