"""Fast twins of the formulas for CPUs: fused kernels compiled by Numba, float32 and float64, on all processors.

    from attnspec.numba_kernels import scaled_dot_product_attention

Names, parameters and defaults are those of `attnspec.reference`. float16 and bfloat16 are computed in float32. `threads(count)` limits the
threads inside a with block; the environment variable NUMBA_NUM_THREADS does for the process.
"""

from attnspec.numba_kernels import affine, higher_order, memory, signed, softmax, transport
from attnspec.numba_kernels.affine import *  # noqa: F403
from attnspec.numba_kernels.higher_order import *  # noqa: F403
from attnspec.numba_kernels.memory import *  # noqa: F403
from attnspec.numba_kernels.signed import *  # noqa: F403
from attnspec.numba_kernels.softmax import *  # noqa: F403
from attnspec.numba_kernels.transport import *  # noqa: F403
from attnspec.numba_kernels.threads import thread_count, threads

__all__ = ["thread_count", "threads"]
__all__ += [name for family in (affine, higher_order, memory, signed, softmax, transport) for name in family.__all__]
