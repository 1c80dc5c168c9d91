"""The order of the rows that the rotary embedding turns.

Meta's files, llama2.c's and GGUF's of the llama kind rotate neighbouring pairs (0, 1), (2, 3), ... of a head. Hugging
Face's layout rotates (0, D/2), (1, D/2 + 1), ...: the even rows of each head come first, then the odd ones.
"""

from torch import Tensor


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k, weight [heads * D, ...] or bias [heads * D], from pairs of neighbours to half-split order."""
    rows, *rest = weight.shape
    if rows % (2 * heads):
        raise ValueError(f"{rows} rows are not {heads} heads of an even size")
    return weight.reshape(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(weight.shape)
