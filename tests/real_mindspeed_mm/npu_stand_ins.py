"""Stand-ins for an Ascend device on a machine without one: packages, device calls and process groups, on CPU.

`install()` comes before MindSpeed is imported. No line of a checkout changes: what is replaced belongs to torch_npu, to
torch's CUDA calls (which torch_npu's transfer_to_npu takes over as well), or to operators compiled on the device.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from npu_operators import OPERATORS, fused_adamw
from torch.overrides import TorchFunctionMode

PACKAGES = ("torch_npu", "torchair", "acl", "decord")
"""Of these any name can be imported. What is called and would compute something says that it has no stand-in."""

OPTIONAL = (
    "SQLAlchemy", "accelerate", "ai_asset_obfuscate", "av", "beartype", "bs4", "cv2", "datasets", "diffusers", "ftfy",
    "gpytorch", "imageio", "orjson", "pandarallel", "pandas", "peft", "pyarrow", "pytz", "qwen_vl_utils", "scipy",
    "sentencepiece", "sklearn", "sqlalchemy", "tiktoken", "timm", "torchdata", "torchvision",
)  # fmt: skip
"""The same for what MindSpeed-MM imports and a vision-language model does not train with, where it is not installed."""

ABSENT = ("megatron.core.datasets.helpers", "megatron.core.datasets.helpers_cpp")
"""Megatron's compiled helper for text datasets, which these runs have none of."""

NUM_DEVICES = 8
DEVICE_NAMES = ("cuda", "npu")


def install(wide: bool = False) -> None:
    """Put all stand-ins in place, for this process and as long as it runs.

    wide: this device computes in fp32 where bf16 is asked for, so that losses differ by what is computed and not by how
    it is rounded. (Without --bf16 MindSpeed-MM does not train: its forward step reaches through Megatron's wrapper.)
    """
    sys.meta_path.insert(0, _Finder((*PACKAGES, *ABSENT)))
    sys.meta_path.append(_Finder(OPTIONAL))
    _replace_device(torch.cuda)
    npu = _Package("torch.npu")
    for name, value in vars(torch.cuda).items():
        if not name.startswith("__"):
            setattr(npu, name, value)
    torch.utils.rename_privateuse1_backend("npu")  # so that torch.device("npu") can be written
    torch.npu = npu
    sys.modules["torch.npu"] = npu
    torch_npu = __import__("torch_npu")
    torch_npu.npu, torch_npu.__version__ = npu, torch.__version__
    sys.modules["torch_npu.npu"] = npu
    for name, operator in OPERATORS.items():
        setattr(torch_npu, name, operator)
    torch._fused_adamw_ = fused_adamw
    _add_apex()
    torch.jit.script = lambda function=None, **_: function
    torch.compile = lambda function=None, **_: function if function is not None else (lambda f: f)
    _replace_groups()
    if hasattr(torch, "accelerator"):
        torch.accelerator.is_available = lambda: False  # so that the planner takes this machine for what it is
    _OnCpu(wide).__enter__()


class _Anything(type):
    """The type of a name that nobody uses here beyond importing, inheriting, decorating or asking for more names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_anything(name)

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls


def _make_anything(name: str) -> Any:
    if name.startswith(("npu_", "_npu_")):

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"torch_npu.{name} has no stand-in in tests/real_mindspeed_mm/npu_operators.py")

        return missing
    return _Anything(name, (_Nothing,), {})


class _Nothing(metaclass=_Anything):
    """Takes any arguments; as a decorator it gives back what it decorates."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and inspect.isroutine(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Package(ModuleType):
    """A module of which any name can be imported."""

    __path__: list[str] = []  # noqa: RUF012  # as a package has it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `packages` and all below them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        package = _Package(spec.name)
        package.__file__ = __file__  # builders of operators look beside it for sources
        package.__version__ = "0"
        return package

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Stream(_Nothing):
    """Everything on a CPU is in order already."""

    cuda_stream = npu_stream = 0
    device = torch.device("cpu")

    def query(self) -> bool:
        return True


class _Event(_Stream):
    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _replace_device(module: Any) -> None:
    """The calls of torch.cuda that ask for, choose or wait for a device."""
    stream = _Stream()
    nothing = SimpleNamespace(
        name="Ascend910B", total_memory=64 << 30, major=8, minor=0, multi_processor_count=1, warp_size=32
    )
    generators = tuple(torch.Generator() for _ in range(NUM_DEVICES))
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "Ascend910B",
        "get_device_properties": lambda *_: nothing,
        "get_device_capability": lambda *_: (8, 0),
        "is_current_stream_capturing": lambda: False,
        "default_generators": generators,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "Stream": _Stream,
        "Event": _Event,
        "_lazy_call": lambda call, **_: call(),
        "_sleep": lambda *_: None,
        "device": contextlib.nullcontext,
        "stream": contextlib.nullcontext,
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "IntTensor": torch.IntTensor,
        "LongTensor": torch.LongTensor,
        "DoubleTensor": torch.DoubleTensor,
    }
    values |= {name: lambda *_, **__: stream for name in ("current_stream", "default_stream")}
    values |= {
        name: lambda *_, **__: None
        for name in ("set_device", "synchronize", "empty_cache", "init", "_lazy_init", "ipc_collect", "set_stream",
                     "manual_seed", "manual_seed_all", "reset_peak_memory_stats", "reset_max_memory_allocated")
    }  # fmt: skip
    values |= {
        name: lambda *_, **__: 0
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    }
    for name, value in values.items():
        setattr(module, name, value)
    if module is torch.cuda:
        torch.cuda.random.get_rng_state = values["get_rng_state"]
        torch.cuda.random.set_rng_state = values["set_rng_state"]


class _OnCpu(TorchFunctionMode):
    """Whatever is asked for on a device of such a name, or of a number, is made or moved to the CPU."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self._wide = wide

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = dict(options or {})
        name = getattr(function, "__name__", "")
        if name == "type" and len(arguments) == 1 and not options:
            return function(*arguments).replace("torch.", "torch.cuda.", 1)
        if function is torch.Tensor.backward:
            return self._backward(*arguments, **options)
        if name in ("cuda", "npu"):
            return arguments[0]
        if name == "pin_memory":
            return arguments[0]
        if "device" in options:
            options["device"] = _cpu(options["device"])
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if name in ("to", "type"):
            arguments = tuple(_cpu(each) if isinstance(each, (str, torch.device)) else each for each in arguments)
        if self._wide:
            if name == "bfloat16":
                return arguments[0].float()
            arguments = tuple(torch.float32 if each is torch.bfloat16 else each for each in arguments)
            if options.get("dtype") is torch.bfloat16:
                options["dtype"] = torch.float32
        return function(*arguments, **options)

    def _backward(self, loss: Any, gradient: Any = None, *rest: Any, **options: Any) -> None:
        """torch takes a mode away while it handles a call, and backward passes of checkouts make tensors as well."""
        with self:
            torch.autograd.backward(loss, gradient, *rest, **options)


def _cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str) and device.partition(":")[0] in DEVICE_NAMES:
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type in DEVICE_NAMES:
        return torch.device("cpu")
    return device


def _add_apex() -> None:
    """Of Ascend's apex the one name that MindSpeed does not put there: Megatron looks for both optimizers or takes
    torch's, and its distributed optimizer then refuses what MindSpeed gives it."""
    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    apex.__spec__ = importlib.machinery.ModuleSpec("apex", None)  # transformers asks whether it is installed
    optimizers.FusedSGD = torch.optim.SGD
    apex.optimizers = optimizers
    sys.modules |= {"apex": apex, "apex.optimizers": optimizers}


def _replace_groups() -> None:
    """nccl and hccl are gloo; a barrier there waits for an all-reduce."""
    start, make = dist.init_process_group, dist.new_group

    def initialize(backend: str | None = None, **options: Any) -> None:
        options.pop("device_id", None)
        start(_gloo(backend), **options)

    def new_group(*arguments: Any, **options: Any) -> Any:
        options["backend"] = _gloo(options.get("backend"))
        options.pop("pg_options", None)
        return make(*arguments, **options)

    def barrier(group: Any = None, **_: Any) -> None:
        dist.all_reduce(torch.zeros(1), group=group)

    send = dist.isend

    def isend(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Of a copy: gloo reads the memory later, and a pipeline gives back what it has sent before it waits; on a
        device both happen on streams, whose order keeps the memory. Contiguous, as operators there give it."""
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        return send(copied, *arguments, **options)

    # P2POp asks whether its operation is one of its module's
    dist.isend = dist.distributed_c10d.isend = isend
    dist.init_process_group, dist.new_group, dist.barrier = initialize, new_group, barrier
    if hasattr(dist, "device_mesh"):  # it has a name of its own for it, and asks for nccl where CUDA is at hand
        dist.device_mesh.new_group = new_group


def _gloo(backend: str | None) -> str | None:
    named = (backend or "").lower()
    return "gloo" if "nccl" in named or "hccl" in named else backend
