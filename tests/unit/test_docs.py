"""Links of the docs, and the functions that they name, exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NATIVE = "\n".join(
    path.read_text() for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".h", ".cpp")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_native_function_that_is_named_exists(page):
    named = set(re.findall(r"\b([A-Z]\w+)::(\w+)", page.read_text()))
    assert not [
        f"{owner}::{name}"
        for owner, name in named
        if not re.search(rf"\b{owner}\b", NATIVE) or not re.search(rf"\b{name}\b", NATIVE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_source_file_that_is_named_by_its_path_exists(page):
    paths = re.findall(
        r"`((?:csrc|torch_kvswap|tests|tools|benchmarks)/[\w./]+\.\w+)`", page.read_text()
    )
    assert not [path for path in paths if not (ROOT / path).exists()]
