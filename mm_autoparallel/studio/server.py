"""The studio's server: on this machine alone, for who has its token, and for pages that it has served itself.

What a request must show: the Host of this server (a name that another site lets point here is refused), no Origin but
its own, and the token, as the cookie that the address with the token sets, or as a bearer. Bodies are bounded, and read
as the models of studio/document.py say. Pages may run its own script alone (Content-Security-Policy).
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from http.cookies import SimpleCookie
from importlib.resources import files
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mm_autoparallel.api.report_page import sources_page
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import is_there, read_text, write_text_atomically
from mm_autoparallel.measurements.models import list_models
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.planner.explain.sensitivity import find_sensitivity
from mm_autoparallel.planner.plan import format_document, plan_document
from mm_autoparallel.records import Noun
from mm_autoparallel.reports.page.html import pack_report
from mm_autoparallel.reports.timeline import render_timeline
from mm_autoparallel.reports.trace import render_trace
from mm_autoparallel.streams import visible
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.actions import act, read_request
from mm_autoparallel.studio.launches import lint_file, list_exporters, list_launches
from mm_autoparallel.studio.moments import FOLDER
from mm_autoparallel.studio.session import Session, Stale
from mm_autoparallel.studio.work import Worker

MAX_BODY_BYTES = 1_000_000
"""Of a request. Assumed: a thousand times what the page sends."""
MAX_CONFIGS = 200
TOKEN_LENGTH = 32
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mm-autoparallel studio</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/page.css"></head>
<body><div id="root" data-studio></div>
<noscript>The studio draws itself with JavaScript, which is off in this browser: allow it for this address.
本页面由 JavaScript 绘制，请在浏览器中为此地址启用。</noscript>
<script type="module" src="/page.js"></script>
</body></html>
"""  # noqa: RUF001  (a comma of Chinese)
_NO_TOKEN = "open the studio by the address that its terminal printed, which holds its token"

Asked = TypeVar("Asked", bound=Noun)


def read_token(folder: Path) -> str:
    """The token of the studio of `folder`, which stays the same when it is started again; made where there is none.

    Its folder is private (studio/serving.py). Raises JobError where the file cannot be read, OSError where it cannot
    be kept.
    """
    path = folder / FOLDER / "token"
    if is_there(path):
        kept = read_text(path, "token", "text").strip()
        if len(kept) >= TOKEN_LENGTH:
            return kept
    token = secrets.token_urlsafe(TOKEN_LENGTH)
    write_text_atomically(path, token)
    path.chmod(0o600)
    return token


class Guard:
    """What stands before every request."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self.app, self.token = app, token
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.cookie = f"mm_autoparallel_studio_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no sockets here
            return
        response = self._refuse(scope)
        await (response or self.app)(scope, receive, send)

    def _refuse(self, scope: Scope) -> Response | None:
        """What to answer in the place of the page; None where the request may pass."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts:
            return _fail("this studio answers to 127.0.0.1 alone", 403)
        if origin is not None and origin != f"http://{host}":
            return _fail("this studio answers to its own pages alone", 403)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _fail("this studio answers to its own pages alone", 403)
        if scope["method"] == "POST" and headers.get("content-type", "").split(";")[0] != "application/json":
            return _fail("a body is JSON here: application/json", 415)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and given and self._is_token(given):
            answer = RedirectResponse("/", 303, headers=_HEADERS)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return answer
        kept = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if not (self._is_token(bearer) or (kept is not None and self._is_token(kept.value))):
            return _fail(_NO_TOKEN, 401)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def build_app(session: Session, worker: Worker, port: int, token: str) -> ASGIApp:
    """The whole server of one session."""
    return Guard(Starlette(routes=_Pages(session, worker).routes()), port, token)


class _Pages:
    def __init__(self, session: Session, worker: Worker) -> None:
        self.session, self.worker = session, worker

    def routes(self) -> list[Route]:
        get: dict[str, Callable[[Request], Response]] = {
            "/": lambda _: _text(_PAGE, "text/html"),
            "/page.js": lambda _: _text(_built("page.js"), "text/javascript"),
            "/page.css": lambda _: _text(_built("page.css"), "text/css"),
            "/state": lambda _: self._state(200),
            "/status": lambda _: self._status(200),
            "/space": self._space,
            "/sources": self._sources,
            "/catalog": lambda _: _json(self._catalog()),
            "/files/{name}": self._file,
        }
        return [
            *(Route(path, _answer(one), methods=["GET"]) for path, one in get.items()),
            Route("/do", self._ask(words.Do, self._do), methods=["POST"]),
            Route("/optimise", self._ask(words.Optimise, self._optimise), methods=["POST"]),
            Route("/why-not", self._ask(words.WhyNot, self._why_not), methods=["POST"]),
            Route(
                "/lint",
                self._ask(words.LintLaunch, lambda asked: _json(lint_file(self.session, asked))),
                methods=["POST"],
            ),
            Route("/cancel", _answer(self._cancel), methods=["POST"]),
        ]

    # -------------------------------------------------------------------------------------------------------- reading

    def _state(self, status: int) -> Response:
        with self.session.lock:
            studio, block = self.session.draw(self.worker.status())
        return Response(pack_report(studio, block), status, _HEADERS, "application/octet-stream")

    def _status(self, status: int) -> Response:
        return _json(words.Status(revision=self.session.revision, work=self.worker.status()), status)

    def _space(self, _: Request) -> Response:
        with self.session.lock:
            source = self.session.present().source
            known = self.session.known(source)
        if known.strategies is None:
            raise JobError("the space of this job has not been searched yet")
        return _json(words.Space(search_revision=source.number, strategies=known.strategies))

    def _sources(self, _: Request) -> Response:
        with self.session.lock:
            moment = self.session.present()
            played, plan = self.session.play(moment.source), self.session.plan_of(moment)
        return _json(sources_page(find_sensitivity(played.costs, [plan])))

    def _catalog(self) -> words.Catalog:
        folder = self.session.folder
        found = (path for pattern in ("*.json", "*/config.json") for path in sorted(folder.glob(pattern)))
        plain = (path for path in found if not path.is_symlink())
        names = [str(path.relative_to(folder)) for path, _ in zip(plain, range(MAX_CONFIGS), strict=False)]
        return words.Catalog(
            devices=tuple(DEVICES),
            models=list_models(),
            configs=tuple(names),
            launches=list_launches(folder, MAX_CONFIGS),
            exporters=list_exporters(),
        )

    def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        with self.session.lock:
            moment = self.session.present()
            estimate = self.session.estimate_of(moment)
            if name == "job.yaml":
                return _saved(name, moment.source.written(self.session.folder), "text/yaml")
            if name == "report.html":
                return _saved(name, self.session.report().html(), "text/html")
        if name == "plan.json":
            bound = self.session.bound_of(moment)
            text = format_document(plan_document(estimate.plan, estimate.figures(bound)))
            return _saved(name, text, "application/json")
        if name == "timeline.svg":
            return _saved(name, render_timeline(estimate.problem, estimate.timeline), "image/svg+xml")
        if name == "trace.json":
            trace = render_trace(estimate.problem, estimate.timeline)
            return _saved(name, json.dumps(trace, separators=(",", ":"), allow_nan=False), "application/json")
        return _fail(f"there is no file {name!r} to save", 404)

    # ---------------------------------------------------------------------------------------------------------- doing

    def _do(self, asked: words.Do) -> Response:
        with self.session.lock:
            try:
                act(self.session, asked)
            except Stale:
                return self._state(409)
            return self._state(200)

    def _optimise(self, asked: words.Optimise) -> Response:
        with self.session.lock:
            try:
                self.worker.optimise(asked)
            except Stale:
                return self._state(409)
        return self._status(202)

    def _why_not(self, asked: words.WhyNot) -> Response:
        with self.session.lock:
            try:
                self.worker.why_not(asked)
            except Stale:
                return self._state(409)
        return self._status(202)

    def _cancel(self, _: Request) -> Response:
        self.worker.cancel()
        return self._status(202)

    def _ask(self, record: type[Asked], do: Callable[[Asked], Response]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that reads a body as `record`."""

        async def answer(request: Request) -> Response:
            body = await _read_body(request)
            if body is None:
                return _fail(f"a body may have {MAX_BODY_BYTES} bytes", 413)
            return await run_in_threadpool(_guarded, lambda: do(read_request(record, body)))

        return answer


def _answer(one: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return await run_in_threadpool(_guarded, lambda: one(request))

    return answer


def _guarded(do: Callable[[], Response]) -> Response:
    """What the person can mend is one paragraph."""
    try:
        return do()
    except PlannerError as error:
        return _fail(str(error), 422)
    except OSError as error:
        return _fail(f"the studio's folder cannot be written: {error.strerror or error}", 422)


async def _read_body(request: Request) -> bytes | None:
    """The body; None where it is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _built(name: str) -> str:
    return (files("mm_autoparallel.reports.page") / "web" / name).read_text("utf-8")


def _text(text: str, kind: str) -> Response:
    return Response(text, 200, _HEADERS, f"{kind}; charset=utf-8")


def _saved(name: str, text: str, kind: str) -> Response:
    return Response(text, 200, _HEADERS | {"Content-Disposition": f'attachment; filename="{name}"'}, kind)


def _json(record: Noun, status: int = 200) -> Response:
    return Response(record.model_dump_json(), status, _HEADERS, "application/json")


def _fail(message: str, status: int) -> Response:
    return _json(words.Failure(error=visible(message)), status)
