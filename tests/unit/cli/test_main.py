from importlib.util import find_spec

import pytest

from torch_kvswap import __main__ as program
from torch_kvswap.cli import doctor


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(arguments, capsys):
    assert program.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m torch_kvswap COMMAND")
    columns = set()
    for command, (_, purpose) in program.COMMANDS.items():
        (line,) = (line for line in out.splitlines() if line.split()[0] == command)
        assert line.endswith(f"  {purpose}")
        columns.add(line.index(purpose))
    assert len(columns) == 1


def test_every_command_has_a_module():
    for module, _ in program.COMMANDS.values():
        assert find_spec(module)


def test_an_unknown_command_is_a_user_error(capsys):
    assert program.main(["dance"]) == 2
    assert capsys.readouterr().err.startswith("torch_kvswap has no command 'dance'\nusage: ")


def test_a_command_gets_its_arguments_and_gives_the_exit_code(monkeypatch):
    monkeypatch.setattr(doctor, "main", len)
    assert program.main(["doctor", "--one", "--two"]) == 2
