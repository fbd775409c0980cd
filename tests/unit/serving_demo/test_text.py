from serving_demo import text


def test_a_file_is_read_as_bytes(tmp_path):
    file = tmp_path / "any"
    file.write_bytes(b"\xff\x00text")
    assert text.read_text(file) == (str(file), b"\xff\x00text")


def test_without_a_file_it_is_the_readme():
    name, read = text.read_text(None)
    assert name == "README.md"
    assert read.startswith(b"# torch_kvswap")


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
