import pytest
import torch

from serving_demo.link import measure_link


@pytest.mark.gpu
def test_the_link_carries_more_than_a_gigabyte_a_second_each_way():
    speeds = measure_link(torch.device("cuda"))
    assert set(speeds) == {"store", "load"}
    assert all(1 < speed < 2000 for speed in speeds.values())
