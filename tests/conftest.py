"""What every test runs under: shapes and types at the edges of the numerical packages are checked while tests run."""

from typing import TYPE_CHECKING

import pytest
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from tests.tiny.models import TinyModels

install_import_hook(["decoding", "modeling"], "beartype.beartype")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> "TinyModels":
    """Tiny random models on disk; imported here so that tests of the server never load torch."""
    from tests.tiny.models import TinyModels

    return TinyModels(tmp_path_factory.mktemp("models"))
