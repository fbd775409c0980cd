"""CUDA tensors for a PyTorch without CUDA, made through DLPack."""

from __future__ import annotations

import ctypes

import torch

_CUDA, _UNSIGNED = 2, 1  # of DLPack


class _Tensor(ctypes.Structure):
    """DLManagedTensor, which begins with a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_kept: list[object] = []


def on_gpu(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """The same memory as a tensor on a GPU, for the ops. PyTorch takes CUDA for initialised from
    then on, so this is for a process of its own (:func:`simulated_driver.run`).

    Args:
        tensor (torch.Tensor): uint8, adopted by the driver as memory of that device. Stays alive.
        device (int): the GPU.
    """
    assert tensor.dtype == torch.uint8
    torch.cuda._lazy_init = lambda: None  # type: ignore[method-assign]
    sizes = (ctypes.c_int64 * (2 * tensor.dim()))(*tensor.shape, *tensor.stride())
    shape = ctypes.addressof(sizes)
    made = _Tensor(
        *(tensor.data_ptr(), _CUDA, device, tensor.dim(), _UNSIGNED, 8, 1),
        *(shape, shape + ctypes.sizeof(sizes) // 2, 0, None, None),
    )
    _kept.append((tensor, sizes, made))
    capsule = _new_capsule(ctypes.addressof(made), b"dltensor", None)
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found
