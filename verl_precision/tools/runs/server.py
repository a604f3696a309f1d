"""The live page's server: one page, its news, and the kept tokens; for those who know the token, and to read only.

No path of a request becomes the path of a file: runs are numbers, responses are offsets that are in the run's list.
"""

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from verl_precision.base.errors import ConfigurationError, error_in_one_line
from verl_precision.base.terminal import printable
from verl_precision.tools.kept_tokens.kept_file import KeptResponse, response_at
from verl_precision.tools.runs.content import as_json
from verl_precision.tools.runs.kept import listed, other_decisions, response_content
from verl_precision.tools.runs.live import Live
from verl_precision.tools.runs.page import POLICY, page

LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HEADERS = {
    "Content-Security-Policy": POLICY + "; connect-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


async def _guarded(token: str, request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Let requests pass whose path begins with the token, and give every answer its headers."""
    given, slash, rest = request.scope["path"].removeprefix("/").partition("/")
    answer: Response
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
        text = "The address lacks this server's token: take the whole one that was printed last.\n"
        answer = PlainTextResponse(text, 403)
    elif not slash:
        answer = RedirectResponse(f"/{token}/")
    else:
        request.scope.update(path=f"/{rest}", raw_path=b"")
        answer = await call_next(request)
    answer.headers.update(_HEADERS)
    return answer


def application(live: Live, token: str, hosts: Sequence[str] = LOCAL) -> Starlette:
    """Return the server's application; requests under other host names are refused (DNS rebinding)."""

    def folder_of(request: Request) -> Path:
        if (run := live.views().get(_number(request, "run"))) is None:
            raise HTTPException(404, "there is no run of this number")
        return run.kept_folder

    def response_of(request: Request) -> KeptResponse:
        return response_at(folder_of(request), _number(request, "at"))

    def state(request: Request) -> Any:
        return live.changes(_number(request, "since", 0))

    def responses(request: Request) -> Any:
        step = _number(request, "step") if "step" in request.query_params else None
        return as_json(listed(folder_of(request), step))

    def response(request: Request) -> Any:
        return as_json(response_content(response_of(request)))

    def decisions(request: Request) -> Any:
        return other_decisions(response_of(request))

    of_path = {"/state": state, "/responses": responses, "/response": response, "/decisions": decisions}
    routes = [Route(path, _refusing(answer), methods=["GET"]) for path, answer in of_path.items()]
    return Starlette(
        routes=[Route("/", lambda _: HTMLResponse(page(None)), methods=["GET"]), *routes],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
            Middleware(BaseHTTPMiddleware, dispatch=partial(_guarded, token)),
            Middleware(GZipMiddleware, compresslevel=3),
        ],
    )


def serve(live: Live, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C, after the page's address has been said; port 0: any that is free.

    Raises:
        ConfigurationError: If host and port cannot be taken.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        problem = f"this address cannot be taken ({error.strerror or error})"
        remedy = "Give another --port, or --port 0 for any that is free."
        raise ConfigurationError(problem, setting="--port", value=port, remedy=remedy) from error
    token, port = secrets.token_urlsafe(24), listening.getsockname()[1]
    config = uvicorn.Config(
        application(live, token, hosts_of(host)),
        log_level="warning", access_log=False, server_header=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    say(f"http://{hosts_of(host)[-1]}:{port}/{token}/")
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


def hosts_of(host: str) -> list[str]:
    """Return the names under which a server that listens on a host is asked, last the one to say.

    Where other machines can ask, these are this one's names and addresses, and nobody else's (DNS rebinding).
    """
    names = [] if host in ("0.0.0.0", "::", "") else [host]
    if host not in ("localhost", "127.0.0.1", "::1"):
        own = [each for some in psutil.net_if_addrs().values() for each in some]
        addresses = (each.address.partition("%")[0] for each in own if each.family in (socket.AF_INET, socket.AF_INET6))
        names = [*addresses, socket.getfqdn(), socket.gethostname(), *names]
    return [*LOCAL, *(f"[{name}]" if ":" in name else name for name in names)]


def _refusing(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint of JSON, which says in words why a file cannot be read; starlette gives it a thread."""

    def endpoint(request: Request) -> Response:
        try:
            content = answer(request)
        except HTTPException:
            raise
        except Exception as error:  # whatever the files of a run hold
            return PlainTextResponse(printable(error_in_one_line(error)), 409)
        if content is None:
            return Response(status_code=204)
        return Response(json.dumps(content, allow_nan=False, separators=(",", ":")), media_type="application/json")

    return endpoint


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name, None if default is None else str(default))
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 19):
        raise HTTPException(400, f"{name}: a whole number is needed")
    return int(text)
