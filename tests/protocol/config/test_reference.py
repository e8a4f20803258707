"""docs/configuration.md is what the code says."""

from pathlib import Path

from protocol.config.explain import reference_markdown


def test_the_configuration_reference_is_up_to_date() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
    assert page.read_text().strip() == reference_markdown().strip(), (
        "run `slipstream config reference > docs/configuration.md`"
    )
