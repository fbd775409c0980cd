"""The ops under torch.compile. Compares values, because opcheck does not see memory behind
addresses.
"""

import pytest
import torch

from torch_kvswap import ops

OPS = torch.ops.torch_kvswap
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAPPING = torch.tensor([[0, 0]])

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(function, backend, **options):
    return torch.compile(function, backend=backend, **options)


def addresses(*tensors):
    return [torch.tensor([tensor.data_ptr()]) for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["wrapper", "packet", "default"])
def test_an_address_copy_is_not_deleted_or_moved(backend, device, form):
    call = {
        "wrapper": ops.swap_blocks_batch,
        "packet": OPS.swap_blocks_batch,
        "default": OPS.swap_blocks_batch.default,
    }[form]
    cache, source = torch.zeros(8, device=device), torch.ones(8)
    (src, dst), size = addresses(source, cache), torch.tensor([32])

    def step(cache, src, dst, size):
        before = cache.sum()
        call(src, dst, size)
        return before, cache.sum()

    before, after = compiled(step, backend)(cache, src, dst, size)
    assert (float(before), float(after)) == (0.0, 8.0)


@pytest.mark.parametrize("form", ["packet", "default"])
def test_an_address_copy_breaks_whole_graphs(backend, form):
    call = OPS.swap_blocks_batch if form == "packet" else OPS.swap_blocks_batch.default
    cache, source = torch.zeros(8), torch.ones(8)
    (src, dst), size = addresses(source, cache), torch.tensor([32])

    class Step(torch.nn.Module):
        def forward(self, src, dst, size):
            call(src, dst, size)
            return size + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="swap_blocks_batch"):
        compiled(Step(), backend, fullgraph=True)(src, dst, size)
    with pytest.raises(Exception, match="swap_blocks_batch"):  # its class differs by release
        torch.export.export(Step(), (src, dst, size))
    assert not cache.any()


@pytest.mark.parametrize("device", DEVICES)
def test_swap_blocks_mixes_with_other_in_place_ops(backend, device):
    cache = torch.zeros(4, 8, device=device)
    source = torch.arange(32.0).reshape(4, 8)

    def step(cache, source):
        cache.add_(1)
        ops.swap_blocks(source, cache, 32, torch.tensor([[1, 0], [2, 3]]))
        cache.mul_(2)
        row = cache[0] + 0
        ops.swap_blocks(cache, cache, 32, torch.tensor([[3, 0]]))
        cache[1:2].zero_()
        return row, cache.sum()

    row, total = compiled(step, backend)(cache, source)
    expected = torch.stack([2 * source[2], torch.zeros(8), torch.full((8,), 2.0), 2 * source[2]])
    assert torch.equal(row.cpu(), 2 * source[1])
    assert torch.equal(cache.cpu(), expected)
    assert float(total) == float(expected.sum())


@pytest.mark.parametrize("device", DEVICES)
def test_swap_blocks_compiles_once_for_varying_sizes(backend, device):
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    frames = CompileCounterWithBackend(backend)

    def step(source, cache):
        ops.swap_blocks(source, cache, source.stride(0) * source.element_size(), MAPPING)

    run = torch.compile(step, backend=frames, fullgraph=True, dynamic=True)
    for width in range(3, 8):
        cache, source = torch.zeros(2, width, device=device), torch.ones(2, width)
        run(source, cache)
        assert cache.tolist() == [[1] * width, [0] * width]
    assert frames.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_one_cache_are_written_through(backend, device):
    cache = torch.zeros(4, 2, 8, device=device)
    source = torch.ones(4, 8)

    def step(cache, source, ids):
        keys, values = cache.unbind(1)
        ops.swap_kv_blocks([source, source], [keys, values], ids, ids)
        return cache[2].sum()

    assert float(compiled(step, backend)(cache, source, torch.tensor([2]))) == 16.0
    assert float(cache.sum()) == 16.0


@pytest.mark.parametrize("device", DEVICES)
def test_expand_block_ids_compiles_once_for_varying_counts(backend, device):
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    frames = CompileCounterWithBackend(backend)

    def step(ids, skip, count):
        return ops.expand_block_ids(ids, 4, skip, count) + 1

    run = torch.compile(step, backend=frames)
    for length in range(3, 11):
        ids = torch.arange(length, device=device)
        got = run(ids, length - 2, 2 * length)
        expected = torch.arange(4 * length)[length - 2 :][: 2 * length] + 1
        assert torch.equal(got.cpu(), expected)
    assert frames.frame_count <= 2


@pytest.mark.parametrize("device", DEVICES)
def test_expand_block_ids_writes_an_out_of_graphs(backend, device):
    def step(ids):
        out = torch.zeros(6, dtype=torch.int64, device=device)
        ops.expand_block_ids(ids, 3, out=out)
        return out * 2

    got = compiled(step, backend, fullgraph=True)(torch.tensor([1, 4], device=device))
    assert got.tolist() == [6, 8, 10, 24, 26, 28]


@pytest.mark.gpu
def test_a_large_pinned_destination_is_right_on_return(backend):
    # Compilers copy into a clone of the destination and copy back on the host.
    rows, row_bytes = 64, 4 << 20
    src = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device="cuda")
    dst = torch.zeros(rows, row_bytes, dtype=torch.uint8).pin_memory()
    mapping = torch.stack([torch.randperm(rows), torch.randperm(rows)], 1)

    def step(src, dst, mapping):
        dst.add_(1)
        ops.swap_blocks(src, dst, row_bytes, mapping)
        return dst[:, 0] + 0

    expected = src.cpu()[mapping[:, 0]]
    first = compiled(step, backend)(src, dst, mapping)
    assert torch.equal(dst[mapping[:, 1]], expected)
    assert torch.equal(first[mapping[:, 1]], expected[:, 0])


@pytest.mark.gpu
def test_a_large_pinned_source_is_read_in_time(backend):
    rows, row_bytes = 64, 4 << 20
    src = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8).pin_memory()
    dst = torch.zeros(rows, row_bytes, dtype=torch.uint8, device="cuda")
    mapping = torch.stack([torch.randperm(rows), torch.randperm(rows)], 1)
    expected = src[mapping[:, 0]] + 1

    def step(src, dst, mapping):
        src.add_(1)
        ops.swap_blocks(src, dst, row_bytes, mapping)
        src.zero_()
        return dst.sum()

    compiled(step, backend)(src, dst, mapping)
    assert torch.equal(dst.cpu()[mapping[:, 1]], expected)
    assert not src.any()
