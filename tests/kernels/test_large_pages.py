"""Memory for weights: tensors of their own in shared pieces, which end with the last of them."""

import gc
import mmap
import weakref

import pytest
import torch

from glassformer.kernels.large_pages import ALIGNED, PAGE, PIECE, LargePages, empty

needs_linux = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are requested on Linux only"
)


def tensor(memory: LargePages, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(memory.empty(shape))


def test_memory_begins_with_a_cache_line():
    for shape in ((3,), (5, 7), (1031,)):
        made = empty(shape)
        assert made.shape == shape and made.dtype == "float32"
        assert made.ctypes.data % ALIGNED == 0


def test_tensors_do_not_overlap():
    memory = LargePages()
    shapes = [(3, 5), (7,), (), (11, 13, 2), (0, 3), (1031,)]
    tensors = [tensor(memory, shape).fill_(place) for place, shape in enumerate(shapes)]
    for place, (made, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert made.shape == shape
        assert made.dtype == torch.float32
        assert torch.equal(made, torch.full(shape, float(place)))


@needs_linux
def test_pieces_begin_with_a_page_and_tensors_with_a_cache_line():
    memory = LargePages()
    first, second = tensor(memory, (3,)), tensor(memory, (5,))
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() == first.data_ptr() + ALIGNED


@needs_linux
def test_storages_are_separate():
    memory = LargePages()
    first, second = tensor(memory, (3,)), tensor(memory, (5,))
    assert first.untyped_storage().nbytes() == 12
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@needs_linux
def test_a_piece_is_freed_with_its_last_tensor():
    memory = LargePages()
    kept, other = tensor(memory, (3,)), tensor(memory, (5,))
    assert memory._piece is not None
    piece = weakref.ref(memory._piece)
    del other, memory
    gc.collect()
    assert piece() is not None
    kept.fill_(2.0)
    del kept
    gc.collect()
    assert piece() is None


def test_a_tensor_larger_than_a_piece():
    memory = LargePages()
    before = tensor(memory, (5,)).fill_(1.0)
    large = tensor(memory, (PIECE // 4 + 3,))
    after = tensor(memory, (7,)).fill_(2.0)
    large[-1] = 3.0
    assert before.tolist() == [1.0] * 5
    assert large[-1] == 3.0
    assert after.tolist() == [2.0] * 7


@needs_linux
def test_a_kernel_without_large_pages_gives_ordinary_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9_999)  # advice that no kernel knows
    made = tensor(LargePages(), (3, 5))
    assert made.fill_(2.0).sum() == 30
