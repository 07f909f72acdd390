"""Where a job's model is: a folder, a name on the hub, or nowhere. Found out before vLLM looks for it.

Owns: which names may be the hub's, and one question to the hub, where vLLM would ask it again and again for a minute.
Does not know: what is in a model's folder, how a model is loaded.

Invariants:
1. A folder that is there is asked no question, nor is a name of which the hub's cache has something.
2. The hub is asked once. What it answers but `there is none` is left to vLLM, which asks with the user's token.
"""

from __future__ import annotations

import os
import re
import ssl
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from recovery.errors import ConfigError

HUB = "https://huggingface.co"
WAIT_S = 10.0
"""For the hub's answer."""

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}(?:/{_PART})?)(?::\w+)?")
"""A repository of the hub, with the kind of quantization of a GGUF file where it has several."""
_SET = re.compile("1|on|yes|true", re.IGNORECASE)


def check_model(model: str, folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if `model` is not to be found; `folder` is the config's, from which a path is taken."""
    if os.path.exists(model) or "://" in model or model.endswith(".gguf"):
        return  # the last two are addresses that only vLLM understands
    place = os.path.normpath(os.path.join(os.path.abspath(folder), os.path.expanduser(model)))
    name = _NAME.fullmatch(model)
    if name is None:
        raise _nowhere(f"there is no model folder {place}")
    if _SET.fullmatch(os.environ.get("VLLM_USE_MODELSCOPE", "")) or _cached(name[1]):
        return
    if any(_SET.fullmatch(os.environ.get(switch, "")) for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise _nowhere(f"there is no model folder {place}, and the hub's cache has nothing named {model}")
    hub = os.environ.get("HF_ENDPOINT") or HUB
    why = _refused(f"{hub.rstrip('/')}/api/models/{name[1]}")
    if why:
        raise _nowhere(f"there is no model folder {place}, nor a model {model} on the hub: {hub} {why}", asked=True)


def _nowhere(what: str, *, asked: bool = False) -> ConfigError:
    hub = "; if it is a name on the hub, see that HF_ENDPOINT can be reached from here" if asked else ""
    return ConfigError(what, hint=f"bring the folder there, or set `model` to where it lies{hub}")


def _cached(name: str) -> bool:
    """Whether the hub's cache has a snapshot of this name, as huggingface_hub lays it out."""
    said = os.environ.get
    home = said("HF_HOME") or os.path.join(said("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = said("HF_HUB_CACHE") or said("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache).expanduser().joinpath(f"models--{name.replace('/', '--')}", "snapshots").is_dir()


def _refused(url: str) -> str:
    """Why there is no such model, in the words of one answer; "" if there may be one."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=WAIT_S):
            return ""
    except HTTPError as error:
        return f"has none (HTTP {error.code})" if error.code == 404 else ""
    except ValueError as error:
        return f"is no address ({error})"
    except URLError as error:
        # Whose certificates are trusted is set elsewhere for vLLM.
        return "" if isinstance(error.reason, ssl.SSLError) else f"does not answer ({error.reason})"
    except (OSError, HTTPException) as error:
        return f"does not answer ({error!r})"
