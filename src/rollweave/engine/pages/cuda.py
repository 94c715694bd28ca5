"""Pages of a GPU's memory, by the driver's virtual memory management
(`cuda.bindings.driver`). **This was not run on a GPU**: `tests/gpu/test_lending.py`
does, where there is one.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rollweave.engine.pages.base import PAGE_BYTES
from rollweave.schema.errors import PagesError


class CudaPages:
    """The driver of GPU number `device` (`PageDriver`). `driver` is the module of the
    driver's calls.
    """

    def __init__(self, driver: Any, device: int = 0) -> None:
        self._driver, self._device = driver, device
        self._handles: list[Any] = []
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        (least,) = self._call(
            "cuMemGetAllocationGranularity",
            self._properties,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        self.page_bytes = -(-PAGE_BYTES // int(least)) * int(least)

    def create(self, pages: int) -> None:
        for _ in range(pages):
            (handle,) = self._call("cuMemCreate", self.page_bytes, self._properties, 0)
            self._handles.append(handle)

    def reserve(self, nbytes: int) -> int:
        (address,) = self._call("cuMemAddressReserve", nbytes, self.page_bytes, 0, 0)
        return int(address)

    def map(self, address: int, page: int) -> None:
        size = self.page_bytes
        self._call("cuMemMap", address, size, 0, self._handles[page], 0)
        self._call("cuMemSetAccess", address, size, [self._access], 1)
        self._call("cuMemsetD8", address, 0, size)

    def unmap(self, address: int) -> None:
        self._call("cuCtxSynchronize")  # no kernel may still read the page
        self._call("cuMemUnmap", address, self.page_bytes)

    def release(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, nbytes), device=f"cuda:{self._device}")

    def close(self) -> None:
        for handle in self._handles:
            self._call("cuMemRelease", handle)
        self._handles.clear()

    def _call(self, name: str, *arguments: Any) -> Sequence[Any]:
        """Call the driver, and return its results without the status."""
        answer: tuple[Any, ...] = getattr(self._driver, name)(*arguments)
        status, *results = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise PagesError(f"{name}: {status}")
        return results


class _Bytes:
    """A range of a GPU's addresses, as other libraries describe their arrays to
    torch.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
