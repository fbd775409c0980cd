"""The example in the docstring of the simulated driver."""

import importlib.util
import re
import sys
import textwrap

import simulated_driver
from simulated_driver import without_cuda


@without_cuda
def test_the_example_of_the_package_passes(tmp_path, monkeypatch):
    (code,) = re.findall(r"::\n\n(.*?)\n\n(?=\S)", simulated_driver.__doc__, re.DOTALL)
    imports = (
        "from simulated_driver import cache, simulated\nfrom torch_kvswap import OffloadHandler\n"
    )
    file = tmp_path / "example.py"
    file.write_text(imports + textwrap.dedent(code))
    spec = importlib.util.spec_from_file_location("example", file)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example", example)
    spec.loader.exec_module(example)
    example.test_a_store_waits_for_the_current_stream()
