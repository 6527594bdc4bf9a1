"""The CUDA kernels of a step in Triton, over a table of the tensors' addresses; `_fused_cuda.py` launches them.

The recursion of psi and the guards are `_idu`'s, in base-2 logarithms; tests hold the two equal.
"""

# A kernel's language only looks like Python: its types are not pyright's.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false

import os

import triton
import triton.language as tl

from anon_optim import _idu

TAIL = tl.constexpr(_idu.TAIL)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

CLOCK_COLUMNS = (
    "due", "accumulate", "bias_correction1", "lr", "gamma", "weight", "changed", "beta3", "bias_correction2",
)  # fmt: skip
"""Of a batch's clock where the device keeps it (`DEVICE_CLOCK`). `due` is 1 for a refresh step, 0 for a step between
refreshes, -1 for a step that AMP skips."""
COLUMNS = tl.constexpr(len(CLOCK_COLUMNS))


@triton.jit
def _address(table, row: tl.constexpr, tensor, n_tensors, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + row * n_tensors + tensor).to(tl.pointer_type(dtype))
    if ALIGNED:
        # Four elements at a time, also of two-byte types: eight would spread the float32 accesses of a warp.
        pointer = tl.multiple_of(pointer, 4 * (dtype.primitive_bitwidth // 8))
    return pointer


@triton.jit
def _load(pointer, offsets, mask, FULL: tl.constexpr):
    # A mask would cost the loads their width, so only a tensor's last block has one.
    if FULL:
        x = tl.load(pointer + offsets)
    else:
        x = tl.load(pointer + offsets, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _cast(value, dtype: tl.constexpr):
    if INTERPRETED and dtype == tl.bfloat16:  # Triton's interpreter truncates where the hardware rounds to nearest
        bits = value.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where(tl.abs(value) < float("inf"), nearest, value)
    return value.to(dtype)


@triton.jit
def _store(pointer, offsets, value, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + offsets, _cast(value, pointer.dtype.element_ty))
    else:
        tl.store(pointer + offsets, _cast(value, pointer.dtype.element_ty), mask=mask)


@triton.jit
def _normal(x):
    """Into float32's normal range, so that 0 stays the mark of an unseen coordinate."""
    return tl.minimum(tl.maximum(x, 1.1754943508222875e-38), 3.4028234663852886e38)


@triton.jit
def _mix(log_old, log_new, first, beta3):
    """log2 of beta3 old + (1 - beta3) new, or new where `first`."""
    a = log_old + tl.log2(_normal(beta3))
    b = log_new + tl.log2(1.0 - beta3)
    top = tl.maximum(a, b)
    return tl.where(first, log_new, top + tl.log2(tl.exp2(a - top) + tl.exp2(b - top)))


@triton.jit
def _round_stochastic(x, seed, offsets):
    """float32 to the bits of a bfloat16 neighbour, chosen so that the mean is exact."""
    bits = x.to(tl.int32, bitcast=True)
    noise = tl.randint(seed, offsets).to(tl.int32) & 0xFFFF
    rounded = ((bits + noise) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) <= 3.3895313892515355e38, rounded, x)


@triton.jit
def _gradient(g_ptr, theta, offsets, mask, factor, weight_decay, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
              FULL: tl.constexpr):  # fmt: skip
    raw = _load(g_ptr, offsets, mask, FULL) * factor
    if MAXIMIZE:
        raw = -raw
    grad = raw
    if COUPLED:
        grad = grad + weight_decay * theta
    return raw, grad


@triton.jit
def _sample(raw, grad, m, BELIEF: tl.constexpr, MASKED: tl.constexpr):
    if BELIEF:
        sample = (grad - m) * (grad - m)
    else:
        sample = grad * grad
    if MASKED:
        sample = tl.where(raw != 0, sample, 0.0)
    return sample


@triton.jit
def _update(p_ptr, v_ptr, theta, m, v, v_before, bound, gamma, decay, step_size, offsets, mask, seed, position,
            CLIP: tl.constexpr, STOCHASTIC: tl.constexpr, REFRESHED: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Clip, write what changed of v, and move theta; returns v."""
    if CLIP:
        # 1 / |m| as a square: the reciprocal square root is one instruction, a division is ten.
        root = tl.rsqrt(tl.maximum(tl.abs(m), 1.1754943508222875e-38))
        limit = _normal(bound * root * root)
        if gamma != 1:
            power = tl.exp2(tl.minimum(gamma * tl.log2(limit), 127.99))  # more would overflow
            limit = tl.where(gamma > 0, _normal(power), 3.4028234663852886e38)
        v = tl.minimum(v, limit)
    if REFRESHED:
        _store(v_ptr, offsets, v, mask, FULL)
    else:
        # Most steps change no v at all, and a store that no lane takes part in moves nothing.
        changed = v != v_before
        if not FULL:
            changed = changed & mask
        tl.store(v_ptr + offsets, _cast(v, v_ptr.dtype.element_ty), mask=changed)
    theta = theta * decay - v * m * step_size
    if STOCHASTIC:
        theta = _round_stochastic(theta, seed, position + offsets)
    _store(p_ptr, offsets, theta, mask, FULL)
    return v


@triton.jit
def _place(table, numels, block_tensor, block_start, block, BLOCK: tl.constexpr):
    """The tensor that a block belongs to, where in it the block starts, and the tensor's size."""
    tensor = tl.load(block_tensor + block)
    return tensor, tl.load(block_start + block).to(tl.int64) * BLOCK, tl.load(numels + tensor)


@triton.jit
def _scale(level, gamma):
    """What a coordinate of mean sigma moves by per unit of lr; 1 before a refresh has set the level."""
    return tl.where(level > 0, _normal(tl.exp2(0.5 * (1.0 - gamma) * tl.log2(_normal(level)))), 1.0)


@triton.jit
def _step_size(level, gamma, lr, bias_correction1, LR_SCALE: tl.constexpr):
    """What v m is multiplied by."""
    step_size = lr / bias_correction1
    if LR_SCALE:
        step_size = step_size / _scale(level, gamma)
    return step_size


@triton.jit
def _plain_block(
    p_ptr, g_ptr, m_ptr, s_ptr, v_ptr, start, n, factor, decay, step_size, bound, least, gamma, accumulate,
    bias_correction2, unseen, weight_decay, one_minus_beta1, beta2, one_minus_beta2, eps, seed, position, power_ptr,
    most, ACCUMULATE: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, BELIEF: tl.constexpr,
    MASKED: tl.constexpr, TOUCH: tl.constexpr, CLIP: tl.constexpr, BRAKE: tl.constexpr, FOLLOW: tl.constexpr,
    STOCHASTIC: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < n
    theta = _load(p_ptr, offsets, mask, FULL)
    raw, grad = _gradient(g_ptr, theta, offsets, mask, factor, weight_decay, MAXIMIZE, COUPLED, FULL)
    m = _load(m_ptr, offsets, mask, FULL)
    v = _load(v_ptr, offsets, mask, FULL)
    m += (grad - m) * one_minus_beta1
    _store(m_ptr, offsets, m, mask, FULL)
    sample = _sample(raw, grad, m, BELIEF, MASKED)
    v_before = v
    if ACCUMULATE:
        if accumulate != 0:
            s = _load(s_ptr, offsets, mask, FULL) * beta2 + sample * one_minus_beta2
            _store(s_ptr, offsets, s, mask, FULL)
            if FOLLOW:
                sigma = _normal(s / bias_correction2 + eps)
                if gamma == 1:
                    risen = tl.rsqrt(sigma)
                else:
                    risen = tl.where(gamma > 0, _normal(tl.exp2(-0.5 * gamma * tl.log2(sigma))), 3.4028234663852886e38)
                v = tl.minimum(v, risen)
    if TOUCH:
        if unseen != 0:
            sigma = tl.maximum(sample + eps, least)
            touched = _normal(tl.exp2(-0.5 * gamma * tl.log2(_normal(sigma))))
            v = tl.where((v == 0) & (raw != 0), touched, v)
    v = _update(p_ptr, v_ptr, theta, m, v, v_before, bound, gamma, decay, step_size, offsets, mask, seed, position,
                CLIP, STOCHASTIC, False, FULL)  # fmt: skip
    if BRAKE:
        tl.store(power_ptr, tl.sum(tl.minimum(sample * v * v, most)))


@triton.jit
def plain_kernel(
    table, numels, block_tensor, block_start, clock, factor_ptr, seed_ptr, levels, brakes, powers, unseens,
    n_tensors, lr, gamma, bias_correction1, bias_correction2, weight_decay, one_minus_beta1, beta2, one_minus_beta2,
    eps, clip, floor, P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    DEVICE_CLOCK: tl.constexpr, HAS_FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
    BELIEF: tl.constexpr, MASKED: tl.constexpr, DECOUPLED: tl.constexpr, TOUCH: tl.constexpr, CLIP: tl.constexpr,
    BRAKE: tl.constexpr, LR_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, FOLLOW: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """A step between refreshes. `ACCUMULATE` is the host's decision whether s may be needed; a device clock has the
    last word."""
    block = tl.program_id(0)
    tensor, start, n = _place(table, numels, block_tensor, block_start, block, BLOCK)
    due = 0.0
    accumulate = 1.0
    if DEVICE_CLOCK:
        due = tl.load(clock + tensor * COLUMNS + 0)
        accumulate = tl.load(clock + tensor * COLUMNS + 1)
        bias_correction1 = tl.load(clock + tensor * COLUMNS + 2)
        lr = tl.load(clock + tensor * COLUMNS + 3)
        gamma = tl.load(clock + tensor * COLUMNS + 4)
        bias_correction2 = tl.load(clock + tensor * COLUMNS + 8)
    if due == 0:
        p_ptr = _address(table, 0, tensor, n_tensors, P_DTYPE, ALIGNED)
        g_ptr = _address(table, 1, tensor, n_tensors, G_DTYPE, ALIGNED)
        m_ptr = _address(table, 2, tensor, n_tensors, tl.float32, ALIGNED)
        s_ptr = _address(table, 3, tensor, n_tensors, tl.float32, ALIGNED)
        v_ptr = _address(table, 4, tensor, n_tensors, V_DTYPE, ALIGNED)
        level = tl.load(levels + tensor)
        step_size = _step_size(level, gamma, lr, bias_correction1, LR_SCALE)
        bound = clip * bias_correction1
        least = floor * level
        most = 0.0
        if BRAKE:
            most = TAIL * tl.load(brakes + tensor * 3 + 0)
            excess = tl.maximum(tl.load(brakes + tensor * 3 + 2), 1.0)
            step_size *= tl.where(gamma > 0, tl.exp2(-0.5 * gamma * tl.log2(excess)), 1.0)
        factor = 1.0
        if HAS_FACTOR:
            factor = tl.load(factor_ptr)
        seed = 0
        if STOCHASTIC:
            seed = tl.load(seed_ptr)
        unseen = 0
        if TOUCH:
            unseen = tl.load(unseens + tensor)
        decay = 1.0
        if DECOUPLED:
            decay = 1.0 - lr * weight_decay
        position = block.to(tl.int64) * BLOCK - start
        if start + BLOCK <= n:
            _plain_block(p_ptr, g_ptr, m_ptr, s_ptr, v_ptr, start, n, factor, decay, step_size, bound, least, gamma,
                         accumulate, bias_correction2, unseen, weight_decay, one_minus_beta1, beta2, one_minus_beta2,
                         eps, seed, position, powers + block, most, ACCUMULATE, MAXIMIZE, COUPLED, BELIEF, MASKED,
                         TOUCH, CLIP, BRAKE, FOLLOW, STOCHASTIC, True, BLOCK)  # fmt: skip
        else:
            _plain_block(p_ptr, g_ptr, m_ptr, s_ptr, v_ptr, start, n, factor, decay, step_size, bound, least, gamma,
                         accumulate, bias_correction2, unseen, weight_decay, one_minus_beta1, beta2, one_minus_beta2,
                         eps, seed, position, powers + block, most, ACCUMULATE, MAXIMIZE, COUPLED, BELIEF, MASKED,
                         TOUCH, CLIP, BRAKE, FOLLOW, STOCHASTIC, False, BLOCK)  # fmt: skip


@triton.jit
def _moments_block(
    p_ptr, g_ptr, m_ptr, s_ptr, start, n, factor, weight, weight_decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    partials, block, n_blocks, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr, BELIEF: tl.constexpr,
    MASKED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < n
    theta = tl.zeros((BLOCK,), tl.float32)
    if COUPLED:
        theta = _load(p_ptr, offsets, mask, FULL)
    raw, grad = _gradient(g_ptr, theta, offsets, mask, factor, weight_decay, MAXIMIZE, COUPLED, FULL)
    m = _load(m_ptr, offsets, mask, FULL)
    m += (grad - m) * one_minus_beta1
    _store(m_ptr, offsets, m, mask, FULL)
    s = _load(s_ptr, offsets, mask, FULL)
    s = s * beta2 + _sample(raw, grad, m, BELIEF, MASKED) * one_minus_beta2
    _store(s_ptr, offsets, s, mask, FULL)
    taught = mask & (s > 0) & (s < float("inf"))
    sigma = tl.where(taught, s / weight + eps, 0.0)
    tl.store(partials + block, tl.sum(sigma))
    tl.store(partials + n_blocks + block, tl.sum(taught.to(tl.float32)))


@triton.jit
def moments_kernel(
    table, numels, block_tensor, block_start, clock, any_due, factor_ptr, weights, partials, n_tensors, n_blocks,
    weight_decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    DEVICE_CLOCK: tl.constexpr, HAS_FACTOR: tl.constexpr, MAXIMIZE: tl.constexpr, COUPLED: tl.constexpr,
    BELIEF: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First of a refresh: m and s, and for each block the sum and count of sigma where s > 0."""
    block = tl.program_id(0)
    if DEVICE_CLOCK:
        block = tl.where(tl.load(any_due) != 0, block, n_blocks)
    factor = 1.0
    if HAS_FACTOR:
        factor = tl.load(factor_ptr)
    while block < n_blocks:
        tensor, start, n = _place(table, numels, block_tensor, block_start, block, BLOCK)
        due = 1.0
        if DEVICE_CLOCK:
            due = tl.load(clock + tensor * COLUMNS + 0)
        if due > 0:
            p_ptr = _address(table, 0, tensor, n_tensors, P_DTYPE, ALIGNED)
            g_ptr = _address(table, 1, tensor, n_tensors, G_DTYPE, ALIGNED)
            m_ptr = _address(table, 2, tensor, n_tensors, tl.float32, ALIGNED)
            s_ptr = _address(table, 3, tensor, n_tensors, tl.float32, ALIGNED)
            weight = tl.load(weights + tensor)
            if start + BLOCK <= n:
                _moments_block(p_ptr, g_ptr, m_ptr, s_ptr, start, n, factor, weight, weight_decay, one_minus_beta1,
                               beta2, one_minus_beta2, eps, partials, block, n_blocks, MAXIMIZE, COUPLED, BELIEF,
                               MASKED, True, BLOCK)  # fmt: skip
            else:
                _moments_block(p_ptr, g_ptr, m_ptr, s_ptr, start, n, factor, weight, weight_decay, one_minus_beta1,
                               beta2, one_minus_beta2, eps, partials, block, n_blocks, MAXIMIZE, COUPLED, BELIEF,
                               MASKED, False, BLOCK)  # fmt: skip
        block += tl.num_programs(0)


@triton.jit
def levels_kernel(
    partials, first_block, clock, beta3s, means, levels, unseens, n_blocks,
    DEVICE_CLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Second of a refresh: each tensor's mean of sigma, and its level, from the blocks' sums in a fixed order."""
    tensor = tl.program_id(0)
    due = 1.0
    if DEVICE_CLOCK:
        due = tl.load(clock + tensor * COLUMNS + 0)
    if due > 0:
        beta3 = tl.load(beta3s + tensor)
        begin = tl.load(first_block + tensor)
        end = tl.load(first_block + tensor + 1)
        total = tl.zeros((CHUNK,), tl.float32)
        count = tl.zeros((CHUNK,), tl.float32)
        while begin < end:
            blocks = begin + tl.arange(0, CHUNK)
            mask = blocks < end
            total += tl.load(partials + blocks, mask=mask, other=0.0)
            count += tl.load(partials + n_blocks + blocks, mask=mask, other=0.0)
            begin += CHUNK
        mean = tl.sum(total) / tl.maximum(tl.sum(count), 1.0)
        level = tl.load(levels + tensor)
        mixed = _normal(tl.where(level > 0, beta3 * level + (1.0 - beta3) * mean, mean))
        tl.store(means + tensor, mean)
        tl.store(unseens + tensor, 0)  # until a block of the refresh finds one
        tl.store(levels + tensor, tl.where(mean > 0, mixed, level))


@triton.jit
def _refresh_block(
    p_ptr, m_ptr, s_ptr, v_ptr, unseen_ptr, start, n, decay, step_size, bound, gamma, changed, mean, weight,
    one_minus_beta2, eps, beta3, floor, seed, position, power_ptr, TOUCH: tl.constexpr, CLIP: tl.constexpr,
    BRAKE: tl.constexpr, STOCHASTIC: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < n
    theta = _load(p_ptr, offsets, mask, FULL)
    m = _load(m_ptr, offsets, mask, FULL)
    s = _load(s_ptr, offsets, mask, FULL)
    v = _load(v_ptr, offsets, mask, FULL)
    _store(s_ptr, offsets, tl.zeros_like(s), mask, FULL)
    # A coordinate first seen on this very step has one sample in s; the steps before taught nothing.
    sigma = s / tl.where(v == 0, one_minus_beta2, weight) + eps
    sigma = _normal(tl.maximum(sigma, floor * mean))
    v = tl.where(changed != 0, 0.0, v)
    log_psi2 = _mix(-2.0 * tl.log2(_normal(v)), gamma * tl.log2(sigma), v == 0, beta3)
    refreshed = _normal(tl.exp2(-0.5 * log_psi2))
    if TOUCH:
        refreshed = tl.where((s > 0) & (s < float("inf")), refreshed, v)
    v = tl.where(gamma == 0, 1.0, refreshed)
    if TOUCH:
        if tl.max((mask & (v == 0)).to(tl.int32)) > 0:
            tl.atomic_max(unseen_ptr, 1)
    v = _update(p_ptr, v_ptr, theta, m, v, v, bound, gamma, decay, step_size, offsets, mask, seed, position,
                CLIP, STOCHASTIC, True, FULL)  # fmt: skip
    if BRAKE:
        tl.store(power_ptr, tl.sum(tl.where(s < float("inf"), s / weight * v * v, 0.0)))


@triton.jit
def refresh_kernel(
    table, numels, block_tensor, block_start, clock, any_due, seed_ptr, means, weights, beta3s, levels, powers, unseens,
    n_tensors, n_blocks, lr, gamma, changed, bias_correction1, weight_decay, one_minus_beta2, eps, clip, floor,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    DEVICE_CLOCK: tl.constexpr, DECOUPLED: tl.constexpr, TOUCH: tl.constexpr, CLIP: tl.constexpr,
    BRAKE: tl.constexpr, LR_SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Third of a refresh: psi from sigma, s back to 0, and the update."""
    block = tl.program_id(0)
    if DEVICE_CLOCK:
        block = tl.where(tl.load(any_due) != 0, block, n_blocks)
    seed = 0
    if STOCHASTIC:
        seed = tl.load(seed_ptr)
    while block < n_blocks:
        tensor, start, n = _place(table, numels, block_tensor, block_start, block, BLOCK)
        due = 1.0
        if DEVICE_CLOCK:
            due = tl.load(clock + tensor * COLUMNS + 0)
            bias_correction1 = tl.load(clock + tensor * COLUMNS + 2)
            lr = tl.load(clock + tensor * COLUMNS + 3)
            changed = tl.load(clock + tensor * COLUMNS + 6)
        if due > 0:
            p_ptr = _address(table, 0, tensor, n_tensors, P_DTYPE, ALIGNED)
            m_ptr = _address(table, 2, tensor, n_tensors, tl.float32, ALIGNED)
            s_ptr = _address(table, 3, tensor, n_tensors, tl.float32, ALIGNED)
            v_ptr = _address(table, 4, tensor, n_tensors, V_DTYPE, ALIGNED)
            step_size = _step_size(tl.load(levels + tensor), gamma, lr, bias_correction1, LR_SCALE)
            bound = clip * bias_correction1
            mean = tl.load(means + tensor)
            weight = tl.load(weights + tensor)
            beta3 = tl.load(beta3s + tensor)
            decay = 1.0
            if DECOUPLED:
                decay = 1.0 - lr * weight_decay
            position = block.to(tl.int64) * BLOCK - start
            if start + BLOCK <= n:
                _refresh_block(p_ptr, m_ptr, s_ptr, v_ptr, unseens + tensor, start, n, decay, step_size, bound, gamma,
                               changed, mean, weight, one_minus_beta2, eps, beta3, floor, seed, position,
                               powers + block, TOUCH, CLIP, BRAKE, STOCHASTIC, True, BLOCK)  # fmt: skip
            else:
                _refresh_block(p_ptr, m_ptr, s_ptr, v_ptr, unseens + tensor, start, n, decay, step_size, bound, gamma,
                               changed, mean, weight, one_minus_beta2, eps, beta3, floor, seed, position,
                               powers + block, TOUCH, CLIP, BRAKE, STOCHASTIC, False, BLOCK)  # fmt: skip
        block += tl.num_programs(0)


@triton.jit
def brake_kernel(
    powers, first_block, numels, clock, levels, brakes, due, gamma, one_minus_beta1,
    DEVICE_CLOCK: tl.constexpr, LEAST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Last of every step: each tensor's brake from the blocks' sums, in a fixed order."""
    tensor = tl.program_id(0)
    if DEVICE_CLOCK:
        due = tl.where(tl.load(clock + tensor * COLUMNS + 4) > 0, tl.load(clock + tensor * COLUMNS + 0), -1.0)
    n = tl.load(numels + tensor)
    if (due >= 0) & (n >= LEAST):
        begin = tl.load(first_block + tensor)
        end = tl.load(first_block + tensor + 1)
        total = tl.zeros((CHUNK,), tl.float32)
        while begin < end:
            blocks = begin + tl.arange(0, CHUNK)
            total += tl.load(powers + blocks, mask=blocks < end, other=0.0)
            begin += CHUNK
        power = tl.sum(total) / n.to(tl.float32)
        foreseen = tl.load(brakes + tensor * 3 + 0)
        average = tl.load(brakes + tensor * 3 + 1)
        excess = tl.load(brakes + tensor * 3 + 2)
        average += (power - average) * one_minus_beta1
        ratio = average / tl.where(foreseen > 0, foreseen, 1.0)
        excess = tl.where((foreseen > 0) & (ratio < float("inf")), tl.maximum(excess, ratio), excess)
        scale = _scale(tl.load(levels + tensor), gamma)
        expected = tl.maximum(power, scale * scale)
        fresh = tl.where((power > 0) & (expected < float("inf")), expected, 0.0)
        tl.store(brakes + tensor * 3 + 0, tl.where(due > 0, fresh, foreseen))
        tl.store(brakes + tensor * 3 + 1, tl.where(due > 0, fresh, average))
        tl.store(brakes + tensor * 3 + 2, tl.where(due > 0, 1.0, excess))
