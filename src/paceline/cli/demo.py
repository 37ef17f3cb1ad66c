"""``paceline demo``: everything once, in the order in which a new user meets it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

MODEL = "smollm2-135m"
QUESTION = "In two sentences: why does a server that runs a language model keep a cache?"
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


def demo(
    output: Annotated[
        Path | None, typer.Option(help="Directory for the measurement. Default: runs/<UTC time>-bench-load.")
    ] = None,
) -> None:
    """Fetch a small model, serve it on a free port, chat with it, and measure it: about two minutes."""
    from paceline.cli.bench_load import load
    from paceline.cli.chat import chat
    from paceline.cli.pull import pull_progress
    from paceline.models import catalog

    _say(f"1. Fetching {MODEL} (93 MB, once)")
    with pull_progress() as progress:
        print(catalog.pull(MODEL, progress))
    _say("2. Serving it")
    with _server() as url:
        _say(f"3. Asking it something. A model of 135 million parameters is fast, not wise.\n\n> {QUESTION}")
        chat(url, question=QUESTION, max_tokens=120, temperature=0.0)
        _say("4. Measuring it, one request at a time and then eight at once")
        try:
            load(url, concurrency="1,8", output=output)
        except typer.Exit as end:  # how the command ends, well or not
            if end.exit_code:
                raise
    _say(
        "5. Going on\n"
        f"   paceline serve {MODEL}          a server to point your application at\n"
        "   paceline chat                       a conversation in the terminal\n"
        "   paceline bench load URL             the same measurement of a server you already run\n"
        f"   paceline bench engine {MODEL}   the engine without HTTP\n"
        "   paceline --help"
    )


def _say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


@contextmanager
def _server() -> Iterator[str]:
    """A `paceline serve` of our own on a free port, for as long as the block runs; gives its URL."""
    import os
    import re
    import subprocess
    import sys
    import tempfile
    import time

    from paceline.errors import PacelineError

    command = [sys.executable, "-m", "paceline.cli.main", "serve", MODEL, "--port", "0"]
    print("$ paceline", *command[3:], flush=True)
    # A key in the environment guards the user's own servers, not this one.
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE_API_KEY"}
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own: Ctrl-C reaches only us, and we end the server in good order.
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while (ready := re.search(r"ready: (\S+)", _written(log))) is None:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise PacelineError(f"the server did not start:\n{_written(log)}")
                time.sleep(0.05)
            print(_written(log).rstrip())
            yield ready[1]
        finally:
            server.terminate()
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _written(log: IO[str]) -> str:
    log.seek(0)
    return log.read()
