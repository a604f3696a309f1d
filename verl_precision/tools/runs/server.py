"""The live page's server: one page, its news, and the kept tokens; for those who know the token, and to read only.

No path of a request becomes the path of a file: runs are numbers, responses are offsets that are in the run's list.
"""

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from verl_precision.tools.kept_tokens.kept_file import KeptResponse
from verl_precision.tools.runs.contents import csv_of
from verl_precision.tools.runs.kept import ORDERS, other_decisions, response_content, text_of
from verl_precision.tools.runs.live import Live, LiveRun
from verl_precision.tools.runs.page import POLICY, live_page
from verl_precision.tools.runs.panels import PANELS

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

    def run_of(request: Request) -> LiveRun:
        return _found(live.run(_number(request, "run")), "there is no run of this number")

    def response_of(request: Request) -> KeptResponse:
        return _found(run_of(request).kept.response(_number(request, "at")), "no response is kept there")

    def page(_: Request) -> Response:
        return HTMLResponse(live_page())

    def state(request: Request) -> Response:
        found = live.changes(_number(request, "since", 0))
        return Response(status_code=204) if found is None else _json(found)

    def table(request: Request) -> Response:
        panel = next((each for each in PANELS if each.name == request.query_params.get("panel")), None)
        text = csv_of(_found(panel, "there is no such figure"), live.points())
        return PlainTextResponse(text, media_type="text/csv; charset=utf-8")

    def responses(request: Request) -> Response:
        order = request.query_params.get("order", "damage")
        if order not in ORDERS:
            raise HTTPException(400, f"order: allowed are {', '.join(ORDERS)}")
        step = _number(request, "step") if "step" in request.query_params else None
        return _json(run_of(request).kept.listed(step, order, _number(request, "from", 0)))

    def response(request: Request) -> Response:
        return _json(response_content(response_of(request)))

    def decisions(request: Request) -> Response:
        return _json(other_decisions(response_of(request)))

    def text(request: Request) -> Response:
        part = request.query_params.get("part", "response")
        if part not in ("prompt", "response"):
            raise HTTPException(400, "part: allowed are prompt, response")
        return PlainTextResponse(text_of(response_of(request), part))

    of_path = {"/": page, "/state": state, "/csv": table, "/responses": responses, "/response": response}
    of_path |= {"/decisions": decisions, "/text": text}
    return Starlette(
        routes=[Route(path, _refusing(answer), methods=["GET"]) for path, answer in of_path.items()],
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


def _refusing(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Return an endpoint that says in words why a file cannot be read; in a thread of its own, as starlette does."""

    def endpoint(request: Request) -> Response:
        try:
            return answer(request)
        except HTTPException:
            raise
        except Exception as error:  # whatever the files of a run hold
            return PlainTextResponse(printable(error_in_one_line(error)), 409)

    return endpoint


def _number(request: Request, name: str, default: int | None = None) -> int:
    text = request.query_params.get(name, None if default is None else str(default))
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 19):
        raise HTTPException(400, f"{name}: a whole number is needed")
    return int(text)


def _found(found: Any, problem: str) -> Any:
    if found is None:
        raise HTTPException(404, problem)
    return found


def _json(content: Mapping[str, Any]) -> Response:
    return Response(json.dumps(content, allow_nan=False, separators=(",", ":")), media_type="application/json")
