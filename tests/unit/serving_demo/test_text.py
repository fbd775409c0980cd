import pytest

from serving_demo import text


def test_a_file_is_read_as_bytes(tmp_path):
    file = tmp_path / "any"
    file.write_bytes(b"\xff\x00text")
    assert text.read_text(file) == (str(file), b"\xff\x00text")


def test_a_checkout_gives_its_readme(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_bytes(b"read me")
    assert text.read_text(None) == ("README.md", b"read me")


def test_an_installed_package_gives_the_readme_of_its_metadata(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "CHECKOUT", tmp_path)
    (tmp_path / "README.md").write_bytes(b"somebody else's, in site-packages")
    metadata = tmp_path / "torch_kvswap-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_kvswap\n\nread me\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert text.read_text(None) == ("the README", b"read me\n")


def test_without_either_there_is_an_error(tmp_path, monkeypatch):
    def nothing(name):
        raise text.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(text, "CHECKOUT", tmp_path)
    monkeypatch.setattr(text.metadata, "metadata", nothing)
    with pytest.raises(OSError, match="torch_kvswap is not installed and brings no README"):
        text.read_text(None)


def test_prompts_are_pieces_of_the_text_that_follow_the_seed():
    source = bytes(range(100))
    prompts = text.cut_prompts(source, 200, 3, 20, seed=1)
    assert len(prompts) == 200
    assert all(prompt in source for prompt in prompts)
    assert {len(prompt) for prompt in prompts} == set(range(3, 21))
    assert prompts == text.cut_prompts(source, 200, 3, 20, seed=1)
    assert prompts != text.cut_prompts(source, 200, 3, 20, seed=2)


def test_a_text_as_long_as_the_longest_prompt_is_enough():
    assert text.cut_prompts(b"abc", 2, 3, 3, seed=0) == [b"abc", b"abc"]
