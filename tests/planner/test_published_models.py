"""Plans of published models have exactly the parameters of the published weights."""

from published_models import PAGE, page


def test_the_tables_of_families_are_up_to_date():
    """Writing them counts each model, and fails where it has not as many parameters as its files."""
    assert page() == PAGE.read_text()
