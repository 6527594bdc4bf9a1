"""Triton kernels for many small residual networks at once: images are channels-last, and network r owns the r-th of
equally many of them, so that a layer of all networks is one launch.

Every kernel is told how many images a network has, how many networks there are, and of how many norms' channels,
parameters and kernels' numbers each has a row.

A library's convolution of 16 channels leaves most of a GPU idle, and its batch norm reads everything again; here a
convolution sums the next norm's statistics while it has the values at hand.
"""

# A kernel's language only looks like Python: its types are not pyright's.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-5)
"""BatchNorm's, torch's default."""


@triton.jit
def convolve(
    x,  # (networks, images, height, width, INPUTS)
    kernel,  # (networks, 9, INPUTS, OUTPUTS) of the forward pass
    z,  # (networks, images, height / STRIDE, width / STRIDE, OUTPUTS)
    sums,  # (2, networks, norms) from this norm's first channel on
    images,
    networks,
    norms,
    parameters,
    kernels,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z = conv3x3(x), and for each channel the sum of z and of its squares."""
    network = tl.program_id(1).to(tl.int64)
    OUT: tl.constexpr = SIDE // STRIDE
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = pixel // (OUT * OUT)
    row, column = pixel // OUT % OUT, pixel % OUT
    given, made = tl.arange(0, INPUTS), tl.arange(0, OUTPUTS)
    inside = image < images
    x += network * images * (SIDE * SIDE * INPUTS)
    kernel += network * kernels
    total = tl.zeros((BLOCK, OUTPUTS), tl.float32)
    for tap in range(9):
        i, j = row * STRIDE + tap // 3 - 1, column * STRIDE + tap % 3 - 1
        seen = inside & (i >= 0) & (i < SIDE) & (j >= 0) & (j < SIDE)
        place = (image * SIDE + i) * SIDE + j
        a = tl.load(x + place[:, None] * INPUTS + given[None, :], mask=seen[:, None], other=0.0)
        w = tl.load(kernel + (tap * INPUTS + given[:, None]) * OUTPUTS + made[None, :])
        total = tl.dot(a, w, total)
    rounded = total.to(z.dtype.element_ty)
    z += network * images * (OUT * OUT * OUTPUTS)
    tl.store(z + pixel[:, None] * OUTPUTS + made[None, :], rounded, mask=inside[:, None])
    value = rounded.to(tl.float32)
    tl.atomic_add(sums + network * norms + made, tl.sum(value, 0), sem="relaxed")
    tl.atomic_add(sums + (networks + network) * norms + made, tl.sum(value * value, 0), sem="relaxed")


@triton.jit
def _moments(sums, network, networks, norms, channel, count):
    """The mean and 1 / deviation of each channel."""
    mean = tl.load(sums + network * norms + channel) / count
    square = tl.load(sums + (networks + network) * norms + channel) / count
    return mean, tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + EPSILON)


@triton.jit
def normalise(
    z,
    sums,
    gain,  # (networks, parameters) from this norm's first on
    bias,
    shortcut,  # what is added: as large as z, or twice as wide and high with fewer channels
    y,
    images,
    networks,
    norms,
    parameters,
    kernels,
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHORTCUT: tl.constexpr,  # its channels; 0: there is none
    BLOCK: tl.constexpr,
):
    """y = relu(batchnorm(z) + shortcut)."""
    network = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    inside = pixel < images * (SIDE * SIDE)
    mean, inverse = _moments(sums, network, networks, norms, channel, images * (SIDE * SIDE))
    weight = tl.load(gain + network * parameters + channel)
    offset = tl.load(bias + network * parameters + channel)
    place = pixel[:, None] * CHANNELS + channel[None, :]
    base = network * images * (SIDE * SIDE * CHANNELS)
    value = tl.load(z + base + place, mask=inside[:, None], other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * (inverse * weight)[None, :] + offset[None, :]
    value = value.to(y.dtype.element_ty).to(tl.float32)
    if SHORTCUT == CHANNELS:
        value += tl.load(shortcut + base + place, mask=inside[:, None], other=0.0).to(tl.float32)
    elif SHORTCUT > 0:
        image, row, column = pixel // (SIDE * SIDE), pixel // SIDE % SIDE, pixel % SIDE
        source = ((image * (2 * SIDE) + 2 * row) * (2 * SIDE) + 2 * column)[:, None] * SHORTCUT + channel[None, :]
        has = inside[:, None] & (channel < SHORTCUT)[None, :]
        theirs = network * images * (4 * SIDE * SIDE * SHORTCUT)
        value += tl.load(shortcut + theirs + source, mask=has, other=0.0).to(tl.float32)
    tl.store(y + base + place, tl.maximum(value, 0.0).to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def unnormalise(
    dy,
    z,
    sums,
    gain,
    dgain,
    dbias,
    dz,
    images,
    networks,
    norms,
    parameters,
    kernels,
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a norm's input, given that of its output and what `convolve_back` summed."""
    network = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    count = images * (SIDE * SIDE)
    mean, inverse = _moments(sums, network, networks, norms, channel, count)
    weight = tl.load(gain + network * parameters + channel)
    plain = tl.load(dbias + network * parameters + channel) / count
    scaled = tl.load(dgain + network * parameters + channel) / count
    inside = (pixel < count)[:, None]
    place = network * count * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    value = (tl.load(z + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
    result = (gradient - plain[None, :] - value * scaled[None, :]) * (inverse * weight)[None, :]
    tl.store(dz + place, result.to(dz.dtype.element_ty), mask=inside)


@triton.jit
def convolve_back(
    dz,  # (networks, images, SIDE / STRIDE, SIDE / STRIDE, OUTPUTS)
    kernel,
    shortcut,  # the gradient of what the shortcut is added to, as large as dz
    x,  # (networks, images, SIDE, SIDE, INPUTS): relu(norm(before) + ...)
    before,
    sums,  # that norm's
    dgain,  # (networks, parameters), that norm's too
    dbias,
    dx,
    images,
    networks,
    norms,
    parameters,
    kernels,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SHORTCUT: tl.constexpr,  # whether there is one
    BLOCK: tl.constexpr,
):
    """The gradient of a convolution's input where relu let it through, with that of the shortcut which leaves there;
    and those of the gain and bias of the norm before."""
    network = tl.program_id(1).to(tl.int64)
    OUT: tl.constexpr = SIDE // STRIDE
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, row, column = pixel // (SIDE * SIDE), pixel // SIDE % SIDE, pixel % SIDE
    given, made = tl.arange(0, INPUTS), tl.arange(0, OUTPUTS)
    inside = image < images
    theirs = network * images * (OUT * OUT * OUTPUTS)
    kernel += network * kernels
    total = tl.zeros((BLOCK, INPUTS), tl.float32)
    for tap in range(9):
        i, j = row + 1 - tap // 3, column + 1 - tap % 3
        seen = inside & (i >= 0) & (i < SIDE) & (j >= 0) & (j < SIDE)
        if STRIDE == 2:
            seen &= (i % 2 == 0) & (j % 2 == 0)
        place = (image * OUT + i // STRIDE) * OUT + j // STRIDE
        g = tl.load(dz + theirs + place[:, None] * OUTPUTS + made[None, :], mask=seen[:, None], other=0.0)
        w = tl.load(kernel + (tap * INPUTS + given[None, :]) * OUTPUTS + made[:, None])
        total = tl.dot(g, w, total)
    if SHORTCUT:
        has = inside
        if STRIDE == 2:
            has &= (row % 2 == 0) & (column % 2 == 0)
        source = ((image * OUT + row // STRIDE) * OUT + column // STRIDE)[:, None] * OUTPUTS + given[None, :]
        total += tl.load(shortcut + theirs + source, mask=has[:, None], other=0.0).to(tl.float32)
    place = network * images * (SIDE * SIDE * INPUTS) + pixel[:, None] * INPUTS + given[None, :]
    alive = tl.load(x + place, mask=inside[:, None], other=0.0) > 0
    rounded = tl.where(alive, total, 0.0).to(dx.dtype.element_ty)
    tl.store(dx + place, rounded, mask=inside[:, None])
    gradient = rounded.to(tl.float32)
    mean, inverse = _moments(sums, network, networks, norms, given, images * (SIDE * SIDE))
    value = (tl.load(before + place, mask=inside[:, None], other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
    tl.atomic_add(dbias + network * parameters + given, tl.sum(gradient, 0), sem="relaxed")
    tl.atomic_add(dgain + network * parameters + given, tl.sum(gradient * value, 0), sem="relaxed")


@triton.jit
def correlate(
    x,
    dz,
    dkernel,  # (networks, 9, INPUTS, OUTPUTS)
    images,
    networks,
    norms,
    parameters,
    kernels,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TAPS: tl.constexpr,  # of a program, rounded up to a power of 2
    USED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The gradient of a convolution's kernel; a program takes a part of its taps and of the images."""
    network = tl.program_id(2).to(tl.int64)
    OUT: tl.constexpr = SIDE // STRIDE
    made, across = tl.arange(0, OUTPUTS), tl.arange(0, TAPS * INPUTS)
    tap = tl.program_id(1) * USED + across // INPUTS
    given = across % INPUTS
    counts = across // INPUTS < USED
    x += network * images * (SIDE * SIDE * INPUTS)
    dz += network * images * (OUT * OUT * OUTPUTS)
    total = tl.zeros((TAPS * INPUTS, OUTPUTS), tl.float32)
    for block in range(BLOCKS):
        pixel = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        image, row, column = pixel // (OUT * OUT), pixel // OUT % OUT, pixel % OUT
        inside = image < images
        i = (row * STRIDE)[:, None] + (tap // 3 - 1)[None, :]
        j = (column * STRIDE)[:, None] + (tap % 3 - 1)[None, :]
        seen = inside[:, None] & counts[None, :] & (i >= 0) & (i < SIDE) & (j >= 0) & (j < SIDE)
        place = ((image[:, None] * SIDE + i) * SIDE + j) * INPUTS + given[None, :]
        a = tl.load(x + place, mask=seen, other=0.0)
        g = tl.load(dz + pixel[:, None] * OUTPUTS + made[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(tl.trans(a), g, total)
    target = (tap * INPUTS + given)[:, None] * OUTPUTS + made[None, :]
    tl.atomic_add(dkernel + network * kernels + target, total, mask=counts[:, None], sem="relaxed")
