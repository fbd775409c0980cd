"""Preemption in transformers' continuous batching: requests are swapped to the host.

    from torch_kvswap.integrations import transformers as kvswap

    with kvswap.enable():
        model.generate_batch(prompts, continuous_batching_config=config)

Copies run while the model does. `config.cpu_offload_space` is the host memory for preempted
requests, in GiB. Importing this module does not import transformers; enable() does.
docs/transformers.md describes the differences from transformers' own offloading.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from torch_kvswap.copy_method import AUTO, COPY_ENGINES, DEFAULT_STAGING_BYTES, copy_method_options
from torch_kvswap.encoding.slot import (
    RAW,
    EncodingName,
    VerifyName,
    read_encoding,
    read_verify,
)
from torch_kvswap.integrations import not_installed
from torch_kvswap.integrations.transformers.swap import SwapOptions

# The releases whose caches and requests are as CacheView and SwapManager read them.
OLDEST, NEWEST = (5, 18), (5, 24)

KNOWN = "transformers {}.{} to {}.{}".format(*OLDEST, *NEWEST)


def is_known(version: str) -> bool:
    """Whether enable() accepts this version of transformers."""
    found = re.match(r"(\d+)\.(\d+)\.", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


class Enabled:
    """What enable() returns: undoes it by disable(), or at the end of a `with` block."""

    def __init__(self, module: Any, replacement: Any) -> None:
        self._module, self._theirs, self._ours = module, module.OffloadingManager, replacement
        module.OffloadingManager = replacement

    def disable(self) -> None:
        """Makes new managers transformers' own again. Idempotent.

        Managers that exist stay as they are.
        """
        if self._module.OffloadingManager is self._ours:
            self._module.OffloadingManager = self._theirs

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def enable(
    *,
    copy_method: str = AUTO,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    encoding: EncodingName = "raw",
    verify: VerifyName = "off",
) -> Enabled:
    """Replaces transformers' offloading manager in this process.

    Affects every continuous batching that starts afterwards: `generate_batch`,
    `init_continuous_batching` and the context manager. A persistent manager that already exists
    stays as it is.

    Args:
        copy_method (str): see OffloadHandler. With "copy_engines", copies slow down
            running kernels less, but delay kernel launches more.
        staging_bytes (int): GPU memory for staged copies; see OffloadHandler.
        encoding (str): see HostPool. With "lossless", `cpu_offload_space` holds more
            blocks of a cache in torch.bfloat16. A request with a block that does not fit into its
            slot is computed again.
        verify (str): see HostPool. A request with a damaged block is computed again. The checksums
            are not part of `cpu_offload_space`.

    Returns:
        Enabled: a context manager that undoes the replacement.

    Raises:
        ImportError: transformers is missing, or this version is not supported.
        RuntimeError: already enabled.
        TypeError: staging_bytes is not an integer.
        ValueError: copy_method, encoding or verify is unknown, staging_bytes is negative, or
            copy_method="copy_engines" is combined with an option that needs kernels.
    """
    copy_method_options(copy_method, staging_bytes)  # raises now, not later
    is_raw = read_encoding(encoding) is RAW
    is_unverified = read_verify(verify) == "off"
    if copy_method == COPY_ENGINES and not (is_raw and is_unverified):
        raise ValueError(
            f"copy_method={copy_method!r} uses no kernels, but encoding={encoding!r} with "
            f"verify={verify!r} needs them; leave out either side"
        )
    try:
        from transformers import __version__ as version
    except ModuleNotFoundError as error:
        raise not_installed("transformers", error) from error
    if not is_known(version):
        raise ImportError(
            f"transformers {version} may keep its caches and requests in a way that torch_kvswap "
            f"does not know; install {KNOWN}"
        )
    # Imported here because they derive from classes of transformers.
    from transformers.generation.continuous_batching import continuous_api

    from torch_kvswap.integrations.transformers.swap_manager import SwapManager

    if isinstance(continuous_api.OffloadingManager, functools.partial):
        raise RuntimeError("torch_kvswap is enabled for transformers already; disable() it first")
    options = SwapOptions(copy_method, staging_bytes, encoding, verify)
    return Enabled(continuous_api, functools.partial(SwapManager, options=options))


def __getattr__(name: str) -> Any:
    if name == "HostCache":  # derives from a class of transformers
        try:
            from torch_kvswap.integrations.transformers.host_cache import HostCache
        except ModuleNotFoundError as error:
            raise not_installed("transformers", error) from error
        return HostCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
