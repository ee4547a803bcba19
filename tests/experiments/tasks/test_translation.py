"""Translation: text files and their errors, the network compared with a slow reference, beam search
compared with all sentences, and trainings small enough to memorize."""

import gzip
import io
import math
from itertools import islice, product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adashift import AdaShift
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.data import files, translation
from experiments.data.batches import Epochs, generator
from experiments.data.files import DataError
from experiments.data.text import (
    END,
    START,
    UNKNOWN,
    Buckets,
    Pairs,
    Sentences,
    Vocabulary,
    read_lines,
    read_pairs,
)
from experiments.data.translation import generate_sentences, load_multi30k, load_sentences
from experiments.models.beam import beam_search
from experiments.models.seq2seq import Lengths, Translator
from experiments.records.run import Run
from experiments.schedules import halvings
from experiments.task import Step
from experiments.tasks.translation import Translation, TranslationTrainer, bleu
from experiments.training.execute import execute
from experiments.training.loop import train

CPU = torch.device("cpu")
WORDS = {"source_words": 11, "target_words": 9}


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


def net_of(seed=0, **changes):
    torch.manual_seed(seed)
    options = WORDS | {"units": 6, "dropout": 0.0, "init": 0.7, "tanh": True} | changes
    return Translator(**options)


def sentences(*lengths, words=11, seed=0):
    source = torch.Generator().manual_seed(seed)
    return Sentences.of(
        [torch.randint(3, words, (n,), generator=source).tolist() for n in lengths], CPU
    )


def one_of(sentences, row):
    length = int(sentences.lengths[row])
    return Sentences(sentences.tokens[row : row + 1, :length], sentences.lengths[row : row + 1])


def run(net, source, words):
    return net(source.tokens, Lengths.of(source.lengths), words)


def loss_of(task, rows):
    (batch,) = task.batches_of(task.data.train, [rows])
    return task.loss(batch)


def config_of(*overrides):
    words = ["experiment=nmt", "optimizer=adam", "scale=smoke", "tracking=off"]
    return compose([*words, *overrides])


def task_of(*overrides, seed=0):
    return build(config_of(*overrides).task, "task", seed=seed, device=CPU)


def weights(task):
    return torch.cat([p.detach().flatten() for p in task.net.parameters()])


def learn(task, optimizer, count):
    torch.manual_seed(0)  # dropout
    return [float(step.take(optimizer)) for step in islice(task.steps(), count)]


# Files


def put(folder, **content):
    folder.mkdir(exist_ok=True)
    for name, text in content.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def own(folder, **changes):
    """Write a folder as `load_sentences` expects it, with the named files changed."""
    whole = {
        "train_de": "ein hund\nein mann\n", "train_en": "a dog\na man\n",
        "dev_de": "ein hund\n", "dev_en": "a dog\n",
        "test_de": "ein mann\n", "test_en": "a man\n",
    }  # fmt: skip
    return put(folder, **whole | changes)


def loaded(folder, **options):
    return load_sentences(CPU, str(folder), "de", "en", **options)


def test_lines_are_split_at_newlines_only(tmp_path):
    put(tmp_path, a="eins\r\nz\u2028wei\x85 \u00a0drei\n\nvier")
    assert read_lines(tmp_path / "a") == ["eins", "z\u2028wei\x85 \u00a0drei", "", "vier"]
    (tmp_path / "b.gz").write_bytes(gzip.compress("\ufeffüber\n".encode()))
    assert read_lines(tmp_path / "b.gz") == ["über"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_en": "a dog\n"}, ["train.de has 2 lines", "train.en has 1", "train.de, line 2"]),
        ({"dev_de": "ein\nmann\n"}, ["dev.de has 2", "dev.de, line 2"]),
        ({"test_en": ""}, ["test.en is empty", "expected one sentence per line"]),
        ({"test_en": "\n\n"}, ["test.en is empty"]),
        ({"train_de": "ein hund\nein m\xe4nn\n".encode("latin-1")},
         ["train.de, line 2", "0xe4", "not UTF-8"]),
        ({"train_de": "ein hund\n".encode("utf-16")}, ["train.de, line 1", "not UTF-8"]),
        ({"train_de": "ein hund\n\n", "train_en": "\na man\n"}, ["train.de and", "no pair of non"]),
        ({"test_de": "ein hund\n\n", "test_en": "\na man\n"}, ["test.de and", "no pair of non"]),
        ({"vocab_de": "<unk>\n<s>\n</s>\nein\n", "vocab_en": "a\n<unk>\n<s>\n</s>\n"},
         ["vocab.en, line 1 is 'a'", "<unk> <s> </s>"]),
        ({"vocab_de": "<s>\n</s>\n", "vocab_en": "a\n"}, ["vocab.de, line 1 is '<s>'"]),
        ({"vocab_de": "<unk>\n<s>", "vocab_en": "a\n"}, ["vocab.de, line 3 is nothing"]),
        ({"vocab_de": "<unk>\n<s>\n</s>\nein\nein\n"}, ["vocab.de, line 5", "already in line 4"]),
        ({"vocab_de": "<unk>\n<s>\n</s>\n"}, ["vocab.en is missing"]),
    ],
)  # fmt: skip
def test_invalid_files_are_reported_with_line_and_fix(tmp_path, changes, words):
    with pytest.raises(DataError) as refusal:
        loaded(own(tmp_path / "x", **changes))
    message = one_line(refusal)
    assert all(word in message for word in words), message


def test_a_missing_or_truncated_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"train\.de is missing"):
        loaded(tmp_path)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"some text" * 50)[:-9])
    with pytest.raises(DataError, match=r"a\.gz is truncated"):
        read_lines(tmp_path / "a.gz")


def test_an_invalid_file_stops_a_run_before_it_starts(tmp_path):
    own(tmp_path / "x", dev_en="a dog\nmore\n")
    words = [
        "data._target_=experiments.data.translation.load_sentences",
        f"+data.path={tmp_path}/x",
    ]
    config = config_of(*words, "+data.source=de", "+data.target=en", f"results={tmp_path}")
    with pytest.raises(DataError, match=r"dev\.en, line 2 has no translation"):
        execute(Run(config))
    assert not (tmp_path / "runs").exists()


def test_files_of_different_length_raise_with_the_line(tmp_path):
    put(tmp_path, a="1\n2\n3\n", b="1\n2\n3\n4\n")
    with pytest.raises(DataError, match=r"b, line 4 has no translation"):
        read_pairs(tmp_path / "a", tmp_path / "b")


# Words


def test_the_most_frequent_words_are_encoded_and_others_are_unknown():
    vocabulary = Vocabulary.of_text(["b a", "a c b", "a"], size=5)
    assert vocabulary.words == ("<unk>", "<s>", "</s>", "a", "b")
    assert vocabulary.encode("a x  c b ") == [3, UNKNOWN, UNKNOWN, 4]
    assert vocabulary.decode([3, UNKNOWN, 4, END, 3]) == "a <unk> b"
    assert len(Vocabulary.of_text(["b a"])) == 5


def test_a_vocabulary_needs_room_for_special_tokens():
    with pytest.raises(ConfigError, match=r"task\.data\.words=3 is invalid"):
        task_of("data.words=3")


def test_special_tokens_in_a_text_are_not_new_words():
    assert Vocabulary.of_text(["<unk> a </s>"]).words == ("<unk>", "<s>", "</s>", "a")


def test_vocabulary_files_are_used_unless_words_is_set(tmp_path):
    folder = own(tmp_path / "x", vocab_de="<unk>\n<s>\n</s>\nmann\n", vocab_en="<unk>\n<s>\n</s>\n")
    corpus = loaded(folder)
    assert corpus.source.words[3:] == ("mann",) and len(corpus.target) == 3
    assert corpus.test.source.tokens.tolist() == [[UNKNOWN, 3]]
    assert len(loaded(folder, words=4).source) == 4
    assert len(loaded(own(tmp_path / "y")).source) == 6


def test_only_training_sentences_are_truncated(tmp_path):
    long = " ".join(f"w{i}" for i in range(60)) + "\n"
    corpus = loaded(own(tmp_path / "x", train_de=2 * long, test_de=long))
    assert corpus.train.source.lengths.tolist() == [50, 50]
    assert corpus.train.target.lengths.tolist() == [4, 4]  # with START and END
    assert corpus.test.source.lengths.tolist() == [60]
    assert loaded(tmp_path / "x", longest=1).train.target.tokens.tolist() == [[1, 3, 2]] * 2


def test_empty_lines_are_not_trained_on_and_have_empty_translations(tmp_path):
    changes = {
        "train_de": "ein hund\n\nein mann\n  \n", "train_en": "a dog\nx\n\n\n",
        "test_de": "\nein hund\n\n", "test_en": "x\na dog\n\n",
    }  # fmt: skip
    own(tmp_path / "x", **changes)
    corpus = loaded(tmp_path / "x")
    assert corpus.train.references == ["a dog"]
    assert corpus.test.source.lengths.tolist() == [0, 2, 0] and corpus.test.whole.tolist() == [1]
    task = small_task(corpus)
    task.net.eval()
    lines, _ = task.translate(corpus.test, torch.arange(3), width=1)
    assert lines[0] == lines[2] == ""
    assert 0 <= task.evaluate()["test_bleu"] <= 100


def test_targets_have_start_and_end_and_are_padded_with_end():
    source, target = Vocabulary.of_text(["a b c"]), Vocabulary.of_text(["x y"])
    pairs = Pairs.of([("a b c", "x"), ("b", "y x")], source, target, CPU)
    assert pairs.source.tokens.tolist() == [[3, 4, 5], [4, END, END]]
    assert pairs.target.tokens.tolist() == [[START, 3, END, END], [START, 4, 3, END]]
    assert pairs.target.lengths.tolist() == [3, 4]


def test_limits_select_the_first_pairs(tmp_path):
    corpus = loaded(own(tmp_path / "x"), limit=1)
    assert corpus.train.references == ["a dog"] and len(corpus.target) == 5
    made = generate_sentences(CPU, limit=30, test_limit=7)
    assert (len(made.train), len(made.dev), len(made.test)) == (30, 7, 7)


# The sets


def available(*sets):
    return any(len(files.search_folders(each)) == len(each.checksums) for each in sets)


@pytest.mark.skipif(
    not available(translation.MULTI30K, translation.MULTI30K_PACKED),
    reason="Multi30k is in no folder of ADASHIFT_DATA",
)
def test_full_multi30k():
    corpus = load_multi30k(CPU, words=4000)
    counts = [len(part) for part in (corpus.train, corpus.dev, corpus.test)]
    assert counts == [29_000, 1_014, 1_000]
    assert corpus.train.references[0] == "two young , white males are outside near many bushes ."
    assert corpus.test.references[0] == "a man in an orange hat starring at something ."
    assert len(corpus.source) == len(corpus.target) == 4000
    assert corpus.source.decode(corpus.dev.source.tokens[0].tolist()).startswith("eine gruppe von")
    unknown = (corpus.test.source.tokens == UNKNOWN).sum() / corpus.test.source.lengths.sum()
    assert 0.03 < unknown < 0.1


def test_iwslt15_is_read_in_its_published_layout(tmp_path, monkeypatch):
    """With official names and vocabularies, but other text and checksums."""
    texts = {
        "train.vi": "xin chào\nvâng\n", "train.en": "hello\nyes\n", "tst2012.vi": "vâng\n",
        "tst2012.en": "yes\n", "tst2013.vi": "chào\n", "tst2013.en": "hello\n",
        "vocab.vi": "<unk>\n<s>\n</s>\nxin\nchào\n", "vocab.en": "<unk>\n<s>\n</s>\nhello\n",
    }  # fmt: skip
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path))
    put(tmp_path / "iwslt15", **texts)
    monkeypatch.setattr(files, "differs", lambda path, checksum: "")
    translation.load_iwslt15.cache_clear()
    corpus = translation.load_iwslt15(CPU)
    translation.load_iwslt15.cache_clear()
    assert corpus.train.source.tokens.tolist() == [[3, 4], [UNKNOWN, END]]
    assert corpus.test.references == ["hello"] and len(corpus.target) == 4
    assert texts.keys() == translation.IWSLT15.checksums.keys()


def iwslt15_tests(folder):
    names = product(("tst2012", "tst2013"), ("vi", "en"))
    return [folder / "iwslt15" / f"{name}.{language}" for name, language in names]


FOLDERS = [f for f in files.data_folders() if all(path.exists() for path in iwslt15_tests(f))]


@pytest.mark.skipif(
    not FOLDERS, reason="tst2012 and tst2013 of IWSLT'15 are in no folder that ADASHIFT_DATA names"
)
def test_available_iwslt15_files_have_the_published_checksums():
    known, paths = translation.IWSLT15.checksums, iwslt15_tests(FOLDERS[0])
    assert [files.differs(path, known[path.name]) for path in paths] == [""] * 4
    assert len(read_pairs(*paths[:2])) == 1_553
    assert len(read_pairs(*paths[2:])) == 1_268


def test_missing_sets_are_reported_with_their_source(tmp_path, monkeypatch):
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path))
    monkeypatch.setattr(files.urllib.request, "urlopen", refuse)
    for make, words in (
        (translation.load_iwslt15, "nlp.stanford.edu"),
        (load_multi30k, "githubusercontent"),
    ):
        make.cache_clear()
        with pytest.raises(DataError) as refusal:
            make(CPU)
        assert words in one_line(refusal)


def refuse(*_, **__):
    raise OSError("no network")


# Batches


def buckets(lengths, size, seed=0):
    made = Buckets(torch.tensor(lengths), 5, 10, size)
    return Epochs(generator(seed, "order"), made.draw_epoch)


LENGTHS = [length for length in range(1, 51) for _ in range(3)]


def epoch(batches):
    return list(islice(batches, batches.per_epoch))


def test_an_epoch_has_every_pair_once_and_batches_have_one_bucket():
    batches = buckets(LENGTHS, 8)
    for _ in range(2):
        rows = epoch(batches)
        assert sorted(torch.cat(rows).tolist()) == list(range(150))
        for batch in rows:
            kinds = {min(LENGTHS[row] // 10, 4) for row in batch.tolist()}
            assert len(kinds) == 1 and len(batch) <= 8
    full = [len(batch) == 8 for batch in rows]
    assert sum(full) == 27 // 8 + 3 * (30 // 8) + 33 // 8 and len(full) - sum(full) == 5


def test_the_order_depends_on_the_seed_and_changes_every_epoch():
    first, again, other = (torch.cat(epoch(buckets(LENGTHS, 8, s))) for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    batches = buckets(LENGTHS, 8)
    assert not torch.equal(torch.cat(epoch(batches)), torch.cat(epoch(batches)))


@pytest.mark.parametrize("spent", [0, 7, 21, 30])
def test_batches_resume_in_the_middle_of_an_epoch(spent):
    whole, rest = buckets(LENGTHS, 8), buckets(LENGTHS, 8, seed=5)
    list(islice(whole, spent))
    rest.load_state_dict(whole.state_dict())
    for a, b in islice(zip(whole, rest, strict=True), 40):
        assert torch.equal(a, b)


def test_a_batch_is_at_most_the_full_set():
    assert sorted(epoch(buckets([3, 4, 5], 64))[0].tolist()) == [0, 1, 2]


def test_a_batch_is_padded_to_its_longest_sentences():
    source, target = Vocabulary.of_text(["a b c"]), Vocabulary.of_text(["x y"])
    lines = [("a b c", "x y x y"), ("b", "y x"), ("c a", "x")]
    task = small_task(
        translation.Corpus(*[Pairs.of(lines, source, target, CPU)] * 3, source, target)
    )
    whole, part = task.batches_of(task.data.train, [torch.arange(3), torch.tensor([1, 2])])
    assert whole.source.shape == (3, 3) and whole.target.shape == (3, 6)
    assert part.source.tolist() == [[4, END], [5, 3]] and part.lengths.order.tolist() == [1, 0]
    assert part.target.tolist() == [[START, 4, 3, END], [START, 3, END, END]]
    assert part.target[:, 1:].t().flatten()[part.words].tolist() == [4, 3, 3, END, END]


# The network


def test_paper_scale_has_the_network_of_the_tutorial():
    """vocab.vi has 7,709 words and vocab.en 17,191."""
    node = config_of("scale=paper").task["model"] | {"source_words": 7709, "target_words": 17191}
    net = build(node, "model")()
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    lstm = {"kernel": (2048, 1024), "bias": (2048,)}
    assert shapes == {
        "source.weight": (7709, 512), "target.weight": (17191, 512),
        **{f"{part}.{k}": s for part in ("forwards", "backwards", "top") for k, s in lstm.items()},
        "bottom.kernel": (2048, 1536), "bottom.bias": (2048,),
        "keys.weight": (512, 1024), "scale": (), "attention.weight": (512, 1536),
        "output.weight": (17191, 512),
    }  # fmt: skip
    assert (node["dropout"], node["init"]) == (0.2, 0.1)


def test_initial_weights_are_uniform_biases_zero_and_forget_gates_one():
    net = net_of(units=32, init=0.1)
    for name, p in net.named_parameters():
        if p.dim() == 2:
            assert 0.095 < p.abs().max() <= 0.1 and p.mean().abs() < 0.01, name
    assert net.scale == 1
    bias = net.bottom.bias.detach().view(4, 32)
    assert bias.tolist() == [[0.0] * 32, [1.0] * 32, [0.0] * 32, [0.0] * 32]


def slowly(net, source, words):
    """Compute one sentence, word by word, with torch's cells and the tutorial's equations."""

    def cell_of(ours):
        cell = nn.LSTMCell(ours.inputs, net.units)
        for theirs, value in zip(cell.parameters(), ours.parts(), strict=True):
            theirs.data.copy_(value)
        return cell

    def read(cell, embedded):
        state = (torch.zeros(net.units), torch.zeros(net.units))
        states = []
        for x in embedded:
            state = cell(x, state)
            states.append(state)
        return [h for h, _ in states], state

    embedded = net.source(source)
    ahead, bottom = read(cell_of(net.forwards), embedded)
    back, top = read(cell_of(net.backwards), embedded.flip(0))
    memory = torch.stack([torch.cat(pair) for pair in zip(ahead, back[::-1], strict=True)])
    lower, upper = cell_of(net.bottom), cell_of(net.top)
    attention, vectors = torch.zeros(net.units), []
    for word in words:
        bottom = lower(torch.cat([net.target(word), attention]), bottom)
        top = upper(bottom[0], top)
        weights = (net.scale * net.keys(memory) @ top[0]).softmax(0)
        attention = net.attention(torch.cat([top[0], weights @ memory]))
        attention = attention.tanh() if net.tanh else attention
        vectors.append(attention)
    return torch.stack(vectors)


@pytest.mark.parametrize("tanh", [True, False])
def test_the_network_matches_the_tutorials_equations_sentence_by_sentence(tanh):
    net = net_of(tanh=tanh)
    net.scale.data.fill_(1.7)
    source, words = sentences(4, 1, 7, 3), torch.randint(9, (4, 5))
    vectors = run(net, source, words)
    assert vectors.shape == (5, 4, 6)
    for row, length in enumerate(source.lengths):
        alone = slowly(net, source.tokens[row, :length], words[row])
        torch.testing.assert_close(vectors[:, row], alone, atol=2e-6, rtol=1e-5)


def test_padding_changes_nothing():
    net, source, words = net_of(), sentences(4, 2), torch.randint(9, (2, 5))
    other = source.tokens.clone()
    other[1, 2:] = 7
    longer = F.pad(source.tokens, (0, 3), value=5)
    outputs = [
        net(tokens, Lengths.of(source.lengths), words) for tokens in (source.tokens, other, longer)
    ]
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


def test_word_by_word_equals_all_words_at_once():
    net, source, words = net_of(), sentences(4, 2, 6), torch.randint(9, (3, 5))
    state = net.encode(source.tokens, Lengths.of(source.lengths))
    at_once = net.output(run(net, source, words)).log_softmax(-1)
    for time, column in enumerate(words.t()):
        scores, state = net.advance(column[:, None], state)
        assert scores.shape == (3, 1, 9)
        torch.testing.assert_close(scores[:, 0], at_once[time])


def test_beams_are_independent_and_can_be_selected():
    net, source = net_of(), sentences(4, 2, 6)
    state = net.encode(source.tokens, Lengths.of(source.lengths))
    _, state = net.advance(torch.full((3, 1), START), state)
    chosen, beams = torch.tensor([2, 0]), torch.zeros(2, 3, dtype=torch.int64)
    words = torch.tensor([[3, 4, 5], [6, 7, 8]])
    scores, _ = net.advance(words, state.select(chosen, beams))
    for row, (sentence, three) in enumerate(zip(chosen, words, strict=True)):
        for beam, word in enumerate(three):
            one = state.select(sentence[None], torch.zeros(1, 1, dtype=torch.int64))
            alone, _ = net.advance(word.view(1, 1), one)
            torch.testing.assert_close(scores[row, beam], alone[0, 0])


def test_dropout_is_active_only_in_training():
    net, source, words = net_of(dropout=0.5), sentences(4, 2), torch.randint(9, (2, 5))
    assert not torch.equal(*(run(net, source, words) for _ in range(2)))
    net.eval()
    assert torch.equal(*(run(net, source, words) for _ in range(2)))
    torch.testing.assert_close(
        run(net, source, words),
        net_of()(source.tokens, Lengths.of(source.lengths), words),
    )


# Beam search


def found(net, source, width, limits=None):
    net.eval()
    state = net.encode(source.tokens, Lengths.of(source.lengths))
    limits = 2 * source.lengths if limits is None else limits
    return beam_search(net.advance, state, limits, width, START, END)


def score_of(net, source, words):
    """Return the log-probability of a sentence by teacher forcing."""
    given = torch.tensor([[START, *words[:-1]]])
    with torch.no_grad():
        scores = net.output(run(net, source, given)).log_softmax(-1)[:, 0]
    return float(scores[range(len(words)), words].sum())


def greedily(net, source, limit):
    """Return the most likely words one by one, recomputing the prefix for each."""
    words = []
    while len(words) < limit and END not in words:
        given = torch.tensor([[START, *words]])
        words.append(int(net.output(run(net, source, given))[-1, 0].argmax()))
    return words


def test_one_beam_is_greedy_and_ten_are_better():
    net = net_of(units=8)
    net.output.weight.data *= 2
    source = sentences(*range(1, 9), *range(1, 9))
    one, ten = found(net, source, 1), found(net, source, 10)
    for row, (narrow, wide) in enumerate(zip(one, ten, strict=True)):
        alone = one_of(source, row)
        assert narrow.words == greedily(net, alone, 2 * int(alone.lengths))
        for each in (narrow, wide):
            assert each.score == pytest.approx(score_of(net, alone, each.words), abs=1e-4)
    better = [wide.score - narrow.score for narrow, wide in zip(one, ten, strict=True)]
    assert sum(better) > 0 and sum(gain > 1e-5 for gain in better) > 5
    assert any(END in each.words for each in ten)


@pytest.mark.parametrize("seed", range(4))
def test_enough_beams_find_the_most_likely_sentence(seed):
    net = net_of(seed, target_words=4, init=1.5)
    net.eval()
    source = sentences(2, 3)
    every = [
        list(words)
        for length in (1, 2, 3)
        for words in product(range(4), repeat=length)
        if END not in words[:-1] and (length == 3 or words[-1] == END)
    ]
    assert len(every) == 1 + 3 + 9 * 4
    for row, best in enumerate(found(net, source, 64, torch.tensor([3, 3]))):
        scores = {tuple(words): score_of(net, one_of(source, row), words) for words in every}
        likeliest = max(scores, key=lambda words: scores[words])
        assert tuple(best.words) == likeliest
        assert best.score == pytest.approx(scores[likeliest], abs=1e-5)


class Chain(SimpleNamespace):
    """A language in which the next word depends only on the last one."""

    def select(self, sentences, beams):
        return self


def test_two_beams_find_a_better_sentence_that_starts_with_a_worse_word():
    """a (0.6) is followed by two words of 0.5; b (0.4) only by the end."""
    table = torch.full((6, 6), -torch.inf)
    start, a, b, x = START, 3, 4, 5
    table[start, [a, b]] = torch.tensor([0.6, 0.4]).log()
    table[a, [x, END]] = torch.tensor([0.5, 0.5]).log()
    table[[b, x], END] = 0.0

    def advance(words, state):
        return table[words], state

    limits = torch.tensor([5, 5])
    one, two = (beam_search(advance, Chain(), limits, width, START, END)[0] for width in (1, 2))
    assert one.words[0] == a and one.score == pytest.approx(math.log(0.3))
    assert two.words == [b, END] and two.score == pytest.approx(math.log(0.4))


def test_each_sentence_has_its_own_length_limit():
    limits = [1, 4, 2]
    lines = found(net_of(), sentences(1, 5, 3), 3, torch.tensor(limits))
    for each, limit in zip(lines, limits, strict=True):
        assert len(each.words) == limit or (len(each.words) < limit and each.words[-1] == END)


def test_a_translation_does_not_depend_on_the_rest_of_the_batch():
    net, source = net_of(), sentences(*range(1, 8))
    together = found(net, source, 4)
    for row in range(7):
        (alone,) = found(net, one_of(source, row), 4)
        assert alone.words == together[row].words
        assert alone.score == pytest.approx(together[row].score, abs=1e-5)


# BLEU


def test_bleu_of_known_strings():
    assert bleu(["a b c d e"], ["a b c d e"]) == pytest.approx(100)
    assert bleu(["a b c d"], ["w x y z"]) == 0
    # n-gram precisions for n = 1 to 4 are 4/5, 3/4, 2/3, 1/2: (1/5)^(1/4)
    assert bleu(["a b c d x"], ["a b c d e"]) == pytest.approx(100 * 0.2**0.25)
    # all words match and 2 of 6 are missing: exp(1 - 6/4)
    assert bleu(["a b c d"], ["a b c d e f"]) == pytest.approx(100 * 0.60653066)


def test_bleu_neither_tokenizes_nor_smooths():
    assert bleu(["it 's A test ."], ["it 's a test ."]) == 0  # no common 4-gram
    assert bleu(["a b c", "a b c d e"], ["a b c", "a b c d e"]) == pytest.approx(100)
    assert bleu(["", "a b c d"], ["", "a b c d"]) == pytest.approx(100)
    assert bleu([""], ["a b"]) == 0


# Steps


def test_gradients_are_clipped_by_their_common_norm():
    start = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]

    def moved(clip):
        parameters = [nn.Parameter(p.clone()) for p in start]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        step = Step("x", lambda: sum((p**2).sum() / 2 for p in parameters), clip=clip)
        step.take(optimizer)
        return torch.cat([a - b.detach() for a, b in zip(start, parameters, strict=True)])

    whole = torch.cat(start)
    torch.testing.assert_close(moved(None), whole)
    torch.testing.assert_close(moved(10.0), whole)
    torch.testing.assert_close(moved(1.0), whole / 5)


def test_training_clips_at_the_released_norm():
    assert config_of("scale=paper").task["trainer"]["clip"] == 5
    task = task_of("trainer.clip=0.001")
    optimizer = torch.optim.SGD(task.net.parameters(), lr=1.0)
    before = weights(task)
    learn(task, optimizer, 1)
    assert (weights(task) - before).norm() == pytest.approx(0.001, rel=1e-3)


def test_the_rate_is_halved_where_the_released_code_halves():
    schedule = build(config_of("scale=paper").schedule, "schedule")
    rates = [schedule(step / 30_000) for step in range(30_000)]
    expected = [0.5 ** max(0, (step - 8_000) // 1_000) for step in range(30_000)]
    assert rates == expected
    assert rates[8_999] == 1 and rates[9_000] == 0.5 and rates[-1] == 2.0**-21


def test_halvings_scale_with_the_length_of_training():
    assert [halvings(x, start=10, every=5, of=20) for x in (0.5, 0.74, 0.76, 1)] == [
        1,
        1,
        0.5,
        0.25,
    ]
    with pytest.raises(ConfigError, match=r"schedule\.every=0"):
        build(config_of("schedule.every=0").schedule, "schedule")


# Training


def small_task(corpus, units=16, beam=2, bleu_sentences=None):
    def model(**words):
        return Translator(units=units, dropout=0.0, init=0.1, tanh=True, **words)

    trainer = TranslationTrainer(batch=16, buckets=5, clip=5.0)
    return Translation(lambda device: corpus, model, trainer, beam, bleu_sentences, 0, CPU)


def test_the_loss_is_summed_over_words_and_averaged_over_sentences():
    task = task_of("model.dropout=0")
    rows = torch.tensor([5, 17, 3])
    parts = [loss_of(task, row[None]) for row in rows]
    torch.testing.assert_close(loss_of(task, rows), torch.stack(parts).mean())
    source, target = (one_of(s, 5) for s in (task.data.train.source, task.data.train.target))
    words = target.tokens[0].tolist()
    assert float(parts[0].detach()) == pytest.approx(
        -score_of(task.net, source, words[1:]), rel=1e-5
    )
    assert words[0] == START and words[-1] == END


def test_an_untrained_network_is_at_chance_and_every_parameter_has_a_gradient():
    task = task_of("model.init=0.001", "model.dropout=0")
    chance = math.log(len(task.data.target))
    assert task.evaluate()["dev_loss"] == pytest.approx(chance, rel=1e-2)
    loss_of(task, torch.arange(20)).backward()
    assert all(p.grad is not None and not p.grad.is_sparse for p in task.net.parameters())


def test_a_few_sentences_are_memorized():
    corpus = generate_sentences(CPU, limit=8)
    same = translation.Corpus(
        corpus.train, corpus.train, corpus.train, corpus.source, corpus.target
    )
    task = small_task(same)
    learn(task, torch.optim.Adam(task.net.parameters(), lr=0.02), 150)
    metrics = task.evaluate()
    assert metrics["test_bleu"] > 99 and metrics["dev_loss"] < 0.1


@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 0.02), ("adashift", 0.02)])
def test_the_same_seed_gives_the_same_record_and_translations(tmp_path, optimizer, lr):
    words, kept = [f"optimizer={optimizer}", f"optimizer.lr={lr}", "steps=20", "log_every=10"], []
    for name in "ab":
        run = Run(config_of(*words, f"results={tmp_path / name}"))
        assert execute(run) == "finished"
        names = ("metrics.csv", "dev.translated.txt", "test.translated.txt")
        kept.append([(run.folder / file).read_bytes() for file in names])
    assert kept[0] == kept[1]
    assert [text.count(b"\n") for text in kept[0][1:]] == [10, 10]
    metrics = run.metrics()
    assert {"dev_bleu", "test_bleu", "dev_loss", "translator/loss"} < set(metrics)
    assert metrics["translator/loss"].iloc[-1] < metrics["translator/loss"].iloc[0]
    assert metrics["test_beam_gain"].notna().tolist() == [False, True]  # only at the end


def test_evaluation_uses_some_sentences_and_all_at_the_end():
    task, seen = task_of("task.bleu_sentences=3", "task.beam=1"), []
    plain = task.translate
    task.translate = lambda pairs, rows, width: seen.append(len(rows)) or plain(pairs, rows, width)
    record = SimpleNamespace(log=lambda step, metrics: None, keep=seen.extend)
    optimizers = {"translator": torch.optim.Adam(task.net.parameters())}
    assert train(task, optimizers, record, steps=4, log_every=2) == "finished"
    assert seen == [3, 3, 10, 10, 10, "dev.translated.txt", "test.translated.txt"]


def test_reference_scores(tmp_path):
    own(tmp_path / "x")
    words = [
        "data._target_=experiments.data.translation.load_sentences",
        f"+data.path={tmp_path}/x",
    ]
    task = task_of(*words, "+data.source=de", "+data.target=en")
    beams = task.scores(None)["test_score"]
    found = task.reference_scores(beams)
    task.net.eval()
    _, greedy = task.translate(task.data.test, torch.arange(len(task.data.test)), width=1)
    assert found["test_beam_gain"] == pytest.approx(beams - greedy) and greedy < 0
    test = task.data.test.references
    usual = max(task.data.train.references, key=task.data.train.references.count)
    assert found["test_constant_bleu"] == bleu([usual] * len(test), test)
    sources = (tmp_path / "x/test.de").read_text().splitlines()
    known = [task.data.source.decode(task.data.source.encode(line)) for line in sources]
    assert found["test_copy_bleu"] == bleu(known, test)


def test_load_by_heart_trains_and_tests_on_the_same_sentences():
    files = translation.search_folders(translation.MULTI30K_PACKED)
    if len(files) < 6:
        pytest.skip("Multi30k is in no folder of ADASHIFT_DATA")
    corpus = translation.load_by_heart(torch.device("cpu"), limit=5)
    assert corpus.train.references == corpus.dev.references == corpus.test.references
    assert (
        corpus.train.references
        == translation.load_multi30k(torch.device("cpu")).train.references[:5]
    )


def test_evaluation_changes_nothing():
    task = task_of()
    before = weights(task)
    assert task.evaluate() == task.evaluate()
    assert task.net.training and torch.equal(before, weights(task))


def test_the_seed_determines_start_and_order():
    first, again, other = (task_of(seed=seed) for seed in (0, 0, 1))
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    rows = [torch.cat([b.rows for b in epoch(task.batches)]) for task in (first, again, other)]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_resuming_is_bit_identical():
    whole, cut, rest = (task_of("model.dropout=0") for _ in range(3))
    options = {"lr": 0.01, "n": 3}
    learn(whole, AdaShift(whole.net.parameters(), **options), 12)
    first = AdaShift(cut.net.parameters(), **options)
    learn(cut, first, 7)
    file = io.BytesIO()
    torch.save([cut.net.state_dict(), first.state_dict(), cut.state_dict()], file)
    file.seek(0)
    net, optimizer, state = torch.load(file, weights_only=True)
    rest.net.load_state_dict(net)
    second = AdaShift(rest.net.parameters(), **options)
    second.load_state_dict(optimizer)
    rest.load_state_dict(state)
    learn(rest, second, 5)
    assert torch.equal(weights(whole), weights(rest))


def test_own_sentences(tmp_path):
    """Run the example of the documentation."""
    own(tmp_path / "x")
    words = [
        "data._target_=experiments.data.translation.load_sentences",
        f"+data.path={tmp_path}/x",
    ]
    run = Run(config_of(*words, "+data.source=de", "+data.target=en", f"results={tmp_path}"))
    assert execute(run) == "finished"
    assert (run.folder / "test.translated.txt").read_text().count("\n") == 1


# Groups of parameters


def test_the_embeddings_can_have_a_phi_of_their_own():
    plain = task_of().parameter_groups("translator")
    assert all(isinstance(p, nn.Parameter) for p in plain)
    task = task_of("+task.embedding_phi=row")
    rows, others = task.parameter_groups("translator")
    assert {id(p) for p in rows["params"]} == {
        id(task.net.source.weight),
        id(task.net.target.weight),
    }
    assert len(rows["params"]) + len(others["params"]) == len(plain)
    optimizer = AdaShift([rows, others], lr=0.01, n=1)
    assert [group["phi"] for group in optimizer.param_groups] == ["row", "max"]
    learn(task, optimizer, 3)
    state = optimizer.state[task.net.source.weight]
    assert state["v"].numel() == len(task.net.source.weight), "one v for each word"


def test_an_unknown_phi_of_the_embeddings_is_reported(tmp_path):
    config = config_of("optimizer=adashift", "+task.embedding_phi=rows", f"results={tmp_path}")
    with pytest.raises(ConfigError, match="phi"):
        execute(Run(config))
