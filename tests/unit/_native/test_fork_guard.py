"""An object is refused in a process that was forked after it was made."""

import os

import pytest

from torch_kvswap._native.loader import ForkGuard


def test_the_process_that_made_it_may_use_it() -> None:
    ForkGuard().check("handler")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_is_refused_by_name() -> None:
    process = ForkGuard()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError) as error:
            process.check("handler")
        os.write(write, str(error.value).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == (
        f"this handler belongs to process {os.getpid()} and cannot be used in process {child}, forked "
        "from it; make a handler in each process"
    )
