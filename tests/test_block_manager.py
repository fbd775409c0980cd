"""What a block manager promises, call by call; its errors."""

from __future__ import annotations
