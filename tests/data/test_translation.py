"""Numbers and dates in words: read back by another reader, held out by value, alike everywhere."""

import builtins
import datetime
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from glassformer.data.tasks import seq2seq as writing
from glassformer.data.tasks.seq2seq import WAYS, Translation, written
from glassformer.data.tokenizers.own import tokenizer_from_json
from glassformer.spec.errors import InputError, MachineError
from glassformer.spec.tasks import TranslationTask
from tests.planting import For, catches

SMALL = TranslationTask(examples=3_000, pieces=400)

# --- an independent reader ------------------------------------------------------------------------

UNITS = {
    "en": "one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen",
    "de": "ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn",
}
TENS = {
    "en": "twenty thirty forty fifty sixty seventy eighty ninety",
    "de": "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
}
GREAT = {"en": {"hundred": 100, "thousand": 1000}, "de": {"hundert": 100, "tausend": 1000}}
MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
}


def read_number(text, language):
    """The value of a number's words: parts below a hundred add up, the great ones multiply."""
    values = {word: i for i, word in enumerate(UNITS[language].split(), start=1)}
    values |= {word: 10 * i for i, word in enumerate(TENS[language].split(), start=2)}
    values |= GREAT[language]
    if language == "de":
        values["eins"] = 1
    longest_first = "|".join(sorted(values, key=len, reverse=True))
    filler = "und" if language == "de" else "and|[ ,-]+"
    parts = re.findall(f"({longest_first})|({filler})", text)
    assert "".join(word + gap for word, gap in parts) == text, text
    total = group = 0
    for word in (values[word] for word, _ in parts if word):
        if word == 1000:
            total, group = total + group * 1000, 0
        elif word == 100:
            group = group * 100
        else:
            group += word
    return total + group


def read_date(text, language):
    """Year, month and day out of a written date."""
    pattern = r"(?P<m>\w+) (?P<d>\d+), (?P<y>\d{4})"
    if language == "de":
        pattern = r"(?P<d>\d+)\. (?P<m>\w+) (?P<y>\d{4})"
    found = re.fullmatch(pattern, text)
    assert found is not None, text
    month = MONTHS[language].split().index(found["m"]) + 1
    return datetime.date(int(found["y"]), month, int(found["d"]))


def value_of(text, form):
    """What a side of a pair means, whatever its form."""
    if form == "digits":
        return datetime.date.fromisoformat(text) if "-" in text else int(text)
    return read_date(text, form) if re.search(r"\d", text) else read_number(text, form)


def pairs_of(task, split):
    for row in range(task.sizes()[split]):
        source, answer = task.describe(split, row).split(" -> ")
        wanted, given = source.split(": ", maxsplit=1)
        yield row, wanted, given, answer


def pairs_mean_the_same(spec=SMALL):
    task = Translation(spec)
    for split in task.sizes():
        for row, wanted, given, answer in pairs_of(task, split):
            asked = task.directions[row % WAYS]
            assert asked[1] == wanted
            assert value_of(given, asked[0]) == value_of(answer, wanted), (given, answer)


def batches_say_what_is_described(spec=SMALL):
    task = Translation(spec)
    names = task.tokenizer
    batch = task.batch("val", np.arange(task.sizes()["val"]))
    for row, wanted, given, answer in pairs_of(task, "val"):
        *source, end = batch.source.tokens[row][batch.source.valid[row]].tolist()
        said = batch.targets["next"][row][batch.valid[row]].tolist()
        read = batch.tokens[row][batch.valid[row]].tolist()
        assert (names.decode(source), end) == (f"{wanted}: {given}", names.eos)
        assert (names.decode(said[:-1]), said[-1]) == (answer, names.eos)
        assert read == [names.bos, *said[:-1]]  # the same, one place later
    assert (batch.tokens[~batch.valid] == names.pad).all()
    assert (batch.source.tokens[~batch.source.valid] == names.pad).all()
    np.testing.assert_array_equal(batch.weights, batch.valid)


def nothing_held_out_is_trained_on(spec=SMALL):
    """By value: a number of another split occurs in no direction, on neither side."""
    task = Translation(spec)
    means = {
        split: {value_of(answer, wanted) for _, wanted, _, answer in pairs_of(task, split)}
        for split in task.sizes()
    }
    assert sum(map(len, means.values())) == len(set().union(*means.values()))
    assert sum(map(len, means.values())) * WAYS == sum(task.sizes().values())


def test_pairs_mean_the_same_to_an_independent_reader():
    pairs_mean_the_same()


def test_batches_say_what_is_described():
    batches_say_what_is_described()


@catches(
    "pairs split, not values",
    "data.tasks.seq2seq:_divided",
    For("number", nth=1),
    to="{func}(len(values))[:len({args[0]})]",
)
def test_nothing_held_out_is_trained_on():
    nothing_held_out_is_trained_on()


def test_the_reader_reads():
    assert read_number("nine hundred and eighty-seven thousand, six hundred and four", "en") == (
        987_604
    )
    assert read_number("einhundertvierundzwanzigtausendsiebzehn", "de") == 124_017
    assert written("number", 124_017, "de") == "einhundertvierundzwanzigtausendsiebzehn"
    assert written("date", datetime.date(2024, 3, 17).toordinal(), "de") == "17. März 2024"


@pytest.mark.parametrize("language", ["en", "de"])
def test_no_two_numbers_share_their_words(language):
    """There is one right answer to words as well; checked where forms are built of."""
    texts = [written("number", value, language) for value in range(1, 1000)]
    texts += [written("number", value, language) for value in range(1000, 1_000_000, 997)]
    assert len(set(texts)) == len(texts)
    values = [read_number(text, language) for text in texts]
    assert all(one < two for one, two in pairwise(values))


def test_half_are_dates_and_numbers_are_even_over_lengths():
    task = Translation(SMALL)
    counts = {}
    for split, size in task.sizes().items():
        groups = task.groups(split, np.arange(size))
        for kind, length, way in zip(
            groups["kind"], groups["length"], groups["direction"], strict=True
        ):
            counts[kind, length] = counts.get((kind, length), 0) + 1
            assert (kind == "date") == (length == "date")
            assert way in {f"{a} to {b}" for a, b in task.directions}
    assert counts["date", "date"] == 1_500
    assert counts["number", "1"] == 9 * WAYS  # all there are
    longer = [counts["number", str(n)] for n in range(3, 7)]
    assert max(longer) - min(longer) <= WAYS


def test_digits_stand_alone_and_a_name_is_no_token():
    task = Translation(SMALL)
    names = task.tokenizer
    assert (names.pad, names.bos, names.eos) == (0, 1, 2)
    assert len(names.encode("1234")) == 4
    assert names.eos not in names.encode("EOS")
    assert names.decode(names.encode("de: EOS 42 äöüß")) == "de: EOS 42 äöüß"
    again = tokenizer_from_json(names.to_json())
    assert (again.pad, again.bos, again.eos) == (0, 1, 2)
    assert again.encode("de: EOS 4217") == names.encode("de: EOS 4217")


def test_other_processes_and_locales_make_the_same_bytes():
    program = (
        "from glassformer.data.tasks.seq2seq import Translation\n"
        "from glassformer.spec.tasks import TranslationTask\n"
        "print(Translation(TranslationTask(examples=3_000, pieces=400)).facts()['sha256'])\n"
    )
    hashes = set()
    for environment in (
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "UTC"},
        {"PYTHONHASHSEED": "2", "LANG": "de_DE.UTF-8", "LANGUAGE": "fr", "TZ": "Asia/Tokyo"},
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path)), **environment},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        hashes.add(done.stdout)
    assert hashes == {Translation(SMALL).facts()["sha256"] + "\n"}


def test_seeds_and_languages_make_other_pairs():
    base = Translation(SMALL).facts()
    other = Translation(TranslationTask(examples=3_000, pieces=400, seed=1)).facts()
    french = Translation(TranslationTask(examples=600, languages=("fr", "es")))
    assert base["sha256"] != other["sha256"]
    assert set(base["writers"]) == {"num2words", "babel"}
    told = {french.describe("train", row).partition(":")[0] for row in range(WAYS)}
    assert told == {"digits", "fr", "es"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"languages": ("en",)}, "two different ones"),
        ({"languages": ("en", "en")}, "two different ones"),
        ({"languages": ("en", "tlh")}, "'tlh' is not one of de, en, es, fr"),
        ({"digits": 7}, "words end at 999,999"),
        ({"last_year": 1899}, "last_year 1899 is below 1900"),
        ({"pieces": 258}, "pieces 258 is below 259"),
        ({"examples": 99}, "examples 99 is below 100"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TranslationTask(**settings)


def test_more_than_there_is_is_refused():
    with pytest.raises(InputError, match="different numbers asked for"):
        Translation(TranslationTask(digits=2, examples=6_000))
    with pytest.raises(InputError, match="different dates asked for"):
        Translation(TranslationTask(first_year=2000, last_year=2000, examples=6_000))


def test_a_missing_library_is_named_with_its_remedy(monkeypatch):
    plain = builtins.__import__

    def without(name, *rest):
        if name == "babel":
            raise ModuleNotFoundError("No module named 'babel'", name="babel")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError) as caught:
        writing.writers()
    assert "needs babel" in str(caught.value)
    assert "pip install num2words" in str(caught.value)
