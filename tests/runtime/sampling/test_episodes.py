"""Episodes with environments: their tokens and masks, what an environment may do, and the limits of its process."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_generators import generator_of, plan_of

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.dsl.user_parts.files import find_module, module_digest
from xtrain.runtime.base.bounded import BeyondBounds
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.user_parts import PartFailed
from xtrain.runtime.feed.chat.calls import CallForm, ToolCall, fault_of
from xtrain.runtime.feed.chat.template import TEMPLATES, ChatTemplate
from xtrain.runtime.nn.batch import Completion, Prompt, SampledGroup
from xtrain.runtime.nn.texts import Chat, Continuation
from xtrain.runtime.sampling.conversation import Conversations
from xtrain.runtime.sampling.environments import ENVIRONMENTS, OpenedEnvironment, open_environment
from xtrain.runtime.sampling.episodes import EpisodePlayer, EpisodeStart
from xtrain.runtime.sampling.prompts import pack, unpacked
from xtrain.runtime.sampling.rollout import summed
from xtrain.runtime.sampling.sampler import RowRanks

TOKENIZER = ByteTokenizer()
TOOLS_TEMPLATE = """
{%- for tool in tools or [] %}{{ '[' + tool.function.name + ']' }}{% endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- generation -%}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor -%}
    {{- eos_token -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- m.role[0] + ':' + m.content + '/' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'a:' }}{% endif -%}
"""
PARTS = '''
import os, random, sys, time
from xtrain import environment, tool

@environment
class own:
    """Counts turns."""

    def reset(self, task, random, size: int = 3):
        self.turns, self.size, self.begun = 0, size, random.randint(0, 9)
        return [{"role": "system", "content": "s"}, {"role": "user", "content": task["prompt"] + str(self.begun)}]

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @tool
    def run(self, code: str) -> str:
        """Run Python."""
        found = {}
        exec(code, {"self": self, "os": os, "sys": sys, "time": time}, found)
        return str(found.get("x", ""))

    def step(self, text):
        self.turns += 1
        %s
        return ("again" if self.turns < self.size else None), self.turns / 4

    def finish(self):
        return 0.125 * self.begun
'''


def template(text: str = TOOLS_TEMPLATE) -> ChatTemplate:
    return ChatTemplate(text=text, origin="own template", bos_token="⟨bos⟩", eos_token="⟨eos⟩")


@pytest.fixture
def opened(tmp_path: Path):
    """An environment, its settings and limits given."""

    def opened(step: str = "", tools: bool = True, **limits: Any) -> OpenedEnvironment:
        (tmp_path / "parts.py").write_text(PARTS % step)
        digest = module_digest(find_module("parts.py", tmp_path))
        user = {"module": "parts.py", "function": "own", "digest": digest, "arguments": limits.pop("arguments", {})}
        schemas = {"add": {"a": "integer", "b": "integer"}, "run": {"code": "string"}}
        known = [
            {"type": "function", "function": {"name": name, "description": "…", "parameters": {
                "type": "object", "properties": {key: {"type": kind} for key, kind in each.items()},
                "required": [key for key in each if key != "b"]}}}
            for name, each in schemas.items()
        ]  # fmt: skip
        resources: dict[str, Any] = {}
        plan: Any = SimpleNamespace(spec=str(tmp_path / "spec.xtrain"))
        limits = {"seconds": 1, "wait": 10, "memory": 1 << 28, **limits}
        open_environment(plan, resources, "own", user, tools=known if tools else [], **limits)
        return resources[ENVIRONMENTS]["own"]

    return opened


class Spoken:
    """A sampler that says given texts, turn by turn; each token with its own log-probability."""

    def __init__(self, texts: list[list[str]], most: int = 30) -> None:
        self.texts, self.most, self.tokenizer, self.asked = texts, most, TOKENIZER, []
        author = generator_of(plan_of("llama { dim = 32, layers = 1, heads = 4, ffn = 40 }"))
        self.author, self.row_ranks = author, RowRanks(author.rank, None, None)

    def sample(self, prompts, ends, keys, most, ended):
        self.asked.append([list(each) for each in prompts])
        found = []
        for row, limit in enumerate(most):
            text = Continuation(TOKENIZER, prompts[row], ends[row], limit, done=not limit)
            tokens: list[int] = []
            said = [*self.texts[row].pop(0).encode(), TOKENIZER.eos] if limit else []
            while not text.done:
                tokens.append(said[len(tokens)])
                text.add(tokens[-1])
            if limit:
                ended(row, text)
            logprobs = [-(n + 1) / 100 for n in range(len(tokens))]
            found.append(Completion(tokens=tokens, logprobs=logprobs, text=text.text, cut=text.cut))
        return found


def player(environment: OpenedEnvironment, sampler: Any, turns: int = 3, positions: int = 400) -> EpisodePlayer:
    conversations = Conversations.of(Chat(template=template(), tokenizer=TOKENIZER), environment.tools)
    return EpisodePlayer(
        sampler=sampler, environment=environment, conversations={"d": conversations}, turns=turns, positions=positions
    )


def starts(count: int) -> list[EpisodeStart]:
    ids = np.array([256, *b"u:7/a:"])
    prompt = Prompt(ids=ids, text="u:7/a:", answer="", rest=ids[:0], values={}, dataset=0, place=5)
    return [EpisodeStart(prompt, f"1 5 {number}", "1 5 begin", "d") for number in range(count)]


def call(name: str, **arguments: Any) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def test_the_row_of_an_episode_is_what_model_and_environment_said(opened):
    """Three turns, with a tool in the second: compared with a row by hand."""
    spoken = Spoken([["one", call("add", a=2), "three"], ["x" * 99]], most=60)
    first, second = player(opened(), spoken).play(starts(2))
    begun = int(first.rewards[-1] / 0.125)
    parts = [
        (f"[add][run]s:s/u:7{begun}/a:", 0), ("one⟨eos⟩", 1), ("u:again/a:", 0),
        (call("add", a=2) + "⟨eos⟩", 1), ("t:3/a:", 0), ("three⟨eos⟩", 1),
    ]  # fmt: skip
    ids = [TOKENIZER.encode_rendered([text])[0].ids.tolist() for text, _ in parts]
    assert list(first.tokens) == [256, *(token for part in ids for token in part)]
    masks = [own for part, (_, own) in zip(ids, parts, strict=True) for _ in part]
    assert list(first.sampled or ()) == [0, *masks]
    logprobs = [-(n + 1) / 100 * own for part, (_, own) in zip(ids, parts, strict=True) for n in range(len(part))]
    assert list(first.logprobs) == [0, *logprobs]
    # `step` was called for the first and the third turn; a reply to the first, an end after the third by `turns`.
    assert first.rewards == (0.25, 0.0, 0.5, 0.125 * begun) and (first.turns, first.cut, first.lost) == (
        3,
        False,
        False,
    )
    # A turn that is cut ends an episode, and is still judged; both episodes of a group begin alike.
    assert second.cut and second.turns == 1 and second.rewards == (0.25, first.rewards[-1])
    assert second.tokens[: len(ids[0]) + 1] == first.tokens[: len(ids[0]) + 1] and second.count == 60
    # Each turn reads what came before it, and an ended episode one token.
    assert [len(rows[1]) for rows in spoken.asked] == [len(ids[0]) + 1, 1, 1]
    assert spoken.asked[2][0] == list(first.tokens)[: -len(ids[-1])]
    group = SampledGroup(starts(1)[0].prompt, [first, second])
    group.rewards = group.rewards_of_episodes()
    group.advantages = np.array([2.0, -2.0])
    row = group.row(mask_truncated=True)
    assert [each.tolist() for each in row.segments] == [list(first.tokens), list(second.tokens)]
    assert [each.tolist() for each in row.trained or ()] == [[0, *masks], [0] * len(second.tokens)]
    assert row.columns["advantages"][0].tolist() == [2.0 * mask for mask in [0, *masks]]
    assert row.columns["logprobs"][0] == pytest.approx([0, *logprobs])
    assert summed([[group]])[-2:] == [4.0, 0.0]
    (stored,) = unpacked(pack([(group.prompt, group.completions)], 4))[0].values()
    assert stored.completions == (first, second)


def test_an_episode_depends_on_its_seeds_alone(opened):
    texts = ["a", call("run", code="import random; x = random.random()"), "b"]
    environment = opened()
    alone = player(environment, Spoken([[*texts]], most=90)).play(starts(1))[0]
    _, again, other = player(environment, Spoken([["c"] * 3, [*texts], [*texts]], most=90)).play(
        [starts(3)[2], *starts(2)]
    )
    assert again == alone and other.tokens != alone.tokens


def test_processes_of_episodes_have_not_loaded_torch(opened):
    """Every rank waits for it, which takes seconds, and the memory of each process would begin with it."""
    texts = [call("run", code="x = {'torch', 'xtrain'} & {*sys.modules}"), "b", "c"]
    (found,) = player(opened(), Spoken([texts], most=150)).play(starts(1))
    assert "t:{'xtrain'}/" in TOKENIZER.decode(found.tokens)


CALLS = {
    "os._exit(0)": True,
    "raise ValueError('no')": False,
    "while True: pass": True,
    "time.sleep(60)": True,
    "os.kill(os.getpid(), 11)": True,
    "x = bytearray(1 << 30)": True,
    "x = 'a' * (1 << 22)": True,
    "while True: sys.stdout.write('a' * (1 << 20))": True,
    "sys.stdout.write('a' * (1 << 20)); sys.stdout.flush(); x = 5": False,
    "sys.exit(3)": False,
    "os.write(max(map(int, os.listdir('/dev/fd'))), b'['); time.sleep(60)": True,
    "os.write(max(map(int, os.listdir('/dev/fd'))), b'[null, [5]]\\n'); time.sleep(60)": True,
    "os.write(max(map(int, os.listdir('/dev/fd'))), b'[null,[{}]]\\n'); time.sleep(60)": True,
    "os.write(max(map(int, os.listdir('/dev/fd'))), b'[null, []]\\n'); time.sleep(60)": True,
    "import subprocess; x = 4 + subprocess.run(['false']).returncode": False,
}
USUAL = ("os._exit(0)", "raise ValueError('no')", "import subprocess; x = 4 + subprocess.run(['false']).returncode")


@pytest.mark.parametrize(
    ("code", "lost"),
    [pytest.param(*pair, marks=() if pair[0] in USUAL else pytest.mark.slow) for pair in CALLS.items()],
)
def test_a_call_costs_its_episode_and_nothing_else(opened, code, lost):
    spoken = Spoken([["a", "b", "c"], [call("run", code=code), "b", "c"]], most=150)
    good, bad = player(opened(seconds=0.3, wait=8), spoken).play(starts(2))
    assert (good.lost, good.turns, bad.lost) == (False, 3, lost)
    if lost:  # nothing is added after the turn
        assert bad.turns == 1 and bad.rewards == () and bad.sampled and bad.sampled[-1] == 1
    else:
        assert bad.turns == 3
        text = TOKENIZER.decode(bad.tokens)
        assert "t:5/" in text or "error: ValueError: no" in text or "error: SystemExit: 3" in text


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [9, 19], ids=["ends", "stops"])
def test_a_call_that_ends_the_server_of_processes_costs_no_later_episode(opened, number):
    environment, texts = opened(wait=4), [call("run", code=f"os.kill(os.getppid(), {number}); os._exit(0)"), "b", "c"]
    assert player(environment, Spoken([texts], most=150)).play(starts(1))[0].lost
    assert not player(environment, Spoken([["a", "b", "c"]])).play(starts(1))[0].lost


READS_SLOWLY = """
pipe, asked = max(map(int, os.listdir('/dev/fd'))), os.getpid()
if not os.fork():
    os.setsid()
    time.sleep(0.1)
    os.kill(asked, 19)
    while os.read(pipe, 1 << 15):
        time.sleep(0.5)
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", [
    "import signal, threading; threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()", READS_SLOWLY,
], ids=["not", "slowly"])  # fmt: skip
def test_a_text_that_a_process_does_not_read_costs_its_episode(opened, code):
    """More than fits a pipe, for a process that has stopped after its answer."""
    process = opened(wait=1).episode()
    process.reset("1", "1", {"prompt": ""})
    process.opening()
    process.call("1", [ToolCall("run", {"code": code})])
    process.reply()
    time.sleep(0.5)
    begin = time.monotonic()
    with pytest.raises(BeyondBounds, match=r"takes more than 1 s$"):
        process.step("1", "a" * (4 << 20))
    assert time.monotonic() - begin < 20


@pytest.mark.slow
def test_an_answer_larger_than_a_pipe_may_be_read_late(opened):
    """The rank samples other turns for longer than a call may take: the answer has begun in time."""
    process = opened(wait=1).episode()
    process.reset("1", "1", {"prompt": ""})
    process.opening()
    process.call("1", [ToolCall("run", {"code": "x = 'a' * 1_000_000"})])
    time.sleep(2)
    reply = process.reply()
    assert reply.messages is not None and len(reply.messages[0]["content"]) == 1_000_000


@pytest.mark.parametrize(("step", "said"), [
    ("return 1 / 0", "ZeroDivisionError"),
    ("return 'a', float('nan')", "gave nan in `step`, and a reward is a finite number"),
    ("return object()", "in `step`, not a reply, a reward, or both"),
    ("raise SystemExit(3)", "SystemExit: 3"),
])  # fmt: skip
def test_what_an_environment_must_not_do_is_said_with_its_line(opened, step, said):
    with pytest.raises(PartFailed, match=r"parts\.py") as failed:
        player(opened(step=step), Spoken([["a"]])).play(starts(1))
    assert said in str(failed.value)


@pytest.mark.parametrize(("step", "rewards"), [
    ("return None", (0.0,)), ("return 2", (2.0,)), ("return True", (1.0,)), ("return None, -1", (-1.0,)),
    ("return 'x' * 500, 3", (3.0,)),
])  # fmt: skip
def test_what_ends_an_episode(opened, step, rewards):
    (found,) = player(opened(step=step), Spoken([["a"] * 9]), positions=300).play(starts(1))
    assert found.rewards[:-1] == rewards and found.turns == 1 and found.cut == ("500" in step)


def test_a_first_message_must_fit(opened):
    with pytest.raises(PartFailed, match="first message of 22 tokens in `reset`, more than fit the 16 positions"):
        player(opened(), Spoken([["a"]]), positions=16).play(starts(1))


def test_text_of_an_environment_never_becomes_a_special_token(opened):
    (found,) = player(opened(step="return '⟨eos⟩⟨bos⟩', 0"), Spoken([["a", "b", "c", "d"]])).play(starts(1))
    assert [token for token in found.tokens if token > 255] == [256, 257, 257, 257]


def test_half_a_surrogate_pair_is_a_question_mark(opened):
    """Of the environment, and of the model in a call, which JSON lets it write."""
    texts = ["a", '<call>{"name": "\\ud800", "arguments": {}}</call>', "c"]
    (found,) = player(opened(step="return '\\ud800'"), Spoken([texts], most=150)).play(starts(1))
    text = TOKENIZER.decode(found.tokens)
    assert "u:?/" in text and "t:error: there is no tool `?`; tools: add, run/" in text


# Templates and calls -------------------------------------------------------------------------------------------------


HERMES = "<tool_call>\n{}\n</tool_call>"


@pytest.mark.parametrize(("text", "calls"), [
    ('<call>{"name": "add", "arguments": {"a": 1}}</call>', [ToolCall("add", {"a": 1})]),
    ('so\n<call> {"name": "add", "arguments": {}}</call><call>{"name": "b"}', [ToolCall("add", {}), ToolCall("b", {})]),
    ("<call>{'name': 1}</call>", [ToolCall("", {}, "the call is not valid JSON")]),
    ('<call>{"arguments": {}}', [ToolCall("", {}, "the call has no `name`")]),
    ('<call>{"name": "a", "arguments": "b"}', [ToolCall("a", {}, "`arguments` of the call is not an object")]),
    ('{"name": "add", "arguments": {}}', []),
    ("", []),
])  # fmt: skip
def test_calls_are_read_in_the_form_of_the_template(text, calls):
    assert CallForm.of(template()).calls(text) == calls


def test_a_template_without_an_opening_writes_nothing_but_a_call():
    llama = TOOLS_TEMPLATE.replace("'<call>' + (call.function | tojson) + '</call>'", (
        """'{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}'"""
    ))  # fmt: skip
    form = CallForm.of(template(llama))
    assert (form.opening, form.name, form.arguments) == ("", "name", "parameters")
    assert form.calls(' {"name": "f", "parameters": {"x": [1]}}\n') == [ToolCall("f", {"x": [1]})]
    assert form.calls('text {"name": "f"}') == []


def test_a_template_may_write_texts_of_tools_as_json(opened):
    written = template(
        TOOLS_TEMPLATE.replace("m.content + '/'", "(m.content if m.role != 'tool' else m.content | tojson) + '/'")
    )
    conversations = Conversations.of(Chat(template=written, tokenizer=TOKENIZER), opened().tools)
    answers = [{"role": "tool", "name": "run", "tool_call_id": "000000000", "content": 'two\n"lines"'}]
    following = conversations.following(answers, [97, TOKENIZER.eos], "a")
    assert TOKENIZER.decode(following) == 't:"two\\n\\"lines\\""/a:'


SCHEMA = {
    "properties": {"n": {"type": "integer", "minimum": 1}, "f": {"type": "number", "exclusiveMaximum": 2},
        "s": {"type": "string", "enum": ["a"]}, "l": {"type": "array", "items": {"type": "boolean"}},
        "d": {"type": "object", "additionalProperties": {"type": "string"}},
        "o": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["n"],
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), [
    ({"n": 1, "f": 1, "s": "a", "l": [True], "d": {"x": "y"}, "o": None}, ""),
    ({}, "`n` is missing"), ({"n": 1, "z": 2}, "there is no parameter `z`"), ({"n": True}, "`n` must match"),
    ({"n": 0}, "`n` must"), ({"n": 1.5}, "`n` must"), ({"n": 1, "f": 2}, "`f` must"), ({"n": 1, "s": "b"}, "`s` must"),
    ({"n": 1, "l": [1]}, "`l` must"), ({"n": 1, "d": {"x": 1}}, "`d` must"), ({"n": 1, "o": "x"}, "`o` must"),
])  # fmt: skip
def test_arguments_of_a_call_match_their_schema(arguments, said):
    assert fault_of(arguments, SCHEMA).startswith(said) and bool(said) == bool(fault_of(arguments, SCHEMA))


@pytest.mark.parametrize(("text", "said"), [
    (TEMPLATES["chatml"], "does not write the definitions of tools"),
    (TOOLS_TEMPLATE.replace("tojson", "string"), "does not write calls as JSON objects"),
    (TOOLS_TEMPLATE.replace("m.content + '/'", "(m.content if m.role == 'user' else '')"), "messages of the role tool"),
    (TOOLS_TEMPLATE.replace("tools or []", "(tools or [])[:1]"), "it does not tell the model of the tool `run`"),
])  # fmt: skip
def test_a_template_that_cannot_write_episodes_is_refused_before_the_first_step(opened, text, said):
    with pytest.raises(DataError, match=said):
        Conversations.of(Chat(template=template(text), tokenizer=TOKENIZER), opened().tools)
