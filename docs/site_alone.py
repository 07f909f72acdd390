"""The built site needs no network: no page or style sheet names a script, style, font, frame or picture elsewhere.

Owns: what makes a browser load something, and the end of a build that has such a thing.
Does not know: which theme is used, how the site is built. A link that a reader may follow is none of it.

Invariant:
1. A diagram left for the theme counts too: its script would load Mermaid from a CDN for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
FOLLOWED = {"canonical", "next", "prev", "alternate", "license", "author", "edit"}
"""Relations of <link> that load nothing."""
IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s*)["']?((?:https?:)?//[^"')\s]+)""")
ELSEWHERE = re.compile(r"(?:https?:)?//", re.IGNORECASE)


def on_post_build(config: Any) -> None:
    """Ends the build, naming every place."""
    site = Path(config["site_dir"])
    found = [
        f"{path.relative_to(site)}: {what}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css", ".svg")
        for what in elsewhere(path.read_text(encoding="utf-8"), style=path.suffix != ".html")
    ]
    if found:
        from mkdocs.exceptions import PluginError

        raise PluginError("the site would load from elsewhere:\n" + "\n".join(found))


def elsewhere(text: str, *, style: bool = False) -> Iterator[str]:
    """What a page loads from another host; `style`: of a style sheet or a picture."""
    if style:
        yield from IN_STYLE.findall(text)
        return
    page = _Page()
    page.feed(text)
    yield from page.found


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        address = given.get(LOADED.get(tag, ""), "")
        if tag == "link" and not set(given.get("rel", "").lower().split()) & FOLLOWED:
            address = given.get("href", "")
        if ELSEWHERE.match(address):
            self.found.append(f"<{tag}> of {address}")
        if "mermaid" in given.get("class", "").split():
            self.found.append("a Mermaid diagram that is not a picture")
        self.found += IN_STYLE.findall(given.get("style", ""))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.found += IN_STYLE.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False
