"""The demo's reports."""

from dataclasses import dataclass

from serving_demo.request import Request
from serving_demo.swapper import Traffic


@dataclass(frozen=True)
class Difference:
    """The first token of a request that differs from the expected one.

    Attributes:
        request (Request): the request.
        index (int): index of the token among the new tokens.
        expected (int): the expected token.
        got (int): the token that was generated.
    """

    request: Request
    index: int
    expected: int
    got: int

    def __str__(self) -> str:
        position = len(self.request.prompt) + self.index
        return (
            f"request {self.request.id}, new token {self.index} (position {position}): "
            f"expected {self.expected}, got {self.got}"
        )


def first_differences(requests: list[Request], expected: list[list[int]]) -> list[Difference]:
    """The first difference of each request that differs.

    Raises:
        ValueError: a request has another number of tokens than expected.
    """
    differences = []
    for request, tokens in zip(requests, expected, strict=True):
        pairs = enumerate(zip(tokens, request.tokens, strict=True))
        different = [Difference(request, i, a, b) for i, (a, b) in pairs if a != b]
        differences += different[:1]
    return differences


def traffic_table(traffic: dict[str, Traffic], link: dict[str, float] | None) -> str:
    """A table of requests, blocks, bytes and speed per direction.

    Args:
        traffic (dict[str, Traffic]): by direction.
        link (dict[str, float] | None): GB/s of one large copy, by direction.
    """
    lines = [
        "       requests    blocks        MB  link MB     GB/s" + ("   of the link" if link else "")
    ]
    for direction, moved in traffic.items():
        speed = moved.nbytes / moved.seconds / 1e9 if moved.seconds else 0.0
        share = f"{speed / link[direction]:8.0%} of {link[direction]:.1f}" if link else ""
        lines.append(
            f"{direction:5}{moved.requests:10}{moved.blocks:10}"
            f"{moved.nbytes / 1e6:10.1f}{moved.link_bytes / 1e6:9.1f}{speed:9.2f}{share}"
        )
    return "\n".join(lines)
