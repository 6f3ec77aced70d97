"""Adam, SGD and Lion in Triton: one pass over the tiles of a table (ADR 0015).

Only :mod:`~zeroshard.optim.triton_update` imports this module, because it imports Triton. That module
also describes the tables. Arguments are addresses, or ``constexpr``.

Each operation rounds once. Where a fused multiply-add is meant there is ``fma``; the compiler makes no
others (``enable_fp_fusion=False``). Division and square root are rounded correctly. bf16 is read and
written as integers, so that it is rounded in the same way on a GPU and in Triton's interpreter.

``ORDER`` is the order of operations: that of torch's kernels for the CPU (0), of torch's kernels for CUDA
in fp32 (1), or of those in fp64 (2). Which of the last two torch has depends on its version.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

FRAGMENT = ("master", "first", "second", "step", "low", "chunk", "grad_at", "numel", "group")
"""What a row of the table of fragments has, in this order; each is an int64."""

OPTIONS = 8
"""Numbers of one param group, fp64. The first is the sign of ``maximize``; see ``*_constants``."""

_MASTER, _FIRST, _SECOND, _STEP, _LOW, _CHUNK, _GRAD_AT, _NUMEL, _GROUP = (
    tl.constexpr(at) for at in range(len(FRAGMENT))
)
_FIELDS, _OPTIONS = tl.constexpr(len(FRAGMENT)), tl.constexpr(OPTIONS)
_CPU, _CUDA_FP32 = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def _word(address, at):
    return tl.load(address.to(tl.pointer_type(tl.int64)) + at)


@triton.jit
def _option(address, at: tl.constexpr):
    return tl.load(address.to(tl.pointer_type(tl.float64)) + at)


@triton.jit
def _pointer(address, dtype: tl.constexpr, aligned: tl.constexpr):
    """``aligned``: the address is a multiple of 16, so that a thread may move 16 bytes at once."""
    if dtype == "bf16":
        pointer = address.to(tl.pointer_type(tl.uint16))
    elif dtype == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if aligned:
        pointer = tl.multiple_of(pointer, [16])
    return pointer


@triton.jit
def _load(address, offsets, mask, dtype: tl.constexpr, aligned: tl.constexpr):
    """Values in fp32, from a tensor of ``dtype``: "bf16", "fp16" or "fp32"."""
    pointers = _pointer(address, dtype, aligned) + offsets
    if mask is None:  # noqa: SIM108
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=mask, other=0)
    if dtype == "bf16":
        values = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif dtype == "fp16":
        values = values.to(tl.float32)
    return values


@triton.jit
def _store(address, offsets, values, mask, dtype: tl.constexpr, aligned: tl.constexpr):
    """Write fp32 ``values``, rounded to ``dtype``."""
    pointers = _pointer(address, dtype, aligned) + offsets
    if dtype == "bf16":
        values = _bf16_bits(values).to(tl.uint16)
    elif dtype == "fp16":
        values = values.to(tl.float16)
    if mask is None:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _bf16_bits(values):
    """The upper halves of the fp32 values, rounded to the nearest, ties to even. NaN stays NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values != values, 0x7FC0, rounded)  # noqa: PLR0124


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    """fp32 ``values``, rounded to ``dtype``, in fp32."""
    if dtype == "bf16":
        result = (_bf16_bits(values) << 16).to(tl.float32, bitcast=True)
    else:
        result = values.to(tl.float16).to(tl.float32)
    return result


@triton.jit
def _power(base, exponent):
    """``base ** exponent`` in fp64; both scalar, ``base`` not negative."""
    return tl.exp2(exponent * tl.log2(base))


@triton.jit
def _lerp(start, end, weight):
    """As torch's: from the nearer end."""
    near = tl.abs(weight) < 0.5
    return tl.fma(tl.where(near, weight, weight - 1.0), end - start, tl.where(near, start, end))


@triton.jit
def _adam_constants(at, step_at, order: tl.constexpr):
    """Scalars of a step. Options: lr, betas, eps, weight decay, whether AdamW."""
    step = tl.load(step_at.to(tl.pointer_type(tl.float32)))
    lr, beta1, beta2, eps = _option(at, 1), _option(at, 2), _option(at, 3), _option(at, 4)
    decay = _option(at, 5)
    decoupled = (_option(at, 6) != 0) & (decay != 0)
    coupled = (_option(at, 6) == 0) & (decay != 0)
    if order == _CPU:
        correction1 = 1.0 - _power(beta1, step.to(tl.float64))
        correction2 = 1.0 - _power(beta2, step.to(tl.float64))
        constants = (
            (-(lr / correction1)).to(tl.float32), tl.sqrt(correction2).to(tl.float32),
            (1.0 - beta1).to(tl.float32), beta2.to(tl.float32), (1.0 - beta2).to(tl.float32),
            eps.to(tl.float32), (1.0 - lr * decay).to(tl.float32), decay.to(tl.float32),
        )  # fmt: skip
    elif order == _CUDA_FP32:
        lr32, decay32 = lr.to(tl.float32), decay.to(tl.float32)
        b1, b2 = beta1.to(tl.float32), beta2.to(tl.float32)
        constants = (
            tl.div_rn(lr32, 1.0 - libdevice.pow(b1, step)),
            tl.sqrt_rn(1.0 - libdevice.pow(b2, step)),
            b1, b2, b2, eps.to(tl.float32), -(lr32 * decay32), decay32,
        )  # fmt: skip
    else:
        correction1 = (1.0 - _power(beta1, step.to(tl.float64))).to(tl.float32)
        correction2 = (1.0 - _power(beta2, step.to(tl.float64))).to(tl.float32)
        constants = (
            (lr / correction1.to(tl.float64)).to(tl.float32), tl.sqrt_rn(correction2),
            beta1, beta2, 1.0 - beta2, eps, lr * decay, decay,
        )  # fmt: skip
    return constants, decoupled, coupled


@triton.jit
def _adam(param, grad, first, second, scalars, order: tl.constexpr):
    """Parameter and moments after a step."""
    constants, decoupled, coupled = scalars
    step_size, root, b1, b2, rest2, eps, shrink, decay = constants
    if order == _CPU:
        param = tl.where(decoupled, param * shrink, param)
        grad = tl.where(coupled, tl.fma(param, decay, grad), grad)
        first = _lerp(first, grad, b1)  # here b1 is 1 - beta1
        second = tl.fma(rest2 * grad, grad, second * b2)
        denominator = tl.div_rn(tl.sqrt_rn(second), root) + eps
        param = param + tl.div_rn(step_size * first, denominator)
    elif order == _CUDA_FP32:
        param = tl.where(decoupled, tl.fma(shrink, param, param), param)
        grad = tl.where(coupled, tl.fma(param, decay, grad), grad)
        first = tl.fma(b1, first, tl.fma(-b1, grad, grad))
        square = grad * grad
        second = tl.fma(b2, second, tl.fma(-b2, square, square))
        denominator = tl.div_rn(tl.sqrt_rn(second), root) + eps
        param = param - tl.div_rn(step_size * first, denominator)
    else:
        wide = param.to(tl.float64)
        param = tl.where(decoupled, (wide - shrink * wide).to(tl.float32), param)
        grad = tl.where(coupled, (grad + wide * decay).to(tl.float32), grad)
        first = (b1 * first + (1.0 - b1) * grad).to(tl.float32)
        second = (b2 * second + rest2 * grad * grad).to(tl.float32)
        denominator = (tl.div_rn(tl.sqrt_rn(second), root) + eps).to(tl.float32)
        param = param - tl.div_rn(step_size * first, denominator)
    return param, first, second


@triton.jit
def _sgd_constants(at, order: tl.constexpr):
    """Scalars of a step. Options: lr, momentum, dampening, weight decay, whether Nesterov."""
    lr, momentum, rest, decay = _option(at, 1), _option(at, 2), 1.0 - _option(at, 3), _option(at, 4)
    if order == _CPU:
        constants = (-lr.to(tl.float32), momentum.to(tl.float32), rest.to(tl.float32))
        decay32 = decay.to(tl.float32)
    else:
        constants = (-lr, momentum, rest)
        decay32 = decay
    return constants, decay32, decay != 0, _option(at, 5) != 0


@triton.jit
def _sgd(param, grad, buffer, scalars, has_momentum: tl.constexpr, order: tl.constexpr):
    """Parameter and momentum after a step."""
    constants, decay, decays, nesterov = scalars
    step_size, momentum, rest = constants
    if order == _CPU:
        grad = tl.where(decays, tl.fma(param, decay, grad), grad)
        if has_momentum:
            buffer = tl.fma(grad, rest, buffer * momentum)
            grad = tl.where(nesterov, tl.fma(buffer, momentum, grad), buffer)
        param = tl.fma(grad, step_size, param)
    else:
        grad = tl.where(decays, (grad + decay * param).to(tl.float32), grad)
        if has_momentum:
            wide = momentum * buffer + rest * grad
            buffer = wide.to(tl.float32)
            grad = tl.where(nesterov, (grad + momentum * wide).to(tl.float32), buffer)
        param = (param + step_size * grad).to(tl.float32)
    return param, buffer


@triton.jit
def _lion_constants(at):
    """Scalars of a step. Options: lr, betas, weight decay."""
    lr, decay = _option(at, 1), _option(at, 4)
    shrink = (1.0 - lr * decay).to(tl.float32)
    weights = (1.0 - _option(at, 2)).to(tl.float32), (1.0 - _option(at, 3)).to(tl.float32)
    return (-lr).to(tl.float32), shrink, weights


@triton.jit
def _lion(param, grad, first, scalars):
    """Parameter and momentum after a step."""
    step_size, shrink, weights = scalars
    toward = _lerp(first, grad, weights[0])
    sign = (toward > 0).to(tl.float32) - (toward < 0).to(tl.float32)
    return param * shrink + sign * step_size, _lerp(first, grad, weights[1])


@triton.jit
def _constants(at, step_at, KIND: tl.constexpr, ORDER: tl.constexpr):
    if KIND == "adam":
        scalars = _adam_constants(at, step_at, ORDER)
    elif KIND == "lion":
        scalars = _lion_constants(at)
    else:
        scalars = _sgd_constants(at, ORDER)
    return scalars


@triton.jit
def _block(
    master, first_at, second_at, low, grads, factor, scalars, offsets, mask,
    KIND: tl.constexpr, ORDER: tl.constexpr, GRAD: tl.constexpr, LOW: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Update one block of a fragment."""
    param = _load(master, offsets, mask, "fp32", ALIGNED)
    if LOW != "":
        seen = _load(low, offsets, mask, LOW, ALIGNED)
        # Start from the parameter where the program wrote into it.
        param = tl.where(_rounded(param, LOW) == seen, param, seen)
    grad = _load(grads, offsets, mask, GRAD, ALIGNED) * factor
    if KIND == "sgd":
        param, _ = _sgd(param, grad, grad, scalars, False, ORDER)
    else:
        first = _load(first_at, offsets, mask, "fp32", ALIGNED)
        if KIND == "adam":
            second = _load(second_at, offsets, mask, "fp32", ALIGNED)
            param, first, second = _adam(param, grad, first, second, scalars, ORDER)
            _store(second_at, offsets, second, mask, "fp32", ALIGNED)
        elif KIND == "sgd momentum":
            param, first = _sgd(param, grad, first, scalars, True, ORDER)
        else:
            param, first = _lion(param, grad, first, scalars)
        _store(first_at, offsets, first, mask, "fp32", ALIGNED)
    _store(master, offsets, param, mask, "fp32", ALIGNED)
    if LOW != "":
        _store(low, offsets, param, mask, LOW, ALIGNED)


_UPDATE_NUMBERS = ("tiles", "fragments", "grads_at", "options_at", "factor_at", "flag_at")


@triton.jit(do_not_specialize=_UPDATE_NUMBERS)  # no other address or option compiles anew
def update(
    tiles, fragments, grads_at, options_at, factor_at, flag_at,
    KIND: tl.constexpr, ORDER: tl.constexpr, GRAD: tl.constexpr, LOW: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Update one tile: up to ``BLOCKS`` blocks of ``BLOCK`` elements of one fragment."""
    if tl.load(flag_at.to(tl.pointer_type(tl.float32))) == 0.0:
        tile = tl.program_id(0).to(tl.int64)
        row = fragments + _word(tiles, 2 * tile) * (8 * _FIELDS)
        begin = tl.multiple_of(_word(tiles, 2 * tile + 1), [BLOCK])
        numel = _word(row, _NUMEL)
        size: tl.constexpr = 4 if GRAD == "fp32" else 2
        grads = _word(grads_at, _word(row, _CHUNK)) + _word(row, _GRAD_AT) * size
        options = options_at + _word(row, _GROUP) * (8 * _OPTIONS)
        master, first, second = _word(row, _MASTER), _word(row, _FIRST), _word(row, _SECOND)
        low = _word(row, _LOW)
        scalars = _constants(options, _word(row, _STEP), KIND, ORDER)
        # The sign of maximize, which is exact, is part of the factor.
        factor = tl.load(factor_at.to(tl.pointer_type(tl.float32)))
        factor = factor * _option(options, 0).to(tl.float32)
        for block in range(min(BLOCKS, (numel - begin + BLOCK - 1) // BLOCK)):
            at = begin + block * BLOCK
            offsets = at + tl.arange(0, BLOCK)
            if at + BLOCK <= numel:
                _block(
                    master, first, second, low, grads, factor, scalars, offsets, None,
                    KIND, ORDER, GRAD, LOW, ALIGNED,
                )  # fmt: skip
            else:
                _block(
                    master, first, second, low, grads, factor, scalars, offsets,
                    offsets < numel,
                    KIND, ORDER, GRAD, LOW, ALIGNED,
                )  # fmt: skip


@triton.jit(do_not_specialize=("fragments", "numel", "flag_at"))
def count(fragments, numel, flag_at, BLOCK: tl.constexpr):
    """Increase the step counts of ``numel`` fragments by one, unless the flag is 1."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    flag = tl.load(flag_at.to(tl.pointer_type(tl.float32)))
    rows = fragments.to(tl.pointer_type(tl.int64)) + offsets * _FIELDS + _STEP
    steps = tl.load(rows, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    value = tl.load(steps, mask=mask, other=0.0)
    tl.store(steps, value + tl.where(flag == 0.0, 1.0, 0.0), mask=mask)
