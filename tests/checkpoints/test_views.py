"""One protocol for all formats: the same names and views give the same numbers, whatever the file."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from joma._checkpoints.formats import open_file
from joma._checkpoints.formats.dcp import DcpFolder
from joma._checkpoints.formats.view import TensorView, contiguous_stride
from joma._checkpoints.reading import LocalFile

FORMATS = ("safetensors", "zip", "zip of views", "legacy", "chunks", "gguf")


def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 4, 8, generator=generator) for name in ("a", "b", "c")}


def write(how, folder):
    """Write the weights in a format, and open them."""
    tensors = weights()
    if how == "chunks":
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, checkpoint_id=folder)
        return DcpFolder.local(folder)
    path = folder / "weights.bin"
    if how == "safetensors":
        path = folder / "weights.safetensors"
        save_file(tensors, path)
    elif how == "gguf":
        gguf = pytest.importorskip("gguf")
        path = folder / "weights.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    elif how == "zip of views":
        turned = {name: tensor.transpose(0, 2).contiguous() for name, tensor in tensors.items()}
        torch.save({name: tensor.transpose(0, 2) for name, tensor in turned.items()}, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=how == "zip")
    return open_file(LocalFile(path))


@pytest.fixture(scope="module", params=FORMATS)
def opened(request, tmp_path_factory):
    return write(request.param, tmp_path_factory.mktemp(request.param.replace(" ", "-")))


def test_names_and_whole_tensors(opened):
    tensors = weights()
    assert sorted(opened.names()) == sorted(tensors)
    views = [opened.view(name) for name in opened.names()]
    for view in views:
        assert view.shape == (6, 4, 8)
        assert view.stride == (32, 8, 1)
        assert view.offset == 0
    for view, tensor in zip(views, opened.read_many(views), strict=True):
        assert torch.equal(tensor, tensors[view.name])


@st.composite
def parts(draw):
    """A tensor's name and a view of it that `torch` can make."""
    name = draw(st.sampled_from(sorted(weights())))
    view = weights()[name].permute(*draw(st.permutations(range(3))))
    for dimension in range(3):
        size = view.shape[dimension]
        start = draw(st.integers(0, size - 1))
        view = view.narrow(dimension, start, draw(st.integers(1, size - start)))
        step = draw(st.integers(1, 2))
        view = view[(slice(None),) * dimension + (slice(None, None, step),)]
    return name, view


@settings(max_examples=30, deadline=None)
@given(st.lists(parts(), min_size=1, max_size=5))
def test_any_parts_in_any_order_are_what_torch_shows(opened, chosen):
    views = []
    for name, view in chosen:
        part = opened.view(name).part(tuple(view.shape), view.stride(), view.storage_offset())
        views.append(part)
    before = opened.bytes_read
    for (_, expected), tensor in zip(chosen, opened.read_many(views), strict=True):
        assert torch.equal(tensor, expected)
    assert opened.bytes_read >= before


def test_a_tensor_read_block_by_block_is_the_tensor(opened):
    tensors = weights()
    whole = opened.view("b")
    blocks = list(whole.blocks(100))
    assert len(blocks) == 6
    result = torch.full((6, 4, 8), float("nan"))
    read = opened.read_many(block for _, _, block in blocks)
    for (dimension, start, block), tensor in zip(blocks, read, strict=True):
        result.narrow(dimension, start, block.shape[dimension]).copy_(tensor)
    assert torch.equal(result, tensors["b"])


@given(st.lists(st.integers(0, 5), max_size=4))
def test_strides_of_whole_tensors_are_those_of_torch(sizes):
    shape = tuple(sizes)
    view = TensorView.full("file", "name", torch.float16, shape)
    assert view.is_contiguous
    assert view.nbytes == 2 * torch.empty(shape).numel()
    if 0 not in shape:  # strides of nothing are a matter of taste
        assert contiguous_stride(shape) == torch.empty(shape).stride()
        assert view.extent == torch.empty(shape).numel()
