"""Compiled elementwise and rowwise kernels, in one pass over memory each."""

from __future__ import annotations

import math

import numpy as np
from numba.types import boolean, float32, float64, int64

from xformer.kernels.numba.compile import in_array, kernel, out_array
from xformer.kernels.numba.vector_math import (
    MIN_SORTABLE_INT,
    ONE,
    ZERO,
    exp,
    float_to_sortable_int,
    sortable_int_to_float,
)

_f32 = np.float32  # a Python number would turn a computation into float64

# --- elementwise ----------------------------------------------------------------------------------------------------


@kernel(in_array(1), in_array(1), float32, out_array(1), out_array(1))
def gelu(x, coefficients, p, y, slope):
    """Compute GELU as kernels/numpy/gelu.py does, and its derivative unless `slope` is empty."""
    c0, c1, c2, c3 = coefficients[0], coefficients[1], coefficients[2], coefficients[3]
    c4, c5, c6, c7 = coefficients[4], coefficients[5], coefficients[6], coefficients[7]
    max_abs, half, density = _f32(30.0), _f32(-0.5), _f32(1.0 / math.sqrt(2.0 * math.pi))
    save = slope.size > 0
    for i in range(x.size):
        a = abs(x[i])
        a = max_abs if a > max_abs else a
        power = exp(half * a * a)
        t = ONE / (ONE + p * a)
        s = (((((((c7 * t + c6) * t + c5) * t + c4) * t + c3) * t + c2) * t + c1) * t + c0) * t * power
        y[i] = (x[i] if x[i] > ZERO else ZERO) - a * s
        if save:
            s -= density * a * power
            slope[i] = s if x[i] < ZERO else ONE - s


@kernel(in_array(1), float32, float32, out_array(1), out_array(1))
def logistic_unit(x, scale, cubic, y, slope):
    """Compute y = x s(scale (x + cubic x^3)), s the logistic function, and its derivative unless `slope` is empty."""
    limit, three, save = _f32(80.0), _f32(3.0), slope.size > 0
    for i in range(x.size):
        low = -limit if x[i] < -limit else x[i]  # minus infinity times zero would be NaN
        clipped = limit if low > limit else low
        square = clipped * clipped
        z = scale * clipped * (ONE + cubic * square)
        a = abs(z)
        e = exp(-(limit if a > limit else a))
        s = (ONE if z > ZERO else e) / (ONE + e)
        y[i] = low * s
        if save:
            slope[i] = s + clipped * s * (ONE - s) * scale * (ONE + three * cubic * square)


@kernel(in_array(1), out_array(1))
def relu(x, y):
    """Compute y = max(x, 0), which propagates NaN."""
    for i in range(x.size):
        y[i] = ZERO if x[i] < ZERO else x[i]


@kernel(in_array(1), in_array(1), out_array(1))
def relu_vjp(g, y, dx):
    """Compute dx = g where y > 0, else 0."""
    for i in range(g.size):
        dx[i] = g[i] if y[i] > ZERO else ZERO


@kernel(in_array(1), in_array(1, boolean), float32, out_array(1))
def dropout(x, mask, scale, y):
    """Compute y = scale x where the mask is True, else 0."""
    for i in range(x.size):
        y[i] = x[i] * scale if mask[i] else ZERO


@kernel(in_array(3), in_array(2), in_array(2), out_array(3))
def rotate(x, cosine, sine, y):
    """Rotate features j and j + half of x, (heads, length, features); copy features beyond 2 half."""
    half = cosine.shape[1]
    for i in range(x.shape[0]):
        for t in range(x.shape[1]):
            row, cos, sin, out = x[i, t], cosine[t], sine[t], y[i, t]
            first, second, out_first, out_second = row[:half], row[half:], out[:half], out[half:]
            for j in range(half):
                out_first[j] = first[j] * cos[j] - second[j] * sin[j]
                out_second[j] = second[j] * cos[j] + first[j] * sin[j]
            for j in range(2 * half, row.size):
                out[j] = row[j]


@kernel(out_array(1), in_array(1), out_array(1), out_array(1), *[float64] * 7)
def adam(p, g, m, v, step_size, beta1, beta2, bias_correction2, epsilon, decay, grad_scale):
    """Update parameter p and its moments m and v in place, with the gradient grad_scale g."""
    b1, c1, b2, c2 = _f32(beta1), _f32(1.0 - beta1), _f32(beta2), _f32(1.0 - beta2)
    a, correction, eps, shrink = _f32(step_size), _f32(bias_correction2), _f32(epsilon), _f32(decay)
    for i in range(p.size):
        gradient = _f32(grad_scale) * g[i]
        m[i] = b1 * m[i] + c1 * gradient
        v[i] = b2 * v[i] + c2 * (gradient * gradient)
        p[i] = shrink * p[i] - a * m[i] / (math.sqrt(v[i] * correction) + eps)


# --- norms ----------------------------------------------------------------------------------------------------------


@kernel(in_array(2), in_array(1), in_array(1), float32, boolean, out_array(2), out_array(2))
def norm(x, weight, bias, epsilon, centered, y, statistics):
    """Compute layer norm if `centered`, else RMS norm.

    statistics: (2, rows), the mean and the inverse standard deviation of each row.
    """
    features = x.shape[1]
    for i in range(x.shape[0]):
        x_row, y_row, mean, variance = x[i], y[i], ZERO, ZERO
        if centered:
            for j in range(features):
                mean += x_row[j]
            mean /= _f32(features)
        for j in range(features):
            variance += (x_row[j] - mean) * (x_row[j] - mean)
        inverse = ONE / math.sqrt(variance / _f32(features) + epsilon)
        statistics[0, i], statistics[1, i] = mean, inverse
        if bias.size > 0:
            for j in range(features):
                y_row[j] = (x_row[j] - mean) * inverse * weight[j] + bias[j]
        else:
            for j in range(features):
                y_row[j] = (x_row[j] - mean) * inverse * weight[j]


@kernel(in_array(2), in_array(2), in_array(1), in_array(2), boolean, out_array(2), out_array(1), out_array(1))
def norm_vjp(g, x, weight, statistics, centered, dx, dweight, dbias):
    """With x^ the normalized rows and h = g w: dx = (h - mean(h) - x^ mean(h x^)) / sigma."""
    features = x.shape[1]
    for i in range(x.shape[0]):
        x_row, g_row, dx_row, mean, inverse = x[i], g[i], dx[i], statistics[0, i], statistics[1, i]
        mean_h, mean_product = ZERO, ZERO
        for j in range(features):
            x_hat, h = (x_row[j] - mean) * inverse, g_row[j] * weight[j]
            mean_h += h
            mean_product += h * x_hat
            dweight[j] += g_row[j] * x_hat
            dbias[j] += g_row[j]
        mean_h = mean_h / _f32(features) if centered else ZERO
        mean_product /= _f32(features)
        for j in range(features):
            x_hat = (x_row[j] - mean) * inverse
            dx_row[j] = (g_row[j] * weight[j] - mean_h - x_hat * mean_product) * inverse


# --- cross-entropy --------------------------------------------------------------------------------------------------


@kernel(in_array(2), in_array(1, int64), int64, float32, float32, out_array(1), out_array(2))
def cross_entropy(logits, labels, pad_id, smoothing, z_loss, losses, statistics):
    """Compute the loss of each row.

    statistics: (2, rows), the largest logit and the sum of exp(logit - largest).
    """
    classes = logits.shape[1]
    for i in range(logits.shape[0]):
        row, max_int, total, sum_logits = logits[i], MIN_SORTABLE_INT, ZERO, ZERO
        losses[i] = ZERO
        if labels[i] == pad_id:
            continue
        for j in range(classes):
            sum_logits += row[j]
            max_int = max(max_int, float_to_sortable_int(row[j]))
        largest = sortable_int_to_float(max_int)
        for j in range(classes):
            total += exp(row[j] - largest)
        statistics[0, i], statistics[1, i] = largest, total
        log_z = largest + math.log(total)
        loss = (ONE - smoothing) * (log_z - row[labels[i]])
        if z_loss > ZERO:  # the square of log_z may overflow
            loss += z_loss * log_z * log_z
        losses[i] = loss + smoothing * (log_z - sum_logits / _f32(classes)) if smoothing > ZERO else loss


@kernel(in_array(1), in_array(2), in_array(1, int64), in_array(2), int64, float32, float32, out_array(2))
def cross_entropy_vjp(g, logits, labels, statistics, pad_id, smoothing, z_loss, dlogits):
    """Compute dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution, Z the partition function."""
    classes = logits.shape[1]
    for i in range(logits.shape[0]):
        row, out, largest, total = logits[i], dlogits[i], statistics[0, i], statistics[1, i]
        if labels[i] == pad_id:
            for j in range(classes):
                out[j] = ZERO
            continue
        factor = g[i] * (ONE + _f32(2.0) * z_loss * (largest + math.log(total))) / total
        low = g[i] * smoothing / _f32(classes)
        for j in range(classes):
            out[j] = exp(row[j] - largest) * factor - low
        out[labels[i]] -= (ONE - smoothing) * g[i]
