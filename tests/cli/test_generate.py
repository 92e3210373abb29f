"""`xtrain generate`: what is said of runs and settings that cannot be, and how texts are printed. Real runs are sampled
elsewhere."""

from pathlib import Path

import pytest
from small_checkpoints import save
from small_runs import drawn, make_run, plan_of
from small_runs import save as save_weights

from xtrain.cli.generate import as_json, as_text
from xtrain.cli.main import main
from xtrain.components.tokenizers.bytes_run import ByteTokenizer
from xtrain.runtime.nn.texts import Continuation, TextEnds
from xtrain.runtime.store.checkpoints import CheckpointFolder


@pytest.fixture
def run(tmp_path) -> Path:
    save(CheckpointFolder(tmp_path / "checkpoints"), 20)
    (tmp_path / "plan.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("which", "said"),
    [("best", "has no checkpoint best; there are latest, ckpt-s000000000020"),
        ("ckpt-s000000000010", "has no checkpoint ckpt-s000000000010; there are latest, ckpt-s000000000020"),
        ("no/such/run", "there is no checkpoint at no/such/run")],
)  # fmt: skip
def test_a_checkpoint_that_is_not_there(run, which, said, capsys):
    assert main(["generate", str(run), "--prompt", "a", "--checkpoint", which]) == 3
    assert said in capsys.readouterr().err


def test_no_run_and_no_checkpoint_yet(run, tmp_path, capsys):
    assert main(["generate", str(tmp_path / "nowhere"), "--prompt", "a"]) == 2
    assert "there is no run at" in capsys.readouterr().err
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    assert main(["generate", str(run), "--prompt", "a"]) == 3
    assert "has no checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (("--tokens", "0"), "--tokens must be at least 1"),
    (("--temperature", "-1"), "--temperature must be a finite number of at least 0"),
    (("--temperature", "nan"), "--temperature must be a finite number of at least 0"),
    (("--top-k", "0"), "--top-k must be at least 1"),
    (("--top-p", "0"), "--top-p must be above 0"),
    (("--min-p", "1.5"), "--min-p must be between 0 and 1"),
    (("--stop", ""), "--stop must not be empty"),
    (("--system", "Be kind."), "--system needs --chat"),
])  # fmt: skip
def test_a_setting_out_of_range(run, arguments, said, capsys):
    assert main(["generate", str(run), "--prompt", "a", *arguments]) == 2
    assert said in capsys.readouterr().err


def continuations(*prompts: str) -> list[Continuation]:
    tokenizer = ByteTokenizer()
    return [Continuation(tokenizer, list(prompt.encode()), TextEnds.of(tokenizer), 4) for prompt in prompts]


def test_texts_are_printed_as_they_grow_and_in_order(capsys):
    texts = continuations("a", "b", "c")
    show, printed = as_text(["a", "b", "c"], whole=True), []
    for column in zip(b"12\xc3\xa9", [51, 257, 0, 0], b"5678", strict=True):
        for text, token in zip(texts, column, strict=True):
            text.add(token)
        show(texts)
        printed.append(capsys.readouterr().out)
    assert printed == ["a1", "2", "", "é\nb3\nc5678\n"]


def test_answers_are_printed_without_the_questions_and_as_json(capsys):
    for show, expected in ((as_text(["a"], whole=False), "12\n"), (as_json(["a"]), '{"prompt": "a", "text": "12"}\n')):
        texts = continuations("a")
        for token in (49, 50, 257):
            texts[0].add(token)
            show(texts)
        assert capsys.readouterr().out == expected


def test_a_model_whose_weights_are_not_finite(tmp_path, capsys):
    plan = plan_of()
    directory = make_run(plan, tmp_path / "run", tmp_path)
    save_weights(plan, directory, {name: value * float("nan") for name, value in drawn(plan).items()})
    assert main(["generate", str(directory), "--prompt", "a", "--top-k", "3"]) == 3
    assert "no token can be chosen after prompt 1" in capsys.readouterr().err
