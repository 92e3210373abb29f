"""`xtrain data show`: rows of a mixture in the order of training, and what of them is trained on."""

import json
from itertools import chain
from pathlib import Path

import pytest

from xtrain.cli.main import main

SPEC = """
experiment shown { budget = 12 steps, seed = 3 }
model llama { dim = 32, layers = 1, heads = 2 }
tokenizer bytes
dataset words { source = text("*.txt") }
dataset lines { source = jsonl("lines.jsonl"), holdout = 20% }
dataset talks {
  source = jsonl("talks.jsonl"), messages = "messages", template = "chatml", train_on = assistant, holdout = 20%
}
mixture { words = 1, lines = 1, talks = 2 }
phase late { from = 50%, mix = { words: 1, lines: 0, talks: 0 } }
batch { sequence = 96, rows = 4 }
collate = to_tensor -> flatten -> shift_tokens -> pack(sequential)
optimizer adamw { lr = 1e-3 }
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        Path(f"{number}.txt").write_text(f"some words {number}\nand more" * (1 + number))
    lines = [{"text": f"line {number} of many"} for number in range(40)]
    Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    talks = [
        [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": str(2 * n)}] for n in range(30)
    ]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    Path("shown.xtrain").write_text(SPEC)
    return "shown.xtrain"


def objects(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def rows(capsys, *arguments: str) -> list[dict]:
    assert main(["data", "show", "shown.xtrain", "--json", *arguments]) == 0
    return objects(capsys)


def test_rows_of_all_datasets_come_in_the_order_of_training(spec: str, capsys):
    every = rows(capsys, "-n", "48")
    assert [row["place"] for row in every] == list(range(len(every)))
    early, late = every[:24], every[24:]
    assert {row["dataset"] for row in early} == {"words", "lines", "talks"}
    assert {row["dataset"] for row in late} == {"words"}
    assert sum(row["dataset"] == "talks" for row in early) in (11, 12, 13)
    assert rows(capsys, "-n", "6", "--step", "5") == every[16:22]
    talks = [row for row in every if row["dataset"] == "talks"]
    assert rows(capsys, "-n", "4", "--dataset", "talks") == talks[:4]
    assert rows(capsys, "-n", "4", "--dataset", "talks", "--step", "6") == [r for r in talks if r["place"] >= 20][:4]
    assert main(["data", "show", spec, "--dataset", "talks", "--step", "7"]) == 0
    nothing = capsys.readouterr()
    assert (nothing.out, nothing.err) == ("", "xtrain data: no row of talks is trained on from step 7 on\n")


def test_the_steps_of_epochs_are_counted_over_all_datasets_also_to_show_one(spec: str, capsys):
    Path(spec).write_text(SPEC.replace("12 steps", "1 epoch"))
    every = rows(capsys, "-n", "1000")
    counts = [main(["data", "show", spec, "--step", step, "-n", "1"]) for step in (str(len(every) // 4), "1000")]
    assert counts == [0, 2] and f"the run has {len(every) // 4} steps" in capsys.readouterr().err
    talks = [row for row in every if row["dataset"] == "talks"]
    assert rows(capsys, "-n", "1000", "--dataset", "talks") == talks


def test_what_is_trained_of_a_conversation_is_the_answer(spec: str, capsys):
    segments = list(chain.from_iterable(row["segments"] for row in rows(capsys, "-n", "20", "--dataset", "talks")))
    whole = [one for one in segments if one["start"] == 0 and one["ends"]]
    assert whole
    for segment in whole:
        trained = [one["text"] for one in segment["stretches"] if one["trained"]]
        assert len(trained) == 1 and "user" not in trained[0] and trained[0].removesuffix("<|im_end|>").isdigit()
        assert segment["trained"] == sum(one["tokens"] for one in segment["stretches"] if one["trained"])
        assert "".join(one["text"] for one in segment["stretches"]).startswith("⟨bos⟩<|im_start|>user\n")
    mixed = rows(capsys, "-n", "20")
    assert [row["trained"] for row in mixed] == [sum(one["trained"] for one in row["segments"]) for row in mixed]
    partly = {(row["dataset"], row["trained"] < row["filled"]) for row in mixed}
    assert partly == {("words", False), ("lines", False), ("talks", True)}


def test_tokens_come_with_their_numbers(spec: str, capsys):
    (row,) = rows(capsys, "-n", "1", "--dataset", "lines", "--tokens")
    first, rest = row["segments"][0]["stretches"]
    assert (first["ids"], first["pieces"]) == ([256], ["⟨bos⟩"])
    assert rest["pieces"][:4] == list("line") and rest["ids"][:4] == list(b"line")
    assert "ids" not in rows(capsys, "-n", "1")[0]["segments"][0]["stretches"][0]
    assert main(["data", "show", spec, "-n", "1", "--dataset", "lines", "--tokens"]) == 0
    assert "⟦⟨bos⟩ 256⟧ │ l 108 │ i 105 │ n 110 │ e 101 │ ␣ 32 │" in capsys.readouterr().out


def test_held_out_rows_are_shown_of_every_dataset(spec: str, capsys):
    found = rows(capsys, "--heldout", "-n", "2")
    assert {row["dataset"] for row in found} == {"lines", "talks"}
    assert all(row["place"] is None for row in found)
    assert {row["dataset"] for row in rows(capsys, "--heldout", "--dataset", "talks")} == {"talks"}


@pytest.mark.parametrize("columns", [24, 60, 200])
def test_pages_fit_the_terminal_and_say_without_colour_what_is_only_read(spec: str, capsys, monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["data", "show", spec, "-n", "12"]) == 0
    page = capsys.readouterr().out
    assert "\x1b" not in page
    assert max(map(len, page.splitlines())) <= min(columns, 100)
    flat = " ".join(page.split())
    assert "step 1, row 1 of 4" in flat and "of them trained" in flat and "⟦…⟧: only read" in flat
    assert "⟦⟨bos⟩<|im_start|>user⏎" in page.replace("\n    ", "") and "⟨bos⟩line" in page


def test_colours_say_it_on_a_terminal(spec: str, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["data", "show", spec, "-n", "1", "--dataset", "talks"]) == 0
    page = capsys.readouterr().out
    assert "\x1b[2m⟨bos⟩<|im_start|>user" in page and "⟦" not in page
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["data", "show", spec, "-n", "1", "--dataset", "talks"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_long_documents_are_shortened_unless_all_is_asked_for(spec: str, capsys):
    Path("9.txt").write_text("begin " + "word " * 200 + "end")
    sets = ("--set", "batch.sequence=2048", "--dataset", "words", "-n", "1")
    assert main(["data", "show", spec, *sets]) == 0
    assert " … " in (short := capsys.readouterr().out)
    assert main(["data", "show", spec, *sets, "--full"]) == 0
    assert (long := capsys.readouterr().out).count("word word") > 2 * short.count("word word")
    assert " … " not in long
    assert main(["data", "show", spec, *sets, "--tokens"]) == 0
    assert "more tokens" in capsys.readouterr().out


def test_a_step_behind_the_end_is_refused(spec: str, capsys):
    assert main(["data", "show", spec, "--step", "13"]) == 2
    assert "the run has 12 steps, --step 1 to 12" in capsys.readouterr().err


def test_rows_that_are_held_out_have_no_step(spec: str, capsys):
    assert main(["data", "show", spec, "--heldout", "--step", "2"]) == 2
    assert "belong to no step; leave out --step" in capsys.readouterr().err


def test_statistics_say_what_is_drawn(spec: str, capsys):
    assert main(["data", "stats", spec, "--json"]) == 0
    *found, mixture = objects(capsys)
    drawn = mixture["mixture"]
    assert sum(one["rows"] for one in drawn.values()) == 48
    assert drawn["words"]["shares"] == {"train": 0.25, "late": 1.0}
    assert drawn["talks"]["rows"] in (11, 12, 13)
    by_name = {one["dataset"]: one["parts"]["training"] for one in found}
    assert 0 < by_name["talks"]["trained_tokens"] < 0.2 * by_name["talks"]["tokens"]
    assert "trained_tokens" not in by_name["lines"]


OWN = """
from attrs import evolve
from xtrain import collator

@collator(takes="labelled samples")
def quiet(samples, every: int = 2):
    \"\"\"No loss on every so many positions; samples of one token are left out.\"\"\"
    for sample in samples:
        labels = sample.labels.clone()
        labels[::every] = -100
        if len(labels) > 1:
            yield evolve(sample, labels=labels)
"""


def test_rows_are_shown_as_collators_of_the_users_own_give_them(spec: str, capsys):
    before = rows(capsys, "-n", "8")
    Path("own.py").write_text(OWN)
    text = Path(spec).read_text().replace("tokenizer bytes", 'tokenizer bytes\nuse "own.py"')
    Path(spec).write_text(text.replace("-> pack(", "-> quiet(every = 3) -> pack("))
    after = rows(capsys, "-n", "8")
    assert [(row["dataset"], row["index"], row["place"]) for row in after] == [
        (row["dataset"], row["index"], row["place"]) for row in before
    ]
    for one, other in zip(after, before, strict=True):
        assert one["filled"] == other["filled"] and one["trained"] < other["trained"]
        assert all(segment["document"] is None and segment["other"] == 0 for segment in one["segments"])
        if one["dataset"] == "lines":
            assert [s["text"] for s in one["segments"]] == [s["text"] for s in other["segments"]]
            assert [s["trained"] for s in one["segments"]] == [s["tokens"] * 2 // 3 for s in one["segments"]]
    assert main(["data", "show", spec, "-n", "1"]) == 0
    assert "Rows are shown behind quiet." in capsys.readouterr().out
