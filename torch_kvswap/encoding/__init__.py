"""How a block is stored in its slot of a host page.

Public: `recommend_encoding()`, which users call before they make a pool, and what it returns.
"""

from torch_kvswap.encoding.recommend import EncodingRecommendation, recommend_encoding

__all__ = ["EncodingRecommendation", "recommend_encoding"]
