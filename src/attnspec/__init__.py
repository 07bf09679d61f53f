"""Attention formulas written once as plain NumPy (the spec), and fast twins that must agree.

    >>> import numpy as np, attnspec
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 6, 8))
    >>> attnspec.attend("sinkhorn_attention", q, k, v, n_iters=5).shape
    (4, 6, 8)

Every reference function is an attribute of this package too: `attnspec.cog_attention(q, k, v)`.
"""

from typing import Any

from attnspec.dispatch import Selection, attend, backends, formulas, select

__version__ = "0.1.0"
__all__ = ["Selection", "__version__", "attend", "backends", "formulas", "select"]


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        from attnspec import reference

        if name in reference.__all__:
            return getattr(reference, name)
    raise AttributeError(f"module 'attnspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    from attnspec import reference

    return sorted({*globals(), *reference.__all__})
