"""Build hook, not installed: an editable install gets the bridge's `.pth` file, but no copies of folders."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableHook(BuildHookInterface):
    """Replaces the wheel's `force-include` in editable installs, where it would copy and go stale."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a build."""
        build_data["force_include_editable"] = {"lmeval_prune/plugin/bridge.pth": "_lmeval_prune_bridge.pth"}
