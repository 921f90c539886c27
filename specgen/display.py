"""What the user sees of a run, on standard error; standard output belongs to the data.

One protocol, five displays: `rich` (live, for terminals), `plain` (a line every few seconds, for
logs), `json` (one object a line, for programs), `none` (settings and summary only) and quiet.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, cast

from specgen.acceptance_view import summary_tables
from specgen.live_view import duration, eta, live_view, settings_view
from specgen.stats import RunStats
from specgen.wording import counted, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

__all__ = ["Display", "ProgressKind", "create_display", "format_value", "progress_line"]

ProgressKind = Literal["auto", "rich", "plain", "json", "none"]

_PLAIN_SECONDS = 5.0
_MAX_WARNINGS = 10


class Display(Protocol):
    """Watches a run; never takes part in it."""

    def start(self, settings: Mapping[str, Any], total: int | None) -> None:
        """Show the effective settings; `total` rows will come, None if unknown."""

    def advance(self, stats: RunStats) -> None:
        """A row was finished and is counted in `stats`."""

    def note(self, message: str) -> None:
        """Say something the user may want to know."""

    def warn(self, message: str, hint: str | None = None) -> None:
        """Say something the user should look at, such as a bad row."""

    def close(self) -> None:
        """End the live part; may be called more than once."""

    def summary(self, stats: RunStats, seconds: float, whole: RunStats | None = None) -> None:
        """Show the closing tables: of this run, and of `whole`, its output with earlier runs."""

    def error(self, message: str, hint: str | None, exit_code: int) -> bool:
        """Show what ended the run; False leaves it to the command line, which says it in words."""
        return False


def create_display(
    kind: ProgressKind, *, quiet: bool = False, data_on_terminal: bool = False
) -> Display:
    """The display for `--progress`.

    Args:
        kind: `auto` is rich on a terminal and plain lines otherwise.
        quiet: show only that rows failed; errors that end the run are not shown by displays.
        data_on_terminal: rows are printed to the same terminal, which a live display would garble.
    """
    if sys.stderr is None:
        return QuietDisplay()
    stream = cast(TextIO, _Tolerant(sys.stderr))
    if quiet:
        return QuietDisplay(stream)
    if kind == "auto":
        live = stream.isatty() and not data_on_terminal and os.environ.get("TERM") != "dumb"
        kind = "rich" if live else "plain"
    if kind == "rich":
        return RichDisplay(stream)
    if kind == "plain":
        return PlainDisplay(stream)
    if kind == "json":
        return JsonDisplay(stream)
    return TextDisplay(stream)


class _Tolerant:
    """Standard error that may go away: a log that cannot be written must not end the job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def format_value(value: object) -> str:
    """A setting as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value)) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={format_value(v)}" for k, v in value.items()) or "-"
    return str(value)


def progress_line(stats: RunStats, total: int | None) -> str:
    """Where a run stands, in one line."""
    seconds = stats.elapsed()
    parts = [f"{stats.rows_done:,}/{'?' if total is None else format(total, ',')} rows"]
    if stats.rows_failed:
        parts.append(f"{stats.rows_failed:,} failed")
    parts.append(f"{stats.completion_tokens / max(seconds, 1e-9):,.1f} tok/s")
    length = stats.speculation.mean_acceptance_length
    if length is not None:
        parts.append(f"acceptance length {length:.2f}")
    left = eta(stats, total, seconds)
    parts.append(f"{duration(seconds)} elapsed")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


class QuietDisplay:
    """Shows errors only: that rows failed, once at the end.

    Args:
        stream: where; None: nowhere.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def start(self, settings: Mapping[str, Any], total: int | None) -> None:
        """Nothing."""

    def advance(self, stats: RunStats) -> None:
        """Nothing."""

    def note(self, message: str) -> None:
        """Nothing."""

    def warn(self, message: str, hint: str | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def summary(self, stats: RunStats, seconds: float, whole: RunStats | None = None) -> None:
        """Say how many rows failed, if any."""
        if stats.rows_failed and self._stream is not None:
            failed = counted(stats.rows_failed, "row")
            self._stream.write(f"error: {failed} failed; the output has the reasons\n")

    def error(self, message: str, hint: str | None, exit_code: int) -> bool:
        """Left to the command line."""
        return False


class TextDisplay:
    """Settings, remarks and the closing tables; no progress."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console: Console = Console(
            file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._total: int | None = None
        self._num_warnings = 0

    def _say(self, text: str) -> None:
        self._console.print(printable(text))

    def start(self, settings: Mapping[str, Any], total: int | None) -> None:
        """Print the settings, one a line."""
        self._total = total
        width = max((len(name) for name in settings), default=0)
        for name, value in settings.items():
            self._say(f"{name:<{width}}  {format_value(value)}")

    def advance(self, stats: RunStats) -> None:
        """Nothing; subclasses show progress."""

    def note(self, message: str) -> None:
        """Print it."""
        self._say(message)

    def warn(self, message: str, hint: str | None = None) -> None:
        """Print it, unless there were many already: all bad rows are in the output."""
        self._num_warnings += 1
        if self._num_warnings <= _MAX_WARNINGS:
            self._say(f"warning: {message}")
            if hint is not None:
                self._say(f"hint: {hint}")
        if self._num_warnings == _MAX_WARNINGS:
            self._say("warning: further failed rows are shown in the output only")

    def close(self) -> None:
        """Nothing; subclasses end their live part."""

    def summary(self, stats: RunStats, seconds: float, whole: RunStats | None = None) -> None:
        """Print the closing tables."""
        self.close()
        for table in summary_tables(stats, seconds, self._console, whole):
            self._console.print(table, soft_wrap=False)

    def error(self, message: str, hint: str | None, exit_code: int) -> bool:
        """Left to the command line."""
        return False


class PlainDisplay(TextDisplay):
    """A line every few seconds, if something changed."""

    def __init__(self, stream: TextIO, interval: float = _PLAIN_SECONDS) -> None:
        super().__init__(stream)
        self._interval = interval
        self._stats: RunStats | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, settings: Mapping[str, Any], total: int | None) -> None:
        """Print the settings and begin to watch."""
        super().start(settings, total)
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def advance(self, stats: RunStats) -> None:
        """Remember what to show next."""
        self._stats = stats

    def _watch(self) -> None:
        shown = -1
        while not self._ended.wait(self._interval):
            stats = self._stats
            if stats is not None and stats.rows_done != shown:
                shown = stats.rows_done
                self._progress(stats)

    def _progress(self, stats: RunStats) -> None:
        self._say(progress_line(stats, self._total))

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class JsonDisplay(PlainDisplay):
    """One JSON object a line: `start`, `progress`, `note`, `warning`, `summary`, `error`."""

    def __init__(self, stream: TextIO, interval: float = _PLAIN_SECONDS) -> None:
        super().__init__(stream, interval)
        self._stream = stream

    def _event(self, event: str, **fields: Any) -> None:
        text = json.dumps({"event": event, **fields}, default=str)
        self._stream.write(text + "\n")
        self._stream.flush()

    def _say(self, text: str) -> None:
        """Settings come as an object instead."""

    def start(self, settings: Mapping[str, Any], total: int | None) -> None:
        """Report the settings and begin to watch."""
        self._event("start", settings=dict(settings), total=total)
        super().start({}, total)

    def note(self, message: str) -> None:
        """Report it."""
        self._event("note", message=message)

    def warn(self, message: str, hint: str | None = None) -> None:
        """Report it; programs can take them all."""
        self._event("warning", message=message, hint=hint)

    def error(self, message: str, hint: str | None, exit_code: int) -> bool:
        """Report it, as the last line."""
        self._event("error", message=message, hint=hint, exit_code=int(exit_code))
        return True

    def _progress(self, stats: RunStats) -> None:
        seconds = stats.elapsed()
        self._event(
            "progress",
            rows_done=stats.rows_done,
            rows_failed=stats.rows_failed,
            total=self._total,
            completion_tokens=stats.completion_tokens,
            tokens_per_s=stats.completion_tokens / max(seconds, 1e-9),
            mean_acceptance_length=stats.speculation.mean_acceptance_length,
            elapsed_s=seconds,
            eta_s=eta(stats, self._total, seconds),
        )

    def summary(self, stats: RunStats, seconds: float, whole: RunStats | None = None) -> None:
        """Report the whole summary."""
        self.close()
        self._event("summary", **stats.summary(seconds, whole))


class RichDisplay(TextDisplay):
    """Two live lines, redrawn a few times a second whatever the rate of rows."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._stats: RunStats | None = None
        self._live: Live | None = None

    def start(self, settings: Mapping[str, Any], total: int | None) -> None:
        """Print the settings and open the live lines."""
        from rich.live import Live

        self._total = total
        self._console.print(settings_view(settings, self._console, format_value), soft_wrap=False)
        self._live = Live(
            get_renderable=self._view,
            console=self._console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()

    def _view(self) -> RenderableType:
        if self._stats is None:
            return ""
        return live_view(self._stats, self._total, self._console)

    def advance(self, stats: RunStats) -> None:
        """Remember what to show next."""
        self._stats = stats

    def close(self) -> None:
        """Take the live lines away."""
        if self._live is not None:
            self._live.stop()
