"""Calls the simulated driver's functions as an application does, by CUDA's names."""

from __future__ import annotations

import ctypes

import torch

_Handle, _Word, _Size, _Int = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuDevicePrimaryCtxRetain": (_Handle, _Int),
    "cuCtxEnablePeerAccess": (_Handle, ctypes.c_uint),
    "cuPointerGetAttributes": (ctypes.c_uint, _Handle, _Handle, _Word),
    "cuMemHostRegister": (_Handle, _Size, ctypes.c_uint),
    "cuMemHostUnregister": (_Handle,),
    "cuMemcpyAsync": (_Word, _Word, _Size, _Handle),
    "cuMemcpyBatchAsync": (*[_Handle] * 3, _Size, _Handle, _Handle, _Size, _Handle, _Handle),
    "cuStreamCreateWithPriority": (_Handle, ctypes.c_uint, ctypes.c_int),
    "cuStreamDestroy": (_Handle,),
    "cuStreamQuery": (_Handle,),
    "cuStreamWaitEvent": (_Handle, _Handle, ctypes.c_uint),
    "cuEventCreate": (_Handle, ctypes.c_uint),
    "cuEventDestroy": (_Handle,),
    "cuEventElapsedTime": (_Handle, _Handle, _Handle),
    "cuEventQuery": (_Handle,),
    "cuEventRecord": (_Handle, _Handle),
}


class CudaError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


class Cuda:
    """Methods return what the function gives, and raise CudaError with its code."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: object) -> int:
        """The code that the function returns."""
        address = self._library.simulated_function(name.encode())
        assert address is not None, f"the simulated driver has no {name}"
        function = ctypes.CFUNCTYPE(_Int, *PROTOTYPES[name])(address)
        self._library.simulated_enter()  # in the context of `Driver.on`
        try:
            return function(*arguments)
        finally:
            self._library.simulated_leave()

    def check(self, name: str, *arguments: object) -> None:
        code = self.call(name, *arguments)
        if code != 0:
            raise CudaError(name, code)

    def create_stream(self) -> int:
        stream = ctypes.c_void_p()
        self.check("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        return stream.value or 0

    def create_event(self, timed: bool = True) -> int:
        event = ctypes.c_void_p()
        self.check("cuEventCreate", ctypes.byref(event), 0 if timed else 2)
        return event.value or 0

    def destroy_stream(self, stream: int) -> None:
        self.check("cuStreamDestroy", stream)

    def destroy_event(self, event: int) -> None:
        self.check("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self.check("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self.check("cuStreamWaitEvent", stream, event, 0)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
        assert dst.nbytes == src.nbytes
        self.check("cuMemcpyAsync", dst.data_ptr(), src.data_ptr(), dst.nbytes, stream)

    def enable_peer_access(self, peer: int) -> None:
        """Of the GPU that `Driver.on` says to the memory of the peer."""
        self.check("cuCtxEnablePeerAccess", self._context(peer), 0)

    def _context(self, device: int) -> int:
        context = ctypes.c_void_p()
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def copy_batch(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], stream: int) -> None:
        """Pairs of destination and source, which are read in the order of the stream."""
        count = len(pairs)
        dsts = (_Word * count)(*[dst.data_ptr() for dst, _ in pairs])
        srcs = (_Word * count)(*[src.data_ptr() for _, src in pairs])
        sizes = (_Size * count)(*[dst.nbytes for dst, _ in pairs])
        attributes, starts = (_Int * 6)(1), (_Size * 1)(0)  # 1: the order of the stream, for all
        arguments = dsts, srcs, sizes, count, attributes, starts, 1, ctypes.byref(_Size())
        self.check("cuMemcpyBatchAsync", *arguments, stream)

    def is_done(self, *, stream: int | None = None, event: int | None = None) -> bool:
        name, handle = ("cuStreamQuery", stream) if event is None else ("cuEventQuery", event)
        code = self.call(name, handle)
        if code not in (0, 600):
            raise CudaError(name, code)
        return code == 0

    def memory_type(self, tensor: torch.Tensor) -> int:
        """1 host, 2 device, 0 unknown to the driver."""
        name, kind = _Int(2), ctypes.c_uint(77)
        value = ctypes.c_void_p(ctypes.addressof(kind))
        address = tensor.data_ptr()
        self.check("cuPointerGetAttributes", 1, ctypes.byref(name), ctypes.byref(value), address)
        return kind.value
