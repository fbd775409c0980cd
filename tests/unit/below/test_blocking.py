"""A store of four methods, and what they must not break."""

from __future__ import annotations

from typing import Any

from store_calls import outcome

from torch_kvswap.below import BlockingStore


class WithoutAnswers(BlockingStore):
    def set(self, key: str, memory: memoryview) -> None: ...

    def get(self, key: str, memory: memoryview) -> None: ...

    def exists(self, keys: list[str]) -> Any: ...

    delete = exists


def test_a_method_that_forgets_its_answer_is_an_error_of_the_call() -> None:
    store = WithoutAnswers()
    keys = list("abcdefgh")
    for call in (store.submit_batch_exists, store.submit_batch_delete):
        assert outcome(store, call(keys))[1:] == (
            False,
            "'NoneType' object is not iterable",
            [False] * 8,
        )
    store.close()
