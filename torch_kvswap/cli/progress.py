"""Progress of a long run on one line."""

from typing import TextIO

WIDTH = 32


class Progress:
    """A progress bar on a terminal, or a line per 10 % elsewhere, of a run that ends at `total`."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._done = 0
        self._shown = -1

    def advance(self, count: int) -> None:
        """Adds `count` to the progress and prints it if the shown value changed."""
        self._done += count
        percent = 100 * self._done // self._total
        shown = percent if self._is_terminal else percent // 10
        if shown == self._shown:
            return
        self._shown = shown
        if self._is_terminal:
            bar = "#" * (WIDTH * percent // 100)
            self._stream.write(f"\r{self._label} [{bar:<{WIDTH}}] {percent:3d} %")
            self._stream.write("\n" if self._done == self._total else "")
        else:
            self._stream.write(f"{self._label} {percent:3d} %\n")
        self._stream.flush()
