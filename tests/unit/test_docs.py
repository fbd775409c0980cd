"""The Python blocks of the docs run. Links, and the functions that the docs name, exist.

The reference has every public name.
"""

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest
import torch
from processes import run_script

import torch_kvswap as kvs

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
NATIVE = "\n".join(
    path.read_text() for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".h", ".cpp")
)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_its_heading(page):
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text())
    for file, anchor in links:
        target = page.parent / file if file else page
        assert target.exists()
        assert not anchor or anchor in anchors_of(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_native_function_that_is_named_exists(page):
    named = set(re.findall(r"\b([A-Z]\w+)::(\w+)", page.read_text()))
    assert not [
        f"{owner}::{name}"
        for owner, name in named
        if not re.search(rf"\b{owner}\b", NATIVE) or not re.search(rf"\b{name}\b", NATIVE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_source_file_exists(page):
    paths = re.findall(
        r"`((?:csrc|torch_kvswap|tests|tools|benchmarks)/[\w./]+\.\w+)`", page.read_text()
    )
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_files_that_the_layout_names_exist():
    rows = re.findall(r"^\| `(\w[\w/]+)/` \| (.*) \|$", PAGES[1].read_text(), re.MULTILINE)
    assert len(rows) > 20
    for folder, contents in rows:
        names = re.findall(r"`(\w+\.(?:py|h|cpp)|\w+/)`", contents)
        assert not [name for name in names if not (ROOT / folder / name).exists()]


BLOCK = re.compile(r"(<!-- not run: .+ -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """The line and the code of each Python block that is not marked `<!-- not run: why -->`."""
    text = page.read_text()
    found = [(text.count("\n", 0, at.start(2)), at) for at in BLOCK.finditer(text)]
    return [(line, at[2].replace('"cuda"', '"cpu"')) for line, at in found if not at[1]]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name
)
def test_the_python_blocks_of_a_page_run(page):
    # Blank lines make a traceback name the page and its line.
    program = textwrap.dedent(
        f"""
        import os
        os.environ["KVSWAP_LATE_CPU"] = "1"  # a forgotten wait shows
        names = {{"__name__": "__main__"}}
        for line, code in {blocks_of(page)!r}:
            exec(compile("\\n" * line + code, {str(page)!r}, "exec"), names)
        """
    )
    run_script(program)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_can_be_pasted_into_a_prompt(page):
    # There only an empty line ends an indented block.
    next_line = re.compile(r"^ .*\n(?!elif |else:|except|finally:)[^\s)\]}].*", re.MULTILINE)
    assert not [
        found for at in BLOCK.finditer(page.read_text()) for found in next_line.findall(at[2])
    ]


PACKAGES = ("", ".below", ".host_pool", ".offload", ".prefix")
PUBLIC = [
    f"torch_kvswap{package}.{name}"
    for package in PACKAGES
    for name in pkgutil.resolve_name(f"torch_kvswap{package}").__all__
    if name != "__version__"
] + ["torch_kvswap.reference.ReferenceHandler"]
DIRECTIVE = re.compile(r"^\.\. (\w+):: ([\w.]+).*\n((?: +:.*\n)*)", re.MULTILINE)


def reference_options() -> dict[str, dict[str, str]]:
    """The options of each name that a page of the reference documents."""
    found = {}
    for page in REFERENCE:
        module = ""
        for directive, name, options in DIRECTIVE.findall(page.read_text()):
            if directive == "currentmodule":
                module = f"{name}."
            elif directive.startswith("auto"):
                full = name if name.startswith("torch_kvswap.") else module + name
                found[full] = dict(re.findall(r":([\w-]+): *(.*)", options))
    return found


def is_documented(kind: type, name: str, options: dict[str, str]) -> bool:
    owner = next(base for base in kind.__mro__ if name in vars(base))
    if not owner.__module__.startswith("torch_kvswap"):
        return True  # Python's own
    if re.search(rf"^ *(\w+, )*{name}\b[\w, ]*( \(|:)", inspect.getdoc(kind) or "", re.MULTILINE):
        return True  # under Attributes
    if options.get("members"):
        return name in options["members"].split(", ")
    is_listed = owner is kind or "inherited-members" in options
    return "members" in options and is_listed and bool(inspect.getdoc(getattr(kind, name)))


@pytest.mark.parametrize("path", PUBLIC)
def test_the_reference_has_every_public_member(path):
    options = reference_options()
    assert path in options
    kind = pkgutil.resolve_name(path)
    names = [name for name in dir(kind) if name[0] != "_"] if inspect.isclass(kind) else []
    assert not [name for name in names if not is_documented(kind, name, options[path])]


# The example of preemption works in a scheduler.


def examples_of(page):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("becomes", ["loaded", "pending", "lost"])
def test_the_preemption_example_runs_without_a_gpu(becomes, monkeypatch):
    preempt, resume = (code for code in examples_of("prefixes.md") if "held" in code)
    rows = torch.arange(18)[:, None].repeat(1, 5)
    gpu = kvs.PagedLayout([rows])
    hasher = kvs.PrefixHasher("my-model", "bfloat16", block_tokens=16)
    with kvs.PrefixCache(gpu, kvs.HostPool(gpu, num_pages=7)) as prefixes:
        names = {"prefixes": prefixes, "hasher": hasher, "tokens": list(range(100))}
        exec(preempt, names)
        assert prefixes.store(["other"], [0]).state == "full"
        if becomes == "pending":
            monkeypatch.setattr(prefixes, "poll", lambda: [])
        if becomes == "lost":
            prefixes.reset()
        exec(resume, names)
        assert (names["job"] is not None) == (becomes == "loaded")
        first = 4 if becomes == "loaded" else 11
        assert rows[11:, 0].tolist() == list(range(first, first + 7))
        assert names["held"].lease.is_held == (becomes == "pending")
