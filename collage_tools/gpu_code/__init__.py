"""Tool ``gpu_code``: the kernels that a GPU would run for a step, on a machine without a GPU."""

from collage_tools.gpu_code.kernels import GpuCode, GpuKernel, gpu_code

__all__ = ["GpuCode", "GpuKernel", "gpu_code"]
