"""tools/environment.py with fake Pythons and a fake pip, and with the real pip and package
indexes on disk.
"""

import ast
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "tools" / "environment.py"
CUDA_BUILDS = ["2.15.0", "2.14.1", "2.9.0"]


def load(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Index:
    """A package index on disk, with wheels that hold nothing but their metadata."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, folder.as_uri()

    def wheel(self, name: str, version: str) -> Path:
        return self.folder / name / f"{name}-{version}-py3-none-any.whl"

    def add(self, name: str, *versions: str, needs: str | None = None) -> None:
        page = self.folder / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        for version in versions:
            wheel, info = self.wheel(name, version), f"{name}-{version}.dist-info"
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            files = {
                "METADATA": metadata + (f"Requires-Dist: {needs}\n" if needs else ""),
                "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                "RECORD": "".join(f"{info}/{file},,\n" for file in ("METADATA", "WHEEL", "RECORD")),
            }
            with zipfile.ZipFile(wheel, "w") as archive:
                for file, text in files.items():
                    archive.writestr(f"{info}/{file}", text)
            with page.open("a") as links:
                links.write(f'<a href="{wheel.name}">{wheel.name}</a>\n')


class Checkout:
    """A checkout with a copy of `venv` as its .venv, which has only pip. pip sees no configuration
    but that of `monkeypatch`."""

    def __init__(self, folder: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.index = folder / "a checkout", Index(folder / "index")
        (self.folder / "tools").mkdir(parents=True)
        shutil.copy(SOURCE, self.folder / "tools")
        shutil.copy(ROOT / "pyproject.toml", self.folder)
        (self.folder / "setup.py").write_text("print('built')\n")
        self.environment = load(self.folder / "tools" / "environment.py")
        monkeypatch.setattr(self.environment, "has_nvidia_driver", lambda: False)
        for name in ("setuptools", "nanobind", "ninja", "numpy", "needed"):
            self.index.add(name, "99.0")
        shutil.copytree(venv, self.folder / ".venv", symlinks=True)
        self.python = self.folder / ".venv" / "bin" / "python"

    def packages(self) -> dict[str, str]:
        places = (self.folder / ".venv").glob("lib/python*/site-packages/*.dist-info")
        return dict(place.stem.split("-") for place in places)

    def install(self, name: str, version: str) -> None:
        (packages,) = (self.folder / ".venv").glob("lib/python*/site-packages")
        zipfile.ZipFile(self.index.wheel(name, version)).extractall(packages)


@pytest.fixture(scope="module")
def venv(tmp_path_factory) -> Path:
    venv = tmp_path_factory.mktemp("venv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # Importing pip, or looking for its spec, would take setuptools' distutils from other tests.
    (packages / "pip").symlink_to(importlib.metadata.distribution("pip").locate_file("pip"))
    return venv


@pytest.fixture
def checkout(monkeypatch, tmp_path, venv) -> Checkout:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("KVSWAP_TORCH_INDEX", raising=False)
    checkout = Checkout(tmp_path, venv, monkeypatch)
    for name, value in {
        "CONFIG_FILE": os.devnull,
        "INDEX_URL": checkout.index.url,
        "NO_CACHE_DIR": "1",
        "DISABLE_PIP_VERSION_CHECK": "1",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return checkout


def test_an_old_python_can_read_the_file_and_gets_a_clear_message():
    ast.parse(SOURCE.read_text(), feature_version=(3, 6))
    code = "import runpy, sys; sys.version_info = (3, 8, 1); runpy.run_path(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, SOURCE], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python 3.10 or later is needed" in done.stderr


@pytest.mark.slow
def test_a_bare_machine_gets_all_and_the_second_time_asks_nobody(checkout, monkeypatch, capfd):
    checkout.index.add("torch", *CUDA_BUILDS, "2.13.0+cpu")
    checkout.install("torch", "2.9.0")  # which is too old
    monkeypatch.setattr(checkout.environment, "find_python", lambda: checkout.python)
    checkout.environment.main("build")
    first = capfd.readouterr()
    assert first.out == f"{checkout.python}\n"
    assert "built\n" in first.err
    assert checkout.packages()["torch"] == "2.13.0+cpu"
    monkeypatch.setattr(checkout.environment, "ensure_pip", lambda python: pytest.fail("used pip"))
    checkout.environment.main("build")
    assert capfd.readouterr().out == f"{checkout.python}\n"
