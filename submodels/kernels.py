"""What single operators take on the CPU: bytes that a convolution holds for a moment, and multiply-adds."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Bytes that a convolution holds at its peak, its outputs included. Which kernel runs depends on the processor, so this
# is the most that any kernel of oneDNN takes. Most of them work on copies of the operands in which channels lie in
# blocks of 16 (of 8 without AVX-512, which takes less): the copies of x, y and the weight are alive together, then the
# result beside its copy. The others unfold one image at a time into columns and multiply matrices. oneDNN leaves
# float64 to torch, which unfolds the whole batch.


def _inside_convolution(y: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    if x.dtype is torch.float64:
        return y.nbytes + _columns(y, weight)
    copies = _blocked_input(x, weight) + weight.nbytes + _blocked(y)
    return max(copies, _blocked(y) + y.nbytes, y.nbytes + _columns(y[:1], weight))


def _inside_convolution_backward(
    out: tuple, grad_y: Tensor, x: Tensor, weight: Tensor, bias_sizes, stride, *_: Any
) -> int:
    grad_x, grad_weight, _ = (0 if g is None else g.nbytes for g in out)
    if x.dtype is torch.float64:
        return grad_x + grad_weight + _columns(grad_y, weight)
    for_weight = max(
        _blocked_input(x, weight) + weight.nbytes + _blocked(grad_y),
        grad_weight + (weight.nbytes if _thin(x, weight) else _blocked_weight(weight, x)),
        grad_weight + _columns(grad_y[:1], weight),
    )
    if out[0] is None:
        return for_weight
    for_x = _blocked(x) + _blocked_weight(weight, x) + _blocked(grad_y)
    copied_once_more = 3 * grad_x if max(stride) > 1 else 0
    return max(for_x, copied_once_more, grad_x + for_weight)  # grad_x comes first and stays


def _blocked(x: Tensor) -> int:
    return x[:, :1].nbytes * -(-x.shape[1] // 16) * 16


def _blocked_input(x: Tensor, weight: Tensor) -> int:
    return 0 if _thin(x, weight) else _blocked(x)


def _thin(x: Tensor, weight: Tensor) -> bool:
    """Whether x has so few channels, as in the first layer mostly, that it is read as it is."""
    return x.shape[1] < 16 and weight.shape[1] == x.shape[1] and _taps(weight) > 1


def _blocked_weight(weight: Tensor, x: Tensor) -> int:
    if weight.shape[1] != x.shape[1]:  # grouped
        return weight.nbytes
    return weight[:1, :1].nbytes * math.prod(-(-n // 16) * 16 for n in weight.shape[:2])


def _columns(y: Tensor, weight: Tensor) -> int:
    return y[:, :1].nbytes * weight.shape[1] * _taps(weight) if _taps(weight) > 1 else 0


def _taps(weight: Tensor) -> int:
    return math.prod(weight.shape[2:])


INSIDE: dict[Any, Callable[..., int]] = {
    aten.convolution: _inside_convolution,
    aten.convolution_backward: _inside_convolution_backward,
}


def _product(out: Tensor, a: Tensor, *_: Any) -> int:
    return out.numel() * a.shape[-1]


def _added_product(out: Tensor, _: Tensor, a: Tensor, *rest: Any) -> int:
    return out.numel() * a.shape[-1]


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *settings: Any) -> int:
    _bias, _stride, _padding, _dilation, transposed, *_ = settings
    # Every output element reads one filter; transposed, every input element is spread by one.
    return (x if transposed else out).numel() * math.prod(weight.shape[1:])


def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    return q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _lstm(out: Any, x: Tensor, w_input: Tensor, w_hidden: Tensor, *_: Any) -> int:
    return x[..., 0].numel() * (w_input.numel() + w_hidden.numel())


# Multiply-adds of an operator, from its output and its arguments; others count as none.
MACS: dict[Any, Callable[..., int]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.mv: _product,
    aten.dot: _product,
    aten.addmm: _added_product,
    aten.addmv: _added_product,
    aten.baddbmm: _added_product,
    aten.convolution: _convolution,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.mkldnn_rnn_layer: _lstm,
}
