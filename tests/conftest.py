"""What every test runs under: shapes and types at the edges of `decoding` are checked, and torch keeps to one thread.

Tiny products gain nothing from two, and lose much where a core is busy with something else.
"""

import os
from typing import TYPE_CHECKING

import pytest
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from tests.tiny.models import TinyModels

os.environ.setdefault("OMP_NUM_THREADS", "1")
install_import_hook(["decoding"], "beartype.beartype")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> "TinyModels":
    """Tiny random models on disk; imported here so that tests of the server never load torch."""
    from tests.tiny.models import TinyModels

    return TinyModels(tmp_path_factory.mktemp("models"))
