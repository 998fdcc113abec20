"""How many threads share the outputs of one matrix product with unquantised weights; one by default.

The bits do not depend on it: an output is one chain of additions, whoever computes it.
"""

from modeling.kernels.build import load_kernels


def set_num_threads(count: int) -> int:
    """Let so many threads share products from now on, the calling one included; returns how many do.

    They may run on the cores that the calling thread may use, so it should not be pinned to one. Without kernels of our
    own nothing happens: torch has its own threads.
    """
    library = load_kernels()
    return 1 if library is None else int(library.jetspec_set_threads(count))
