"""transformers' continuous batching with our handler: preempted requests are stored and restored
beside the model.

    from torch_kvswap.integrations import transformers as kvswap

    with kvswap.enable():
        model.generate_batch(prompts, continuous_batching_config=config)

config.cpu_offload_space says how many GiB of host memory are for preempted requests. Importing this
module imports nothing of transformers; enable() does. docs/transformers.md says what is different.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from types import TracebackType
from typing import Any

from torch_kvswap.integrations.transformers.cache import Cache, SectorCache, TensorCache
from torch_kvswap.integrations.transformers.swap import Options

# How each version that this was written for and tested with keeps its caches.
VIEWS: dict[tuple[int, int], type[Cache]] = {
    (5, 17): TensorCache,
    **{(5, minor): SectorCache for minor in range(18, 24)},
}
_enabled: list[Enabled] = []


class Enabled:
    """What enable() has changed, until disable(). A context manager, which calls it."""

    def __init__(self, module: Any, replacement: Any) -> None:
        self._module, self._theirs = module, module.OffloadingManager
        module.OffloadingManager = replacement

    def disable(self) -> None:
        """From now on new managers are transformers' own again. Those that were made meanwhile keep
        what they have. Idempotent."""
        if self in _enabled:
            _enabled.remove(self)
            self._module.OffloadingManager = self._theirs

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disable()


def enable(*, copy_method: str | None = None, copy_engines_only: bool = False) -> Enabled:
    """Puts our manager in the place of transformers' own for every continuous batching that begins
    from now on in this process: `generate_batch`, `init_continuous_batching` and the context
    manager; a persistent one that exists already stays as it is.

    copy_method: as of `OffloadHandler`. copy_engines_only: copies slow down kernels beside them
    less, but launches more (`OffloadHandler.store`).

    Raises ImportError when transformers is missing or of a version that this does not know,
    RuntimeError when it is enabled already.
    """
    if _enabled:
        raise RuntimeError("torch_kvswap is enabled for transformers already; disable() it first")
    found = view()
    # Only now: they derive from classes of the version that was found.
    from transformers.generation.continuous_batching import continuous_api

    from torch_kvswap.integrations.transformers.manager import SwapManager

    options = Options(copy_method, copy_engines_only)
    made = functools.partial(SwapManager, view=found, options=options)
    _enabled.append(Enabled(continuous_api, made))
    return _enabled[0]


def disable() -> None:
    """Undoes enable(); nothing when it is not enabled."""
    for enabled in list(_enabled):
        enabled.disable()


def view() -> type[Cache]:
    """How the transformers that is installed keeps its caches. Raises ImportError as enable()."""
    known = " to ".join(f"{major}.{minor}" for major, minor in (min(VIEWS), max(VIEWS)))
    advice = f"install torch_kvswap[transformers], which takes {known}"
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"transformers is not installed; {advice}")
    version = importlib.import_module("transformers").__version__
    found = re.match(r"(\d+)\.(\d+)\.", version)
    known_view = VIEWS.get((int(found[1]), int(found[2]))) if found else None
    if known_view is None:
        raise ImportError(
            f"transformers {version} may keep its caches and requests in a way that torch_kvswap "
            f"does not know; {advice}"
        )
    return known_view
