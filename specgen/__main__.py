"""`python -m specgen`."""

from __future__ import annotations

from specgen.cli import main

if __name__ == "__main__":
    main()
