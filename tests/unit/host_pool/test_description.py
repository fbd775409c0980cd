"""What people read if the descriptions of two pages differ."""

from torch_kvswap.host_pool.description import difference


def test_long_values_are_cut_to_where_they_differ() -> None:
    same = "option 1, " * 30
    here, there = f"{same}dtype 'fp8'", f"{same}quantization 'awq', {same}"
    assert difference({"model": here}, {"model": there}, ("here", "there")) == (
        f"model: ...{same[:100]}dtype 'fp8' here, "
        f"...{same[:100]}quantization 'awq', {same[:80]}... there"
    )
