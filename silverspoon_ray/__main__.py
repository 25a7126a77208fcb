"""``python -m silverspoon_ray``."""

from __future__ import annotations

import sys

from silverspoon_ray.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
