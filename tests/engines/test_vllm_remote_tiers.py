"""vLLM's object and peer tiers below our host memory, over NIXL, on this machine. They run where nixl,
and for objects moto as the store, are installed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import in_time
from processes import free_port
from vllm_serving import CHUNKS, PROMPTS, Serving, check, serving
from vllm_tiers import without_gpu

pytest.importorskip("nixl")


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)


def extra(**tier: Any) -> dict[str, Any]:
    return {"secondary_tiers": [tier]}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("moto.server")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/rows", method="PUT")
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except OSError:
            return False
        return True

    try:
        assert in_time(answers)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def loaded(engine: Serving) -> int:
    """Blocks that came from the host memory, which was empty at first."""
    return int(engine.worker._handler.metrics().loads.blocks)


def test_objects_are_found_by_the_next_engine(tmp_path: Path, bucket: str) -> None:
    store = {"bucket": "rows", "endpoint_override": bucket, "region": "us-east-1"}
    store |= {"access_key": "any", "secret_key": "any"}
    for found in (0, CHUNKS):
        tiers = extra(type="obj", store_config=store)
        with serving(tmp_path, extra=tiers) as engine:
            engine.serve(PROMPTS)
            check(engine, PROMPTS)
            assert loaded(engine) == found


def test_a_peer_gets_the_rows_of_a_prompt(tmp_path: Path) -> None:
    """One engine computes prompts for another one, on another port of this machine."""
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as running:
        first, second = (
            running.enter_context(
                serving(tmp_path, extra=extra(type="p2p", host="127.0.0.1", port=port))
            )
            for port in ports
        )
        for name, one in PROMPTS.items():
            named = {"kv_request_id": name}
            first.add(name, one, 1, {"remote_decoder": named})
            named |= {"remote_host": "127.0.0.1", "remote_port": ports[0]}
            second.add(name, one, transfer={"remote_prefiller": named})

        def step() -> bool:
            for engine in (first, second):
                engine.step()
            return second.ends.keys() == PROMPTS.keys()

        assert in_time(step)
        check(second, PROMPTS)
        assert loaded(second) == CHUNKS
