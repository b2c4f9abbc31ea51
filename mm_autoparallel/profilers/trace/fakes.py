"""A model whose numbers are not there: PyTorch's FakeTensor for all that has weights in it, real integers for the rest.

A model is built fake. Its step runs outside of the fake mode, so that what is made of the batch's integers alone
(positions, lengths, masks, grids of patches) is computed for real and may decide how long a tensor is or which way the
code goes; whatever meets a weight is fake from there on. Only an operator that would have to read the numbers of such a
tensor fails, and the message names it and its module.

Fakes are CPU tensors: a build of PyTorch without CUDA dies of autograd on fakes of CUDA (2.13: the input's device guard
is not linked). That costs little: the flash attention of CPU keeps query, key, value, output and one fp32 log-sum-exp a
head and token, which is what the kernels of CUDA keep but for 24 bytes of random state.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # gives collectives a result on fake tensors
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.dispatch import asks_for_device, is_of_wrappers, tensors_in
from mm_autoparallel.profilers.trace.balance import deal_counts, follow_choice, read_balanced, rows_of_mask
from mm_autoparallel.signals import interrupt_waits, interrupted_at_safe_points, raise_interrupt

_NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
_NOT_FAKED = (UnsupportedOperatorException, UnsupportedFakeTensorException)

_NO_SHAPES = ("no fake impl registered for", "Expected inputs of BF16 type")
"""Of the messages for operators of torch.library.custom_op, and for grouped products in fp32 (PyTorch 2.13)."""

_UNREADABLE = ("data pointer", "data is not allocated", ".numpy() is not supported")
"""Of messages of PyTorch 2.13 where C++ or NumPy reaches for the numbers of a fake tensor."""

_NOT_THE_MODELS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Where code lies that is not the model's own: PyTorch's, and the profilers'."""


_DISTRIBUTED = "/torch/distributed/tensor/"
"""Of the path of code that operators of distributed tensors call."""

FAKES = FakeTensorMode(allow_non_fake_inputs=True)
"""One for all models, so that a batch that is kept for the next one may have fakes in it."""

_MANY = 2**20
"""Assumed: numbers in a tensor of fractions from which nothing is read that decides how a model runs: pixels."""

_HUGE = 2**26
"""Assumed: the same of any tensor: masks of one sample of 8,192 tokens are not above it."""


def build_fake(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, with fake parameters and buffers. Raises ProfileError where that cannot be."""
    try:
        with interruptible(), FAKES, _conversions_replace_parameters():
            return build()
    except (*_NEEDS_NUMBERS, *_NOT_FAKED, RuntimeError) as failure:
        told = _tell(failure, None)
        if told is None:
            raise
        raise ProfileError(told) from failure


@contextmanager
def on_fakes(model: nn.Module) -> Iterator[None]:
    """Around whatever runs `model` and its backward.

    Raises ProfileError for an operator that cannot be faked: which one, in which module, and the way round.
    """
    try:
        with interruptible(), _Accelerator(), _AcceleratorFunctions():  # type: ignore[no-untyped-call]
            yield
    except (*_NEEDS_NUMBERS, *_NOT_FAKED, RuntimeError) as failure:
        told = _tell(failure, model)
        if told is None:
            raise
        raise ProfileError(told) from failure


class _SafePoints(TorchFunctionMode):
    """An interrupt comes where code calls a function of PyTorch, and not within: PyTorch's own code calls Python there
    (modes, hooks of saved tensors, what it looks up of a subclass) and lets the process abort for an exception, as
    2.13 does for one in torch._library.simple_registry.find_torch_dispatch_rule.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Any function, as it is."""
        if interrupt_waits() and not _is_within_operator():
            raise_interrupt()
        return func(*args, **dict(kwargs or {}))


def _is_within_operator() -> bool:
    """Whether what calls is Python that an operator has called: function modes are on there too where the operator was
    called by torch.autograd.Function.apply.
    """
    frames = traceback.walk_stack(None)
    return any(
        frame.f_code.co_name == "__torch_dispatch__" or _DISTRIBUTED in frame.f_code.co_filename for frame, _ in frames
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """Around code that builds or runs fakes: an interrupt ends it where it can be carried out. No file is written."""
    with interrupted_at_safe_points(), _SafePoints():
        yield


def choose_as_accelerator() -> TorchFunctionMode:
    """Around code that runs inside of `on_fakes`, but where PyTorch has put function modes away: what a backward
    recomputes.
    """
    return _AcceleratorFunctions()


@contextmanager
def _conversions_replace_parameters() -> Iterator[None]:
    """Lets `model.to(dtype)` put new parameters in the old ones' places, tied ones tied.

    PyTorch 2.13 would swap what fake tensors hold, and cannot: something holds a weak reference to most of them.
    """
    plain = nn.Module._apply

    def apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        changed: dict[Tensor, Tensor] = {}  # by identity, which is how tensors hash

        def once(tensor: Tensor) -> Tensor:
            if tensor not in changed:
                with torch.no_grad():
                    new = change(tensor)
                keep = new is tensor or not isinstance(tensor, nn.Parameter)
                changed[tensor] = new if keep else nn.Parameter(new, tensor.requires_grad)
            return changed[tensor]

        for part in module.modules() if recurse else (module,):
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    held[name] = None if tensor is None else once(tensor)  # type: ignore[assignment]
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


class _Accelerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What an accelerator would do and the CPU's fakes do not.

    Experts are taken as balanced (balance.py).

    Real masks are read where they choose from fake tensors: `hidden[mask]` has as many rows as the mask says. A layer
    norm keeps its means and deviations in fp32, where CPU keeps them in the type of its input. And so that large
    batches take no memory, tensors of many fractions (pixels) and huge ones (masks) are fake.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Operators of other modes and of tensor subclasses come by here on plain tensors."""
        if is_of_wrappers(tuple(types)):
            return NotImplemented
        if asks_for_device(func):
            return func(*args)
        balanced = read_balanced(func, args)
        if balanced is not None:
            return balanced
        if func._schema.name in _CHOOSING and any(_is_mask(index) for index in args[1]):
            chosen = [_places(index) for index in args[1]]
            args = (args[0], list(itertools.chain.from_iterable(chosen)), *args[2:])
        named = dict(kwargs or {})
        if _makes_many_fractions(func, args, named):
            with FAKES:
                return torch.empty(args[0], dtype=named.get("dtype"))
        with FAKES if _grows_huge(args, named) else nullcontext():
            result = func(*args, **named)
        follow_choice(func, args, result)
        if func is torch.ops.aten.native_layer_norm.default and result[1].dtype != torch.float32:
            normed, *statistics = result
            result = (normed, *(torch.empty_like(each, dtype=torch.float32) for each in statistics))
        return result


class _AcceleratorFunctions(TorchFunctionMode):
    """Functions for which PyTorch chooses other operators on an accelerator than on CPU.

    Attention with dropout, or with values of another size than queries, is one kernel there (the memory-efficient one,
    aten/src/ATen/native/transformers/sdp_utils_cpp.h), and whole score matrices on CPU. Dropout keeps a mask of one
    byte a number there (native_dropout), and one in the type of its input on CPU.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls of functions on fake tensors; all others pass."""
        named = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention and isinstance(args[0], FakeTensor):
            given = _bind_attention(*args, **named)
            if given is not None:
                query, key, value, dropout, is_causal, scale = given
                attend = torch.ops.aten._scaled_dot_product_efficient_attention
                return attend(query, key, value, None, True, dropout, is_causal, scale=scale)[0]
        if func is Tensor.tolist and isinstance(args[0], FakeTensor):
            counts = deal_counts(args[0])
            if counts is not None:
                return counts
        if func is nn.functional.dropout and isinstance(args[0], FakeTensor):
            fraction, training, inplace = _bind_dropout(*args[1:], **named)
            if training and fraction and not inplace:
                return torch.ops.aten.native_dropout(args[0], fraction, True)[0]
        return func(*args, **named)


def _bind_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, float, bool, float | None] | None:
    """The arguments of scaled_dot_product_attention that matter; None where CPU has a fused kernel, or none has.

    None has where samples share their queries.
    """
    uneven = query.shape[-1] != value.shape[-1]
    shared = query.shape[:-2] != key.shape[:-2]
    if attn_mask is not None or enable_gqa or shared or not (dropout_p or uneven):
        return None
    return query, key, value, dropout_p, is_causal, scale


def _bind_dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[float, bool, bool]:
    return p, training, inplace


_CHOOSING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


_MAKING = frozenset({"aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn"})


def _makes_many_fractions(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    if func._schema.name not in _MAKING or math.prod(args[0]) <= _MANY:
        return False
    dtype: torch.dtype = named.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point


def _grows_huge(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether real tensors, laid over each other, make more than _HUGE numbers."""
    tensors = tensors_in(args, named)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    shapes = [reversed(tensor.shape) for tensor in tensors]
    return math.prod(max(sizes) for sizes in itertools.zip_longest(*shapes, fillvalue=1)) > _HUGE


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _places(index: Any) -> tuple[Any, ...]:
    """Where a mask is true, of each dimension, as far as that is known; of anything else itself."""
    if _is_mask(index) and not isinstance(index, FakeTensor):
        return tuple(index.nonzero().unbind(1))
    return rows_of_mask(index) or (index,)


def _tell(failure: Exception, model: nn.Module | None) -> str | None:
    """What cannot be faked, where, and the way round; None where `failure` is another mistake."""
    where = _describe_place(failure, model)
    if isinstance(failure, _NEEDS_NUMBERS):
        return (
            f"{where} runs {_operator(failure)}, whose result depends on numbers that the model computes, and a model "
            "that is traced has none. Give the module a form whose sizes follow from the batch alone (experts as one "
            "grouped or batched product with a fixed number of rows, indices from Python numbers or from the batch's "
            "own integers), or measure it on a device with `mm-autoparallel profile`"
        )
    if isinstance(failure, _NOT_FAKED) or any(words in str(failure) for words in _NO_SHAPES):
        return (
            f"{where} runs {_operator(failure)}, of which PyTorch does not know what comes out without running it. "
            "Register its shapes with torch.library.register_fake, choose another implementation of the module (plain "
            "PyTorch, `attention: unfused`, bf16), or measure it on a device with `mm-autoparallel profile`"
        )
    if any(words in str(failure) for words in _UNREADABLE):
        return (
            f"{where} reads the numbers of a tensor past PyTorch's operators ({str(failure).splitlines()[0]}), and a "
            "model that is traced has none. Keep such numbers in Python, or as integers of the batch, or measure it "
            "on a device with `mm-autoparallel profile`"
        )
    return None


def _operator(failure: Exception) -> str:
    """The operator that an error of fake tensors tells of, as an attribute or in its first line."""
    found = getattr(failure, "func", None) or (failure.args[0] if failure.args else "an operator")
    return str(found).splitlines()[0].removeprefix(f"There was {_NO_SHAPES[0]} ").split(". ")[0]


def _describe_place(failure: Exception, model: nn.Module | None) -> str:
    """The innermost module whose code was running, by its path and class, and the line of code."""
    names = {} if model is None else {module: path for path, module in model.named_modules()}
    place, line = "building the model" if model is None else "the model's step", ""
    for frame, number in traceback.walk_tb(failure.__traceback__):
        owner = next((frame.f_locals.get(name) for name in frame.f_code.co_varnames[:1]), None)  # mostly `self`
        file = frame.f_code.co_filename
        if file.startswith(_NOT_THE_MODELS):
            continue
        line = f" at {file}:{number}"
        if isinstance(owner, nn.Module):
            path = names.get(owner)
            place = type(owner).__name__ if path is None else f"{path or 'the model'} ({type(owner).__name__})"
    return f"{place}{line}"
