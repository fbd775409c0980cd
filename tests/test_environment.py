"""tools/environment.py, with a pip and Pythons that only answer."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from expecttest import assert_expected_inline

SOURCE = Path(__file__).parent.parent / "tools" / "environment.py"
INDEX_ANSWER = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.9.0, 2.9.0+cpu\n"
ONLY_CUDA = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0, 2.9.0\n"


class Machine:
    """Answers the questions that contain a key of `answers`, fails others, remembers them all."""

    def __init__(self, folder: Path) -> None:
        self.answers: dict[str, str] = {"pip --version": "pip 23.0"}
        self.asked: list[str] = []
        self.ran: list[str] = []
        self.folder = folder

    def spell(self, command: tuple[object, ...]) -> str:
        return " ".join(map(str, command)).replace(str(self.folder), "ROOT")

    def ask(self, *command: object) -> subprocess.CompletedProcess[str]:
        self.asked.append(self.spell(command))
        for key, answer in self.answers.items():
            if key in self.asked[-1]:
                return subprocess.CompletedProcess(command, 0, answer, "")
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no answer")

    def run(self, *command: object) -> None:
        self.ran.append(self.spell(command))


@pytest.fixture
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(environment, monkeypatch, tmp_path) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(environment, "ask", machine.ask)
    monkeypatch.setattr(environment, "run", machine.run)
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(environment, "BUILD", tmp_path / "build")
    monkeypatch.setattr(environment, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(sys, "executable", "ROOT/bin/python3")
    monkeypatch.setattr(sys, "prefix", "ROOT")
    monkeypatch.setattr(sys, "base_prefix", "ROOT")
    monkeypatch.delenv("KVSWAP_TORCH_INDEX", raising=False)
    return machine


def make_venv(machine: Machine) -> Path:
    python = machine.folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (machine.folder / ".venv" / "pyvenv.cfg").touch()
    return python


def test_an_old_python_can_read_the_file_and_gets_a_clear_message():
    ast.parse(SOURCE.read_text(), feature_version=(3, 6))
    code = "import runpy, sys; sys.version_info = (3, 8, 1); runpy.run_path(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, SOURCE], capture_output=True, text=True)
    assert done.returncode == 1
    assert_expected_inline(
        done.stderr.replace(sys.executable, "python3"),
        """\
torch_kvswap: Python 3.10 or later is needed, python3 is 3.8. Name another one, such as make PYTHON=python3.12
""",
    )


def test_the_lint_tools_are_pinned(environment):
    pins = environment.requirements("lint")
    assert [pin.partition("==")[0] for pin in pins] == ["ruff", "mypy", "clang-format"]
    assert all("==" in pin for pin in pins)


def test_every_list_that_is_installed_is_in_pyproject(environment):
    for extras in environment.EXTRAS.values():
        for name in ["requires", "dependencies", *extras]:
            assert environment.requirements(name)


def test_a_virtual_environment_with_torch_is_used_itself(environment, machine, monkeypatch):
    monkeypatch.setattr(sys, "prefix", "ROOT/their_venv")
    machine.answers["m.version('torch')"] = "2.11.0+cu130\n"
    assert environment.find_python() == Path("ROOT/bin/python3")
    assert machine.ran == []


def test_a_virtual_environment_without_torch_is_left_alone(environment, machine, monkeypatch):
    monkeypatch.setattr(sys, "prefix", "ROOT/their_venv")
    assert environment.find_python() == machine.folder / ".venv/bin/python"
    assert machine.ran == ["ROOT/bin/python3 -m venv --clear --without-pip ROOT/.venv"]


def test_a_system_python_with_torch_is_seen_by_a_venv(environment, machine, capsys):
    machine.answers["m.version('torch')"] = "2.13.0\n"
    assert environment.find_python() == machine.folder / ".venv/bin/python"
    assert machine.ran == [
        "ROOT/bin/python3 -m venv --clear --without-pip --system-site-packages ROOT/.venv"
    ]
    assert "which sees torch 2.13.0 of ROOT/bin/python3" in capsys.readouterr().err


def test_a_torch_that_is_too_old_counts_as_none(environment, machine, capsys):
    machine.answers["m.version('torch')"] = "2.10.1+cpu\n"
    environment.find_python()
    assert machine.ran == ["ROOT/bin/python3 -m venv --clear --without-pip ROOT/.venv"]
    assert "torch 2.10.1+cpu of ROOT/bin/python3 is too old" in capsys.readouterr().err


def test_a_venv_that_is_there_is_kept(environment, machine):
    python = make_venv(machine)
    assert environment.find_python() == python
    assert machine.ran == []


def test_without_a_driver_an_older_cpu_build_is_preferred_to_a_newer_one(environment, machine):
    machine.answers["index versions torch"] = INDEX_ANSWER
    environment.install_torch(Path("python"))
    pip = "python -m pip --disable-pip-version-check --no-input"
    assert machine.ran == [
        f"{pip} install --no-deps torch==2.13.0+cpu",
        f"{pip} install torch==2.13.0+cpu",
    ]


def test_with_a_driver_the_newest_cuda_build_is_taken(environment, machine, monkeypatch):
    monkeypatch.setattr(environment, "has_nvidia_driver", lambda: True)
    machine.answers["index versions torch"] = INDEX_ANSWER.replace("2.15.0,", "2.15.0+cpu, 2.15.0,")
    environment.install_torch(Path("python"))
    assert machine.ran[-1].endswith("install torch==2.15.0")


def test_where_only_a_cuda_build_can_be_had_it_says_so_and_goes_on(environment, machine, capsys):
    machine.answers["index versions torch"] = ONLY_CUDA
    environment.install_torch(Path("python"))
    assert machine.ran[-1].endswith("install torch==2.15.0")
    assert_expected_inline(
        capsys.readouterr().err,
        """\
torch_kvswap: installing torch 2.15.0
torch_kvswap: that is probably a CUDA build of several GB. There is no NVIDIA driver, but pip offers no CPU build (a version with +cpu). To avoid the CUDA build, put the address of a package index that has one into KVSWAP_TORCH_INDEX.
""",
    )


def test_the_named_index_replaces_all_others_for_torch_alone(environment, machine, monkeypatch):
    monkeypatch.setenv("KVSWAP_TORCH_INDEX", "file:///index")
    machine.answers["PIP_INDEX_URL=file:///index"] = INDEX_ANSWER
    environment.install_torch(Path("python"))
    torch, its_needs = machine.ran
    assert torch.startswith("env PIP_INDEX_URL=file:///index PIP_EXTRA_INDEX_URL=file:///index ")
    assert torch.endswith("install --no-deps torch==2.13.0+cpu")
    assert its_needs.startswith("python -m pip")


@pytest.mark.parametrize("answer", ["", "torch (2.9.0)\nAvailable versions: 2.9.0, 2.9.0+cpu\n"])
def test_where_no_torch_can_be_had_it_stops_with_the_way_out(environment, machine, answer):
    machine.answers["index versions torch"] = answer
    with pytest.raises(SystemExit) as stop:
        environment.install_torch(Path("python"))
    assert machine.ran == []
    assert_expected_inline(
        str(stop.value),
        """torch_kvswap: pip offers no torch 2.11 or later; put the address of a package index that has one into KVSWAP_TORCH_INDEX.""",
    )


def test_pip_is_brought_by_a_python_that_has_it(environment, machine):
    machine.answers = {"ROOT/bin/python3 -m pip --python python install --quiet pip": ""}
    environment.ensure_pip(Path("python"))
    assert "python -m ensurepip --default-pip" in machine.asked
    machine.answers = {}
    with pytest.raises(SystemExit, match="neither ensurepip nor pip"):
        environment.ensure_pip(Path("python"))


def test_the_second_time_nothing_is_installed_or_asked(environment, machine):
    python = make_venv(machine)
    machine.answers["m.version('torch')"] = "2.13.0\n"
    environment.ensure_packages(python, ["test"])
    assert len(machine.ran) == 1
    assert "pytest" in machine.ran[0]
    asked = len(machine.asked)
    environment.ensure_packages(python, ["test"])
    assert (len(machine.ran), len(machine.asked)) == (1, asked)
    environment.ensure_packages(python, ["lint"])
    assert "ruff" in machine.ran[1]


def test_a_venv_that_was_made_again_is_filled_again(environment, machine):
    python = make_venv(machine)
    machine.answers["m.version('torch')"] = "2.13.0\n"
    environment.ensure_packages(python, [])
    (python.parent.parent / "pyvenv.cfg").unlink()
    (python.parent.parent / "pyvenv.cfg").write_text("new")
    environment.ensure_packages(python, [])
    assert len(machine.ran) == 2


def test_lint_builds_no_library_and_the_others_do(environment, machine, capsys):
    python = make_venv(machine)
    machine.answers["m.version('torch')"] = "2.13.0\n"
    environment.main("lint")
    assert not any("build_ext" in command for command in machine.ran)
    environment.main("test")
    assert machine.ran[-1].endswith("setup.py --quiet build_ext --inplace")
    assert capsys.readouterr().out == f"{python}\n{python}\n"
