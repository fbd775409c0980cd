"""The private members of vLLM that our connector uses. vLLM may change them in any release."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import vllm_engine  # noqa: F401  skips where vLLM's tests do not run
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

SOURCES = Path(__file__).parents[2] / "torch_kvswap/integrations/vllm"
PRIVATE = {
    OffloadingConnectorScheduler: ["jobs", "req_status"],
    CPUOffloadingWorker: ["store_handler"],
}
NAMES = [(owner, f"_{name}") for owner, names in PRIVATE.items() for name in names]
# Of Python.
OTHERS = {"_getframe", "_replace"}


@pytest.mark.parametrize(
    ("owner", "name"), NAMES, ids=[f"{owner.__name__}.{name}" for owner, name in NAMES]
)
def test_vllm_has_the_private_member(owner, name):
    assert hasattr(owner, name) or re.search(rf"self\.{name}\b", inspect.getsource(owner))


def test_the_sources_use_no_other_private_member():
    used, ours = set[str](), set[str]()
    for source in SOURCES.glob("*.py"):
        text = source.read_text()
        for node in ast.walk(ast.parse(text)) if "from vllm." in text else ():
            if isinstance(node, ast.FunctionDef):
                ours.add(node.name)
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                is_parents = isinstance(node.value, ast.Call) and (
                    getattr(node.value.func, "id", "") == "super"
                )
                (ours if isinstance(node.ctx, ast.Store) else used).add(node.attr)
                if is_parents:
                    used.add(f"{node.attr} of super()")
    theirs = {name for _, name in NAMES}
    from_super = {name.split()[0] for name in used if name.endswith("()")}
    assert from_super <= theirs
    assert {name for name in used if not name.endswith("()")} - ours - OTHERS <= theirs
    assert theirs <= used
