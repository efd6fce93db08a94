"""Installed as ``hydra_plugins.torchrl_unilab``, where Hydra looks for plugins by itself."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

import torchrl_unilab.hydra  # noqa: F401  (registers the config groups)


class RecipesPlugin(SearchPathPlugin):
    """Lets ``--config-name`` and defaults lists find our recipes."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the recipes, behind the configs of the user."""
        search_path.append("torchrl-unilab", "pkg://torchrl_unilab.hydra.recipes")
