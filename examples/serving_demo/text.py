"""The text that prompts are cut from."""

from importlib import metadata
from pathlib import Path
from random import Random

CHECKOUT = Path(__file__).parents[2]


def read_text(file: Path | None) -> tuple[str, bytes]:
    """Name and bytes of `file`, or else of the project's README: beside the package in a checkout,
    in the metadata of an installed package. Raises OSError when there is none."""
    if file is not None:
        return str(file), file.read_bytes()
    if (CHECKOUT / "pyproject.toml").exists():
        return "README.md", (CHECKOUT / "README.md").read_bytes()
    try:
        description = metadata.metadata("torch_kvswap")["Description"]
    except metadata.PackageNotFoundError as error:
        raise FileNotFoundError("torch_kvswap is not installed and brings no README") from error
    return "the README", description.encode()


def cut_prompts(text: bytes, count: int, shortest: int, longest: int, seed: int) -> list[bytes]:
    """`count` pieces of `text`, each of `shortest` to `longest` bytes; the text has `longest`."""
    random = Random(seed)
    lengths = [random.randint(shortest, longest) for _ in range(count)]
    starts = [random.randint(0, len(text) - length) for length in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
