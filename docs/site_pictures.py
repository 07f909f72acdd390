"""Mermaid diagrams of the pages as pictures that the site carries: drawn while it is built, by mmdr, of the lock.

Owns: which block becomes which picture, and what of a drawing is changed so that an <img> can show it.
Does not know: what is drawn (make_diagrams.py makes the blocks from the program's tables).

Invariant:
1. A reader's browser draws nothing and loads no program for it: in the pages there is an image, beside them an SVG.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROOT = re.compile(r'(<svg [^>]*?)width="100%"([^>]*? viewBox=")([-\d.]+) ([-\d.]+) ([\d.]+) ([\d.]+)"')
ROOM = 24
"""Left and right of a diagram: the reader's font may be wider than the one that it was measured with."""


def on_files(files: Any, config: Any) -> Any:
    """Every diagram becomes a file of the site."""
    from mkdocs.structure.files import File

    for page in list(files.documentation_pages()):
        for number, source in enumerate(BLOCK.findall(page.content_string)):
            place = f"{PurePosixPath(page.src_uri).parent}/{name_of(page.src_uri, number)}"
            files.append(File.generated(config, place.removeprefix("./"), content=drawn(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    """Where a diagram stood there is its picture."""
    return with_pictures(markdown, page.file.src_uri)


def with_pictures(markdown: str, src_uri: str) -> str:
    numbers = iter(range(len(markdown)))
    return BLOCK.sub(lambda match: f"![a diagram of states]({name_of(src_uri, next(numbers))})", markdown)


def name_of(src_uri: str, number: int) -> str:
    return f"{PurePosixPath(src_uri).stem}-diagram-{number + 1}.svg"


def drawn(source: str) -> str:
    """The diagram as SVG, of a size of its own: an image without one is as wide as the page."""
    import mmdr

    def sized(match: re.Match[str]) -> str:
        x, y, width, height = (float(value) for value in match.groups()[2:])
        size = f'width="{width + 2 * ROOM:g}" height="{height:g}"'
        return f'{match[1]}{size}{match[2]}{x - ROOM:g} {y:g} {width + 2 * ROOM:g} {height:g}"'

    svg, n = ROOT.subn(sized, mmdr.render(source).svg(), count=1)
    if n != 1:
        raise ValueError(f"mmdr drew something else than an SVG with a viewBox: {svg[:200]}")
    return svg
