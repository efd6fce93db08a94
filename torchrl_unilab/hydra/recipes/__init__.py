"""Whole configurations, for ``--config-name`` and for defaults lists."""
