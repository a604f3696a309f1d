"""The server of the live page: the page, its updates and the kept tokens; read-only, with a secret token.

No path of a request becomes the path of a file: a request names a run by its number, and a response by its offset.
"""

import hmac
import json
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
from verl_precision.tools.kept_tokens.kept_file import response_at
from verl_precision.tools.runs.content import Live, response_content, responses_content
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
    """Pass on the requests whose path begins with the token, and add the security headers to every answer."""
    given, slash, rest = request.scope["path"].removeprefix("/").partition("/")
    answer: Response
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
        text = "The address lacks this server's token. Open the whole address that was printed last.\n"
        answer = PlainTextResponse(text, 403)
    elif not slash:
        answer = RedirectResponse(f"/{token}/")
    else:
        request.scope.update(path=f"/{rest}", raw_path=b"")
        answer = await call_next(request)
    answer.headers.update(_HEADERS)
    return answer


def application(live: Live, token: str) -> Starlette:
    """Return the server's application; requests under other host names are refused (DNS rebinding)."""

    def folder_of(request: Request) -> Path:
        if (run := live.views().get(_number(request, "run"))) is None:
            raise HTTPException(404, "there is no run with this number")
        return run.kept_folder

    def responses(request: Request) -> Any:
        step = _number(request, "step") if "step" in request.query_params else None
        return responses_content(folder_of(request), step)

    answers: dict[str, Callable[[Request], Any]] = {
        "/state": lambda request: live.changes(_number(request, "since", "0")),
        "/responses": responses,
        "/response": lambda asked: response_content(response_at(folder_of(asked), _number(asked, "at"))),
    }
    routes = [Route(path, _refusing(answer), methods=["GET"]) for path, answer in answers.items()]
    return Starlette(
        routes=[Route("/", lambda _: HTMLResponse(page(None)), methods=["GET"]), *routes],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(LOCAL), www_redirect=False),
            Middleware(BaseHTTPMiddleware, dispatch=partial(_guarded, token)),
            Middleware(GZipMiddleware, compresslevel=3),
        ],
    )


def serve(live: Live, port: int, say: Callable[[str], None]) -> None:
    """Call `say` with the page's address, then serve this machine until Ctrl-C; port 0: any free port."""
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        problem = f"this port cannot be used ({error.strerror or error})"
        remedy = "Give another --port, or --port 0 for any that is free."
        raise ConfigurationError(problem, setting="--port", value=port, remedy=remedy) from error
    token, port = secrets.token_urlsafe(24), listening.getsockname()[1]
    config = uvicorn.Config(
        application(live, token),
        log_level="warning", access_log=False, server_header=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    say(f"http://127.0.0.1:{port}/{token}/")
    with listening:
        uvicorn.Server(config).run(sockets=[listening])


def _refusing(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return a JSON endpoint, which answers with the reason if a file cannot be read; starlette gives it a thread."""

    def endpoint(request: Request) -> Response:
        try:
            content = answer(request)
        except HTTPException:
            raise
        except Exception as error:  # a run's files may have any content
            return PlainTextResponse(printable(error_in_one_line(error)), 409)
        if content is None:
            return Response(status_code=204)
        return Response(json.dumps(content, allow_nan=False, separators=(",", ":")), media_type="application/json")

    return endpoint


def _number(request: Request, name: str, default: str = "") -> int:
    text = request.query_params.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise HTTPException(400, f"{name}: this must be a whole number")
    return int(text)
