"""Calls the simulated driver's functions as an application does, by CUDA's names."""

from __future__ import annotations

import ctypes

import torch

_Handle, _Word, _Size, _Int = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuDeviceGetAttribute": (_Handle, _Int, _Int),
    "cuDeviceCanAccessPeer": (_Handle, _Int, _Int),
    "cuDevicePrimaryCtxRetain": (_Handle, _Int),
    "cuCtxEnablePeerAccess": (_Handle, ctypes.c_uint),
    "cuDriverGetVersion": (_Handle,),
    "cuThreadExchangeStreamCaptureMode": (_Handle,),
    "cuPointerGetAttributes": (ctypes.c_uint, _Handle, _Handle, _Word),
    "cuMemHostAlloc": (_Handle, _Size, ctypes.c_uint),
    "cuMemFreeHost": (_Handle,),
    "cuMemHostRegister": (_Handle, _Size, ctypes.c_uint),
    "cuMemHostUnregister": (_Handle,),
    "cuMemAlloc": (_Handle, _Size),
    "cuMemcpyAsync": (_Word, _Word, _Size, _Handle),
    "cuMemcpyPeerAsync": (_Word, _Handle, _Word, _Handle, _Size, _Handle),
    "cuModuleGetFunction": (_Handle, _Handle, _Handle),
    "cuLaunchKernel": (_Handle, *[ctypes.c_uint] * 7, _Handle, _Handle, _Handle),
    "cuMemcpy3DAsync": (_Handle, _Handle),
    "cuMemcpyBatchAsync": (*[_Handle] * 3, _Size, _Handle, _Handle, _Size, _Handle, _Handle),
    "cuStreamCreateWithPriority": (_Handle, ctypes.c_uint, ctypes.c_int),
    "cuStreamDestroy": (_Handle,),
    "cuStreamIsCapturing": (_Handle, _Handle),
    "cuStreamQuery": (_Handle,),
    "cuStreamSynchronize": (_Handle,),
    "cuStreamWaitEvent": (_Handle, _Handle, ctypes.c_uint),
    "cuStreamWaitValue64": (_Handle, _Word, _Word, ctypes.c_uint),
    "cuStreamWriteValue64": (_Handle, _Word, _Word, ctypes.c_uint),
    "cuEventCreate": (_Handle, ctypes.c_uint),
    "cuEventDestroy": (_Handle,),
    "cuEventElapsedTime": (_Handle, _Handle, _Handle),
    "cuEventQuery": (_Handle,),
    "cuEventRecord": (_Handle, _Handle),
    "cuEventSynchronize": (_Handle,),
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

    def wait_value(self, stream: int, word: torch.Tensor, value: int) -> None:
        """Until the int64 word is at least the value."""
        self.check("cuStreamWaitValue64", stream, word.data_ptr(), value, 0)

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

    def copy_batch(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], stream: int, *orders: int
    ) -> None:
        """Pairs of destination and source. orders: of the sources, one for each pair; 1, which is
        the default, is the order of the stream, 2 during the call, 3 any."""
        count = len(pairs)
        orders = orders or (1,) * count
        assert len(orders) == count
        dsts = (_Word * count)(*[dst.data_ptr() for dst, _ in pairs])
        srcs = (_Word * count)(*[src.data_ptr() for _, src in pairs])
        sizes = (_Size * count)(*[dst.nbytes for dst, _ in pairs])
        # Attributes are for all copies up to the next start.
        firsts = [at for at in range(count) if at == 0 or orders[at] != orders[at - 1]]
        attributes = (_Int * (6 * len(firsts)))()
        attributes[::6] = [orders[at] for at in firsts]
        starts, failed = (_Size * len(firsts))(*firsts), ctypes.byref(_Size())
        arguments = dsts, srcs, sizes, count, attributes, starts, len(firsts), failed
        self.check("cuMemcpyBatchAsync", *arguments, stream)

    def launch(
        self,
        name: str,
        arguments: ctypes.Structure,
        stream: int,
        threads: int = 32,
        shared: int = 0,
    ) -> None:
        """A kernel of the library, with one CTA."""
        function, given = ctypes.c_void_p(), (_Handle * 1)(ctypes.addressof(arguments))
        self.check("cuModuleGetFunction", ctypes.byref(function), None, name.encode())
        grid, block = (1, 1, 1), (threads, 1, 1)
        self.check("cuLaunchKernel", function, *grid, *block, shared, stream, given, None)

    def is_done(self, *, stream: int | None = None, event: int | None = None) -> bool:
        name, handle = ("cuStreamQuery", stream) if event is None else ("cuEventQuery", event)
        code = self.call(name, handle)
        if code not in (0, 600):
            raise CudaError(name, code)
        return code == 0

    def synchronize(self, *, stream: int | None = None, event: int | None = None) -> None:
        if event is None:
            self.check("cuStreamSynchronize", stream)
        else:
            self.check("cuEventSynchronize", event)

    def memory_type(self, tensor: torch.Tensor) -> int:
        """1 host, 2 device, 0 unknown to the driver."""
        name, kind = _Int(2), ctypes.c_uint(77)
        value = ctypes.c_void_p(ctypes.addressof(kind))
        address = tensor.data_ptr()
        self.check("cuPointerGetAttributes", 1, ctypes.byref(name), ctypes.byref(value), address)
        return kind.value
