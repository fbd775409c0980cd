"""Gets ready what the Makefile's commands need, on a bare machine too.

    python3 tools/environment.py build|demo|lint|test|test-transformers

Finds or makes a Python environment with torch, installs the command's tools into it, and builds the
native library. Says so on stderr, a line each; the only line on stdout is the path of the Python to
use. A torch that is there is used: that of the virtual environment in which this runs, or that of a
system Python through a `.venv` that sees it. Else `.venv` gets one, a CPU build if there is no
NVIDIA driver and such a build can be had. Nothing is installed outside a virtual environment.

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
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
EXTRAS: dict[str, list[str]] = {
    "build": [],
    "demo": [],
    "lint": ["lint"],
    "test": ["test"],
    "test-transformers": ["test", "transformers"],
}
OLDEST_TORCH = (2, 11)


def say(message: str) -> None:
    print(f"torch_kvswap: {message}", file=sys.stderr, flush=True)


def ask(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command for its answer, which may be that it failed."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)


def run(*command: object) -> None:
    """Run a command that must succeed. What it prints goes to stderr."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=sys.stderr, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"torch_kvswap: failed with status {done.returncode}: {' '.join(words)}")


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
    if release(version) >= OLDEST_TORCH:
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
                f"torch_kvswap: {sys.executable} has neither ensurepip nor pip. Install one of "
                "them; on Debian and Ubuntu it is the package python3-venv."
            )


def has_nvidia_driver() -> bool:
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0)) == 0
    except OSError:
        return False


def choose_torch(versions: list[str], cpu_build: bool) -> str:
    """The newest build of the wanted kind, else the newest. `versions` has the newest first."""
    for version in versions:
        if ("+cpu" in version) == cpu_build:
            return version
    return versions[0]


def install_torch(python: Path) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    index = os.environ.get("KVSWAP_TORCH_INDEX")
    # Settings, unlike options, replace the further indexes that pip is configured with.
    source = ["env", f"PIP_INDEX_URL={index}", f"PIP_EXTRA_INDEX_URL={index}"] if index else []
    advice = "put the address of a package index that has one into KVSWAP_TORCH_INDEX"
    # This downloads no wheel to find out. `install --dry-run` would, all of them.
    answer = ask(*source, *pip, "index", "versions", "torch")
    offered = re.findall(r"\d[\w.+]*", answer.stdout.partition("Available versions:")[2])
    versions = [version for version in offered if release(version) >= OLDEST_TORCH]
    if not versions:
        say(answer.stderr.strip())
        raise SystemExit(f"torch_kvswap: pip offers no torch 2.11 or later; {advice}.")
    cpu_build = not has_nvidia_driver()
    version = choose_torch(versions, cpu_build)
    say(f"installing torch {version}")
    if cpu_build and "+cpu" not in version:
        say(
            "that is probably a CUDA build of several GB. There is no NVIDIA driver, but pip "
            f"offers no CPU build (a version with +cpu). To avoid the CUDA build, {advice}."
        )
    run(*source, *pip, "install", "--no-deps", f"torch=={version}")
    run(*pip, "install", f"torch=={version}")  # what it needs may lie in other indexes


def ensure_packages(python: Path, extras: list[str]) -> None:
    """Install what is missing. The stamp spares asking pip, which takes a second."""
    lists = ["requires", "dependencies", *extras]
    wanted = list(dict.fromkeys(item for name in lists for item in requirements(name)))
    made = (python.parent.parent / "pyvenv.cfg").stat().st_mtime_ns
    stamp, state = BUILD / f"{'-'.join(['packages', *extras])}.stamp", f"{python} {made} {wanted}"
    if stamp.exists() and stamp.read_text() == state:
        return
    ensure_pip(python)
    if torch_version(python) is None:
        install_torch(python)
    say(f"installing what is missing of {', '.join(wanted)}")
    options = ["--quiet", "--no-input", "--disable-pip-version-check"]
    run(python, "-m", "pip", "install", *options, *wanted)
    BUILD.mkdir(exist_ok=True)
    stamp.write_text(state)


def main(command: str) -> None:
    python = find_python()
    ensure_packages(python, EXTRAS[command])
    if command != "lint":
        run(python, "setup.py", "--quiet", "build_ext", "--inplace")  # does only what is needed
    say(f"using torch {torch_version(python)} of {python}")
    print(python)


if __name__ == "__main__":
    if sys.argv[1:] not in [[name] for name in EXTRAS]:
        raise SystemExit(__doc__)
    main(sys.argv[1])
