"""Templates that do not end, take all memory, or fail: bounded, with a reason, and what is around them goes on."""

import os
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.base import bounded
from xtrain.runtime.base.bounded import BeyondBounds, Bounded
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.documents import DocumentEncoder, TokenDocument
from xtrain.runtime.feed.records import BadRecord, SourceRecord
from xtrain.runtime.nn.texts import Chat

TALK = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}]
TIME, SPACE = "takes more than 1 s of processor time", "of memory"
TEMPLATES = {
    "nested loops": ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", TIME),
    "a long text": ("{{ 'a' * 10**10 }}", SPACE),
    "a long text of a variable": ("{{ messages[0].content * 10**10 }}", SPACE),
    "a constant that is filtered": ("{{ 'a' | center(10000000000) }}", SPACE),
    "doubling": ("{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", SPACE),
    "a long list": ("{{ ([0] * 10**10) | length }}", SPACE),
    "a large number": ("{{ 10 ** (10 ** 10) }}", "takes more than"),
    "a wide number": ("{{ '%10000000000d' % 1 }}", SPACE),
    "a text of a text": ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", SPACE),
    "output of a loop": ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", SPACE),
    "a macro that calls itself": (
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "the template calls itself without end",
    ),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
    "deep lists": ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "nested too deep"),
    "deep loops": ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "too many statically nested blocks"),
    "a failure without words": ("{{ raise_exception('') }}", "the template refuses it: TemplateError"),
    "a failure of a constant": ("{{ 'a' | round }}", ""),
    "no syntax": ("{% for %}", "invalid chat template: "),
    "not in the sandbox": ("{{ ''.__class__.__mro__ }}", "the template refuses it: access to attribute"),
}


def outcome(template: str, tmp_path: Path, talk: Any = TALK) -> Any:
    (tmp_path / "t.jinja").write_text(template)
    try:
        encoder = DocumentEncoder(ByteTokenizer(), {"form": "chat", "template": "t.jinja"}, tmp_path)
        (found,) = encoder.encode([SourceRecord(talk, "here")])
    except DataError as error:
        return error
    return found


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 1.0)
    monkeypatch.setattr(bounded, "MEMORY", 1 << 27)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_bounded_and_says_why(name: str, tmp_path: Path):
    template, reason = TEMPLATES[name]
    before, size = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = outcome(template, tmp_path)
    said = found.reason if isinstance(found, BadRecord) else str(found)
    assert isinstance(found, BadRecord | DataError), found
    assert reason in said and not said.rstrip().endswith(":")
    assert time.process_time() - before < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < 1 << 17  # KiB


@pytest.mark.parametrize(
    "name", [pytest.param("nested loops", marks=pytest.mark.slow), "doubling", "a macro that calls itself"]
)
def test_prompts_of_users_are_bounded_too(name: str, tmp_path: Path):
    from xtrain.runtime.feed.chat.template import ChatTemplate

    template = ChatTemplate(text=TEMPLATES[name][0], origin="t.jinja", bos_token="", eos_token="")
    chat = Chat(template=template, tokenizer=ByteTokenizer())
    assert chat.closing == ""
    with pytest.raises(DataError, match=rf"t\.jinja: .*{TEMPLATES[name][1]}"):
        chat.prompt("Hi.")


def test_records_around_one_that_a_template_refuses_are_documents(tmp_path: Path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ 1 / (m.content | length) }}{{ m.content }};{% endfor %}"
    )
    encoder = DocumentEncoder(ByteTokenizer(), {"form": "chat", "template": "t.jinja", "train_on": "all"}, tmp_path)
    empty = [{"role": "user", "content": ""}, TALK[1]]
    found = encoder.encode([SourceRecord(each, "") for each in (TALK, empty, TALK)])
    assert [type(each) for each in found] == [TokenDocument, BadRecord, TokenDocument]
    assert found[1].reason == "the template refuses it: division by zero"  # type: ignore[union-attr]


def test_a_call_beyond_its_bounds_ends_its_process_alone():
    def work(item: int) -> int:
        while item == 2:
            pass
        if item == 3:
            os._exit(7)
        return os.getpid()

    calls = Bounded(work)
    first = calls.map([1, 1])
    assert first[0] == first[1] != os.getpid() and calls.map([4]) == first[:1]
    for item, reason in ((2, TIME), (3, "ends its process")):
        with pytest.raises(BeyondBounds, match=reason):
            calls.map([1, item, 1])
    assert calls.map([1]) != first[:1]


def test_the_process_ends_with_its_owner_and_a_copy_has_another():
    calls: Bounded[int, int] = Bounded(_pid)
    (process,) = calls.map([1])
    copy = pickle.loads(pickle.dumps(calls))
    (other,) = copy.map([1])
    assert len({process, other, os.getpid()}) == 3
    del calls, copy
    for each in (process, other):
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


def _pid(item: int) -> int:
    return os.getpid() + 0 * item


def test_nothing_that_is_open_stays_open_in_the_process():
    reading, writing = os.pipe()
    calls: Bounded[int, int] = Bounded(_pid)
    calls.map([1])
    os.close(writing)
    assert os.read(reading, 1) == b""  # the end of the pipe, though the process lives
    os.close(reading)
