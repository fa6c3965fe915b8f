"""The process in which chat templates run: a template is a program that came with a model.

Started by path in an isolated interpreter, with bounds set by the kernel: memory by a resource
limit, processor time by a timer whose signal ends the process, no files to write. Jinja's immutable
sandbox keeps the template away from everything but its arguments. Requests and answers are lines of
JSON; the first line holds the templates by name.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

MEGABYTE = 1 << 20


class TooLong(Exception):
    """The output exceeds its limit."""


def environment() -> Any:
    """Return a Jinja environment as chat templates expect it: functions, trimming, loop control."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the model's own text; it changes nothing."""

        tags = {"generation"}  # noqa: RUF012  Jinja's own form

        def parse(self, parser: Parser) -> nodes.Node:
            """Return the block's body unchanged."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML, which would show in the prompt.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


def clock(now: str | None) -> Callable[[str], str]:
    """Return `strftime_now`: the time in a template's own format."""
    moment = datetime.now() if now is None else datetime.fromisoformat(now)
    return moment.strftime


def bounded(pieces: Iterator[str], *, most: int) -> str:
    """Join all pieces, up to a number of characters."""
    made, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > most:
            raise TooLong
        made.append(piece)
    return "".join(made)


def answer(template: Any, request: dict[str, Any], *, most: int) -> dict[str, str]:
    """Render one request."""
    template.globals["strftime_now"] = clock(request["now"])
    return {"text": bounded(template.generate(request["names"]), most=most)}


def guarded(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return the result of a call, or the kind of error and its message."""
    from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
    from jinja2.exceptions import SecurityError

    try:
        return work()
    except TooLong:
        return {"error": "length", "message": ""}
    except (MemoryError, RecursionError):
        return {"error": "memory", "message": ""}
    except SecurityError as error:
        return {"error": "security", "message": str(error)}
    except (TemplateSyntaxError, SyntaxError) as error:
        return {"error": "syntax", "message": str(error)}
    except UndefinedError as error:
        return {"error": "failed", "message": str(error)}
    except TemplateError as error:
        return {"error": "refused", "message": str(error)}
    except Exception as error:  # whatever a template's own arithmetic comes to
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}


def confine(*, megabytes: int) -> None:
    """Limit memory, file size and core dumps of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * MEGABYTE, megabytes * MEGABYTE))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


def main() -> None:
    """Serve requests; argv: path of Jinja, megabytes, most characters, seconds of CPU time."""
    place, megabytes, most, seconds = sys.argv[1:]
    sys.path.append(place)
    made = environment()
    guarded(dict)  # everything is imported before memory is bounded
    confine(megabytes=int(megabytes))
    sources: dict[str, str] = json.loads(sys.stdin.readline())
    compiled: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, float(seconds))

        def work(request: dict[str, Any] = request) -> dict[str, str]:
            name = request["template"]
            if name not in compiled:
                compiled[name] = made.from_string(sources[name])
            return answer(compiled[name], request, most=int(most))

        found = guarded(work)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
