"""Settings of Sphinx for `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch_kvswap  # noqa: E402  the checkout's own

project = "torch_kvswap"
author = "the torch_kvswap authors"
version = release = torch_kvswap.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"torch_kvswap {version}"
html_extra_path = ["../benchmarks/results"]  # the pages link to the results behind their figures
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have the types, with units and shapes
autodoc_mock_imports = ["transformers", "vllm", "sglang"]  # their classes are bases of ours
napoleon_use_ivar = True
napoleon_use_rtype = False

# Where the site has what lies outside of docs/.
_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "torch_kvswap/reference.py": "reference/plain_form.md",
}


def _redirect(text: str, root: str) -> str:
    """Makes links to files outside of docs/ lead to what the site has.

    Args:
        text (str): of a page.
        root (str): what the page's links to such files begin with.
    """
    results = rf"\[([^\[\]]+)\]\({re.escape(root)}benchmarks/results/([^)]+)\)"
    text = re.sub(results, r'<a href="\2">\1</a>', text)
    for path, page in _OUTSIDE.items():
        text = text.replace(f"]({root}{path}", f"]({page}")
    return text


def _read_page(app: object, page: str, source: list[str]) -> None:
    source[0] = _redirect(source[0], "../")


def _read_included(app: object, path: Path, page: str, source: list[str]) -> None:
    source[0] = _redirect(source[0], "").replace("](docs/", "](")


def _skip_fields(
    app: object, what: str, name: str, member: object, skip: bool, options: object
) -> bool | None:
    """Leaves out fields of named tuples, which the class's docstring lists under Attributes."""
    return True if type(member).__name__ == "_tuplegetter" else None


def setup(app: Any) -> None:
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
    app.connect("autodoc-skip-member", _skip_fields)
