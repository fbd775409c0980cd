"""The text that prompts are cut from."""

from pathlib import Path
from random import Random

README = Path(__file__).parents[2] / "README.md"


def read_text(file: Path | None) -> tuple[str, bytes]:
    """Name and bytes of `file`, or else of the project's README.

    Raises:
        OSError: it cannot be read.
    """
    if file is None:
        return README.name, README.read_bytes()
    return str(file), file.read_bytes()


def cut_prompts(text: bytes, count: int, shortest: int, longest: int, seed: int) -> list[bytes]:
    """`count` pieces of `text`, each of `shortest` to `longest` bytes; the text has `longest`."""
    random = Random(seed)
    lengths = [random.randint(shortest, longest) for _ in range(count)]
    starts = [random.randint(0, len(text) - length) for length in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
