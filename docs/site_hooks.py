"""What the site adds to the pages while it is built: decisions, the fields of the configuration, links out of docs/.

Owns: how a schema is shown as tables, how links to files beside docs/ are told where there is no repository.
Does not know: what else is on a page, which fields there are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELDS = re.compile(r"<!-- fields: (\w+) -->")
BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!decisions/|schemas/)[^)]*\)")


def on_config(config: Any) -> Any:
    """Every decision record is in the navigation, in its order."""
    decisions = sorted(path.name for path in Path(config["docs_dir"], "decisions").glob("*.md"))
    for entry in config["nav"]:
        if isinstance(entry, dict) and "Decisions" in entry:
            entry["Decisions"] = [f"decisions/{name}" for name in decisions]
    return config


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    """The fields of the configuration where they are asked for; a link to what the site does not carry is its name."""
    from recovery.config import job_schema

    if page.file.src_uri.count("/") == 0:
        markdown = OUTSIDE.sub(r"\1", markdown)
    return FIELDS.sub(lambda match: "\n".join(tables(job_schema(), match[1])), markdown)


def tables(schema: dict[str, Any], block: str, at: str = "") -> Iterator[str]:
    """One table for a block of the schema, then one for each block in it. `at`: its place in the file."""
    stated, inner = schema["$defs"][block], []
    yield f"## {f'`{at}`' if at else 'The job'}\n\n{stated.get('description', '')}\n"
    yield "| field | values | default | meaning |\n|---|---|---|---|"
    for name, field in stated["properties"].items():
        ref = next((option["$ref"] for option in (field, *field.get("anyOf", [])) if "$ref" in option), None)
        if ref is not None:
            inner.append((ref.rpartition("/")[2], f"{at}.{name}".lstrip(".")))
        values, default = f"[below](#{inner[-1][1].replace('.', '')})" if ref else values_of(field), default_of(field)
        needed = "**needed**" if name in stated.get("required", []) else "" if ref else default
        yield f"| `{name}` | {values} | {needed} | {field.get('description', '')} |"
    yield ""
    for name, place in inner:
        yield from tables(schema, name, place)


def values_of(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(values_of(option) for option in field["anyOf"])
    bounds = [f"{word} {field[key]}" for key, word in BOUNDS.items() if key in field]
    return " ".join([str(field.get("type", "any")), *bounds])


def default_of(field: dict[str, Any]) -> str:
    return f"`{json.dumps(field['default'])}`" if "default" in field else "`{}`"
