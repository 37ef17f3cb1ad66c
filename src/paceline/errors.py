"""Every error that Paceline raises on purpose; anything else that escapes is a bug."""


class PacelineError(Exception):
    """Base of our errors. The message says what was wrong, the number and the limit, and what to do."""

    exit_code = 2


class InputError(PacelineError):
    """The caller asked for something that cannot be done (exit code 2, HTTP 400)."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """Name of the offending request field, where there is one."""
        self.code = code
        """Machine-readable reason in OpenAI's vocabulary, such as ``context_length_exceeded``."""


class ModelFileError(PacelineError):
    """A model file is missing, damaged or of a kind we cannot read (exit code 2)."""


class TargetUnreachableError(PacelineError):
    """A server that should be measured or talked to does not answer (exit code 3)."""

    exit_code = 3


class OverloadedError(PacelineError):
    """Too much waits already (HTTP 503)."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which another try may be in time."""


class ExecutorError(PacelineError):
    """The executor failed on a batch; the engine ends the request that caused it and goes on."""
