"""A CUDA device without a GPU: the CPU computes, and mixed devices and waits for the device are found.

It needs a CUDA build of torch, because a CPU build cannot index tensors on `cuda:0`. There is no backward pass. Tensors
have values, unlike in torch's FakeTensorMode, so a wait does not end the run.
"""

import sys
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
COPIES = (aten._to_copy.default, aten.copy_.default)
READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class GpuTensor(torch.Tensor):
    """Tensor that reports a CUDA device, with its values in the tensor `host` on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host):
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, host.shape, device=FakeGpu.device, **layout)
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise RuntimeError(f"{function} was called outside the context of the FakeGpu")

    def __repr__(self):
        return f"GpuTensor({self.host})"

    def tolist(self):
        """As torch does it for tensors on a GPU, but not for subclasses."""
        return self.cpu().tolist()


class FakeGpu(TorchDispatchMode):
    """Context in which `device` can be used as if there were a GPU.

    `waits` are the functions of the package that have waited for the device, including blocking copies to it.
    """

    device = torch.device("cuda:0")

    def __init__(self):
        super().__init__()
        self.waits = set()

    def __enter__(self):
        torch._C._ensureCUDADeviceGuardSet()
        self.lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self.patch = mock.patch.multiple(
            "torch.cuda", _lazy_init=lambda: None, mem_get_info=lambda device: (2**34, 2**34),
            memory_reserved=lambda device: 0, memory_allocated=lambda device: 0,
        )  # fmt: skip
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.patch.stop()
        torch._C._set_only_lift_cpu_tensors(self.lifts)

    def move(self, module):
        """Move a module to the device."""
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        module.to(self.device)
        torch.__future__.set_overwrite_module_params_on_conversion(before)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        leaves, structure = tree_flatten((arguments, options or {}))
        ours = [leaf for leaf in leaves if isinstance(leaf, GpuTensor)]
        given = (options or {}).get("device")
        to_gpu = bool(ours) if given is None else given.type == "cuda"
        if waits(function, arguments, options or {}, bool(ours), to_gpu):
            self.waits.add(place())
        if (ours or to_gpu) and function not in COPIES:
            check_devices(function, arguments, leaves)
        host_arguments, host_options = tree_unflatten([on_host(leaf) for leaf in leaves], structure)
        result = function(*host_arguments, **host_options)
        if function is aten.copy_.default:
            return arguments[0]
        if ours and torch.Tag.inplace_view in function.tags:
            with torch._C._DisableTorchDispatch():  # only shape and strides change
                return function(*arguments, **(options or {}))
        if not to_gpu:
            return result
        same = {id(tensor.host): tensor for tensor in ours}
        return tree_map_only(torch.Tensor, lambda t: same[id(t)] if id(t) in same else GpuTensor(t), result)


def on_host(leaf):
    """Return an argument for the computation on the CPU."""
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("cpu")
    return leaf.host if isinstance(leaf, GpuTensor) else leaf


def check_devices(function, arguments, leaves):
    """Refuse tensors on the CPU, except single numbers and indices, and generators of the CPU."""
    indices = arguments[1] if function in INDEXING else ()
    for leaf in leaves:
        tensor = isinstance(leaf, torch.Tensor) and not isinstance(leaf, GpuTensor)
        if tensor and leaf.ndim and not any(leaf is index for index in indices):
            raise RuntimeError(f"{function}: a tensor of shape {tuple(leaf.shape)} is on the CPU, others on the GPU")
        if isinstance(leaf, torch.Generator) and leaf.device.type == "cpu":
            raise RuntimeError(f"{function}: the generator is for the CPU, but the result is on the GPU")


def waits(function, arguments, options, from_gpu, to_gpu):
    """Return whether the CPU waits for the GPU in a function: if it copies between them or reads values."""
    if function is aten._to_copy.default:
        return from_gpu != to_gpu and not options.get("non_blocking")
    if function is aten.copy_.default:
        between = isinstance(arguments[0], GpuTensor) != isinstance(arguments[1], GpuTensor)
        return between and arguments[1].ndim > 0 and not any(arguments[2:])
    if function in INDEXING and from_gpu:
        indices = [index for index in arguments[1] if index is not None]
        return any(index.dtype == torch.bool or not isinstance(index, GpuTensor) for index in indices)
    return from_gpu and bool(READS_VALUES & set(function.tags))


def place():
    """Return the innermost function of the package that is running, apart from those of `features.py`."""
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("tvr_lightning.") and module != "tvr_lightning.features":
            return f"{module.removeprefix('tvr_lightning.')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return ""
