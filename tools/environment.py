"""Gets ready what the Makefile's commands need, on a bare machine too.

    python3 tools/environment.py build|demo|docs|lint|test|test-transformers|wheel

Finds or makes a Python environment with torch, installs the command's tools into it, and builds the
native library. Says so on stderr, a line each; the only line on stdout is the path of the Python to
use. A torch that is there is used: that of the virtual environment in which this runs, or that of a
system Python through a `.venv` that sees it. Else `.venv` gets one, and pip chooses its version, as
it is configured; without an NVIDIA driver from the CPU builds, if it can get one. Nothing is
installed outside a virtual environment.

KVSWAP_TORCH_INDEX  the package index to take torch from
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  old Pythons can read the file up to here
    raise SystemExit(
        "torch_kvswap: Python 3.10 or later is needed, {} is {}.{}. Name another one, such as "
        "make PYTHON=python3.12".format(sys.executable, *sys.version_info[:2])
    )

import ast
import ctypes
import os
import re
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
TORCH = "torch>=2.11"
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
EXTRAS: dict[str, list[str]] = {
    "build": [],
    "demo": [],
    "docs": ["docs"],
    "lint": ["lint"],
    "test": ["test", "wheel"],
    "test-transformers": ["test", "transformers"],
    "wheel": ["wheel"],
}


def say(message: str) -> None:
    print(f"torch_kvswap: {message}", file=sys.stderr, flush=True)


def ask(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command for its answer, which may be that it failed."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)


def try_run(*command: object) -> bool:
    """Run a command whose output goes to stderr. True if it succeeded."""
    words = [str(word) for word in command]
    return subprocess.run(words, stdout=sys.stderr, cwd=ROOT).returncode == 0


def run(*command: object) -> None:
    """Run a command that must succeed."""
    if not try_run(*command):
        raise SystemExit(f"torch_kvswap: failed: {shlex.join(map(str, command))}")


def requirements(name: str) -> list[str]:
    """A list in pyproject.toml. Python 3.10 cannot read TOML, but such a list reads as Python."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.findall(rf"^{name} = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    return [str(item) for item in ast.literal_eval(found[0])]


def release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def torch_version(python: Path) -> str | None:
    """The version of the torch that `python` has, if that is new enough."""
    answer = ask(python, "-c", "import importlib.metadata as m; print(m.version('torch'))")
    version = answer.stdout.strip()
    if release(version) >= release(TORCH):
        return version
    if version:
        say(f"torch {version} of {python} is too old, 2.11 or later is needed")
    return None


def find_python() -> Path:
    """The Python to use. It belongs to a virtual environment, which may still lack everything."""
    here, ours = Path(sys.executable), VENV / "bin" / "python"
    version = torch_version(here)
    if version and sys.prefix != sys.base_prefix:
        return here
    if not ours.exists():
        say(f"making {VENV}" + (f", which sees torch {version} of {here}" if version else ""))
        share = ["--system-site-packages"] if version else []
        run(here, "-m", "venv", "--clear", "--without-pip", *share, VENV)
    return ours


def ensure_pip(python: Path) -> None:
    answer = ask(python, "-m", "pip", "--version")
    if answer.returncode != 0:
        say(f"installing pip for {python}")
        bring = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "pip"]
        if ask(python, "-m", "ensurepip", "--default-pip").returncode and ask(*bring).returncode:
            raise SystemExit(
                f"torch_kvswap: {sys.executable} has neither ensurepip nor pip 22.3 or later. "
                "Install one of them; on Debian and Ubuntu it is the package python3-venv."
            )


def has_nvidia_driver() -> bool:
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0)) == 0
    except OSError:
        return False


def unwanted_builds(offered: list[str], cpu_build: bool) -> list[str]:
    """The versions to exclude so that pip takes a build of the wanted kind.

    A version without a local part stays beside its CPU build, since excluding 2.13.0 excludes
    2.13.0+cpu too; pip prefers the latter.
    """
    if not cpu_build:
        return [version for version in offered if "+cpu" in version]
    cpu = {version.partition("+")[0] for version in offered if "+cpu" in version}
    return [
        version
        for version in offered
        if version.partition("+")[0] not in cpu or ("+" in version and "+cpu" not in version)
    ]


def install_torch(python: Path) -> None:
    """Install the torch that pip chooses among the builds of the wanted kind, or else among all."""
    index = os.environ.get("KVSWAP_TORCH_INDEX")
    # Settings, unlike options, replace the further indexes that pip is configured with.
    source = ["env", f"PIP_INDEX_URL={index}", f"PIP_EXTRA_INDEX_URL={index}"] if index else []
    answer = ask(*source, python, *PIP, "index", "versions", "torch")
    listed = re.findall(r"\d[\w.+]*", answer.stdout.partition("Available versions:")[2])
    offered = [version for version in listed if release(version) >= release(TORCH)]
    cpu_build = not has_nvidia_driver()
    unwanted = unwanted_builds(offered, cpu_build)
    BUILD.mkdir(exist_ok=True)
    # torch is downloaded alone, since what it needs may lie in other indexes. pip installs it after
    # what it needs, so a torch that is there is complete.
    with TemporaryDirectory(dir=BUILD) as folder:

        def download(requirement: str) -> bool:
            say(f"downloading {requirement}")
            options = ["--no-deps", "--dest", folder]
            return try_run(*source, python, *PIP, "download", *options, requirement)

        some_wanted = len(unwanted) < len(offered)
        if not (some_wanted and download(",!=".join([TORCH, *unwanted]))):
            if cpu_build:
                say(
                    "there is no NVIDIA driver, but pip can get no CPU build of torch (a version "
                    "with +cpu). What it downloads now may be a CUDA build of several GB. To avoid "
                    "that, interrupt, and put the address of a package index with CPU builds into "
                    "KVSWAP_TORCH_INDEX."
                )
            if not download(TORCH):
                raise SystemExit(
                    f"torch_kvswap: pip finds no {TORCH} for {python}; it said why above. Put the "
                    "address of a package index that has one into KVSWAP_TORCH_INDEX, or use "
                    "another Python, such as make PYTHON=python3.12"
                )
        run(python, *PIP, "install", "--no-user", *Path(folder).iterdir())


def ensure_packages(python: Path, extras: list[str]) -> None:
    """Install what is missing. The stamp spares asking pip, which takes a second."""
    lists = ["requires", "dependencies", *extras]
    # A torch that is there stays: pip would replace one that its constraints do not allow.
    wanted = [item for name in lists for item in requirements(name) if item != TORCH]
    made = (python.parent.parent / "pyvenv.cfg").stat().st_mtime_ns
    stamp = BUILD / f"{'-'.join(['packages', *extras])}.stamp"
    torch, state = torch_version(python), f"{python} {made} {wanted}"
    if torch and stamp.exists() and stamp.read_text() == state:
        return
    ensure_pip(python)
    if torch is None:
        install_torch(python)
    say(f"installing what is missing of {', '.join(wanted)}")
    run(python, *PIP, "install", "--quiet", "--no-user", *wanted)
    BUILD.mkdir(exist_ok=True)
    stamp.write_text(state)


def main(command: str) -> None:
    python = find_python()
    ensure_packages(python, EXTRAS[command])
    if command not in ("lint", "wheel"):
        run(python, "setup.py", "--quiet", "build_ext", "--inplace")  # does only what is needed
    say(f"using torch {torch_version(python)} of {python}")
    print(python)


if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in EXTRAS]:
        raise SystemExit(__doc__)
    main(sys.argv[1])
