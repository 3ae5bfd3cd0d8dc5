"""Shows a job that is followed: progress on stderr, and the job's output as it was written.

On a terminal, progress is one line that is rewritten, with the time since the job was accepted. Where stderr is none,
or stdout is a pipe, it is that line alone, once the job has ended, and before it why the job waits.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, TextIO

from moorage.cli.framework.console import is_live, is_piped, is_quiet, plain, print_err
from moorage.cli.framework.exit_codes import shell_code
from moorage.cli.framework.render import age, ports_words, state, waits
from moorage.cli.framework.screen import cut
from moorage.cli.jobs.job_rows import stall_event_words
from moorage.cli.jobs.labelled import Labelled
from moorage.cli.jobs.replica_words import Eta, replica_words
from moorage.client.answers import explained_in
from moorage.schemas.job import CANCELLED, QUEUED, STARTS_WITH, STATES, TERMINAL
from moorage.schemas.ranges import RANGES_SAID, Ranges, count_of, format_ranges, is_in, ranges_of
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.output import Piece
    from moorage.schemas.answers.jobs import Explained
    from moorage.schemas.frames import Event

#: a line that follows many small steps is drawn anew no more often than this, in seconds
REDRAW_S: Final = 0.1


class Progress:
    """Shows one job that is followed. `quiet`, and -q of the command, show the job's output alone.

    Output goes to stdout and stderr as the job wrote it; with `labelled`, in whole lines that begin with their replica.
    With `whole`, the output should come from its beginning, so a first piece that begins later is reported as a loss.
    The one line of a job with several `replicas` says how many are in which state. With `looks_back`, a job that had
    ended before has no such line outside a terminal.
    """

    def __init__(
        self,
        job: str,
        *,
        quiet: bool = False,
        whole: bool = False,
        labelled: bool = False,
        named: bool = False,
        replicas: int = 1,
        only: Ranges | None = None,
        looks_back: bool = False,
    ) -> None:
        """With `named` beside `labelled`, each line begins with the job as well; with `only`, states are shown of the
        job itself and of these replicas."""
        self._job = job
        self._quiet = quiet or is_quiet()
        self._looks_back = looks_back
        self._whole = whole
        # who reads a pipe may write to this terminal at any moment, also behind a line that is unfinished
        self._rewrites = is_live(sys.stderr) and not is_piped(sys.stdout)
        self._line = ""
        self._drawn = False
        self._shown_s = -REDRAW_S
        self._began_s = time.monotonic()
        self._accepted_ms: int | None = None
        self._changed_ms = 0
        self._offsets: dict[tuple[int, int, str], int] = {}
        self._at_line_start = True
        self._simulated = False
        self._replicated = False
        self._replicas = replicas if only is None else count_of(only)
        self._only = only
        self._states: dict[int, str] = {}  # by replica
        self._eta = Eta()
        self._labelled = Labelled(job=job if named else "", has_replicas=replicas > 1) if labelled else None
        self._state = ""
        self._reason = ""  # why it waits, as last said in a pipe
        self._noted = ""

    def event(self, event: Event) -> None:
        """Show a transition: the job's new state, and where it is."""
        self._simulated = self._simulated or event.simulated
        if not self._state and event.state in TERMINAL and self._looks_back and not self._rewrites:
            self._quiet = True
        self._state = event.state
        for change in event.changes:
            self._accepted_ms = change.time_ms if self._accepted_ms is None else self._accepted_ms
            self._changed_ms = change.time_ms
        if event.waiting is not None:
            self.waiting(explained_in(event.waiting))
        if self._quiet:
            return
        if event.stalled is not None and self._shows(event.stalled.replica):
            self._note(f"warning[stalled]: {stall_event_words(event.stalled)}")
        changes = [change for change in event.changes if self._shows(change.replica)]
        self._replicated = self._replicated or any(change.replica > 0 for change in changes)
        moved = [change for change in changes if change.replica >= 0 and change.state in STATES]
        gone = [change.replica for change in moved if change.state == CANCELLED and change.why.startswith(STARTS_WITH)]
        self._replicas -= len(gone)
        self._states.update({change.replica: change.state for change in moved if change.replica not in gone})
        if self._replicas > 1 and (changes or (event.replicas is not None and self._only is None)):
            self._show("  ".join(filter(None, (self._tag(event.state), self._counted(event)))))
            return
        for change in changes[-1:]:
            words = [self._tag(change.state)]
            if change.worker:
                words.append(f"on {change.worker}{' sim' if self._simulated else ''}")
            if change.gpus:
                words.append(many(len(change.gpus), "GPU"))
            if self._replicated and change.replica >= 0:
                words.append(f"replica {change.replica}")
            if change.attempt > 1:
                words.append(f"attempt {change.attempt}")
            if change.code:
                words.append(f"code {shell_code(change.code)}")
            if change.why:
                words.append(change.why)
            self._show("  ".join(words))

    @property
    def _has_ended(self) -> bool:
        """Whether the job is over, or the replicas that are wanted of it."""
        is_over = self._only is not None and self._replicas == sum(each in TERMINAL for each in self._states.values())
        return is_over or self._state in TERMINAL

    def _shows(self, replica: int) -> bool:
        """Return whether a change is shown: of the job itself (-1), or of a replica that is wanted."""
        return self._only is None or replica < 0 or is_in(self._only, replica)

    def _counted(self, event: Event) -> str:
        """Return `running 32  waiting 5  done 3 (1 failed: 17)`, with when the last will end; "" before any is placed.

        Of very many replicas the event has the counts, else the transitions so far.
        """
        if event.replicas is not None and self._only is None:
            states, ended = dict(event.replicas.states), None
        else:
            states = dict(Counter(self._states.values()))
            states[QUEUED] = states.get(QUEUED, 0) + max(0, self._replicas - len(self._states)) if states else 0
            ended = {name: self._which(name) for name in states}
        return "  ".join(filter(None, (replica_words(states, ended), self._eta.words(states))))

    def _which(self, name: str) -> str:
        return format_ranges(
            ranges_of(replica for replica, state in self._states.items() if state == name), RANGES_SAID
        )

    def waiting(self, why: Explained) -> None:
        """Show why the job waits."""
        if self._quiet or not why.reason:
            return
        if self._has_ended:
            return  # other replicas wait
        text = f"{self._tag('QUEUED')}  {waits(why)}"
        if self._rewrites:
            self._show(text)
        elif why.reason != self._reason:
            self._reason = why.reason
            print_err(text)

    def _note(self, text: str) -> None:
        if not self._quiet:
            self.erase()
            print_err(text)

    def output(self, piece: Piece) -> None:
        """Write a piece of the job's output, or show a note or ports that its worker sends in the same stream."""
        if not piece.is_output:
            self._show_piece(piece)
            return
        key = (piece.replica, piece.attempt, piece.stream)
        expected = self._offsets.get(key, 0 if self._whole else piece.offset)
        if piece.dropped:
            self._name_cut(key, piece)
        elif piece.offset > expected:
            self._note(
                f"warning[output]: {piece.offset - expected} bytes of the job's {piece.stream} did not arrive here"
            )
        self._offsets[key] = max(expected, piece.behind)
        if self._labelled is not None:
            data = piece.text.encode() if piece.data is None else piece.data
            self._write(piece.stream, self._labelled.lines(key, data, end=piece.end))
        elif piece.data is not None:
            self._write(piece.stream, piece.data)
        elif piece.text:
            self._write(piece.stream, piece.text)

    def _name_cut(self, key: tuple[int, int, str], piece: Piece) -> None:
        """Write a line, in the output itself, about the part of it that the worker did not keep."""
        line = f"[moorage: {piece.dropped} bytes of std{piece.stream} are dropped here, by output_cap_bytes]\n".encode()
        if self._labelled is not None:
            for unfinished in (self._labelled.lines(key, b"", end=True), self._labelled.lines(key, line, end=False)):
                self._write(piece.stream, unfinished)
        else:
            self._write(piece.stream, b"\n" + line)

    def _show_piece(self, piece: Piece) -> None:
        """Show what the worker does before the start, or the job's ports. In a pipe, a pull of an image is one line in
        all."""
        of = f"replica {piece.replica}: " if self._labelled is not None else ""
        if piece.ports:
            self._note(f"{of}ports: {ports_words(piece.ports)}")
            return
        if piece.note.startswith("warning["):
            self._note(f"{of}{piece.note}")
            return
        head = piece.note.split(": ")[0]
        if self._rewrites and not self._quiet:
            self._show(f"{self._tag(self._state)}  {of}{piece.note}")
        elif head != self._noted:
            self._noted = head
            self._note(f"{self._tag(self._state)}  {of}{head}")

    def _write(self, name: str, text: str | bytes) -> None:
        """Write output: on a terminal as text, otherwise byte by byte as it came, whatever the stream's encoding."""
        if not text:
            return
        self.erase()
        stream: TextIO = sys.stdout if name == "out" else sys.stderr
        if not stream.isatty():
            stream.flush()
            stream.buffer.write(text.encode() if isinstance(text, str) else text)
        else:
            stream.write(text.decode(errors="replace") if isinstance(text, bytes) else text)
        stream.flush()
        if stream.isatty():
            self._at_line_start = text[-1:] in ("\n", b"\n")

    def show_line(self, text: str) -> None:
        """Show this text as the progress line."""
        if not self._quiet:
            self._line = text
            self._draw()

    def show_often(self, text: str, now_s: float) -> None:
        """Show this text as the progress line, unless another was shown less than `REDRAW_S` ago: over a slow line each
        takes its time."""
        if now_s - self._shown_s >= REDRAW_S:
            self._shown_s = now_s
            self.show_line(text)

    def tick(self) -> None:
        """Write labelled lines that stay unfinished, and redraw the progress line, if it is there, with the time that
        has passed."""
        for name, text in self._labelled.overdue() if self._labelled is not None else ():
            self._write(name, text)
        if self._drawn:
            self._draw()

    def erase(self) -> None:
        """Erase the progress line, so that something else can be written."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False

    def close(self) -> None:
        """Write the unfinished lines of the output, and leave the last progress line on the terminal; elsewhere print
        it, if the job has ended."""
        for name, text in self._labelled.rest() if self._labelled is not None else ():
            self._write(name, text)
        if not self._rewrites:
            if self._line and self._has_ended:
                print_err(f"{self._line}  {age(self._lasted_ms())}")
        elif self._line and not self._drawn:
            self._draw()
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._drawn = False

    def _tag(self, name: str) -> str:
        return f"{self._job}  {state(name, sys.stderr)}"

    def _show(self, text: str) -> None:
        if text == self._line:
            return
        self._line = text
        if self._rewrites:
            self._draw()

    def _lasted_ms(self) -> float:
        """Return the time since the job was accepted, in ms; until its end if it is over. If its acceptance was not
        seen, since this began to follow it."""
        here_ms = (time.monotonic() - self._began_s) * 1000
        if self._accepted_ms is None:
            return here_ms
        if self._state in TERMINAL:
            return self._changed_ms - self._accepted_ms
        return max(here_ms, time.time() * 1000 - self._accepted_ms)  # where this host's clock is behind, the former

    def _draw(self) -> None:
        text = self._line
        if not self._at_line_start:
            sys.stderr.write("\n")
            self._at_line_start = True
        waited = age(self._lasted_ms())
        room = shutil.get_terminal_size().columns - len(waited) - 3
        shown = cut(plain(text), room)
        sys.stderr.write(f"\r\x1b[K{shown}  {waited}")
        sys.stderr.flush()
        self._drawn = True
