"""Text data: files and tokenizers, and the errors that name those that cannot
be read.
"""

import sys

import numpy as np
import pytest

from xshard.data import text

TEXTS = [
    "one two three four. " * 9,
    "eins zwei drei\r\nvier " * 7,
    "\N{SNOWMAN} <|end|>\0 one two",
]


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(TEXTS, 300)


def test_tokens_decode_to_the_text(tokenizer):
    encode = text.encoder(tokenizer)
    end = tokenizer.token_to_id(text.END)
    for sample in (*TEXTS, "", "what it has not seen: \N{GREEK SMALL LETTER ALPHA}"):
        tokens = encode(sample)
        assert tokens.dtype == np.int32 and tokens.max(initial=0) < 300
        # An end token that is written in the text does not end it.
        assert (tokens == end).tolist() == [False] * (len(tokens) - 1) + [True]
        assert tokenizer.decode(tokens[:-1].tolist()) == sample
    assert len(encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_a_tokenizer_depends_only_on_its_texts(tokenizer, tmp_path):
    again = text.train_tokenizer(reversed(TEXTS), 300)
    assert again.to_str() == tokenizer.to_str()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (
        text.load_tokenizer(tmp_path / "tokenizer.json").to_str() == tokenizer.to_str()
    )


def test_invalid_tokenizers_are_refused(tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text("{")
    for name, reason in (
        ("gone.json", "No such file"),
        ("broken.json", "EOF while parsing"),
    ):
        with pytest.raises(
            ValueError, match=rf"{name} cannot be read as a tokenizer \(.*{reason}"
        ):
            text.load_tokenizer(tmp_path / name)
    with pytest.raises(ValueError, match="vocabulary of 256 must have more than 256"):
        text.train_tokenizer(TEXTS, 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'xshard\[text\]'"):
        text.train_tokenizer(TEXTS, 300)


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer, tmp_path):
    content = tokenizer.to_str().replace(text.END, "<|fin|>")
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=r"other.json has no token '<\|end\|>'"):
        text.load_tokenizer(tmp_path / "other.json")


def test_files_are_read_as_texts(tmp_path):
    for number, content in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_bytes(content.encode())
    paths = sorted(tmp_path.iterdir())
    files = text.Files(paths)
    assert [files[i] for i in range(len(files))] == TEXTS
    with pytest.raises(ValueError, match="gone.txt is not a file"):
        text.Files([*paths, tmp_path / "gone.txt"])
    (tmp_path / "1.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(
        ValueError, match="1.txt cannot be read as UTF-8 .*0xff in position 0"
    ):
        files[1]
    (tmp_path / "1.txt").unlink()
    with pytest.raises(ValueError, match="1.txt cannot be read .*No such file"):
        files[1]
