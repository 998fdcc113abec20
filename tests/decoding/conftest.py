"""Checks every shape and type at the edges of `decoding` while its tests run."""

from jaxtyping import install_import_hook

install_import_hook(["decoding"], "beartype.beartype")
