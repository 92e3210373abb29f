"""Episodes of rollouts: conversations of the model with an environment, turn by turn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field, frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.bounded import BeyondBounds
from xtrain.runtime.feed.chat.template import load_template
from xtrain.runtime.feed.records import named_values
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import Completion, Prompt
from xtrain.runtime.nn.texts import Chat, Continuation
from xtrain.runtime.sampling.conversation import Conversations
from xtrain.runtime.sampling.engine_sampler import EngineSampler
from xtrain.runtime.sampling.environments import EpisodeProcess, OpenedEnvironment, Reply
from xtrain.runtime.sampling.sampler import RowRanks, Sampler


@frozen
class EpisodeStart:
    """Beginning of an episode. number: of the episode in its group. key: seed of its draws. begin: seed of the random
    numbers of `reset`, the same for the whole group. dataset: whose conversations it has."""

    prompt: Prompt
    key: str
    begin: str
    dataset: str


@define(eq=False)
class Episode:
    """State of an episode. going: the model has another turn. process: None on ranks without it, and after its end."""

    start: EpisodeStart
    conversations: Conversations
    process: EpisodeProcess | None = None
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    sampled: list[int] = field(factory=list)
    rewards: list[float] = field(factory=list)
    texts: list[str] = field(factory=list)
    experts: np.ndarray | None = None
    columns: dict[str, np.ndarray] = field(factory=dict)
    left_out: float = 0.0
    turns: int = 0
    going: bool = True
    cut: bool = False
    lost: bool = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        """Add tokens of the model or of the environment."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.sampled += [int(sampled)] * len(tokens)

    def add_turn(self, turn: Completion) -> None:
        """Add a turn of the model."""
        if turn.experts is not None:
            before = turn.experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate((before, turn.experts[len(before) :]))
        for name, own in turn.columns.items():
            self.columns[name] = np.concatenate((_filled(self.columns[name], len(self.tokens)), own))
        self.add(turn.tokens, turn.logprobs, sampled=True)
        self.left_out += turn.left_out
        self.turns += 1
        self.texts.append(turn.text)

    def lose(self) -> None:
        """End the episode after a call exceeded its limits."""
        self.going, self.lost, self.process = False, True, None

    def result(self) -> Completion:
        """Return the episode as a completion."""
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs,
            text="".join(self.texts),
            cut=self.cut,
            left_out=self.left_out,
            columns={name: _filled(column, len(self.tokens)) for name, column in self.columns.items()},
            experts=self.experts,
            sampled=self.sampled,
            rewards=tuple(self.rewards),
            turns=self.turns,
            lost=self.lost,
        )


def _filled(column: np.ndarray, tokens: int) -> np.ndarray:
    """Return a column [C, width] with zeros for the tokens after its end, up to `tokens`."""
    return np.pad(column, ((0, tokens - len(column)), (0, 0)))


@frozen(kw_only=True, eq=False)
class EpisodePlayer:
    """Player of episodes. conversations: by the name of a dataset. positions: of an episode in a row, which has one
    token more. Calls are collective over all ranks, which need the same number of episodes each."""

    sampler: Sampler | EngineSampler
    environment: OpenedEnvironment
    conversations: Mapping[str, Conversations]
    turns: int
    positions: int

    @classmethod
    def of(
        cls,
        plan: Plan,
        sampler: Sampler | EngineSampler,
        environment: OpenedEnvironment,
        datasets: Sequence[str],
        turns: int,
    ) -> "EpisodePlayer":
        """Return the player of a plan's episodes. Raises DataError for a template that cannot write them."""
        positions, tokenizer = plan.node("setup.prompts").args["positions"], sampler.tokenizer
        conversations = {name: conversations_of(plan, name, tokenizer, environment) for name in datasets}
        return cls(
            sampler=sampler, environment=environment, conversations=conversations, turns=turns, positions=positions
        )

    @staticmethod
    def starts(
        prompts: Sequence[Prompt], keys: Sequence[str], begins: Sequence[str], datasets: Sequence[str]
    ) -> list[EpisodeStart]:
        """Return the beginnings of episodes; see `EpisodeStart`."""
        return [EpisodeStart(*given) for given in zip(prompts, keys, begins, datasets, strict=True)]

    def play(self, starts: Sequence[EpisodeStart]) -> list[Completion]:
        """Play episodes side by side, and return them as completions.

        A turn depends only on its episode: what the environment says, the seed and the number of the turn. While the
        model writes the turns of other episodes, the environment answers those that have ended. Raises LogitsNotFinite
        on all ranks alike; PartFailed on the ranks that call the environment, and DataError, if it does something
        invalid.
        """
        columns = self.sampler.columns([]) if isinstance(self.sampler, Sampler) else {}
        episodes = [Episode(start, self.conversations[start.dataset], columns={**columns}) for start in starts]
        try:
            self._open(episodes)
            for turn in range(self.turns):
                if not self._anyone_goes_on(episodes):
                    break
                self._turn(episodes, turn)
            self._finish(episodes)
        finally:
            for episode in episodes:
                if episode.process is not None:
                    episode.process.close()
        return [episode.result() for episode in episodes]

    def _open(self, episodes: Sequence[Episode]) -> None:
        if self._ranks.is_first:
            for episode in episodes:
                start = episode.start
                question = episode.conversations.question(start.prompt.text)
                task = {"prompt": question, "answer": start.prompt.answer, **start.prompt.values}
                episode.process = self.environment.episode()
                _send(episode, "reset", start.key, start.begin, task)
        rows: list[list[float]] = []
        for episode in episodes:
            rows.append([0])
            if episode.process is not None:
                try:
                    messages = episode.process.opening()
                except BeyondBounds:
                    episode.lose()
                    continue
                ids = episode.conversations.opening(messages)
                if len(ids) > self.positions:
                    part = self.environment.part
                    room = f"the {self.positions:,} positions that an episode has"
                    raise part.failed(f"gave a first message of {len(ids):,} tokens in `reset`, more than fit {room}")
                rows[-1] = [1, *ids]
        for episode, (known, *ids) in zip(episodes, self._ranks.share_numbers(rows), strict=True):
            if not known:
                # A row has at least one position; nothing of it is learned.
                episode.lose()
                ids = [episode.start.prompt.ids[0]] * 2
            tokens = [int(token) for token in ids]
            episode.add(tokens, [0.0] * len(tokens), sampled=False)

    def _turn(self, episodes: Sequence[Episode], turn: int) -> None:
        """Sample a turn of every open episode, and add the reply."""
        last = turn == self.turns - 1
        waiting: list[Episode] = []

        def ended(row: int, text: Continuation) -> None:
            if episodes[row].process is not None:
                waiting.append(episodes[row])
                self._answer(episodes[row], f"{episodes[row].start.key} {turn}", text.text, last=last or text.cut)

        room = [self.positions + 1 - len(episode.tokens) for episode in episodes]
        sampled = self.sampler.sample(
            [episode.tokens if episode.going else episode.tokens[-1:] for episode in episodes],
            [episode.conversations.ends for episode in episodes],
            [f"{episode.start.key} {turn}" for episode in episodes],
            [min(self.sampler.most, left) * episode.going for episode, left in zip(episodes, room, strict=True)],
            ended,
        )
        played = [episode for episode in episodes if episode.going]
        for episode, completion in zip(episodes, sampled, strict=True):
            if episode.going:
                episode.add_turn(completion)
                episode.cut = completion.cut
        answers = self._ranks.share_numbers(
            [self._answered(episode, sampled[n], waits=episode in waiting) for n, episode in enumerate(episodes)]
        )
        for episode, (state, reward, *ids) in zip(episodes, answers, strict=True):
            if episode not in played:
                continue
            if not state:
                episode.lose()
                continue
            episode.rewards.append(reward)
            tokens = [int(token) for token in ids]
            ends = state == 1 or last or episode.cut
            episode.going = not ends and len(episode.tokens) + len(tokens) <= self.positions
            episode.cut |= not ends and not episode.going
            if episode.going:
                episode.add(tokens, [0.0] * len(tokens), sampled=False)

    def _answer(self, episode: Episode, key: str, text: str, *, last: bool) -> None:
        """Send the text of a turn to the environment. last: nothing follows, so that no tool is called."""
        form = episode.conversations.form
        calls = [] if form is None or last else form.calls(text)
        if calls:
            _send(episode, "call", key, calls)
        else:
            _send(episode, "step", key, text.strip())

    def _answered(self, episode: Episode, turn: Completion, *, waits: bool) -> list[float]:
        """Return what the environment answers as numbers: 0 for a lost episode, 1 at its end, 2 before another turn;
        the reward, and the tokens that follow."""
        if not waits or episode.process is None:
            return [0, 0]
        try:
            reply = episode.process.reply()
        except BeyondBounds:
            episode.process = None
            return [0, 0]
        if reply.messages is None:
            return [1, reply.reward]
        return [2, reply.reward, *self._following(episode, reply, turn)]

    def _following(self, episode: Episode, reply: Reply, turn: Completion) -> list[int]:
        assert reply.messages is not None
        if turn.cut:
            return []
        episode.texts += [f"\n[{message['role']}] {message['content']}\n" for message in reply.messages]
        return episode.conversations.following(reply.messages, turn.tokens, turn.text)

    def _finish(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            if episode.process is not None:
                _send(episode, "finish", f"{episode.start.key} end")
        rows: list[list[float]] = []
        for episode in episodes:
            rows.append([0, 0])
            if episode.process is not None:
                try:
                    rows[-1] = [1, episode.process.reward()]
                except BeyondBounds:
                    episode.process = None
        for episode, (known, reward) in zip(episodes, self._ranks.share_numbers(rows), strict=True):
            if known:
                episode.rewards.append(reward)
            else:
                episode.lose()

    def _anyone_goes_on(self, episodes: Sequence[Episode]) -> bool:
        rank = self._ranks.rank
        going = torch.tensor(any(episode.going for episode in episodes), dtype=torch.int32, device=rank.device)
        if rank.world_size > 1:
            dist.all_reduce(going, op=dist.ReduceOp.MAX)
        return bool(going.item())

    @property
    def _ranks(self) -> RowRanks:
        return self.sampler.row_ranks


def _send(episode: Episode, name: str, *arguments: Any) -> None:
    """Send a call to the process of an episode; a process that has ended answers nothing."""
    assert episode.process is not None
    try:
        getattr(episode.process, name)(*arguments)
    except BeyondBounds:
        episode.process.close()
        episode.process = None


def conversations_of(
    plan: Plan, dataset: str, tokenizer: TextTokenizer, environment: OpenedEnvironment
) -> Conversations:
    """Return the conversations of a dataset with an environment. Raises DataError as `Conversations.of` does."""
    reads = {node.args["dataset"]: node.args["reads"] for node in plan.nodes if node.op == "setup.data"}[dataset]
    arguments = named_values(reads.get("template_arguments", {}))
    template = load_template(reads["template"], tokenizer, Path.cwd(), arguments)
    return Conversations.of(Chat(template=template, tokenizer=tokenizer), environment.tools)
