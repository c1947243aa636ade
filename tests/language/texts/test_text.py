"""Text from data sets and files, its splits, and how it is packed; tiny tokenizers, nothing needs a network."""

import json
import logging
import sys

import datasets
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from mmpreproj.language.config import TextSource
from mmpreproj.language.texts.documents import find_files, read_documents
from mmpreproj.language.texts.packing import beginning_token, pack_text, tokenizer_digest
from mmpreproj.language.texts.splits import hold_out
from mmpreproj.training.config import ConfigError

BOS, EOS = 1, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep what `datasets` prepares out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return folder


def make_tokenizer(*, begins=False, eos="</s>", characters="abcdefghijklmnopqrstuvwxyz0123456789\n ", **settings):
    """Build a tokenizer with a token for each character; `begins` makes it put <s> first, as Llama's does."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos, **settings)


def text_of(tokenizer, tokens):
    return "".join(tokenizer.convert_ids_to_tokens(torch.as_tensor(tokens).flatten().tolist()))


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def many(folder, count=40):
    """Write documents of ten characters, which all differ."""
    return write(folder, {f"{number:03}.txt": f"doc {number:06}" for number in range(count)})


def documents(source, role="train"):
    return read_documents(source, origin="probe.yaml")[role]["text"][:]


def pack(source, tokenizer=None, *, length=16):
    return pack_text(source, tokenizer or make_tokenizer(), length=length, origin="probe.yaml")


def saved(folder, **splits):
    parts = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return TextSource(dataset=str(folder))


# --- the section ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give dataset, .* or files.*got neither"),
        ({"dataset": "a/b", "files": "x.txt"}, "got both"),
        ({"files": "x.txt", "subset": "en"}, "subset has no meaning for files; leave it out"),
        ({"files": "x.txt", "splits": {"test": "t"}}, "splits has no meaning for files"),
        ({"dataset": "a/b", "document_separator": "\n"}, "document_separator has no meaning for dataset"),
        ({"files": "x.txt", "document_separator": ""}, "at least 1 character"),
        ({"files": "x.txt", "held_out": 0.5}, "less than 0.5"),
        ({"files": "x.txt", "held_out": 0}, "greater than 0"),
        ({"files": "x.txt", "separator": "\n"}, "'eos' or 'none'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        TextSource.model_validate(values)


def test_a_section_that_was_written_whole_is_read_again():
    for source in (TextSource(files="x.txt", document_separator="\n"), TextSource(dataset="a/b", subset="en")):
        assert TextSource.model_validate(source.model_dump(mode="json")) == source


def test_without_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"probe.yaml: .*pip install 'mmpreproj\[lm\]'"):
        read_documents(TextSource(files="x.txt"), origin="probe.yaml")


# --- files ---


def test_text_files_are_one_document_each_in_the_order_of_their_paths(tmp_path):
    write(tmp_path, {"b.md": "second\r\n", "a/deep/x.rst": "\ufefffirst", "c.txt": "third", "d.log": "not asked for"})
    patterns = [f"{tmp_path}/**/*.rst", f"{tmp_path}/b.md", f"{tmp_path}/*.txt", f"{tmp_path}/c.txt"]
    assert documents(TextSource(files=patterns)) == ["first", "second\n", "third"]


def test_relative_and_home_paths_and_names_that_look_like_patterns_are_found(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": "a", "b[1].txt": "b"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [path.name for path in find_files(["~/a.txt", "b[1].txt"])] == ["a.txt", "b[1].txt"]


def test_a_separator_is_searched_for_as_it_stands(tmp_path):
    write(tmp_path, {"a.txt": "one.*two+three.*four"})
    assert documents(TextSource(files=f"{tmp_path}/a.txt", document_separator=".*")) == ["one", "two+three", "four"]


def test_rows_of_each_format_are_documents(tmp_path):
    long = "x" * 200_000  # longer than Python's own limit of a CSV cell
    write(
        tmp_path,
        {
            "1.jsonl": '{"body": "lines 1", "n": 1}\n\n{"body": null}\n{"body": "lines 2"}\n',
            "2.json": json.dumps([{"body": "list 1"}, {"body": "list 2"}]),
            "3.json": json.dumps({"body": "object", "year": 1790}),
            "4.json": '{"body": "lines a"}\n{"body": "lines b"}',
            "5.csv": f'n,body\n1,"a ""quoted"",\nline"\n2,{long}\n',
        },
    )
    datasets.Dataset.from_dict({"n": [1], "body": ["stored"]}).to_parquet(tmp_path / "6.parquet")
    found = documents(TextSource(files=f"{tmp_path}/*", column="body"))
    expected = ["lines 1", "lines 2", "list 1", "list 2", "object", "lines a", "lines b", 'a "quoted",\nline', long]
    assert found == [*expected, "stored"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", r"probe.yaml: files: .*a.txt is not UTF-8 \(byte 3\); convert it"),
        ("a.csv", b"text\ncaf\xe9\n", r"files: .*a.csv is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', r"files: .*a.jsonl, line 2, is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', r"files: .*a.jsonl, line 2, is not valid JSON"),
        ("a.json", b"[1", r"files: .*a.json is not valid JSON"),
        ("a.json", b"[1]", r"files: .*a.json, row 1 is no object with columns, but int"),
        (
            "a.json",
            b'{"body": "a", "n": 1}',
            r"column: .*a.json, row 1 has no column 'text', only 'body', 'n'; set column",
        ),
        ("a.jsonl", b'{"text": ["a"]}', r"column: .*a.jsonl, row 1: 'text' holds list; expected text"),
        ("a.csv", b"body,n\nx,1\n", r"column: .*a.csv, row 1 has no column 'text', only 'body', 'n'"),
        ("a.parquet", b"x", r"files: .*a.parquet is not valid parquet"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        documents(TextSource(files=f"{tmp_path}/*"))


def test_a_parquet_file_without_the_column_lists_those_there_are(tmp_path):
    datasets.Dataset.from_dict({"n": [1], "body": ["a"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet has no column 'text', only 'n', 'body'"):
        documents(TextSource(files=f"{tmp_path}/*"))


def test_patterns_that_match_nothing_and_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"files: no file matches '.*/\*.txt', looked for from"):
        documents(TextSource(files=f"{tmp_path}/*.txt"))
    with pytest.raises(ConfigError, match=r"is a folder; name its files, such as .*/\*\*/\*.txt"):
        documents(TextSource(files=f"{tmp_path}/"))


def test_a_file_that_changed_is_read_again(tmp_path):
    source = TextSource(files=f"{write(tmp_path, {'a.txt': 'before'})}/a.txt")
    assert documents(source) == ["before"]
    write(tmp_path, {"a.txt": "and after"})
    assert documents(source) == ["and after"]


# --- data sets ---


def test_splits_of_a_data_set_are_those_it_names(tmp_path):
    source = saved(tmp_path / "d", learn=["a"], validation=["b"], exam=["c"])
    source = TextSource(dataset=source.dataset, splits={"train": "learn", "test": "exam"})
    assert [documents(source, role) for role in ("train", "validation", "test")] == [["a"], ["b"], ["c"]]


def test_parts_of_splits_are_taken_from_a_folder_of_files(tmp_path):
    rows = datasets.Dataset.from_dict({"line": ["a", "b", "c", "d"]})
    rows.to_parquet(tmp_path / "train.parquet")
    source = TextSource(dataset=str(tmp_path), column="line", splits={"train": "train[:2]", "validation": "train[2:]"})
    assert (documents(source), documents(source, "validation")) == (["a", "b"], ["c", "d"])
    assert "test" not in read_documents(source, origin="probe.yaml")


@pytest.mark.parametrize(
    ("there", "splits", "message"),
    [
        (["a"], {}, "splits.train: .*d has no split 'train', only 'a'; name one of them"),
        (["train"], {"test": "exam"}, "splits.test: .*d has no split 'exam', only 'train'"),
        (
            ["train", "valid"],
            {},
            "splits.validation: .* no split 'validation', but 'valid'; set splits.validation: valid",
        ),
        (
            ["train"],
            {"train": "train[:1]"},
            r"splits: .* was saved to disk, of which no part 'train\[:1\]' can be taken",
        ),
    ],
)
def test_splits_that_are_not_there_are_refused(tmp_path, there, splits, message):
    saved(tmp_path / "d", **{name: ["a"] for name in there})
    with pytest.raises(ConfigError, match=rf"probe.yaml: {message}"):
        documents(TextSource(dataset=str(tmp_path / "d"), splits=splits))


def test_a_split_that_serves_as_another_is_not_proposed(tmp_path):
    saved(tmp_path / "d", train=["a"], eval=["b"])
    for role, missing in (("validation", "test"), ("test", "validation")):
        source = TextSource(dataset=str(tmp_path / "d"), splits={role: "eval"})
        assert documents(source, role) == ["b"] and missing not in read_documents(source, origin="probe.yaml")


def test_data_sets_that_have_no_such_text_are_refused(tmp_path):
    datasets.Dataset.from_dict({"n": [1]}).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"column: .*d, split 'train' has no column 'text', only 'n'"):
        documents(TextSource(dataset=str(tmp_path / "d")))
    with pytest.raises(ConfigError, match=r"column: .*'n' holds .*int64.*; expected text, name another column"):
        documents(TextSource(dataset=str(tmp_path / "d"), column="n"))
    with pytest.raises(ConfigError, match=r"dataset: 'nobody/nothing' cannot be loaded: .*without a network"):
        documents(TextSource(dataset="nobody/nothing"))


def test_nothing_is_written_beside_a_saved_data_set(tmp_path):
    source = saved(tmp_path / "d", train=[f"doc {number}" for number in range(30)])
    before = sorted(path for path in (tmp_path / "d").rglob("*"))
    pack(source)
    assert sorted(path for path in (tmp_path / "d").rglob("*")) == before


# --- what is held out ---


def test_each_share_is_about_what_was_asked_for_by_characters():
    generator = np.random.default_rng(0)
    characters = generator.integers(1, 1000, 2000)
    rows = hold_out(generator.permutation(2000), characters, ["test", "validation"], share=0.1)
    assert sorted(np.concatenate(list(rows.values()))) == list(range(2000))
    for role in ("test", "validation"):
        assert abs(characters[rows[role]].sum() / characters.sum() - 0.1) < 0.002


def test_a_long_document_is_not_held_out_among_short_ones():
    characters = np.array([1000, *[10] * 50])
    rows = hold_out(np.arange(51), characters, ["test"], share=0.1)
    assert 0 in rows["train"] and len(rows["test"]) == 15  # 150 of 1500 characters


@pytest.mark.parametrize("sizes", [[10, 10, 10], [1, 1000, 1000], [1000, 1, 1]])
def test_three_documents_are_one_for_each_split(sizes):
    rows = hold_out(np.arange(3), np.array(sizes), ["test", "validation"], share=0.4)
    assert [len(rows[role]) for role in ("train", "test", "validation")] == [1, 1, 1]


def test_copies_of_a_document_land_on_one_side(tmp_path):
    rows = [f"doc {number % 20}" + " \n" * (number % 3) for number in range(120)]
    tokenizer = make_tokenizer()
    packed = pack(saved(tmp_path / "d", train=rows), tokenizer, length=2)
    sides = [
        {part.strip() for part in text_of(tokenizer, tokens).split("</s>")[:-1]}
        for tokens in (packed.train[:]["input_ids"], packed.validation, packed.test)
    ]
    assert all(sides) and not (sides[1] & sides[2]) and not (sides[0] & (sides[1] | sides[2]))


def test_what_is_held_out_goes_by_the_text_and_the_seed_alone(tmp_path):
    def held(folder, **settings):
        packed = pack(TextSource(files=f"{folder}/*.txt", **settings), tokenizer)
        return set(text_of(tokenizer, packed.test).split("</s>"))

    tokenizer = make_tokenizer()
    folder = many(tmp_path / "a")
    texts = sorted((path.read_text() for path in folder.iterdir()), reverse=True)
    renamed = write(tmp_path / "b", {f"{place:03}.txt": text for place, text in enumerate(texts)})
    assert held(folder) == held(renamed)
    assert held(folder) != held(folder, split_seed=1)


def test_only_splits_that_are_missing_are_taken_from_train(tmp_path):
    rows = [f"doc {number:03}" for number in range(50)]
    packed = pack(saved(tmp_path / "d", train=rows, validation=["a doc"]))
    assert [packed.counts[role].documents for role in ("train", "validation", "test")] == [45, 1, 5]


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        (
            {"a.txt": "one"},
            {},
            "train, test, validation need a document each; different documents there are: 1; .*set document_sep",
        ),
        ({"a.txt": "one"}, {"document_separator": "#"}, ".*another document_separator; '#' is too rare"),
        ({"a.txt": "same", "b.txt": "same", "c.txt": "same "}, {}, ".*different documents there are: 1; "),
        (
            {"a.txt": " \n", "b.txt": ""},
            {},
            "train: no document of files .* has text, of 2 read; name other text",
        ),
    ],
)
def test_text_that_cannot_be_split_says_what_to_do(tmp_path, files, settings, message):
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=rf"probe.yaml: {message}"):
        pack(TextSource(files=f"{tmp_path}/*.txt", **settings))


def test_an_empty_split_of_a_data_set_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"probe.yaml: test: no document of dataset .* has text, of 1 read"):
        pack(saved(tmp_path / "d", train=["some text"], validation=["some text"], test=[""]))


# --- packing ---


def test_blocks_are_the_documents_end_to_end_without_the_incomplete_one(tmp_path):
    tokenizer = make_tokenizer()
    packed = pack(TextSource(files=f"{many(tmp_path)}/*.txt"), tokenizer, length=16)
    rows = packed.train[:]["input_ids"]
    assert rows.shape == (packed.counts["train"].tokens // 16, 16) and rows.dtype == torch.int64
    assert packed.train[0]["input_ids"].shape == (16,)
    joined = [text_of(tokenizer, tokens) for tokens in (rows, packed.validation, packed.test)]
    whole = [part.split("</s>") for part in joined]
    assert [parts[-1] for parts in whole[1:]] == ["", ""]  # ends with an end-of-text token
    found = [part for parts in whole for part in parts[:-1]]
    expected = {f"doc {number:06}" for number in range(40)}
    assert len(set(found)) == len(found) and set(found) <= expected and len(found) >= 38
    assert whole[0][:-1] != sorted(whole[0][:-1])  # shuffled


def test_blocks_go_on_over_the_batches_they_are_made_in(tmp_path):
    rows = [f"{number:05}"[: 1 + number % 5] for number in range(3500)]
    tokenizer = make_tokenizer()
    source = saved(tmp_path / "d", train=rows, validation=["some"], test=["text"]).model_copy(
        update={"separator": "none"}
    )
    packed = pack(source, tokenizer, length=7)
    expected = "".join(rows)
    assert text_of(tokenizer, packed.train[:]["input_ids"]) == expected[: len(expected) // 7 * 7]


def test_rows_of_a_running_text_are_joined_as_they_are_and_its_end_is_held_out(tmp_path):
    rows = [line for number in range(100) for line in (f"line {number:03}\n", "", " \n")]
    tokenizer = make_tokenizer()
    source = saved(tmp_path / "d", train=rows).model_copy(update={"separator": "none"})
    packed = pack(source, tokenizer, length=2)
    parts = [text_of(tokenizer, part) for part in (packed.train[:]["input_ids"], packed.validation, packed.test)]
    assert "".join(parts)[:-1] in "".join(rows) and len("".join(parts)) >= len("".join(rows)) - 1
    assert all(0.09 < len(part) / len("".join(rows)) < 0.12 for part in parts[1:])


def test_a_token_that_the_tokenizer_puts_first_is_at_each_documents_beginning(tmp_path):
    tokenizer = make_tokenizer(begins=True)
    packed = pack(saved(tmp_path / "d", train=["abc", "def"], validation=["ab"], test=["a", "b"]), tokenizer, length=2)
    assert packed.beginning == BOS
    assert text_of(tokenizer, packed.validation) == "<s>ab</s>"
    assert sorted(text_of(tokenizer, packed.test).split("</s>")) == ["", "<s>a", "<s>b"]
    assert text_of(tokenizer, packed.train[:]["input_ids"]).count("<s>") == 2


def test_a_running_text_has_that_token_once(tmp_path):
    tokenizer = make_tokenizer(begins=True)
    source = saved(tmp_path / "d", train=["abc", "def"], validation=["a", "b"], test=["a"])
    packed = pack(source.model_copy(update={"separator": "none"}), tokenizer, length=7)
    assert text_of(tokenizer, packed.train[:]["input_ids"]) == "<s>abcdef"
    assert text_of(tokenizer, packed.validation) == "<s>ab"
    assert packed.counts["validation"].tokens == 3


def test_the_beginning_token_is_found_by_comparing():
    assert beginning_token(make_tokenizer(begins=True)) == BOS
    assert beginning_token(make_tokenizer()) is None


def test_counts_are_of_the_text_itself(tmp_path):
    source = saved(tmp_path / "d", train=["abc", "def", ""], validation=["aé", "  "], test=["日本"])
    counts = pack(source, length=4).counts
    found = [(part.documents, part.tokens, part.characters, part.bytes) for part in counts.values()]
    assert found == [(2, 8, 6, 6), (1, 3, 2, 3), (1, 3, 2, 6)]


def test_too_little_text_for_a_block_is_refused(tmp_path):
    source = saved(tmp_path / "d", train=["abc"], validation=["ab"], test=["ab"])
    with pytest.raises(
        ConfigError, match=r"probe.yaml: train has 4 tokens, too few for one block of length 5; give more"
    ):
        pack(source, length=5)
    with pytest.raises(ConfigError, match=r"length: a block needs 2 tokens or more, to predict one; got 1"):
        pack(source, length=1)


def test_a_split_without_anything_to_predict_is_refused(tmp_path):
    source = saved(tmp_path / "d", train=["abc"], validation=["a"], test=["ab"])
    with pytest.raises(ConfigError, match=r"validation has 1 tokens, of which none can be predicted"):
        pack(source.model_copy(update={"separator": "none"}), length=2)


def test_a_tokenizer_without_an_end_of_text_token_is_refused_unless_none_is_needed(tmp_path):
    source, tokenizer = saved(tmp_path / "d", train=["abc"], validation=["ab"], test=["ab"]), make_tokenizer(eos=None)
    with pytest.raises(
        ConfigError, match=r"separator: 'eos' needs an end-of-text token, .* set its eos_token, or sep"
    ):
        pack(source, tokenizer, length=2)
    assert pack(source.model_copy(update={"separator": "none"}), tokenizer, length=2).counts["train"].tokens == 3


def test_documents_longer_than_the_context_are_whole_and_bring_no_warning(tmp_path, caplog):
    tokenizer = make_tokenizer(model_max_length=4)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        packed = pack(saved(tmp_path / "d", train=["a" * 50], validation=["a" * 9], test=["ab"]), tokenizer)
        assert not caplog.records
        tokenizer("a" * 50)
        assert "longer than the specified maximum" in caplog.text  # other callers still hear of it
    finally:
        logger.removeHandler(caplog.handler)
    assert packed.counts["train"].tokens == 51


def test_truncation_and_padding_that_a_tokenizer_was_left_with_do_not_matter(tmp_path):
    source = saved(tmp_path / "d", train=["a" * 50, "b"], validation=["a" * 9], test=["ab"])
    used = make_tokenizer(pad_token="<unk>")
    used.backend_tokenizer.enable_truncation(3)
    used.backend_tokenizer.enable_padding(length=60)
    assert pack(source, used).counts["train"].tokens == 53


# --- digest and cache ---


def test_the_digest_tells_apart_all_that_went_in(tmp_path):
    files = f"{many(tmp_path)}/*.txt"
    source, digests = TextSource(files=files), set()
    digests.add(pack(source).digest)
    digests.add(pack(source, length=8).digest)
    digests.add(pack(source, make_tokenizer(begins=True)).digest)
    digests.add(pack(source, make_tokenizer(characters="\n 0123456789abcdefghijklmnopqrstuvwxyz")).digest)
    digests.add(pack(TextSource(files=files, split_seed=1)).digest)
    digests.add(pack(TextSource(files=files, separator="none")).digest)
    digests.add(pack(TextSource(files=files, held_out=0.2)).digest)
    write(tmp_path, {"000.txt": "doc 999999"})
    digests.add(pack(source).digest)
    assert len(digests) == 8


def test_the_digest_is_the_same_for_the_same_text_from_elsewhere(tmp_path):
    first = pack(TextSource(files=f"{many(tmp_path / 'a')}/*.txt"))
    rows = [{"body": f"doc {number:06}"} for number in range(40)]
    lines = write(tmp_path / "b", {"x.jsonl": "\n".join(map(json.dumps, rows))})
    assert pack(TextSource(files=f"{lines}/x.jsonl", column="body")).digest == first.digest


def test_the_tokenizers_digest_is_of_how_it_cuts_not_of_how_it_was_used():
    fresh, used = make_tokenizer(), make_tokenizer(model_max_length=7)
    used(["abc", "d"], padding=False, truncation=True)
    assert tokenizer_digest(fresh) == tokenizer_digest(used)
    used.add_tokens(["abc"])
    assert tokenizer_digest(fresh) != tokenizer_digest(used)


def test_a_second_run_tokenises_nothing(tmp_path, monkeypatch):
    source = TextSource(files=f"{many(tmp_path)}/*.txt")
    first = pack(source)
    from mmpreproj.language.texts import packing

    monkeypatch.setattr(packing, "_tokenise", None)
    again = pack(source)
    assert again.train[:]["input_ids"].equal(first.train[:]["input_ids"])
    assert again.test.equal(first.test) and again.digest == first.digest


def test_blocks_are_on_disk(tmp_path):
    packed = pack(TextSource(files=f"{many(tmp_path)}/*.txt"))
    assert [file["filename"] for file in packed.train.cache_files]


def test_work_of_seconds_shows_no_bar_and_leaves_the_setting_as_it_was(tmp_path, capfd):
    assert not datasets.utils.are_progress_bars_disabled()
    pack(TextSource(files=f"{many(tmp_path)}/*.txt"))
    assert capfd.readouterr().err == ""
    assert not datasets.utils.are_progress_bars_disabled()


def test_a_tokenizer_written_in_python_serves_too(tmp_path):
    source = saved(tmp_path / "d", train=["abc", "de"], validation=["é"], test=["ab"])
    packed = pack(source, ByT5Tokenizer(), length=7)
    assert packed.validation.tolist() == [0xC3 + 3, 0xA9 + 3, 1]  # bytes after three special tokens, of which 1 ends
    assert packed.digest != pack(source, ByT5Tokenizer(extra_ids=0), length=7).digest
