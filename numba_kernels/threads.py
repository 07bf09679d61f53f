from attnspec.numba_kernels.parallel import in_parallel, thread_count, threads  # noqa: F401  (to be removed)
