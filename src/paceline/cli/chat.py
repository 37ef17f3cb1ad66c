"""``paceline chat``: a conversation in the terminal, with a server or with a model of its own."""

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from paceline.cli.partners import ChatOptions, Messages, Partner

DEFAULT_URL = "http://localhost:8000"
DEFAULT_MODEL = "smollm2-135m"


def chat(
    model_or_url: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL_OR_URL]",
            help="A model to load, or the URL of a server. Default: the server at PACELINE_URL; if that is not set, "
            f"the one at {DEFAULT_URL} if there is one, else {DEFAULT_MODEL}.",
        ),
    ] = None,
    question: Annotated[str | None, typer.Option(help="Ask this one question and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.7,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: the rest of the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    quantize: Annotated[
        Literal["q8", "q4"] | None,
        typer.Option(help="Load MODEL and quantize its matrices of floats; embeddings and head to q8."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key that the server asks for.")
    ] = None,
) -> None:
    """Talk to a model. /clear forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer.

    Without a terminal, the whole standard input is one question: git diff | paceline chat --system "Review this"
    """
    import sys

    from paceline.cli.api_key import check_api_key
    from paceline.cli.partners import ChatOptions, find_partner

    options = ChatOptions(system, temperature, max_tokens, seed)
    key = None if api_key is None else check_api_key(api_key)
    # sys.stdin is None where it was closed (`<&-`).
    interactive = question is None and sys.stdin is not None and sys.stdin.isatty()
    asked = "" if interactive else _one_question(question)
    with closing(find_partner(model_or_url, options, key, quantize)) as partner:
        if interactive:
            _converse(partner, options)
            return
        print(f"[{partner.name}]", file=sys.stderr)
        _, stopped = _say(partner, [*_opening(options), {"role": "user", "content": asked}])
        if stopped:
            raise KeyboardInterrupt


def _one_question(question: str | None) -> str:
    """
    Raises:
        InputError: there is nothing in it.
    """
    import sys

    from paceline.errors import InputError

    if question is None:
        # Whatever the locale says: `git diff` has the bytes of all kinds of files.
        question = "" if sys.stdin is None else sys.stdin.buffer.read().decode(errors="replace")
    if not question.strip():
        raise InputError('the question is empty: give it as --question "TEXT", or on the standard input')
    return question


def _opening(options: "ChatOptions") -> "Messages":
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _converse(partner: "Partner", options: "ChatOptions") -> None:
    import readline  # noqa: F401 - gives input() its history and line editing
    import sys

    from paceline.errors import InputError, PacelineError

    print(f"{partner.name} · /clear forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer", file=sys.stderr)
    messages = _opening(options)
    leaving = False
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if leaving:
                return
            # It may have been meant for an answer that ended a moment ago.
            leaving = True
            print("Ctrl-C again or Ctrl-D ends", file=sys.stderr)
            continue
        leaving = False
        if question == "/exit":
            return
        if question == "/clear":
            messages = _opening(options)
        elif question:
            asked = [*messages, {"role": "user", "content": question}]
            try:
                text, _ = _say(partner, asked)
            except PacelineError as error:
                hint = " (/clear starts anew)" if isinstance(error, InputError) else ""
                print(f"error: {error}{hint}", file=sys.stderr)
            else:
                messages = [*asked, {"role": "assistant", "content": text}]


def _say(partner: "Partner", messages: "Messages") -> tuple[str, bool]:
    """Print an answer as it comes, and its speed on stderr; Ctrl-C keeps what there is of it.

    Returns the text, and whether it was stopped.
    """
    import sys

    from paceline.errors import PacelineError

    began = time.perf_counter()
    first: float | None = None
    tokens: int | None = None
    stopped = False
    pieces: list[str] = []
    answer = partner.answer(messages)
    try:
        for piece in answer:
            if isinstance(piece, int):
                tokens = piece
                continue
            first = first or time.perf_counter()
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stopped = True
    except PacelineError:
        if any(pieces):
            print(flush=True)
        raise
    ended = time.perf_counter()
    with suppress(KeyboardInterrupt):
        answer.close()
    print(flush=True)
    print(_speed(began, first, ended, tokens, stopped=stopped), file=sys.stderr)
    return "".join(pieces), stopped


def _speed(began: float, first: float | None, ended: float, tokens: int | None, *, stopped: bool) -> str:
    """TTFT, tokens where the server counts them, and decode speed as (n - 1) tokens over the time after the first."""
    if first is None:
        return "[stopped]" if stopped else "[no text]"
    parts = [f"first token after {(first - began) * 1e3:.0f} ms"]
    if stopped:
        parts.append("stopped")
    elif tokens is not None:
        parts.append(f"{tokens} tokens")
        if tokens > 1 and ended > first:
            parts.append(f"{(tokens - 1) / (ended - first):.1f} tok/s")
    return f"[{', '.join(parts)}]"
