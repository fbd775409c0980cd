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
napoleon_use_rtype = True
default_role = "code"
smartquotes = False  # "raw" is a string

# Where the site has what lies outside of docs/.
_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
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


def _public_names() -> dict[str, str]:
    """The full name of each class and function that a page of the reference documents."""
    directive = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)", re.MULTILINE)
    found: dict[str, str] = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        module = ""
        for kind, name in directive.findall(page.read_text()):
            if kind == "currentmodule":
                module = f"{name}."
            else:
                full = name if name.startswith("torch_kvswap.") else module + name
                found.setdefault(full.rpartition(".")[2], full)
    return found


_NAMES = _public_names()
_NAMED = re.compile(
    r"docs/(?P<page>\w+)\.md"
    rf"|`?\b(?P<name>{'|'.join(_NAMES)})\b(?:\.(?P<member>\w+)\b(?:\(\))?)?`?(?![(`]|\.\w)"
)


def _link(match: re.Match[str]) -> str:
    """A link to what was named; as it stands, if that is part of something else."""
    if page := match["page"]:
        return f"`/{page}`:doc:"  # a line may begin with it, unlike with :doc:
    before = match.string[: match.start()]
    if before[-1:] in ("`", ".", ":", "_", "~") or before.count("``") % 2:
        return match[0]
    name, member = match["name"], match["member"]
    if member is None:
        if name.istitle() and match[0][0] != "`":
            return name  # a word, such as Stored
        return f"`{name} <{_NAMES[name]}>`:py:obj:"
    return f"`{name}.{member} <{_NAMES[name]}.{member}>`:py:obj:"


def _link_docstring(
    app: object, what: str, name: str, member: object, options: object, lines: list[str]
) -> None:
    """Makes links of the pages, classes and methods that a docstring names."""
    returns = False
    for number, line in enumerate(lines):
        field = re.match(r":(\w+)[^:]*:", line)
        returns = field[1] == "returns" if field else returns and bool(line)
        if returns and not field:
            line = "   " + line.strip()  # napoleon indents it further than the first line
        if not field or field[1] not in ("type", "vartype", "rtype"):  # napoleon links these
            start = field.end() if field else 0
            line = line[:start] + _NAMED.sub(_link, line[start:])
        lines[number] = line


def setup(app: Any) -> None:
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _link_docstring, priority=900)  # behind napoleon
