"""Rows for engines of any tensor parallelism: vLLM's `canonical_layout`, for secondary tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_kvswap.integrations.vllm.options import SpecOptions
from torch_kvswap.layout import PagedLayout


class Share(NamedTuple):
    """What a worker has of canonical rows.

    A slot has one KV head after another, each with all layers, so that the heads of a worker are
    one piece of it, however many they are. vLLM keeps one layer after another, each with all heads.
    Latent attention has one head.

    Attributes:
        heads (int): KV heads of a layer, of all workers.
        part (tuple[int, int]): which part of the heads this worker has, and the number of parts.
        turn (tuple[int, int]): which of the workers with these heads this is, and their number.
            They store by turns: page p is stored by worker p modulo their number.
    """

    heads: int
    part: tuple[int, int]
    turn: tuple[int, int]

    @classmethod
    def of(cls, kv_caches: Any, heads: int) -> Share:
        """Reads it from vLLM's mappings of the layers to canonical pages.

        Args:
            kv_caches: vLLM's CanonicalKVCaches.
            heads (int): KV heads of a layer, of all workers.

        Raises:
            ValueError: a layer is not certified, or is not one piece of its canonical page, or the
                layers are divided in different ways.
        """
        shares = set()
        for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
            mapping = ref.mapping
            if mapping is None or not mapping.parallelism_agnostic:
                raise refusal("vLLM does not certify the KV cache of each layer for it")
            size = mapping.local_page_size_bytes
            first = mapping.runs[0]
            if first.fragment_size != size:
                raise refusal(
                    f"a canonical page has a block of a layer in fragments of "
                    f"{first.fragment_size} of its {size} bytes"
                )
            part = first.canonical_offset // size, mapping.canonical_page_size_bytes // size
            shares.add(cls(heads, part, (mapping.writer_index, mapping.num_writers)))
        if len(shares) != 1:
            raise refusal("the layers are divided among the workers in different ways")
        return shares.pop()

    @property
    def heads_here(self) -> int:
        """KV heads of a layer in this worker."""
        return self.heads // self.part[1]


def refusal(why: str, instead: str = "leave it out") -> ValueError:
    """The error of a configuration with `canonical_layout`."""
    return ValueError(f"kv_connector_extra_config: canonical_layout is set, but {why}; {instead}")


def is_canonical(config: Any, options: SpecOptions) -> bool:
    """Whether vLLM's OffloadingConfig asks for canonical rows.

    Raises:
        ValueError: it does, and there can be none.
    """
    if not config.extra_config.get("canonical_layout"):
        return False
    if options.encoding != "raw" or options.verify != "off":
        raise refusal(
            f"encoding is {options.encoding!r} and verify {options.verify!r}, which depend on the "
            "number of workers",
            "leave these out",
        )
    if config.kv_cache_layout != "LBHNC":
        raise refusal(
            f"the KV cache has the layout {config.kv_cache_layout}, in which the heads of a worker "
            "are in many pieces",
            "set the environment variable VLLM_KV_CACHE_LAYOUT=HND",
        )
    if not config.parallel.is_parallelism_agnostic:
        raise refusal(
            "blocks of this model depend on how it is divided among the GPUs, as with context "
            "parallelism, Mamba states, or a scale for each token and head"
        )
    return True


def check_equal_groups(layouts: Sequence[PagedLayout]) -> None:
    """Raises ValueError if some group has smaller blocks: where their parts lie in a slot would
    depend on the number of workers."""
    sizes = sorted({layout.block_bytes for layout in layouts})
    if len(sizes) > 1:
        raise refusal(f"blocks of some groups of layers have {sizes[0]} bytes, others {sizes[-1]}")


def kv_heads() -> int:
    """KV heads of a layer, of all workers, of the model that vLLM starts in this process."""
    from vllm.config import get_current_vllm_config

    model = get_current_vllm_config().model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())
