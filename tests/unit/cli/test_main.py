import pytest

import torch_kvswap as kvs
from torch_kvswap import __main__ as program
from torch_kvswap.cli import doctor, serve


def test_a_command_gets_arguments_and_gives_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((doctor, "doctor"), (serve, "serve")):
        monkeypatch.setattr(module, "main", len)
        assert program.main([name, "--one", "--two"]) == 2
    assert program.main(["dance"]) == 2
    assert capsys.readouterr().err.startswith("torch_kvswap has no command 'dance'\nusage: ")
    assert program.main([]) == 0
    capsys.readouterr()
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == f"torch_kvswap {kvs.__version__}\n"
