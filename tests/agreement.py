"""What tests of the fast twins share."""

import numpy as np

from attnspec import numba_kernels, reference


def assert_same(name, arrays, options=None, rtol=1e-9, atol=1e-11):
    """The Numba twin's float64 results, all of them, are the reference's up to rounding; NaN and infinity stand in the same places."""
    call = {**arrays, **(options or {})}
    got, want = (getattr(package, name)(**call) for package in (numba_kernels, reference))
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert np.shape(ours) == np.shape(theirs)
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=f"{name}, {list(options or {})}")
