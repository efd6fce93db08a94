"""``python -m torchrl_unilab``."""

from torchrl_unilab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
