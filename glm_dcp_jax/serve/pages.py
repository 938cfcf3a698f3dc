"""Pages for people: one HTML file each, which loads nothing but answers of this server."""

import base64
import hashlib
import re
from importlib import resources

from fastapi import Response


class Page:
    """An HTML file of this package, with one script and one style of its own, and nothing from elsewhere."""

    def __init__(self, file: str) -> None:
        self._text = resources.files(__package__).joinpath(file).read_text("utf-8")
        self._headers = {
            "Content-Security-Policy": _policy(self._text),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def answer(self) -> Response:
        """The page."""
        return Response(self._text, media_type="text/html", headers=self._headers)


def _policy(page: str) -> str:
    """What a browser may run and load on the page: its own script and style, and answers of this server."""

    def hash_of(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert found is not None, tag
        return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{hash_of('script')}'; style-src 'sha256-{hash_of('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
