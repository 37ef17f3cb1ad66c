"""The ``paceline`` command: errors as one line, and the meaning of exit codes."""

import sys

_INTERRUPTED = 130


def main() -> None:
    """Entry point of the console script."""
    try:
        # Imported here, so that Ctrl-C while this loads is an interrupt like any other.
        from paceline.cli.commands import app
        from paceline.errors import PacelineError

        try:
            app()
        except PacelineError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # `paceline models | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
