"""Installed as ``hydra_plugins.torchrl_unilab``, where Hydra looks for plugins by itself."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from torchrl_unilab.hydra.nodes import NodeSource  # Hydra takes each plugin that it sees here


class RecipesPlugin(SearchPathPlugin):
    """Lets ``--config-name`` and defaults lists find our recipes and nodes."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append both, behind the configs of the user."""
        search_path.append("torchrl-unilab", "pkg://torchrl_unilab.hydra.recipes")
        search_path.append("torchrl-unilab", f"{NodeSource.scheme()}://")
