"""The workloads behind `attnspec bench`: our kernels beside what people use today, timed in turn on the same arrays."""

from attnspec.bench.machine import Machine, describe_machine
from attnspec.bench.timing import Row, Timing, general_workload, measure
from attnspec.bench.workloads import Workload, mlx_workloads, workloads

__all__ = ["Machine", "Row", "Timing", "Workload", "describe_machine", "general_workload", "measure", "mlx_workloads", "workloads"]
