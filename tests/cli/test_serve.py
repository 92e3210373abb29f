"""`xtrain serve` where it cannot: what is said before any rank is started."""

import socket
from pathlib import Path

import pytest

from xtrain.cli.main import main
from xtrain.cli.serve import _made_key, _repair
from xtrain.cli.verb import Refused
from xtrain.server.store import Store

SPEC = Path(__file__).parents[2] / "specs" / "serve_cpu.xtrain"


def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[int, str]:
    status = main(["serve", *arguments, "--set", f'workspace.root="{tmp_path}"'])
    found = capsys.readouterr()
    assert "starting" not in found.out and not list(tmp_path.glob("serve_cpu/*"))
    return status, found.err


def test_a_port_that_is_taken_is_said_before_ranks_are_started(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, error = said(capsys, tmp_path, str(SPEC), "--set", f"serve.port={port}")
    assert status == 3
    assert f"cannot listen on port {port} of 127.0.0.1: Address already in use" in error
    assert "choose another `serve.port`" in error


def test_a_spec_without_serve_is_told_from_one_with_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "spec.xtrain"
    path.write_text('experiment a { seed = 1 }\nmodel "models/nowhere"\ntokenizer bytes\n')
    status, error = said(capsys, tmp_path, str(path))
    assert status == 2 and error.startswith("xtrain serve: the spec has no `serve` block; add one")


def test_a_key_that_is_not_set_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    status, error = said(capsys, tmp_path, str(SPEC), "--set", 'serve.key="NO_SUCH_KEY"')
    assert status == 3 and "error[X709]" in error


def test_a_key_that_is_made_is_printed_and_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "server" / "key"
    keys = [_made_key("a", "XTRAIN_KEY", path) for _ in range(2)]
    (key,) = keys[0].of.values()
    assert keys[1].of == keys[0].of
    assert capsys.readouterr().out == f"a: clients send the key {key} ({path}); set XTRAIN_KEY to change it\n" * 2
    path.write_text("")
    with pytest.raises(Refused, match="not as it was written; remove the file to get a new key"):
        _made_key("a", "XTRAIN_KEY", path)


def test_what_is_repaired_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Store(tmp_path).close()
    _repair("a", tmp_path)
    assert capsys.readouterr().out == f"a: {tmp_path} is whole\n"
    (tmp_path / "store.db").unlink()
    _repair("a", tmp_path)
    kept = f"a: {tmp_path} was repaired: the original is in {tmp_path / 'damaged'}\n"
    assert capsys.readouterr().out == f"a: damaged: store.db is missing\n{kept}"
