"""Record what comes of each part of TorchRL: ``python -m tests.compatibility``."""

from __future__ import annotations

import json

from tests.compatibility.parts import GROUPS, outcome
from tests.compatibility.test_parts import RECORD

RECORD.write_text(
    json.dumps(
        {group.title: {name: outcome(group, name) for name in group.parts} for group in GROUPS},
        indent=1,
    )
    + "\n"
)
