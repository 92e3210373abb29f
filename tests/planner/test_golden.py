"""Plans of every spec, byte for byte as they were looked at last (see tests/support/golden.py)."""

import json

import golden
import pytest

CASES = [(spec, ending) for spec in golden.SPECS for ending in (".txt", ".json")]
texts_by_spec: dict[str, dict[str, str]] = {}


def texts(spec):
    """Each spec is planned once."""
    if spec.name not in texts_by_spec:
        texts_by_spec[spec.name] = golden.texts(spec)
    return texts_by_spec[spec.name]


@pytest.mark.parametrize(("spec", "ending"), CASES, ids=[f"{spec.stem}{ending}" for spec, ending in CASES])
def test_a_plan_is_as_it_was_looked_at(spec, ending):
    name = f"{spec.stem}{ending}"
    if found := golden.difference(name, texts(spec)[name]):
        pytest.fail(found, pytrace=False)


def test_no_golden_plan_without_its_spec():
    assert golden.stale() == []


@pytest.mark.parametrize("spec", golden.SPECS, ids=lambda spec: spec.stem)
def test_golden_plans_are_small_and_readable(spec):
    text = texts(spec)[f"{spec.stem}.json"]
    assert len(text) < 120_000
    content = json.loads(text)
    assert content["id"] in texts(spec)[f"{spec.stem}.txt"]


def test_nothing_of_this_machine_is_in_them(tmp_path, monkeypatch):
    """Where they are made does not matter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/web").mkdir(parents=True)
    (tmp_path / "data/web/a.jsonl").write_text("{}\n")
    spec = next(spec for spec in golden.SPECS if "data/web" in spec.read_text())
    assert golden.texts(spec) == texts(spec)
    assert str(golden.ROOT) not in "".join(texts(spec).values())


@pytest.mark.parametrize(("now", "shown"), [
    ('{"nodes": [{"id": "a", "n": 2}, {"id": "b"}]}', [".nodes[a].n: 1 → 2"]),
    ('{"nodes": [{"id": "a", "n": 1.0}, {"id": "b"}]}', [".nodes[a].n: 1 → 1.0"]),
    ('{"nodes": [{"id": "a", "n": 1}]}', ['- .nodes[b]: {"id": "b"}']),
    ('{"nodes": [{"id": "b"}, {"id": "a", "n": 1}]}', [".nodes: the same entries in another order"]),
    ('{"nodes": [{"id": "a", "n": 1}, {"id": "b"}], "x": "y"}', ['+ .x: "y"']),
    ('{"nodes": [{"id": "a", "n": 1},\n{"id": "b"}]}', ["the same content in other lines"]),
])  # fmt: skip
def test_a_difference_of_plans_is_shown_by_node(monkeypatch, tmp_path, now, shown):
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    (tmp_path / "a.json").write_text('{"nodes": [{"id": "a", "n": 1}, {"id": "b"}]}')
    assert golden.difference("a.json", now).splitlines()[1:-2] == shown


def test_a_difference_is_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    assert golden.difference("a.txt", "one\ntwo\nthree\n") == ""
    found = golden.difference("a.txt", "one\n2\nthree\n").splitlines()
    assert found[:6] == ["--- kept a.txt", "+++ now a.txt", "@@ -1,3 +1,3 @@", " one", "-two", "+2"]
    assert "golden.py --write" in found[-1]
    assert "+new" in golden.difference("b.txt", "new\n")
