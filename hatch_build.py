"""Puts the shipped draft weights into the wheel, as modeling/weights, where server/models.py looks without a checkout.

An editable install reads them from the checkout instead: a copy there would be stale after the next training run.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WeightsHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["weights"] = "modeling/weights"
