"""The text that prompts are cut from."""

from pathlib import Path
from random import Random

README = Path(__file__).parents[2] / "README.md"


def read_text(file: Path | None) -> tuple[str, bytes]:
    """The name and bytes of `file`, or of the project's README.

    Raises:
        OSError: the file cannot be read.
    """
    if file is None:
        return README.name, README.read_bytes()
    return str(file), file.read_bytes()


def cut_prompts(text: bytes, count: int, shortest: int, longest: int, seed: int) -> list[bytes]:
    """Cuts `count` prompts of `shortest` to `longest` bytes from a text of at least `longest`."""
    random = Random(seed)
    lengths = [random.randint(shortest, longest) for _ in range(count)]
    starts = [random.randint(0, len(text) - length) for length in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
