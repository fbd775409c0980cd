"""The bandwidth of the link between host and device."""

import torch

PROBE_BYTES = 256 << 20


def measure_link(device: torch.device, repeats: int = 3) -> dict[str, float]:
    """Measures one large pinned copy in each direction.

    Blocks the host, and allocates 256 MiB on each side.

    Args:
        device (torch.device): a CUDA device.
        repeats (int): number of copies; the fastest counts.

    Returns:
        dict[str, float]: GB/s (1e9 bytes) for "store" (device to host) and "load".
    """
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        return {
            "store": PROBE_BYTES / 1e9 / _best_seconds(on_device, host, repeats),
            "load": PROBE_BYTES / 1e9 / _best_seconds(host, on_device, repeats),
        }


def _best_seconds(src: torch.Tensor, dst: torch.Tensor, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # the first also touches the memory, and is never the fastest
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        dst.copy_(src, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
