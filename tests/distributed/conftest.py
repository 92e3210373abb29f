import pytest
from projects import Project
from trials import Laboratory


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("distributed")


@pytest.fixture
def here(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> Laboratory:
    """Teachers lie in its folder."""
    monkeypatch.chdir(lab.folder)
    return lab
