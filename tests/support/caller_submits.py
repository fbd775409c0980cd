"""Handlers whose callers submit more, or less, than others do."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest

from torch_kvswap.copy_method import copy_method_options
from torch_kvswap.offload import handler
from torch_kvswap.offload.handler import OffloadHandler


class CallerSubmits(OffloadHandler):
    """The calling thread submits its jobs, however long that takes."""

    _seconds: ClassVar[float] = math.inf

    def _open(self, *arguments: Any, **options: Any) -> None:
        def changed(*of: Any) -> Any:
            made = copy_method_options(*of)
            made.caller_seconds = self._seconds
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handler, "copy_method_options", changed)
            super()._open(*arguments, **options)


class CallerBegins(CallerSubmits):
    """The calling thread begins staged jobs, however small, and leaves the rest to another one."""

    _seconds = -1.0
