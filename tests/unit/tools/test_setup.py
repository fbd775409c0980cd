"""setup.py: what it says without nvcc, and what the sdist holds."""

import importlib.util
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from expecttest import assert_expected_inline

ROOT = Path(__file__).parents[3]


@pytest.fixture
def setup(monkeypatch) -> ModuleType:
    for name in ("KVSWAP_CUDA", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("kvswap_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_build_without_nvcc_says_so_or_stops(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup, "cuda_homes", lambda: iter([Path("/nowhere"), Path("/or/here")]))
    assert setup.find_cuda() is None
    assert_expected_inline(
        capsys.readouterr().out,
        """\
torch_kvswap: the kernels are left out: no CUDA 12.0 or later is in /nowhere, /or/here
""",
    )
    monkeypatch.setenv("KVSWAP_CUDA", "1")
    with pytest.raises(SystemExit) as stop:
        setup.find_cuda()
    assert_expected_inline(
        str(stop.value),
        """torch_kvswap: KVSWAP_CUDA is 1, but no CUDA 12.0 or later is in /nowhere, /or/here. Name its folder in CUDA_HOME, or set KVSWAP_CUDA=0 to leave the kernels out.""",
    )


@pytest.mark.slow
def test_the_sdist_has_what_a_build_needs(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = tmp_path.iterdir()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "setup.py", "pyproject.toml"} <= names
    assert native <= names
