import pytest
from projects import Project


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("distributed")
