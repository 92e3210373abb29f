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
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.chat.template import Arguments, ChatTemplate, TemplateRefusal, reserved, unused
from xtrain.runtime.feed.chat.writer import written_prompt, written_turns
from xtrain.runtime.feed.records import Message, named_values
from xtrain.runtime.feed.tokenizers import TextTokenizer


def planned_template(plan: Plan) -> str:
    """Return the template of the conversations that a plan reads; `auto` without one or with several."""
    reads = [node.args["reads"] for node in plan.nodes if node.op == "setup.data"]
    templates = {settings["template"] for settings in reads if "template" in settings}
    return templates.pop() if len(templates) == 1 else "auto"


def planned_arguments(plan: Plan, template: str) -> Arguments:
    """Return the further arguments of a template in all conversations that a plan reads with it; () if they differ."""
    reads = [node.args["reads"] for node in plan.nodes if node.op == "setup.data"]
    arguments = [named_values(args.get("template_arguments", {})) for args in reads if args.get("template") == template]
    return arguments[0] if arguments and all(other == arguments[0] for other in arguments) else ()


@frozen(kw_only=True)
class Chat:
    """A template, and the system message that conversations begin with; "": none."""

    template: ChatTemplate
    tokenizer: TextTokenizer
    system: str = ""

    def prompt(self, said: str) -> list[int]:
        """Return the tokens of a conversation with one user message, up to where the answer begins.

        Raises DataError if the template refuses it or leaves it out, and for texts that spell a special token, which
        data cannot have either.
        """
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": said})
        for message in messages:
            if (spelt := self.reserved.search(message["content"])) is not None:
                raise DataError(f"the {message['role']} message contains the special token {spelt[0]}")
        try:
            (text,) = Bounded(partial(written_prompt, self.template)).map([messages])
        except (TemplateRefusal, BeyondBounds) as refusal:
            raise DataError(f"{self.template.origin}: {refusal}") from refusal
        return self.begun(text)

    def begun(self, text: str) -> list[int]:
        """Return the tokens of a rendered conversation from its beginning on."""
        ids = self.tokenizer.encode_rendered([text])[0].ids.tolist()
        begun = not self.tokenizer.has_bos or ids[:1] == [self.tokenizer.bos]
        return ids if begun else [self.tokenizer.bos, *ids]

    @property
    def closing(self) -> str:
        """Text that the template writes after an answer; "" without one, or if it is ambiguous."""
        question: Message = {"role": "user", "content": "a"}
        (answer,) = unused([question], 1)
        said: list[Message] = [question, {"role": "assistant", "content": answer}]
        try:
            (turn,) = Bounded(self._said).map([said])
        except (TemplateRefusal, BeyondBounds):
            return ""
        return turn.partition(answer)[2].strip()

    def _said(self, messages: list[Message]) -> str:
        turns, _ = written_turns(self.template, messages, self.reserved)
        return "".join(turns.text[start:end] for start, end in turns.spans())

    @property
    def reserved(self) -> re.Pattern[str]:
        """Texts that no message may contain."""
        return reserved(self.tokenizer, self.template)


# Number of earlier tokens to decode with new ones: tokenizers write some tokens differently at the beginning of a text.
CONTEXT = 5
BROKEN = "\ufffd"


@frozen
class TextEnds:
    """Ends of a text in addition to eos: tokens, and texts, which are not part of it."""

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: TextTokenizer, texts: Iterable[str] = ()) -> Self:
        """Return the ends. A text that is the name of a special token becomes that token, which decoded text never
        contains."""
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
    """Text after a prompt. Characters are added to `text` once all their bytes have come.

    most: largest number of tokens. done: the text has ended. cut: it ended at that number, without an end token.
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
        """Add the next token; ignored after the end."""
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
        """End the text."""
        if not self.done:
            self._read(whole=True)
            self.done = True

    def _read(self, *, whole: bool) -> None:
        """Decode new tokens. An incomplete character waits for its other bytes, unless none will come (`whole`)."""
        before = self.tokenizer.decode(self._ids[self._begin : self._known])
        after = self.tokenizer.decode(self._ids[self._begin :])
        if len(after) <= len(before) or (after.endswith(BROKEN) and not whole):
            return
        self._begin, self._known = self._known, len(self._ids)
        seen = len(self.text)
        self.text += after[len(before) :]
        end_places = [self.text.find(end, max(0, seen - len(end) + 1)) for end in self.ends.texts]
        if places := [place for place in end_places if place >= 0]:
            self.text = self.text[: min(places)]
            self.done = True

    def news(self) -> str:
        """Return the text that has become certain since the last call, without a possible beginning of an end."""
        upto = len(self.text) if self.done else len(self.text) - self._doubtful()
        new = self.text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return new

    def _doubtful(self) -> int:
        """Return the number of characters at the end of the text that may begin an end."""
        return max((_overlap(self.text, end) for end in self.ends.texts), default=0)


def _overlap(text: str, end: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `end`, but not all of it."""
    return next((count for count in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:count])), 0)


NO_TOKEN: Final = -1


@frozen(kw_only=True)
class Sampling:
    """Settings of the choice of tokens.

    temperature: divisor of logits; 0: the likeliest token. top_k: choose among the likeliest k; None: all. top_p: among
    the fewest with this total probability (Holtzman et al. 2020, arXiv 1904.09751). min_p: among those with at least
    this share of the likeliest token's probability (Nguyen et al. 2024, arXiv 2407.01082). seed: of the draws of every
    row, which do not depend on other rows.

    Raises ValueError for invalid numbers.
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
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1,
            "min_p must be between 0 and 1": not 0 <= self.min_p <= 1,
        }
        if problem := next((message for message, applies in wrong.items() if applies), None):
            raise ValueError(problem)

    def candidates(self, logits_BV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weights [B, N], 0 for left-out tokens, and their tokens; None: all in order.

        Each setting applies to the tokens that the previous ones left, in the order of the attributes.
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

    def kept(self, logits_BV: Tensor) -> Tensor:
        """Return the tokens that `Draws` chooses from, ids from 1 and 0 for left-out ones, int64 [B, N]."""
        weights_BN, tokens_BN = self.candidates(centred(logits_BV))
        if tokens_BN is None:
            tokens_BN = torch.arange(logits_BV.shape[1], device=logits_BV.device).expand(weights_BN.shape)
        return torch.where(weights_BN > 0, tokens_BN + 1, 0)

    def left_out(self, logits_BV: Tensor, logprob_BV: Tensor) -> Tensor:
        """Return the total probability [B] of left-out tokens. logprob_BV: of logits / temperature."""
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
        """Return a token [B] for every row; NO_TOKEN if logits are NaN or infinite. A row takes one random number,
        whatever the candidates."""
        known_B = logits_BV.amax(-1).isfinite()  # others may be -inf, as of tokens that never follow
        tokens_B = logits_BV.argmax(-1) if self.sampling.temperature == 0 else self._drawn(logits_BV)
        return tokens_B.where(known_B, NO_TOKEN)

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        weights_BN, tokens_BN = self.sampling.candidates(centred(logits_BV))
        ends_BN = running_sums(weights_BN, torch.float64)
        shares_B = torch.tensor([generator.random() for generator in self.generators], dtype=torch.float64)
        whole_B1 = ends_BN[:, -1:]
        # Below the total, so that a candidate of weight 0 after the last one is never hit.
        targets_B1 = torch.minimum(shares_B.to(whole_B1.device)[:, None] * whole_B1, whole_B1.nextafter(0 * whole_B1))
        places_B1 = torch.searchsorted(ends_BN, targets_B1, right=True)
        return (places_B1 if tokens_BN is None else tokens_BN.gather(1, places_B1))[:, 0]


def centred(logits_BV: Tensor) -> Tensor:
    """Return logits minus the largest, so that none overflows when divided by a low temperature, in at least fp32; 0
    where that is NaN or infinite."""
    best_B1 = logits_BV.amax(-1, keepdim=True)
    apart_BV = (logits_BV - best_B1).where(best_B1.isfinite(), 0)
    return apart_BV if apart_BV.dtype == torch.float64 else apart_BV.float()


def running_sums(x_BN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return cumulative sums along the last dim. CUDA has no deterministic algorithm: in deterministic mode the host
    sums."""
    if x_BN.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x_BN.cpu().cumsum(-1, dtype=dtype).to(x_BN.device)
    return x_BN.cumsum(-1, dtype=dtype)
