"""Checks of the source: imports go downward, and some folders do without torch."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torch_kvswap"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
NATIVE = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
# Layers, lowest first. A module imports from its own layer and from those below.
LAYERS = (
    ("_native",),
    ("results",),
    ("devices",),
    ("layout", "ops", "copy_method"),
    ("encoding",),
    ("host_pool",),
    ("offload", "reference", "below"),
    ("prefix",),
    ("integrations",),
    ("cli", "__init__", "__main__"),
)
# Folders of csrc/, lowest first. A file includes from its own layer and from those below.
NATIVE_LAYERS = (
    ("", "prefix"),
    ("cuda",),
    ("kernels",),
    ("copy",),
    ("encoding",),
    ("device", "ops"),
    ("offload",),
    ("bindings",),
)
# Folders of csrc/ that include no torch header.
TORCH_FREE = ("copy", "cuda", "device", "encoding", "kernels", "offload", "prefix")


def package_of(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if package_of(module) in names]
    assert found, f"{module} is in no layer; add it to LAYERS"
    return found[0]


def native_layer(folder: str) -> int:
    found = [number for number, names in enumerate(NATIVE_LAYERS) if folder in names]
    assert found, f"csrc/{folder} is in no layer; add it to NATIVE_LAYERS"
    return found[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(module: str) -> Iterator[str]:
    """Full dotted names of all that a module imports, also for types and inside functions."""
    package = ["torch_kvswap", *module.split(".")[:-1]]
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


@cache
def imported_modules(module: str) -> set[str]:
    """The modules of the package that a module imports; the package itself is `__init__`."""
    found = set()
    for name in imported_names(module):
        if package_of(name) != "torch_kvswap" or f"{name}.".startswith("torch_kvswap._C."):
            continue  # the native library imports nothing of the package
        parts = name.split(".")[1:]
        names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        names += [f"{name}.__init__" for name in names]
        found.add(next((name for name in names if name in MODULES), "__init__"))
    return found


@cache
def includes(path: Path) -> set[str]:
    """What a native file includes, and what its own headers include in turn."""
    names = {*re.findall(r'^\s*#\s*include\s*[<"](.+)[>"]', path.read_text(), re.MULTILINE)}
    for name in [*names]:
        own = (folder / name for folder in (path.parent, ROOT / "csrc"))
        header = next((file for file in own if file.exists()), None)
        names |= includes(header) if header else set()
    return names


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module):
    here = layer(module)
    for other in imported_modules(module) - {module}:
        if other == "__init__":
            continue  # the version
        assert layer(other) <= here, f"{module} imports {other}, which is above it"
        assert package_of(other) != "integrations" or package_of(module) in ("integrations", "cli")


def test_no_modules_import_each_other_in_a_circle():
    order = TopologicalSorter({module: imported_modules(module) - {module} for module in MODULES})
    order.prepare()


def test_tensors_are_made_on_named_devices():
    """An engine's default device would give others, on meta without an address."""
    makers, found = _device_constructors(), []
    for path in [*MODULES.values(), *sorted((ROOT / "examples").rglob("*.py"))]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
                maker = getattr(torch, ast.unparse(node.func)[len("torch.") :], None)
                if maker in makers and "device" not in [word.arg for word in node.keywords]:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_the_block_manager_needs_no_handler():
    known, new = set(), {"prefix.manager"}
    while new:
        known |= new
        new = {other for module in new for other in imported_modules(module)} - known
    assert known.isdisjoint({"offload.handler", "offload.native", "host_pool.pool", "layout"})


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_native_file_includes_what_its_folder_may(path):
    names = includes(path)
    if path.suffix != ".cu":
        cuda = [name for name in names if re.match(r"(cuda|cuda_runtime\w*|cuda_fp16)\.h$", name)]
        assert not cuda, "it must compile without CUDA"
    folder = path.parent.name if path.parent.name != "csrc" else ""
    if folder in TORCH_FREE:
        assert not [name for name in names if name.startswith(("torch/", "ATen/", "c10/"))]
    for name in names:
        if (ROOT / "csrc" / name).exists():
            other = name.rpartition("/")[0]
            assert native_layer(other) <= native_layer(folder), f"{name} is above"
    if path.parent.name == "offload":
        known = {name for name in names if re.match("cuda/|device/", name)}
        assert known <= {"device/device.h"}, "another kind of device needs no change here"
        assert not re.search(r"(?i:cuda)|\bcu[A-Z]\w+\(", path.read_text())


def test_no_file_names_folders_or_registries():
    folder = re.compile(r"(?<![\w.$])/(?:home|root|work|Users)/\w")
    registry = re.compile(
        r"\b(?:pypi|pythonhosted|anaconda|download\.pytorch|pypi\.nvidia)\.\w{2,3}\b"
    )
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if folder.search(line) or registry.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
