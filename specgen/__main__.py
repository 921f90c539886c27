"""The way in of `specgen` and `python -m specgen`."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    # Until it listens for signals, Ctrl-C ends the process instead of showing where that was.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from specgen.cli import cli

    cli()
    raise AssertionError("cli() exits")


if __name__ == "__main__":
    main()
