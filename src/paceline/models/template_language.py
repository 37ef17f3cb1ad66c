"""The jinja2 of chat templates: what transformers offers them (utils/chat_template_utils.py)."""

import json
from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ModelFileError


def template_environment(today: date | None) -> ImmutableSandboxedEnvironment:
    """A sandbox; ``today`` is what its clock shows, None for the real one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _clock(today)
    return environment


def compiled(source: str, environment: ImmutableSandboxedEnvironment) -> jinja2.Template:
    """Raises ModelFileError: the template does not compile."""
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFileError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError) as error:  # nested too deep, or a number of too many digits
        raise ModelFileError(f"the chat template does not compile: {error}") from error


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what an assistant wrote, for training; here it only shows it."""

    tags = {"generation"}  # noqa: RUF012 (an instance attribute's type in jinja2's stubs)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _clock(today: date | None) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        now = datetime.now().astimezone() if today is None else datetime.combine(today, time()).astimezone()
        return now.strftime(pattern)

    return strftime_now
