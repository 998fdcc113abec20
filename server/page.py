"""The page at `/`: a chat that shows what speculation does. Its files are served as they are; what it shows, it asks
from the same API as any client. Knows nothing of models and requests."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

PAGE_PATH = "/"
MEDIA_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.mjs": "text/javascript",
    "rounds.mjs": "text/javascript",
}
PAGE_PATHS = frozenset({PAGE_PATH, *(f"/static/{name}" for name in MEDIA_TYPES)})
"""Open without a key: a browser cannot send one before the page has asked for it."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(router: APIRouter) -> None:
    """Add `/` and the files it needs, read once."""
    folder = files("server") / "static"
    contents = {name: (folder / name).read_bytes() for name in MEDIA_TYPES}

    def file_response(name: str) -> Response:
        return Response(contents[name], media_type=MEDIA_TYPES[name], headers=HEADERS)

    async def index() -> Response:
        """A chat page for the browser."""
        return file_response("index.html")

    async def static(name: str) -> Response:
        """A file of the page."""
        if name not in contents:
            raise HTTPException(404)
        return file_response(name)

    router.add_api_route(PAGE_PATH, index, methods=["GET", "HEAD"], include_in_schema=False)
    router.add_api_route("/static/{name}", static, methods=["GET", "HEAD"], include_in_schema=False)
