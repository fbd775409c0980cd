from __future__ import annotations

import random

import pytest
from vllm_serving import expected_tokens, serving


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=length)


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("is_async", [False, True])
def test_x(tmp_path, runner, is_async):
    prompts = {f"{n}": prompt(n, 40 + 17 * n) for n in range(6)}
    with serving(tmp_path, runner=runner, is_async=is_async) as engine:
        got = engine.serve(prompts)
        for name, one in prompts.items():
            assert got[name] == expected_tokens(one, 4), name
        engine.forget_gpu()
        again = {f"again {name}": one for name, one in prompts.items()}
        got = engine.serve(again)
        for name, one in again.items():
            assert got[name] == expected_tokens(one, 4), name
