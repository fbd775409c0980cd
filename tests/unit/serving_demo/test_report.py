import pytest
from expecttest import assert_expected_inline

from serving_demo.report import first_differences, traffic_table
from serving_demo.request import Request
from serving_demo.swapper import Traffic


def served(number, tokens):
    return Request(number, b"four", len(tokens), 16, tokens=tokens)


def test_the_first_difference_of_each_request_is_found():
    requests = [served(0, [1, 2, 3]), served(1, [1, 9, 9]), served(2, [8, 2, 3])]
    assert_expected_inline(
        "\n".join(map(str, first_differences(requests, [[1, 2, 3]] * 3))),
        """\
request 1, new token 1 (position 5): expected 2, got 9
request 2, new token 0 (position 4): expected 1, got 8""",
    )


def test_missing_tokens_are_no_agreement():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        first_differences([served(0, [1, 2])], [[1, 2, 3]])


TRAFFIC = {
    "store": Traffic(requests=3, blocks=20, nbytes=2_000_000, link_bytes=1_500_000, seconds=0.001),
    "load": Traffic(requests=3, blocks=20, nbytes=2_000_000, link_bytes=1_500_000, seconds=0.0001),
}


def test_the_table_gives_speeds():
    assert_expected_inline(
        traffic_table(TRAFFIC, None),
        """\
       requests    blocks        MB  link MB     GB/s
store         3        20       2.0      1.5     2.00
load          3        20       2.0      1.5    20.00""",
    )


def test_the_table_gives_the_share_of_the_link():
    table = traffic_table(TRAFFIC, {"store": 50.0, "load": 55.5})
    assert_expected_inline(
        table,
        """\
       requests    blocks        MB  link MB     GB/s   of the link
store         3        20       2.0      1.5     2.00      4% of 50.0
load          3        20       2.0      1.5    20.00     36% of 55.5""",
    )


def test_the_table_of_nothing_moved():
    assert_expected_inline(
        traffic_table({"store": Traffic(), "load": Traffic()}, None),
        """\
       requests    blocks        MB  link MB     GB/s
store         0         0       0.0      0.0     0.00
load          0         0       0.0      0.0     0.00""",
    )
