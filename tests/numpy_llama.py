"""A Llama in numpy that reads a Hugging Face folder: the judge of what the model folders hold.

Owns: reading safetensors (BF16, F32) and config.json, a plain forward pass, greedy decoding.
Does not know: the code that writes such folders (it is written from the formats' own documents), any engine.

Invariants:
1. Everything is computed in float32.
2. Predicting ids at once, or one by one with `past`, is the same computation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


class NumpyLlama:
    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        data = (folder / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        self.w = {}
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                raw = data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
                if entry["dtype"] == "BF16":
                    values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
                else:
                    values = np.frombuffer(raw, "<f4")
                self.w[name] = values.reshape(entry["shape"])
        self.w.setdefault("lm_head.weight", self.w["model.embed_tokens.weight"])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.w[name + ".weight"]

    def predict(self, ids: list[int], past: dict[int, Any] | None = None) -> list[int]:
        """The likeliest next id after each of `ids`; `past` carries keys and values from one call to the next."""
        past = {} if past is None else past
        c, n, d = self.config, len(ids), self.config["head_dim"]
        before = past[0][0].shape[0] if past else 0
        angle = np.outer(before + np.arange(n), c["rope_theta"] ** (-np.arange(0, d, 2) / d))
        cos, sin = (np.tile(f(angle), 2)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        mask = np.where(np.tri(n, before + n, before, dtype=bool), 0, -np.inf).astype(np.float32)

        def rotated(x: np.ndarray) -> np.ndarray:
            return x * cos + np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

        x = self.w["model.embed_tokens.weight"][ids]
        for layer in range(c["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            h = self._norm(x, p + "input_layernorm")
            q, k, v = ((h @ self.w[f"{p}self_attn.{m}_proj.weight"].T).reshape(n, -1, d) for m in "qkv")
            k = rotated(k)
            if layer in past:
                k, v = (np.concatenate(pair) for pair in zip(past[layer], (k, v), strict=True))
            past[layer] = (k, v)
            q = rotated(q)
            k, v = (np.repeat(m, q.shape[1] // m.shape[1], 1) for m in (k, v))
            score = np.einsum("ihd,jhd->hij", q, k) / d**0.5 + mask
            score = np.exp(score - score.max(-1, keepdims=True))
            heads = np.einsum("hij,jhd->ihd", score / score.sum(-1, keepdims=True), v)
            x = x + heads.reshape(n, -1) @ self.w[p + "self_attn.o_proj.weight"].T
            h = self._norm(x, p + "post_attention_layernorm")
            gate = h @ self.w[p + "mlp.gate_proj.weight"].T
            up = h @ self.w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[p + "mlp.down_proj.weight"].T
        return (self._norm(x, "model.norm") @ self.w["lm_head.weight"].T).argmax(-1).tolist()

    def greedy(self, ids: list[int], count: int) -> list[int]:
        past: dict[int, Any] = {}
        made = self.predict(ids, past)[-1:]
        while len(made) < count:
            made += self.predict(made[-1:], past)
        return made
