"""Derivatives that need no autograd: complex step, central differences, and the check of a hand-written backward pass against them."""

import numpy as np

STEP = 1e-30


def complex_step(function, arrays, name, direction):
    """Directional derivative of function(**arrays), a real array, along `direction` in the array `name`; exact to rounding."""
    moved = {**arrays, name: arrays[name] + 1j * STEP * direction}
    return np.asarray(function(**moved)).imag / STEP


def central_difference(function, arrays, name, direction, step=1e-6):
    """The same by central differences, good to about 1e-8: for kinks and for checking complex_step itself."""
    ahead = function(**{**arrays, name: arrays[name] + step * direction})
    behind = function(**{**arrays, name: arrays[name] - step * direction})
    return (np.asarray(ahead) - np.asarray(behind)) / (2 * step)


def jacobian_product(function, arrays, name, cotangent):
    """J^T cotangent for the array `name`, an entry at a time by complex step."""
    gradient = np.zeros(arrays[name].shape)
    for index in np.ndindex(gradient.shape):
        direction = np.zeros(gradient.shape)
        direction[index] = 1.0
        gradient[index] = np.sum(cotangent * complex_step(function, arrays, name, direction))
    return gradient


def assert_gradients(function, gradients, arrays, cotangent):
    """Every gradient in {array name: gradient} equals J^T cotangent by complex step, entry by entry."""
    for name, got in gradients.items():
        want = jacobian_product(function, arrays, name, cotangent)
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12 * max(1.0, np.abs(want).max(initial=0.0)), err_msg=f"d{name}")
