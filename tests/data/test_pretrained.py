"""Models and tokenizers of the hub's format: what counts as one."""

import pytest


def test_settings_alone_are_no_tokenizer(tmp_path):
    from joma._data.pretrained import has_tokenizer, load_tokenizer

    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="there is no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert has_tokenizer(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/spiece.model").touch()
    assert has_tokenizer(tmp_path / "other")
