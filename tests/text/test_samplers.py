"""Every sampler against plain Python (`naive_samplers`), in any order, and what is drawn."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import OptionError
from kvcellar.text.sampler import SAMPLERS, Sampler, SamplerOptions
from kvcellar.text.sampling.dry import Breakers, repeats
from kvcellar.text.sampling.selection import philox
from kvcellar.types import BoolArray, Float32Array
from tests.profiles import examples
from tests.text import naive_samplers as naive

_LOGITS = st.lists(
    st.one_of(st.floats(-8, 8, width=16), st.sampled_from([0.0, 1.0, 2.0])),
    min_size=2,
    max_size=60,
)
_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def neutral(**options: Any) -> SamplerOptions:
    """Options that change nothing but what is given."""
    return SamplerOptions(**{**_NEUTRAL, "seed": 1, **options})


def found(row: Float32Array, options: SamplerOptions, *args: Any, **named: Any) -> dict[int, float]:
    ids, probabilities = Sampler(options).distribution(row, *args, **named)
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


_ONE_BY_ONE: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "penalties": st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.37]),
            "presence_penalty": st.sampled_from([0.0, 0.53]),
            "frequency_penalty": st.sampled_from([0.0, 0.29]),
            "penalty_last_n": st.integers(-1, 6),
            "penalty_over": st.sampled_from(["window", "answer"]),
        }
    ),
    "dry": st.fixed_dictionaries(
        {
            "dry_multiplier": st.sampled_from([0.0, 0.83]),
            "dry_base": st.sampled_from([1.0, 1.01, 1.75]),
            "dry_allowed_length": st.integers(1, 3),
            "dry_penalty_last_n": st.integers(-1, 12),
            "dry_sequence_breakers": st.sampled_from([(), (0,), ([0, 1], 2), ([1, 1, 0], [1])]),
        }
    ),
    "top_n_sigma": st.fixed_dictionaries({"top_n_sigma": st.sampled_from([-1, 0, 0.71, 1.83])}),
    "top_k": st.fixed_dictionaries({"top_k": st.integers(0, 12)}),
    "typ_p": st.fixed_dictionaries({"typical_p": st.sampled_from([0.2171, 0.7137, 1.0])}),
    "top_p": st.fixed_dictionaries({"top_p": st.sampled_from([0.1171, 0.5537, 0.9319, 1.0])}),
    "min_p": st.fixed_dictionaries({"min_p": st.sampled_from([0.0, 0.0713, 0.4531])}),
    "xtc": st.fixed_dictionaries(
        {
            "xtc_probability": st.sampled_from([0.0, 1.0]),
            "xtc_threshold": st.sampled_from([0.0531, 0.1973, 0.6]),
        }
    ),
    "temperature": st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.71, 1.0, 2.3]),
            "dynatemp_range": st.sampled_from([0.0, 0.0, 0.43, 1.5]),
            "dynatemp_exponent": st.sampled_from([0.7, 1.0, 2.0]),
        }
    ),
}


@st.composite
def _cases(draw: st.DrawFn, names: Sequence[str]) -> tuple[list[float], SamplerOptions, list[int]]:
    logits = draw(_LOGITS)
    few = st.integers(0, min(2, len(logits) - 1))
    history = draw(st.lists(few, max_size=60))
    options: dict[str, Any] = {"min_keep": draw(st.integers(0, 4))}
    for name in names:
        options |= draw(_ONE_BY_ONE[name])
    return logits, neutral(samplers=names, **options), history


def check(case: tuple[list[float], SamplerOptions, list[int]], n_prompt: int = 4) -> None:
    logits, options, history = case
    row = np.array(logits, np.float32)
    before = row.copy()
    wanted = naive.distribution(logits, options, history, n_prompt)
    got = found(row, options, history, n_prompt=n_prompt)
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    assert np.array_equal(row, before)
    assert Sampler(options).sample(row, history, n_prompt=n_prompt) in got


@pytest.mark.parametrize("name", _ONE_BY_ONE)
@examples(40)
@given(data=st.data())
def test_a_sampler_alone_is_the_naive_one(name: str, data: st.DataObject) -> None:
    check(data.draw(_cases([name])))


@examples(150)
@given(st.permutations(list(_ONE_BY_ONE)).flatmap(lambda names: _cases(names)))
def test_all_samplers_in_any_order_are_the_naive_chain(
    case: tuple[list[float], SamplerOptions, list[int]],
) -> None:
    check(case)


@pytest.mark.parametrize("later", ["penalties", "dry", "typ_p", "xtc"])
@pytest.mark.parametrize("cut", ["top_k", "top_p", "min_p", "top_n_sigma"])
def test_a_greedy_choice_minds_what_was_cut_before(cut: str, later: str) -> None:
    """What changes the best token comes behind a cut that left one token, or two."""
    options = neutral(
        temperature=0.0,
        samplers=[cut, later, "temperature"],
        top_k=2,
        top_p=0.7,
        min_p=0.5,
        top_n_sigma=0.9,
        presence_penalty=9.0,
        dry_multiplier=9.0,
        dry_sequence_breakers=(),
        typical_p=0.3,
        xtc_probability=1.0,
        xtc_threshold=0.05,
    )
    check(([2.0, 1.9, 0.9, 0.0, -3.0], options, [1, 2, 0, 1, 2]))


def test_of_a_large_vocabulary_the_same_is_left() -> None:
    row = np.random.default_rng(5).normal(0, 3, 5000).astype(np.float32)
    row[::7] = -np.inf
    for options in (
        neutral(typical_p=0.83, top_n_sigma=2.5),
        neutral(typical_p=0.9, min_keep=700),
        neutral(top_p=0.97, min_p=0.001, xtc_probability=1, xtc_threshold=0.02),
        neutral(dynatemp_range=0.5, temperature=0.6),
    ):
        wanted = naive.distribution(row.tolist(), options)
        assert found(row, options) == pytest.approx(wanted, rel=1e-6)


# -- DRY


@examples(60)
@given(
    tokens=st.one_of(
        st.lists(st.integers(0, 1), min_size=2, max_size=120),
        st.tuples(st.integers(1, 9), st.integers(60, 200)).map(
            lambda of: [i % of[0] for i in range(of[1])]
        ),
    ),
    least=st.integers(1, 4),
    most=st.integers(1, 150),
)
def test_repeats_are_counted_however_long(tokens: list[int], least: int, most: int) -> None:
    least = min(least, most)
    wanted = {}
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length >= least:
            wanted[end] = min(length, most)
    assert dict(repeats(tokens, least, most)) == wanted


class Letters:
    """A tokenizer of some pieces; it takes the longest that fits."""

    pieces = (b"a", b"\n", b"x\n", b"", b"ab", b"b", b"cab", b"c", b"<", b"x<", b"|", b"|>", b">")

    def encode(self, text: str, *, add_special: bool, continuing: bool) -> list[int]:
        assert (add_special, continuing) == (False, True)
        ids, rest = list[int](), text.encode()
        while rest:
            best = max((p for p in self.pieces if p and rest.startswith(p)), key=len)
            ids.append(self.pieces.index(best))
            rest = rest[len(best) :]
        return ids


@pytest.mark.parametrize(
    ("breaker", "text", "left"),
    [
        ("\n", [0, 1, 0, 0], 2),
        ("\n", [0, 2, 0], 1),
        ("ab", [0, 4, 7], 1),
        ("ab", [7, 0, 5, 7], 1),  # spelled by two tokens
        ("ab", [6, 0, 0], 2),
        ("<|>", [9, 11, 0], 1),
        ("<|>", [9, 10, 0], 3),  # not spelled to its end
        ("b", [0, 0], 2),
    ],
)
def test_a_string_breaks_wherever_tokens_spell_it(breaker: str, text: list[int], left: int) -> None:
    assert Breakers([breaker], Letters()).limit(text) == left


def test_a_repetition_is_penalized_unless_a_breaker_is_in_it() -> None:
    row, history = np.zeros(12, np.float32), [0, 5, 7, 8, 0, 5, 7]
    options: dict[str, Any] = {"dry_multiplier": 1.0, "temperature": 1.0}
    sampler = Sampler(neutral(**options), tokenizer=Letters())
    ids, probabilities = sampler.distribution(row, history)
    assert ids[probabilities.argmin()] == 8
    broken = Sampler(neutral(dry_sequence_breakers=["c"], **options), tokenizer=Letters())
    assert np.ptp(broken.distribution(row, history)[1]) == 0
    with pytest.raises(OptionError, match=r"tokenizer=model\.tokenizer"):
        Sampler(neutral(**options))


# -- what is drawn


@pytest.mark.parametrize(
    ("key", "counter", "block"),
    [
        (0, (0, 0), (0xCA00A0459843D731, 0x66C24222C9A845B5)),
        (2**64 - 1, (2**64 - 1, 2**64 - 1), (0x65B021D60CD8310F, 0x4D02F3222F86DF20)),
    ],
)
def test_random_numbers_are_those_of_philox(
    key: int, counter: tuple[int, int], block: tuple[int, int]
) -> None:
    """The known answers that come with Random123."""
    assert philox(key, counter) == block


def test_a_random_number_depends_on_seed_choice_and_position_alone() -> None:
    row = np.zeros(10_000, np.float32)
    first, other = Sampler(neutral(seed=3)), Sampler(neutral(seed=3))
    drawn = [first.sample(row, position=i) for i in range(12)]
    assert [other.sample(row, position=i) for i in reversed(range(12))] == drawn[::-1]
    assert [Sampler(neutral(seed=3)).sample(row, [1] * i) for i in range(1, 12)] == drawn[1:]
    assert len(set(drawn)) > 10
    for changed in (neutral(seed=4), neutral(seed=3, choice=1)):
        assert not set(enumerate(drawn)) & {
            (i, Sampler(changed).sample(row, position=i)) for i in range(12)
        }


def chi_square(counts: Counter[int], wanted: dict[int, float]) -> float:
    n = counts.total()
    assert set(counts) <= set(wanted)
    return sum((counts[t] - n * p) ** 2 / (n * p) for t, p in wanted.items())


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.71},
        {"xtc_probability": 1.0, "xtc_threshold": 0.2},
        {"dynatemp_range": 0.5},
        {"top_n_sigma": 1.5},
        {"temperature": 1.7, "top_k": 4},
    ],
)
def test_draws_follow_the_naive_distribution(options: dict[str, Any]) -> None:
    row = np.log(np.array([0.35, 0.05, 0.25, 0.2, 0.1, 0.05], np.float32))
    chosen = neutral(**options)
    sampler = Sampler(chosen)
    counts = Counter(sampler.sample(row) for _ in range(4000))
    assert chi_square(counts, naive.distribution(row.tolist(), chosen)) < 20.5  # 5 degrees, 0.001


def test_xtc_drops_the_best_as_often_as_asked() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    options = neutral(xtc_probability=0.4, xtc_threshold=0.25)
    with_it = naive.distribution(row.tolist(), neutral(xtc_probability=1, xtc_threshold=0.25))
    mixed = {
        t: 0.6 * p + 0.4 * with_it.get(t, 0.0)
        for t, p in naive.distribution(row.tolist(), neutral()).items()
    }
    sampler = Sampler(options)
    counts = Counter(sampler.sample(row) for _ in range(4000))
    assert chi_square(counts, mixed) < 13.9  # 2 degrees, 0.001


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_is_the_naive_one_and_holds_the_surprise(version: int) -> None:
    random = np.random.default_rng(version)
    options = neutral(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, temperature=1.2)
    sampler, mu, surprises = Sampler(options), 6.0, []
    for i in range(300):
        row = random.normal(0, 2, 200).astype(np.float32)
        wanted = naive.mirostat(row.tolist(), options, mu)
        if i < 40:
            ids, probabilities = sampler.distribution(row)
            got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
            assert got == pytest.approx(wanted, rel=1e-5)
        surprises.append(-math.log2(wanted[sampler.sample(row)]))
        mu -= 0.2 * (surprises[-1] - 3.0)
        assert sampler.state()["selection"] == pytest.approx([mu], rel=1e-4)
        mu = sampler.state()["selection"][0]  # type: ignore[index]
    assert sum(surprises[50:]) / 250 == pytest.approx(3.0, abs=0.15)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "row", [np.zeros(50), np.r_[90.0, np.zeros(9)], np.zeros(1), np.linspace(0, 700, 30)]
)
def test_mirostat_takes_any_logits(version: int, row: Float32Array) -> None:
    sampler = Sampler(neutral(mirostat=version, mirostat_tau=0.0, mirostat_eta=3.0))
    for _ in range(30):
        assert 0 <= sampler.sample(row.astype(np.float32)) < len(row)


def test_adaptive_p_is_the_naive_one_and_keeps_near_its_target() -> None:
    options = neutral(adaptive_target=0.3, adaptive_decay=0.8, temperature=0.9, top_k=20)
    sampler, chosen, n = Sampler(options), 0.3 / 0.2, 1 / 0.2
    taken: list[float] = []
    for _ in range(200):
        row = np.random.default_rng(len(taken)).normal(0, 2, 40).astype(np.float32)
        shares = naive.distribution(row.tolist(), options)
        wanted = naive.adaptive_p(shares, min(max(0.6 - chosen / n, 0.0), 1.0))
        ids, probabilities = sampler.distribution(row)
        got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
        assert got == pytest.approx(wanted, rel=1e-4)
        taken.append(shares[sampler.sample(row)])
        chosen, n = taken[-1] + 0.8 * chosen, 1 + 0.8 * n
        assert sampler.state()["selection"] == pytest.approx([chosen, n])
    assert sum(taken) / 200 == pytest.approx(0.3, abs=0.08)


def test_a_sampler_goes_on_from_a_copy_a_pickle_and_a_state() -> None:
    row = np.random.default_rng(0).normal(0, 2, 300).astype(np.float32)
    sampler = Sampler(neutral(seed=None, mirostat=2))
    for _ in range(5):
        sampler.sample(row)
    again = Sampler(neutral(mirostat=2))
    again.set_state(sampler.state())
    others = [sampler.copy(), pickle.loads(pickle.dumps(sampler)), again]
    wanted = [sampler.sample(row) for _ in range(20)]
    for other in others:
        assert [other.sample(row) for _ in range(20)] == wanted
    with pytest.raises(OptionError, match=r"Sampler\.state"):
        Sampler(neutral()).set_state(sampler.state())


# -- hooks, constraints, options


class Cycle:
    """Allows one token after another."""

    def __init__(self, n_vocab: int, place: int = 0) -> None:
        self.n_vocab, self.place = n_vocab, place
        self.is_finished = False

    def allowed(self) -> BoolArray:
        return np.array([token == self.place for token in range(self.n_vocab)])

    def accept(self, token: int) -> None:
        assert token == self.place
        self.place = (token + 1) % self.n_vocab

    def copy(self) -> Cycle:
        return Cycle(self.n_vocab, self.place)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_wins_over_all_and_accepts_what_was_sampled(temperature: float) -> None:
    row = np.array([9.0, 0.0, 0.0, 9.0, 9.0], np.float32)
    options = neutral(temperature=temperature, logit_bias={0: 5.0})
    sampler = Sampler(options, constraint=Cycle(3), hooks=[lambda row, _: row * -1])
    assert [sampler.sample(row) for _ in range(4)] == [0, 1, 2, 0]
    twin = sampler.copy()
    assert [sampler.sample(row), sampler.sample(row)] == [1, 2]
    assert twin.sample(row) == 1
    forced = Sampler(neutral(logit_bias={4: math.inf}), constraint=Cycle(3))
    with pytest.raises(OptionError, match="constraint allows no token"):
        forced.sample(row)
    with pytest.raises(OptionError, match="made for 9 tokens, the logits have 5"):
        Sampler(constraint=Cycle(9)).sample(row)


def test_hooks_change_a_copy_or_return_a_row() -> None:
    row, seen = np.array([1.0, 2.0, 3.0], np.float32), []

    def bans_last(logits: Float32Array, history: Sequence[int]) -> None:
        seen.append(list(history))
        logits[2] = -np.inf

    options = SamplerOptions(temperature=0)
    assert Sampler(options, hooks=[bans_last]).sample(row, [7]) == 1

    def turned(logits: Float32Array, _: Sequence[int]) -> Float32Array:
        return logits[[2, 0, 1]]

    assert Sampler(options, hooks=[bans_last, turned]).sample(row, [7]) == 2
    assert seen == [[7], [7]]
    assert row.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("bad", [5, np.zeros(2, np.float32), np.full(3, np.nan), [0.0, 0.0, 0.0]])
def test_what_a_hook_returns_is_checked(bad: Any) -> None:
    with pytest.raises(OptionError, match="the hook"):
        Sampler(hooks=[lambda *_: bad]).sample(np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samplers", "top_k"),
        ("samplers", ["top_k", "infill"]),
        ("samplers", ["top_k", "top_k"]),
        ("typical_p", 0.0),
        ("top_n_sigma", -2),
        ("xtc_probability", 1.1),
        ("xtc_threshold", -0.1),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", "\n"),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x" * 41]),
        ("dry_sequence_breakers", [-1]),
        ("dry_sequence_breakers", [[]]),
        ("dry_sequence_breakers", [1.5]),
        ("mirostat", 3),
        ("mirostat_tau", math.nan),
        ("mirostat_eta", -1),
        ("dynatemp_range", -1),
        ("dynatemp_exponent", math.inf),
        ("adaptive_target", 1.5),
        ("adaptive_decay", 1.0),
        ("min_keep", -1),
        ("penalty_over", "prompt"),
        ("choice", -1),
    ],
)
def test_options_are_checked_by_name(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        SamplerOptions(**{name: value})  # type: ignore[arg-type]


def test_options_are_values() -> None:
    options = neutral(samplers=list(SAMPLERS[:3]), dry_sequence_breakers=["a", 3, [1, 2]])
    assert options == pickle.loads(pickle.dumps(options))
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    assert options.breakers == ("a", (3,), (1, 2))
