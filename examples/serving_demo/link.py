"""What the link between host and device can carry."""

import torch

PROBE_BYTES = 256 << 20


def measure_link(device: torch.device, repeats: int = 3) -> dict[str, float]:
    """GB/s (1e9 bytes) of one big pinned copy on the CUDA `device`, the best of `repeats`, for
    "store" (device to host) and "load". Blocks the host; takes 256 MiB on either side."""
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        return {
            "store": PROBE_BYTES / 1e9 / _best_seconds(on_device, host, repeats),
            "load": PROBE_BYTES / 1e9 / _best_seconds(host, on_device, repeats),
        }


def _best_seconds(src: torch.Tensor, dst: torch.Tensor, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # the first touches what was never touched, and is not the best
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        dst.copy_(src, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
