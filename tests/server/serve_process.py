"""``paceline serve`` as a process of its own."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


class ServeProcess:
    """A ``paceline serve`` process with one output, read as far as it was needed."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self.process = process
        self.output = output
        self.text = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        while True:
            found = re.search(pattern, self.text)
            if found:
                return found
            with suppress(OSError):  # EIO is a terminal's end of file
                piece = os.read(self.output, 65536)
                if piece:
                    self.text += piece.decode()
                    continue
            raise AssertionError(f"the output ended without {pattern!r}:\n{self.text}")

    @property
    def url(self) -> str:
        return self.read_until(r"ready\W+(http://127\.0\.0\.1:\d+) ")[1]

    def end(self, *signals: signal.Signals) -> int:
        for number in signals:
            self.process.send_signal(number)
        return self.process.wait(timeout=20)
