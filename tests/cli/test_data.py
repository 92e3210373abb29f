"""`xtrain data`: what is shown is what a run reads, and nothing heavy is loaded for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.cli.main import main

SPEC = """
experiment look { budget = 4 steps, seed = 3 }
model llama { dim = 32, layers = 1, heads = 2 }
tokenizer bytes
dataset words { source = text("*.txt") }
dataset others { source = text("*.txt"), holdout = 100% }
batch { sequence = 16, rows = 2 }
collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)
optimizer adamw { lr = 1e-3 }
every 2 steps eval others
"""
TEXTS = {"a": "one\ntwo", "b": "three four five six seven", "c": "eight", "d": "nine"}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        Path(f"{name}.txt").write_text(text)
    Path("look.xtrain").write_text(SPEC)
    return "look.xtrain"


def objects(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_statistics_count_what_there_is(spec: str, capsys):
    assert main(["data", "stats", spec, "--json"]) == 0
    words, others = objects(capsys)
    tokens = sum(len(text) + 2 for text in TEXTS.values())
    assert (words["dataset"], words["documents"], words["tokens"]) == ("words", 4, tokens)
    training = words["parts"]["training"]
    assert training["lengths"] == {"least": 6, "median": 8, "p90": 22, "p99": 26, "most": 27}
    # 8, 26, 6 and 5 positions: a full row, then 10 + 6 and 8 + 5.
    assert (training["rows"], training["fill"], training["steps_an_epoch"]) == (3, round(45 / 48, 6), 1.5)
    assert (training["documents_split"], training["documents_cut"], words["oversized"]) == (1, 0, "split")
    assert words["parts"]["hold-out"]["rows"] == 0 and words["parts"]["hold-out"]["lengths"] == {}
    assert others["parts"]["hold-out"]["documents"] == 4


@pytest.mark.parametrize(
    ("setting", "policy", "rows", "split", "cut", "unanswered"),
    [("", "truncate", 3, 0, 2, 1), (", oversized = split", "split", 5, 2, 0, None)],
)
def test_conversations_are_cut_at_their_end_unless_that_is_said(
    spec: str, setting: str, policy: str, rows: int, split: int, cut: int, unanswered: int | None, capsys
):
    """A row holds the second question with a part of its answer, and nothing of the answer to the third one."""
    talks = [("1+1", "2"), ("2+2", "4" * 120), ("3" * 120, "6")]
    Path("talks.jsonl").write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in talks))
    dataset = (
        f'dataset words {{ source = jsonl("talks.jsonl"), prompt = "q", response = "a", template = "plain"{setting} }}'
    )
    text = SPEC.replace('dataset words { source = text("*.txt") }', dataset).replace("sequence = 16", "sequence = 96")
    Path("talks.xtrain").write_text(text.replace("multipack", "single"))
    assert main(["data", "stats", "talks.xtrain", "--json"]) == 0
    words = objects(capsys)[0]
    training = words["parts"]["training"]
    assert (words["oversized"], training["rows"]) == (policy, rows)
    assert (training["documents_split"], training["documents_cut"]) == (split, cut)
    assert training.get("documents_unanswered") == unanswered
    assert main(["data", "stats", "talks.xtrain"]) == 0
    said = "1 of the cut ones have nothing left to predict" in " ".join(capsys.readouterr().out.split())
    assert said == bool(unanswered)


def test_every_row_of_an_epoch_is_shown_with_its_text(spec: str, capsys):
    assert main(["data", "show", spec, "--json"]) == 0
    rows = objects(capsys)
    assert sorted(row["index"] for row in rows) == [0, 1, 2]
    segments = sorted((s["document"], s["start"], s["before"], s["text"]) for row in rows for s in row["segments"])
    assert segments == [
        (0, 0, "", TEXTS["a"]),
        (1, 0, "", TEXTS["b"][:16]),
        (1, 16, TEXTS["b"][15], TEXTS["b"][16:]),
        (2, 0, "", TEXTS["c"]),
        (3, 0, "", TEXTS["d"]),
    ]
    assert all(row["filled"] == sum(s["tokens"] for s in row["segments"]) for row in rows)


def test_rows_are_those_of_the_step(spec: str, capsys):
    assert main(["data", "show", spec, "--json"]) == 0
    all_of_them = [row["index"] for row in objects(capsys)]
    assert main(["data", "show", spec, "--json", "-n", "1", "--step", "2"]) == 0
    assert [row["index"] for row in objects(capsys)] == all_of_them[2:3]


def test_pages_for_people(spec: str, capsys):
    assert main(["data", "stats", spec]) == 0
    page = capsys.readouterr().out
    assert "4 of 49 tokens" in page and "93.750% filled" in page and "1.5 steps" in page
    assert main(["data", "show", spec, "--dataset", "others", "-n", "9"]) == 0
    page = capsys.readouterr().out
    assert "\x1b" not in page
    for shown in ("⟨bos⟩one⏎ two⟨eos⟩", "document 1 from 16, 10 tokens", "3 of padding", "100.0% of 16 positions"):
        assert shown in page


def test_what_cannot_be_shown_is_said(spec: str, capsys):
    assert main(["data", "show", spec, "--dataset", "wrds"]) == 2
    assert "no dataset `wrds`; this plan reads words, others" in capsys.readouterr().err
    assert main(["data", "show", spec, "--step", "-1"]) == 2
    assert main(["data", "stats", spec, "--set", "batch.sequence=x"]) == 2
    for path in Path().glob("*.txt"):
        path.unlink()
    assert main(["data", "stats", spec]) == 3
    assert "error[X507]: pattern matches no file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "show", spec, "-n", "0"])


def test_looking_at_data_does_not_load_torch(spec: str):
    code = (
        f"import sys; from xtrain.cli.main import main; main(['data', 'show', '{spec}']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_pairs_are_counted_and_shown_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [{"chosen": "1+1=2", "rejected": "1+1=3", "gap": number} for number in range(3)]
    lines += [{"chosen": "1+1=" + "2" * 20, "rejected": "1+1=3", "gap": 1}, {"chosen": "q", "rejected": "q", "gap": 0}]
    lines += [{"chosen": "x", "rejected": "x", "gap": 0}, {"chosen": "x", "gap": 0}]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    source = 'source = jsonl("pairs.jsonl"), chosen = "chosen", rejected = "rejected", values = { gap: "gap" }'
    pairs = f"dataset pairs {{ {source}, bad_records = 3 }}"
    text = SPEC.replace('dataset words { source = text("*.txt") }', pairs)
    text = text.replace('dataset others { source = text("*.txt"), holdout = 100% }\n', "")
    text = text.replace("every 2 steps eval others\n", "")
    Path("look.xtrain").write_text(f"{text}\nloss orpo {{ }}\n")
    assert main(["data", "stats", "look.xtrain", "--dataset", "pairs", "--json"]) == 0
    (found,) = objects(capsys)
    training = found["parts"]["training"]
    # 6 + 6 positions a pair; the long one has 25 + 6, and a row 16.
    counts = (training[name] for name in ("pairs", "rows", "documents_left_out", "tokens_lost"))
    assert tuple(counts) == (4, 3, 1, 31)
    assert training["fill"] == 12 / 16 and training["trained_tokens"] == 3 * 4 + 21 + 2
    assert found["bad_records"] == 3 and found["bad_reasons"]["fields `chosen` and `rejected` are equal"] == 2
    assert found["numbers"] == {"gap": {"least": 0.0, "mean": 1.0, "most": 2.0}}
    assert main(["data", "stats", "look.xtrain"]) == 0
    page = capsys.readouterr().out
    assert (
        "0 pairs cut, 1 left out, as oversized = skip says: 31 tokens lost" in page
        and "gap  min 0 · mean 1 · max 2" in page
    )
    assert "bad records 2 fields `chosen` and `rejected` are equal" in " ".join(page.split())
    assert main(["data", "show", "look.xtrain", "--dataset", "pairs", "-n", "3", "--json"]) == 0
    rows = objects(capsys)
    assert [[segment["side"] for segment in row["segments"]] for row in rows] == [["chosen", "rejected"]] * 3
    assert {segment["text"] for row in rows for segment in row["segments"]} == {"1+1=2", "1+1=3"}
    assert sorted(row["segments"][0]["values"]["gap"] for row in rows) == [0, 1, 2]
    assert main(["data", "show", "look.xtrain", "--dataset", "pairs", "-n", "1"]) == 0
    page = capsys.readouterr().out
    assert ", chosen, 6 tokens, 2 trained, gap " in page and ", rejected, 6 tokens, 2 trained, gap " in page
