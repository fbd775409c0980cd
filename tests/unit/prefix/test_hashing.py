"""Keys of blocks are equal for equal content and settings, and only for these."""

from __future__ import annotations

import pickle
import struct
from array import array
from hashlib import sha256
from itertools import combinations

import numpy as np
import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torch_kvswap._C import fold_keys
from torch_kvswap.prefix.hashing import KEY_BYTES, PrefixHasher, PrefixKeys, encode, hash_key
from torch_kvswap.prefix.manager import BlockManager

TOKENS = list(range(1000, 1064))
SETTINGS = {"model": "m", "dtype": "bfloat16", "block_tokens": 16}


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def keys(tokens=TOKENS, **settings) -> list[bytes]:
    return list(PrefixHasher(**{**SETTINGS, **settings}).keys(tokens))


def test_prompts_share_keys_of_equal_beginnings():
    first, second = keys(), keys([*TOKENS[:40], 5, *TOKENS[41:]])
    assert len(first) == 4
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])  # the last block has equal tokens in both


def test_keys_are_the_same_in_every_process():
    assert (
        keys() == keys(np.array(TOKENS)) == keys(np.array(TOKENS, np.uint16)) == keys(tuple(TOKENS))
    )
    assert (
        keys(torch.tensor(TOKENS)) == keys(array("H", TOKENS)) == keys(range(1000, 1064)) == keys()
    )
    many = np.arange(40_000) % 7
    assert keys(many.tolist()) == keys(many)
    assert_expected_inline(
        keys()[-1].hex(), """38979b2ed4a38253b1c5e5f68ca3f56f4e6855ad4db7b543b77d2b1b17de1d2a"""
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("salt", [None, "", "a", "b", b"a", "None"]),
        ("adapter", [None, "", "lora", ("lora", 1), ("lora", 2), 1, True, 1.0]),
        ("model", ["m", "m2", "M"]),
        ("dtype", ["bfloat16", "float8_e4m3", "float8_e5m2"]),
        ("block_tokens", [16, 8, 32]),
        ("group", [0, 1]),
        ("extra", [None, (), ((),), "x", ("x",), -1, 255, 256]),
    ],
)
def test_equal_tokens_under_other_settings_share_nothing(name, values):
    every = [set(keys(**{name: value})) for value in values]
    for one, other in combinations(every, 2):
        assert not one & other


def test_hashes_of_different_kinds_differ():
    (block,) = keys(TOKENS[:16])
    assert hash_key(block) == block
    assert hash_key(block[:-1]) != sha256(block[:-1]).digest()
    root = encode(("torch_kvswap", 1, "m", "bfloat16", 16, None, None, 0, None))
    assert hash_key(root) not in keys()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(values, values)
def test_different_values_never_have_equal_bytes(one, other):
    """So settings that would be equal when joined, as ("a", "bc") and ("ab", "c"), share no keys."""
    assert (encode(one) == encode(other)) == (repr(one) == repr(other))
    # None is the beginning of another one either, so lists of them are told apart.
    assert repr(one) == repr(other) or not encode(one).startswith(encode(other))


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (64, 3)]
)
def test_a_lookup_leaves_one_token_to_compute(tokens, blocks):
    hasher, manager = PrefixHasher(**SETTINGS), BlockManager(10)
    prompt = TOKENS[:tokens]
    manager.complete(manager.prepare_store(hasher.keys(prompt)))
    assert manager.lookup(hasher.keys(prompt)).ready == tokens // 16
    assert manager.lookup(hasher.lookup_keys(prompt)).ready == blocks
    assert len(hasher.lookup_keys(prompt)) == blocks
    assert max(tokens - 1, 0) - 15 <= blocks * 16 <= max(tokens - 1, 0)


def test_a_part_full_block_has_its_own_key():
    hasher = PrefixHasher(**SETTINGS)

    def part_of(tokens: list[int]) -> bytes:
        full = hasher.keys(tokens)
        of_all = hasher.request_keys(tokens)
        assert of_all[: len(full)] == full
        return of_all.joined[len(full) * KEY_BYTES :]

    part = part_of(TOKENS[:20])
    head = b"\x02" + struct.pack("<Q", 4)  # a block of 4 tokens
    assert part == sha256(head + keys()[0] + struct.pack("<4I", *TOKENS[16:20])).digest()
    others = [part_of(TOKENS[:21]), part_of([7, *TOKENS[1:20]]), *keys()]
    assert part not in others
    assert part_of([*TOKENS[:20]]) == part
    assert part_of(TOKENS[:32]) == b""
    zero = part_of([*TOKENS[:20], 0])
    assert zero != part  # a token 0 is a token


def test_the_keys_of_a_prompt_are_a_sequence():
    hasher = PrefixHasher(**SETTINGS)
    of_prompt = hasher.keys(TOKENS)
    assert len(of_prompt) == 4
    assert list(of_prompt) == [of_prompt[place] for place in range(4)] == keys()
    assert of_prompt[-1] == keys()[3]
    assert of_prompt[1:-1] == of_prompt[1:3]
    assert list(of_prompt[1:3]) == keys()[1:3]
    assert of_prompt[:2] == hasher.keys(TOKENS[:32])
    assert not hasher.keys([])
    assert {of_prompt} == {pickle.loads(pickle.dumps(of_prompt))}
    assert error_text(lambda: of_prompt[::2]) == (
        "ValueError: a slice of keys has the step 2; take adjacent keys"
    )
    with pytest.raises(IndexError):
        of_prompt[4]


def test_errors_say_what_was_wrong():
    hasher = PrefixHasher(**SETTINGS)
    errors = [
        error_text(hasher.keys, [1, 2, -1, 4]),
        error_text(hasher.keys, [1] * 20_000 + [None]),
        error_text(hasher.keys, np.array([1, 2**32])),
        error_text(hasher.keys, np.array([1.5])),
        error_text(hasher.keys, np.ones((2, 2), np.int64)),
        error_text(hasher.keys, torch.ones(2, dtype=torch.bfloat16)),
        *(error_text(call, b"1") for call in (hasher.lookup_keys, hasher.request_keys)),
        error_text(PrefixHasher, None, "bfloat16", 16),
        error_text(PrefixHasher, "m", torch.bfloat16, 16),
        error_text(PrefixHasher, "", "bfloat16", 16),
        error_text(PrefixHasher, "m", "bfloat16", 2**32),
        error_text(PrefixHasher, "m", "bfloat16", 16, group="x"),
        error_text(PrefixHasher, "m", "bfloat16", 16, salt=5),
        error_text(PrefixHasher, "m", "bfloat16", 16, adapter=[1]),
        error_text(PrefixKeys, b"x" * 95, 16),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: tokens[2] is -1; it must be 0 to 4294967295
TypeError: tokens[20000] is None; it must be an integer
ValueError: tokens[1] is 4294967296; it must be 0 to 4294967295
TypeError: tokens is an array of float64; tokens must be integers
ValueError: tokens has shape (2, 2); it must have one dimension
TypeError: tokens cannot be read as an array of integers: Got unsupported ScalarType
BFloat16
TypeError: tokens is bytes; pass a list or an array of integers
TypeError: tokens is bytes; pass a list or an array of integers
TypeError: model is None; it must be a str
TypeError: dtype is torch.bfloat16; pass its name, such as 'bfloat16'
ValueError: model is '', dtype 'bfloat16'; name both: blocks of different models or
types must not have equal keys
ValueError: block_tokens is 4294967296; it must be 1 to 4294967295
TypeError: group is a str; it must be an integer
TypeError: salt is an int; it must be a str, bytes or None
TypeError: adapter: a list cannot be part of a key; use None, bool, int, float, str,
bytes and tuples of them
ValueError: joined has 95 bytes, but a key has 32; pass keys in a row, or a list of keys""",
    )


# Keys of vLLM: a block hash and four bytes with the number of a group


def test_a_key_of_vllm_is_its_block_hash():
    block, groups = bytes(range(32)), [number.to_bytes(4, "big") for number in range(300)]
    folded = split(fold_keys([block + group for group in groups]))
    assert folded[0] == block
    assert len(set(folded)) == len(groups)
    assert {key[8:] for key in folded} == {block[8:]}
    neighbours = [
        bytes([0, 0, 0, n]) + bytes(28) + group for n in range(256) for group in groups[:4]
    ]
    assert len(set(split(fold_keys(neighbours)))) == len(neighbours)


def test_other_hashes_of_vllm_are_hashed():
    short = b"x" * 20
    assert fold_keys((short, bytes(36))) == hash_key(short) + bytes(32)
    assert fold_keys([]) == b""
    with pytest.raises(TypeError, match="expected bytes, int found"):
        fold_keys([1])
