"""The table of the README has the committed figures."""

from __future__ import annotations

import readme_table


def test_the_readme_has_the_committed_figures() -> None:
    assert f"\n\n{readme_table.readme_table()}\n\n" in readme_table.README.read_text()
