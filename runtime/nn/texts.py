"""Texts that a model continues: the conversation before, the choice of the next token, and where a text ends."""

import math
import random
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Self

import torch
from attrs import define, field, frozen
from torch import Tensor

from xtrain.plan.plan import Plan
from xtrain.runtime.base.bounded import BeyondBounds, Bounded
from xtrain.runtime.base.data_errors import DataError
from xtrain.runtime.feed.chat.template import Arguments, ChatTemplate, TemplateRefusal, reserved, unused
from xtrain.runtime.feed.chat.writer import written_prompt, written_turns
from xtrain.runtime.feed.records import Message, named_values
from xtrain.runtime.feed.tokenizers import TextTokenizer


def planned_template(plan: Plan) -> str:
    """The template of the conversations that a plan reads, `auto` where it reads none or by several templates."""
    reads = [node.args["reads"] for node in plan.nodes if node.op == "setup.data"]
    found = {each["template"] for each in reads if "template" in each}
    return found.pop() if len(found) == 1 else "auto"


def planned_arguments(plan: Plan, template: str) -> Arguments:
    """Return what a template is given for all conversations that a plan reads by it; () where these differ."""
    reads = [node.args["reads"] for node in plan.nodes if node.op == "setup.data"]
    found = [named_values(each.get("template_arguments", {})) for each in reads if each.get("template") == template]
    return found[0] if found and all(each == found[0] for each in found) else ()


@frozen(kw_only=True)
class Chat:
    """A template, and the turn of the system that conversations begin with; "": none."""

    template: ChatTemplate
    tokenizer: TextTokenizer
    system: str = ""

    def prompt(self, said: str) -> list[int]:
        """The tokens of a conversation in which a user has said something, up to where the answer begins.

        Raises DataError where the template does not take it or leaves it out, and for texts that spell a special token:
        such turns are in no data either.
        """
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": said})
        for message in messages:
            if (spelt := self._reserved.search(message["content"])) is not None:
                raise DataError(f"the {message['role']} says the special token {spelt[0]}")
        try:
            (text,) = Bounded(partial(written_prompt, self.template)).map([messages])
        except (TemplateRefusal, BeyondBounds) as refusal:
            raise DataError(f"{self.template.origin}: {refusal}") from refusal
        ids = self.tokenizer.encode_rendered([text])[0].ids.tolist()
        begun = not self.tokenizer.has_bos or ids[:1] == [self.tokenizer.bos]
        return ids if begun else [self.tokenizer.bos, *ids]

    @property
    def closing(self) -> str:
        """What the template writes behind an answer; "" where it writes nothing, or in ways that leave it open."""
        question: Message = {"role": "user", "content": "a"}
        (answer,) = unused([question], 1)
        said: list[Message] = [question, {"role": "assistant", "content": answer}]
        try:
            (turn,) = Bounded(self._said).map([said])
        except (TemplateRefusal, BeyondBounds):
            return ""
        return turn.partition(answer)[2].strip()

    def _said(self, messages: list[Message]) -> str:
        turns, _ = written_turns(self.template, messages, self._reserved)
        return "".join(turns.text[start:end] for start, end in turns.spans())

    @property
    def _reserved(self) -> re.Pattern[str]:
        return reserved(self.tokenizer, self.template)


# So many tokens before new ones are decoded with them: tokenizers write some tokens otherwise where a text begins.
CONTEXT = 5
BROKEN = "\ufffd"


@frozen
class TextEnds:
    """What ends a text besides eos: tokens, and texts, which are not part of it."""

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: TextTokenizer, texts: Iterable[str] = ()) -> Self:
        """A text that is the name of a special token is that token: it is in no text that is decoded."""
        tokens, others = {tokenizer.eos}, []
        for text in texts:
            ids = tokenizer.encode_rendered([text])[0].ids.tolist()
            if len(ids) == 1 and ids[0] in tokenizer.specials:
                tokens.add(ids[0])
            else:
                others.append(text)
        return cls(frozenset(tokens), tuple(others))


@define(eq=False)
class Continuation:
    """What follows a prompt. Characters are part of `text` once all their bytes are there.

    most: tokens that are added at most. done: nothing follows. cut: as it has so many, without an end.
    """

    tokenizer: TextTokenizer
    prompt: Sequence[int]
    ends: TextEnds
    most: int
    text: str = ""
    done: bool = False
    cut: bool = False
    added: int = 0
    _ids: list[int] = field(init=False)
    _known: int = field(init=False)
    _shown: int = field(default=0, init=False)
    _begin: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._ids = list(self.prompt[-CONTEXT:])
        self._known = len(self._ids)

    def add(self, token: int) -> None:
        """Take the next token; those behind the end are of no account."""
        if self.done:
            return
        if token in self.ends.tokens:
            self.finish()
            return
        self.added += 1
        self._ids.append(token)
        self._read(whole=False)
        if not self.done and self.added == self.most:
            self.cut = True
            self.finish()

    def finish(self) -> None:
        """Nothing follows."""
        if not self.done:
            self._read(whole=True)
            self.done = True

    def _read(self, *, whole: bool) -> None:
        """Decode what is new. Half a character waits for its other bytes, unless there are none to come (`whole`)."""
        before = self.tokenizer.decode(self._ids[self._begin : self._known])
        after = self.tokenizer.decode(self._ids[self._begin :])
        if len(after) <= len(before) or (after.endswith(BROKEN) and not whole):
            return
        self._begin, self._known = self._known, len(self._ids)
        seen = len(self.text)
        self.text += after[len(before) :]
        found = [self.text.find(end, max(0, seen - len(end) + 1)) for end in self.ends.texts]
        if places := [place for place in found if place >= 0]:
            self.text = self.text[: min(places)]
            self.done = True

    def news(self) -> str:
        """What has become certain since the last call: not what may be the beginning of an end."""
        upto = len(self.text) if self.done else len(self.text) - self._doubtful()
        new = self.text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return new

    def _doubtful(self) -> int:
        """Characters at the end of the text that begin a text which would end it."""
        return max((_overlap(self.text, end) for end in self.ends.texts), default=0)


def _overlap(text: str, end: str) -> int:
    """The most characters at the end of `text` that `end` begins with, without being all of it."""
    return next((count for count in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:count])), 0)


NO_TOKEN: Final = -1


@frozen(kw_only=True)
class Sampling:
    """How tokens are drawn.

    temperature: logits are divided by it; 0: the likeliest token. top_k: from so many of the likeliest; None: from
    all. top_p: from the fewest that have this share of the probability together (Holtzman et al. 2020, arXiv
    1904.09751). min_p: from those with at least this share of the probability of the likeliest (Nguyen et al. 2024,
    arXiv 2407.01082). seed: of the draws of every row, which are then the same whatever other rows there are.

    Raises ValueError for numbers that are none of these.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        wrong = {
            "temperature must be 0 or above, and finite": not 0 <= self.temperature < math.inf,
            "top_k must be at least 1": self.top_k is not None and self.top_k < 1,
            "top_p must lie above 0 and at most at 1": not 0 < self.top_p <= 1,
            "min_p must lie between 0 and 1": not 0 <= self.min_p <= 1,
        }
        if problem := next((each for each, found in wrong.items() if found), None):
            raise ValueError(problem)

    def candidates(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights [B, N], 0 of what is left out, and the tokens that they are of; None: all in order.

        One setting works on what those before have left, in the order of the attributes.
        """
        scores_BN, tokens_BN = logits_BV / self.temperature, None
        if self.top_k is not None and self.top_k < logits_BV.shape[1]:
            scores_BN, tokens_BN = scores_BN.topk(self.top_k)
        elif self.top_p < 1:
            scores_BN, tokens_BN = scores_BN.sort(descending=True)
        weights_BN = scores_BN.softmax(-1)
        if self.top_p < 1:
            before_BN = running_sums(weights_BN) - weights_BN
            weights_BN = weights_BN * (before_BN < self.top_p)
        if self.min_p:
            weights_BN = weights_BN * (weights_BN >= self.min_p * weights_BN.amax(-1, keepdim=True))
        return weights_BN, tokens_BN

    def left_out(self, logits_BV: Tensor, logprob_BV: Tensor) -> Tensor:
        """The probability [B] of what is no candidate. logprob_BV: of logits / temperature."""
        if self.top_k is None and self.top_p == 1 and not self.min_p:
            return logprob_BV.new_zeros(len(logprob_BV))
        weights_BN, tokens_BN = self.candidates(logits_BV)
        chances_BN = logprob_BV.exp() if tokens_BN is None else logprob_BV.gather(1, tokens_BN).exp()
        return (1 - (chances_BN * (weights_BN > 0)).sum(-1)).clamp_(min=0)


@frozen(eq=False)
class Draws:
    """The draws of a batch of rows, each with a generator of its own."""

    sampling: Sampling
    generators: Sequence[random.Random]

    @classmethod
    def of(cls, sampling: Sampling, rows: int) -> Self:
        return cls(sampling, [random.Random(sampling.seed) for _ in range(rows)])

    def next(self, logits_BV: Tensor) -> Tensor:
        """A token [B] for every row; NO_TOKEN where logits are NaN or infinite. A row takes one random number, whatever
        there is to choose from."""
        best_B1 = logits_BV.amax(-1, keepdim=True)
        known_B1 = best_B1.isfinite()  # others may be -inf, as of tokens that never follow
        if self.sampling.temperature == 0:
            tokens_B = logits_BV.argmax(-1)
        else:  # below the largest, so that none is too large when it is divided by a low temperature
            tokens_B = self._drawn((logits_BV - best_B1).where(known_B1, 0))
        return tokens_B.where(known_B1[:, 0], NO_TOKEN)

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        exact = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
        weights_BN, tokens_BN = self.sampling.candidates(exact)
        ends_BN = running_sums(weights_BN, torch.float64)
        shares_B = torch.tensor([each.random() for each in self.generators], dtype=torch.float64)
        whole_B1 = ends_BN[:, -1:]
        # Below the whole, so that a candidate of weight 0 behind the last one is never hit.
        targets_B1 = torch.minimum(shares_B.to(whole_B1.device)[:, None] * whole_B1, whole_B1.nextafter(0 * whole_B1))
        places_B1 = torch.searchsorted(ends_BN, targets_B1, right=True)
        return (places_B1 if tokens_BN is None else tokens_BN.gather(1, places_B1))[:, 0]


def running_sums(x_BN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Along the last dim. CUDA has no algorithm that gives the same each time: where no other may be, the host sums."""
    if x_BN.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x_BN.cpu().cumsum(-1, dtype=dtype).to(x_BN.device)
    return x_BN.cumsum(-1, dtype=dtype)
