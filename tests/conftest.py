"""What every test runs under: shapes and types at the edges of the numerical packages are checked while tests run."""

from jaxtyping import install_import_hook

install_import_hook(["decoding", "modeling"], "beartype.beartype")
