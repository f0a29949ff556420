"""Corpora: the paper's words, blocks that change nothing, caches that many processes hit, windows by step number."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.encoding import basic_english
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joma._data import text as text_module
from joma._data import zipf
from joma._data.cache import write_tokens
from joma._data.corpora import Corpus, corpus
from joma._data.folders import cache_folder
from joma._data.text import Span, Text
from joma._data.tokens import UNKNOWN, Words, narrowest, split_words
from joma._train.windows import epoch, streams, window

JOMA_DATA = os.environ.get("JOMA_DATA", "")
SRC = Path(text_module.__file__).parents[2]
quick = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# pieces in which the rules meet: marks, break tags with and without quotes inside, odd white space, capital sigma
PIECES = st.lists(
    st.sampled_from(
        [
            "The",
            "cat's",
            '"',
            "'",
            ".",
            ",",
            "(",
            ")",
            "!",
            "?",
            ";",
            ":",
            "<br />",
            '<br" />',
            '<br "/>',
            "<BR />",
            "<unk>",
            "@-@",
            " ",
            " ",
            " ",
            "\n",
            "\t",
            "\u2028",
            "\x1f",
            "ΟΔΟΣ",
            "Σ",
            "İ",
            "é",
            "漢字",
            "a.b",
        ]
    ),
    max_size=60,
).map("".join)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JOMA_DATA", raising=False)


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return folder


def words_of(c: Corpus, part: str) -> list[str]:
    return [c.vocabulary[i] for i in getattr(c, part)]


# --- words


@given(PIECES)
@quick
def test_words_are_those_of_torchtexts_basic_english(text):
    assert split_words(text) == basic_english(text)


@given(PIECES, st.integers(1, 40), st.integers(1, 20))
@quick
def test_blocks_change_no_word_and_lose_no_byte(monkeypatch, text, block, line):
    monkeypatch.setattr(text_module, "BLOCK", block)
    monkeypatch.setattr(text_module, "LINE", line)
    data = text.encode()
    blocks = list(Span("x", data).blocks())
    assert b"".join(blocks) == data
    assert [word for b in blocks for word in split_words(b.decode())] == basic_english(text)


@given(
    st.lists(st.sampled_from([*"abcdef.,", "<unk>"]), min_size=1, max_size=80),
    st.integers(1, 9) | st.none(),
)
@quick
def test_vocabulary_is_unk_then_frequency_then_alphabet_up_to_the_cap(tmp_path, words, cap):
    (tmp_path / "scratch").unlink(missing_ok=True)
    tokeniser, chunks = Words.train(
        Text((Span("x", " ".join(words).encode()),)), cap, tmp_path / "scratch"
    )
    tokens = np.concatenate(list(chunks))
    counts = Counter(words)
    counts.pop(UNKNOWN, None)
    expected = [UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word))][:cap]
    assert tokeniser.words == expected
    assert [expected[t] for t in tokens] == [
        word if word in expected else UNKNOWN for word in words
    ]
    assert not (tmp_path / "scratch").exists()


def test_more_distinct_words_than_the_first_table_of_counts_holds(tmp_path):
    many = [f"w{i}" for i in range(150_000)]
    tokeniser, chunks = Words.train(
        Text((Span("x", " ".join([*many, "w149999"]).encode()),)), None, tmp_path / "s"
    )
    tokens = np.concatenate(list(chunks))
    assert tokens.dtype == np.uint32
    assert tokeniser.words[:3] == ["<unk>", "w149999", "w0"]
    assert tokeniser.decode(tokens) == " ".join([*many, "w149999"])


def test_numbers_are_as_narrow_as_the_vocabulary_allows():
    assert narrowest(1 << 16) == np.uint16
    assert narrowest((1 << 16) + 1) == np.uint32


@pytest.mark.skipif(not JOMA_DATA, reason="WikiText-2 is looked for in $JOMA_DATA")
def test_wikitext_2_has_the_papers_vocabulary(monkeypatch):
    monkeypatch.setenv("JOMA_DATA", JOMA_DATA)
    c = corpus("wikitext-2")
    assert c.size == len(c.vocabulary) == 28_782
    assert len(c.train) == 2_049_990
    assert c.vocabulary[0] == UNKNOWN
    assert c.vocabulary.count(UNKNOWN) == 1
    assert corpus("wikitext-2", vocabulary=4_000).size == 4_000


# --- byte pairs


def test_byte_pairs_give_the_text_back(tmp_path):
    pytest.importorskip("tokenizers")
    text = "Ein Wort,  zwei\tWörter; 漢字 <unk>\r\n\n  def f(x): return x\n" * 30
    folder = write(tmp_path / "t", train__txt=text, valid__txt="Zwei neue Wörter: ½\n")
    c = corpus(folder, tokeniser="bpe", vocabulary=280)
    assert c.size == c.vocabulary.get_vocab_size() == 280
    assert c.tokeniser.decode(c.train) == text
    assert c.tokeniser.decode(c.valid) == "Zwei neue Wörter: ½\n"
    assert len(c.train) < 0.8 * len(text.encode())
    again = corpus(folder, tokeniser="bpe", vocabulary=280, cache=tmp_path / "other")
    np.testing.assert_array_equal(c.train, again.train)


# --- streams and windows


def batchify(data: torch.Tensor, bsz: int) -> torch.Tensor:
    """`batchify` of PyTorch's word_language_model example."""
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


@given(st.integers(1, 6), st.integers(1, 9), st.integers(2, 200))
@quick
def test_windows_are_those_of_the_word_language_model_example(batch, length, n):
    tokens = np.arange(n, dtype=np.uint16) * 7 % 101
    source = batchify(torch.from_numpy(tokens.astype(np.int64)), batch)
    if len(source) - 1 < length:
        with pytest.raises(ValueError, match=r"streams"):
            window(streams(tokens, batch), 0, length)
        return
    mine = streams(tokens, batch)
    np.testing.assert_array_equal(mine, source)
    starts = [
        i for i in range(0, len(source) - 1, length) if i + length <= len(source) - 1
    ]  # whole windows
    assert epoch(mine, length) == len(starts)
    for step in range(2 * len(starts) + 1):
        i = starts[step % len(starts)]
        inputs, targets = window(mine, step, length)
        np.testing.assert_array_equal(inputs.T, source[i : i + length])
        np.testing.assert_array_equal(targets.T, source[i + 1 : i + 1 + length])
        for array in (inputs, targets):
            assert array.shape == (batch, length)
            assert array.dtype == np.int64
            assert array.flags.c_contiguous
            assert type(array) is np.ndarray


def test_streams_copy_nothing(tmp_path):
    write_tokens(tmp_path / "t.npy", [np.arange(1000, dtype=np.uint16)], np.dtype(np.uint16))
    tokens = np.load(tmp_path / "t.npy", mmap_mode="r")
    assert np.shares_memory(streams(tokens, 20), tokens)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: streams(np.arange(10), 0), "batch is 0"),
        (
            lambda: streams(np.arange(10), 6),
            "10 tokens in 6 streams leave 1 per stream.*at most 5 streams",
        ),
        (lambda: streams(np.arange(0), 1), "0 tokens"),
        (
            lambda: window(streams(np.arange(700), 20), 0, 35),
            "shorter than a window.*20 streams of 35.*at least 720",
        ),
        (lambda: window(streams(np.arange(720), 20), -1, 35), "step is -1"),
        (lambda: window(streams(np.arange(720), 20), 0, 0), "length is 0"),
    ],
)
def test_windows_that_do_not_exist(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- where text comes from


def test_zipf_is_the_same_everywhere_with_zipf_frequencies_and_first_order_dependence():
    words = zipf.text().split()
    counts = Counter(words)
    assert hashlib.sha256(zipf.text()).hexdigest().startswith("2c336136f4f48c3e")
    # By Zipf's law the r-th word has frequency proportional to 1/r; successors add noise to it.
    frequencies = sorted(counts.values(), reverse=True)[:200]
    ranks = np.arange(1, len(frequencies) + 1)
    slope = np.polyfit(np.log(ranks), np.log(frequencies), 1)[0]
    assert -1.15 < slope < -0.85
    # Half of the words after w0 are one of five successors, on top of their own frequency.
    followers = Counter(after for word, after in pairwise(words) if word == b"w0")
    likely = followers.most_common(5)
    share_after = sum(count for _, count in likely) / followers.total()
    share_anywhere = sum(counts[word] for word, _ in likely) / len(words)
    assert share_after == pytest.approx(0.5 + 0.5 * share_anywhere, abs=0.1)
    assert 1900 < corpus("zipf").size <= len(counts) + 1  # of its training part, and <unk>


def test_hblt_has_the_trees_own_co_occurrence():
    """Pairs of tokens occur together in the lines as often as the tree's closed form says."""
    from joma._data import trees

    spec = "samples=20000,depth=2,children=2,latents=3,classes=4,rho=0.7,seed=5"
    lines = trees.text(spec).decode().splitlines()
    occurs = np.zeros((len(lines), 6), dtype=bool)
    for row, line in enumerate(lines):
        first, *words, stop = line.split()
        assert first[0] == "c"
        assert stop == "."
        assert words == sorted(words)
        occurs[row, [int(word[1:]) for word in words]] = True
    tree = trees.tree(trees.options(spec))
    together = np.einsum("ni,nj->ij", occurs.astype(float), occurs.astype(float)) / len(lines)
    assert np.abs(together - tree.joint(tree.tokens)).max() < 5 * 0.5 / np.sqrt(len(lines))
    c = corpus(f"hblt:{spec}")
    assert set(c.vocabulary) == {
        "<unk>",
        ".",
        *(f"c{k}" for k in range(4)),
        *(f"t{m}" for m in range(6)),
    }
    assert len(c.valid) / (len(c.train) + len(c.valid)) == pytest.approx(0.1, abs=0.01)


def test_pydoc_is_the_standard_librarys_text_its_last_tenth_for_validation():
    from pydoc_data.topics import topics

    c = corpus("pydoc")
    together = " ".join(words_of(c, "train")).split()
    known = set(c.vocabulary)
    everything = [word for name in sorted(topics) for word in basic_english(topics[name])]
    assert together + words_of(c, "valid") == [
        word if word in known else UNKNOWN for word in everything
    ]
    assert 0.07 < len(c.valid) / len(everything) < 0.13
    assert c.name == "pydoc"
    assert isinstance(c.train, np.memmap)


def test_parts_are_found_by_whole_words_in_names(tmp_path):
    folder = write(
        tmp_path / "a", corpus_train__txt="t", corpus_dev__txt="v", wiki_test__txt="no", README="no"
    )
    write(folder / "training", one="also")
    c = corpus(folder)
    assert (words_of(c, "train"), words_of(c, "valid")) == (["t", "also"], ["<unk>"])
    # names that only contain the letters of a part say nothing: all of this is one text
    folder = write(
        tmp_path / "b", a_medieval__txt="1 2 3 4 5 6 7 8\n", b_device__txt="9 10\n", c_trains="11\n"
    )
    c = corpus(folder)
    assert len(c.train) + len(c.valid) == 11
    assert 1 <= len(c.valid) <= 2


def test_only_one_part_is_named(tmp_path):
    c = corpus(
        write(tmp_path / "a", valid__txt="x y", one__txt="x", two__txt="y z", test__txt="no")
    )
    assert (words_of(c, "train"), words_of(c, "valid")) == (["x", "y", "z"], ["x", "y"])
    c = corpus(write(tmp_path / "b", train__txt="a\n" * 100, notes__txt="no"))
    assert (len(c.train), len(c.valid)) == (91, 9)


def test_hidden_and_binary_files_are_no_text_and_words_end_with_their_file(tmp_path):
    folder = write(tmp_path / "a", train1="one", train2="\ufefftwo", valid="one two")
    (folder / "train.bin").write_bytes(b"\0\1train")
    (folder / ".train").write_text("hidden")
    c = corpus(folder)
    assert words_of(c, "train") == ["one", "two"]


def test_one_file_without_line_ends_is_cut_between_words(tmp_path):
    (tmp_path / "f.txt").write_text(" ".join(f"word{i}" for i in range(100)))
    c = corpus(tmp_path / "f.txt")
    assert words_of(c, "train") == sorted(words_of(c, "train"), key=lambda w: int(w[4:]))
    assert len(c.train) + len(c.valid) == 100
    assert len(c.valid) in (9, 10)


def test_wikitext_is_found_in_the_folder_its_parent_and_by_path(tmp_path, monkeypatch):
    folder = write(
        tmp_path / "wikitext-2",
        wiki__train__tokens="a b <unk>",
        wiki__valid__tokens="b",
        wiki__test__tokens="c",
    )
    write(folder, wiki__train__raw="raw", wiki__valid__raw="raw", wiki__test__tokens="c")
    digests = {corpus(folder).digest, corpus(tmp_path).digest}
    for data in (folder, tmp_path):
        monkeypatch.setenv("JOMA_DATA", str(data))
        c = corpus("wikitext-2")
        digests.add(c.digest)
    assert len(digests) == 1
    assert c.vocabulary == ["<unk>", "a", "b"]
    assert corpus(tmp_path).name == "wikitext-2"


def test_one_wikitext_is_never_taken_for_the_other(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("wikitext-2", "unnamed"):
        folder = write(tmp_path / name, wiki__train__tokens="a", wiki__valid__tokens="a")
        monkeypatch.setenv("JOMA_DATA", str(folder))
        assert corpus("wikitext-2").size == 2
        with pytest.raises(
            ValueError, match=r"wikitext-103 was not found: .*joma\[hf\].*JOMA_DATA"
        ):
            corpus("wikitext-103")
    write(tmp_path / "wikitext-103", wiki__train__tokens="b", wiki__valid__tokens="b")
    with pytest.raises(ValueError, match="holds wikitext-2 and wikitext-103"):
        corpus(tmp_path)


@given(st.lists(st.text("ab \n", max_size=30), min_size=1, max_size=4), st.integers(1, 30))
@quick
def test_splitting_a_text_loses_nothing_and_cuts_no_word(monkeypatch, files, line):
    monkeypatch.setattr(text_module, "LINE", line)
    data = [file.encode() for file in files]
    whole = Text(tuple(Span(str(i), d) for i, d in enumerate(data)))
    parts = whole.split(0.9)
    assert b"".join(b for part in parts for span in part.spans for b in span.blocks()) == b"".join(
        data
    )
    assert [w for part in parts for b in part.blocks() for w in b.split()] == [
        w for f in files for w in f.split()
    ]
    if files[-1].strip() and len(" ".join(files).split()) > 1 and max(map(len, data)) <= line:
        assert parts[1].size() > 0


# --- the hub


def test_a_data_set_is_streamed_once_and_again_when_a_local_one_changes(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"id": i, "text": f"row {i}"}) + "\n" for i in range(50))
    )
    (folder / "validation.jsonl").write_text(json.dumps({"id": 1, "text": "row 7"}) + "\n")
    said = []
    c = corpus(f"hf:{folder}", say=said.append)
    assert words_of(c, "train") == [word for i in range(50) for word in ("row", str(i))]
    assert words_of(c, "valid") == ["row", "7"]
    assert "streaming" in said[0]
    assert corpus(f"hf:{folder}", say=said.append).digest == c.digest
    assert len(said) == 2  # streamed and encoded, once each
    (folder / "validation.jsonl").write_text(json.dumps({"id": 1, "text": "row 77"}) + "\n")
    assert corpus(f"hf:{folder}").digest != c.digest
    (folder / "train.jsonl").write_text(json.dumps({"a": "x", "b": "y"}) + "\n")
    with pytest.raises(ValueError, match="no column called text: the columns of text are a, b"):
        corpus(f"hf:{folder}")


def test_without_folder_and_hub_the_error_says_how_to_get_wikitext(monkeypatch):
    pytest.importorskip("datasets")

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.dataset_info", unreachable)
    with pytest.raises(
        ValueError, match=r"wikitext-2 was not found.*JOMA_DATA is not set.*no route.*set JOMA_DATA"
    ):
        corpus("wikitext-2")
    with pytest.raises(
        ValueError, match=r"cannot load some/set:plain from the hub \(ConnectionError: no route\)"
    ):
        corpus("hf:some/set:plain")


# --- the cache


def test_the_cache_is_where_the_environment_says(monkeypatch):
    assert cache_folder() == Path(os.environ["JOMA_CACHE"])
    monkeypatch.delenv("JOMA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/joma")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "joma"


def test_the_second_time_comes_from_the_cache_and_any_change_is_another_entry(tmp_path):
    folder = write(tmp_path / "a", train__txt="a a b", valid__txt="b")
    said = []
    first = corpus(folder, say=said.append)
    assert corpus(folder, say=said.append).digest == first.digest
    assert len(said) == 1
    capped = corpus(folder, vocabulary=2)
    write(folder, valid__txt="a")
    changed = corpus(folder)
    write(folder, train__txt="a a ", valid__txt="ba")  # the same bytes, cut elsewhere
    moved = corpus(folder)
    assert len({first.digest, capped.digest, changed.digest, moved.digest}) == 4
    assert capped.vocabulary == ["<unk>", "a"]


@pytest.mark.parametrize("file", ["train.npy", "valid.npy", "vocabulary", "corpus.json"])
@pytest.mark.parametrize("damage", ["gone", "short", "empty"])
def test_a_damaged_entry_is_made_again(tmp_path, file, damage):
    folder = write(tmp_path / "a", train__txt="a b c " * 50, valid__txt="b c " * 50)
    c = corpus(folder)
    expected = np.array(c.train), np.array(c.valid)
    path = tmp_path / "cache" / "corpora" / c.digest / file
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[: len(content) // 2 if damage == "short" else 0])
    again = corpus(folder)
    np.testing.assert_array_equal(again.train, expected[0])
    np.testing.assert_array_equal(again.valid, expected[1])
    assert path.read_bytes() == content


RACER = """
import sys, time, hashlib
from pathlib import Path
if sys.argv[3] == "no locks":
    sys.modules["fcntl"] = None
from joma._data import cache
from joma._data.corpora import corpus
if sys.argv[3] == "no locks":  # both are done before either is renamed
    to_disk = cache._to_disk
    def met(folder):
        to_disk(folder)
        Path(sys.argv[2], f"filled{sys.argv[4]}").touch()
        while len(list(Path(sys.argv[2]).glob("filled*"))) < 2:
            time.sleep(0.01)
    cache._to_disk = met
Path(sys.argv[2], f"ready{sys.argv[4]}").touch()
while len(list(Path(sys.argv[2]).glob("ready*"))) < 2:
    time.sleep(0.005)
said = []
c = corpus(sys.argv[1], say=said.append)
print(len(said), c.digest, len(c.train), hashlib.sha256(c.train.tobytes()).hexdigest(), c.size)
"""


def process(code: str, *args: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def some_text(words: int, seed: int = 0) -> str:
    draw = np.random.default_rng(seed).zipf(1.3, words) % 5_000
    return (
        "\n".join(" ".join(f"w{i}" for i in draw[k : k + 20]) for k in range(0, words, 20)) + "\n"
    )


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_two_processes_at_once_get_the_same_corpus(tmp_path, locks):
    folder = write(tmp_path / "a", train__txt=some_text(60_000), valid__txt=some_text(1_000, 1))
    racers = [process(RACER, folder, tmp_path, locks, i) for i in range(2)]
    outputs = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    results = [out.split() for out, _ in outputs]
    assert results[0][1:] == results[1][1:]
    assert sorted(int(r[0]) for r in results) == (
        [0, 1] if locks == "locks" else [1, 1]
    )  # who encoded
    alone = corpus(folder, cache=tmp_path / "alone")
    assert results[0][1:3] == [alone.digest, str(len(alone.train))]
    np.testing.assert_array_equal(alone.train, corpus(folder).train)
    entries = [
        path.name
        for path in (tmp_path / "cache" / "corpora").iterdir()
        if not path.name.endswith(".lock")
    ]
    assert entries == [alone.digest]  # nothing half-made is left


def test_a_process_killed_while_encoding_leaves_no_entry_and_the_next_one_tidies_up(tmp_path):
    folder = write(tmp_path / "a", train__txt="a b c\n" * 50, valid__txt="a\n")
    stuck = process(
        "import sys, time; from joma._data import cache; from joma._data.corpora import corpus\n"
        "cache._to_disk = lambda folder: time.sleep(60)\ncorpus(sys.argv[1])",
        folder,
    )
    corpora, deadline = tmp_path / "cache" / "corpora", time.monotonic() + 20
    while not list(corpora.glob(".*.partial-*/corpus.json")):
        assert time.monotonic() < deadline, stuck.poll()
        time.sleep(0.02)
    stuck.send_signal(signal.SIGKILL)
    stuck.communicate()
    assert len(list(corpora.glob(".*.partial-*"))) == 1
    c = corpus(folder)
    assert len(c.train) == 150
    assert sorted(path.name for path in corpora.iterdir()) == [f".{c.digest}.lock", c.digest]


PEAK = """
import sys
from joma._data.corpora import corpus
from joma._data.tokens import split_words
def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))
before = status("VmRSS")
if sys.argv[2] == "all at once":
    words = split_words(open(sys.argv[1] + "/train.txt").read())
else:
    corpus(sys.argv[1], vocabulary=500)
print((status("VmHWM") - before) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    piece = some_text(100_000)  # 0.4 MB
    peak = {}
    for copies in (4, 32):
        folder = write(
            tmp_path / str(copies), train__txt=piece * copies, valid__txt=some_text(100, 1)
        )
        peak[copies] = float(process(PEAK, folder, "streamed").communicate(timeout=120)[0])
    naive = float(process(PEAK, folder, "all at once").communicate(timeout=120)[0])
    assert peak[32] < peak[4] + 4, (
        peak
    )  # MB; the text grows by 10 MB, its tokens as uint32 by 11 MB
    assert naive > peak[4] + 100  # the check can fail


# --- bad input


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "wikitext-3",
            {},
            "unknown corpus 'wikitext-3': there is no file or folder .*wikitext-3.*hblt, hf:NAME",
        ),
        ("hblt:rh0=1", {}, "hblt has no option 'rh0'"),
        ("hblt:depth=2.5", {}, "depth must be a whole number, got '2.5'"),
        ("hblt:samples=0", {}, "samples must be at least 1"),
        ("hblt:rho=-0.1", {}, r"rho must be in \[0, 1\]"),
        ("", {}, "no corpus was named"),
        ("hf:", {}, "hf: names no data set"),
        ("pydoc", {"vocabulary": 0}, "capped at 0 words"),
        ("pydoc", {"vocabulary": -5}, "capped at -5 words"),
        ("pydoc", {"tokeniser": "bpe", "vocabulary": 255}, "255: byte pairs need at least 256"),
        (
            "pydoc",
            {"tokeniser": "letters"},
            "unknown tokeniser 'letters': choose one of words, bpe",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(source, options, message):
    with pytest.raises(ValueError, match=message):
        corpus(source, **options)


def test_text_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"no training text in .*empty"):
        corpus(write(tmp_path / "empty"))
    with pytest.raises(ValueError, match="no training text"):
        corpus(write(tmp_path / "only", valid__txt="a b"))
    for name, content in (("nothing", ""), ("blank", ' \n"";: \n')):
        (tmp_path / name).write_text(content)
        with pytest.raises(
            ValueError, match=f"the training text of {name} is empty: no words in .*{name}"
        ):
            corpus(tmp_path / name)
    with pytest.raises(ValueError, match="the validation text of v is empty"):
        corpus(write(tmp_path / "v", train__txt="a b", valid__txt="\n"))
    (tmp_path / "short").write_text("word")
    with pytest.raises(ValueError, match="the validation text of short is empty"):
        corpus(tmp_path / "short")
    assert not [
        path for path in (tmp_path / "cache" / "corpora").iterdir() if path.suffix != ".lock"
    ]


def test_a_file_that_is_not_utf_8_is_named_with_the_place(tmp_path):
    folder = write(tmp_path / "a", train__txt="x\n" * 300_000, valid__txt="x")
    with (folder / "train.txt").open("ab") as stream:
        stream.write("café\n".encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"train\.txt is not UTF-8 text: byte 0xe9 at position 600003"
    ):
        corpus(folder)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write the cache: .*file.*JOMA_CACHE"):
        corpus("pydoc", cache=tmp_path / "file")
