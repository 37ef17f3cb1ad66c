import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.command import BenchmarkError
from benchmarks.server import Server, free_port

# Answers 503 three times, as llama-server does while it loads, then with the completion of its second argument.
_FAKE = """
import http.server, json, subprocess, sys
subprocess.Popen(["sleep", "60"])
calls = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global calls
        calls += 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["max_tokens"] == 1, asked
        self.send_response(503 if calls < 4 else 200 if sys.argv[2].isdigit() else 400)
        self.end_headers()
        tokens = int(sys.argv[2]) if sys.argv[2].isdigit() else sys.argv[2]
        self.wfile.write(json.dumps({"usage": {"completion_tokens": tokens}}).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _server(answer: str) -> Server:
    port = free_port()
    return Server([sys.executable, "-c", _FAKE, str(port), answer], port, {})


def test_the_first_token_is_waited_for_and_the_end_ends_all_processes() -> None:
    with _server("1") as server:
        assert server.seconds_to_first_token() > 0
        tree = psutil.Process().children(recursive=True)
        ours = [each for each in tree if each.name() == "sleep" or str(server.port) in each.cmdline()]
        assert len(ours) == 2
        assert server.resident_bytes() == sum(each.memory_info().rss for each in ours)
    psutil.wait_procs(ours, timeout=10)
    assert not any(each.is_running() and each.status() != "zombie" for each in ours)


def test_a_server_that_gives_more_than_it_was_asked_for_is_not_timed() -> None:
    with _server("2") as server, pytest.raises(BenchmarkError, match="asked for one token"):
        server.seconds_to_first_token()


def test_a_refusal_is_shown() -> None:
    with _server("refused") as server, pytest.raises(BenchmarkError, match=r"answered 400: .*refused"):
        server.seconds_to_first_token()


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = ["sh", "-c", f"echo cannot open {tmp_path / 'model.gguf'} >&2; exit 7"]
    with Server(command, free_port(), {}) as server, pytest.raises(BenchmarkError, match=r"code 7: cannot open .*gguf"):
        server.seconds_to_first_token()
