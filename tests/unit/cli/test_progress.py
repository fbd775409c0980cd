from io import StringIO

from torch_kvswap.cli.progress import Progress


class Terminal(StringIO):
    def isatty(self):
        return True


def shown(stream):
    progress = Progress("serving", 200, stream)
    for _ in range(200):
        progress.advance(1)
    return stream.getvalue()


def test_a_terminal_gets_one_line_that_grows():
    text = shown(Terminal())
    assert text.count("\n") == 1
    assert text.split("\r")[51] == f"serving [{'#' * 16}{' ' * 16}]  50 %"
    assert text.endswith(f"\rserving [{'#' * 32}] 100 %\n")


def test_elsewhere_there_is_a_line_every_tenth():
    tenths = [f"serving {percent:3d} %" for percent in range(0, 101, 10)]
    assert shown(StringIO()).splitlines() == tenths
