"""Everything that needs torch_npu, the adapter that makes Ascend NPUs a device of PyTorch; it is optional."""

from __future__ import annotations

import importlib
import importlib.util


def load_npu() -> bool:
    """Imports torch_npu where it is installed, so that `npu` becomes a device type. False where it is not.

    PyTorch imports it by itself unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set; a second import does nothing.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")
    return True


def npu_memory_bytes(index: int) -> int:
    """Memory of NPU `index` in bytes, as torch_npu reports it."""
    properties = importlib.import_module("torch_npu").npu.get_device_properties(index)
    return int(properties.total_memory)


def npu_name(index: int) -> str:
    """The name of NPU `index`: `Ascend910B2`."""
    return str(importlib.import_module("torch_npu").npu.get_device_name(index))
