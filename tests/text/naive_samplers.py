"""Every sampler in plain Python, over a dictionary from token to logit.

Written from the papers and llama.cpp's rules, sharing nothing with the package but its options.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from kvcellar.text.sampler import SamplerOptions

Logits = dict[int, float]
ROUNDING = 1e-12


def ranked(logits: Logits) -> list[int]:
    return sorted(logits, key=lambda token: (-logits[token], token))


def softmax(logits: Logits) -> dict[int, float]:
    top = max(logits.values())
    weights = {token: math.exp(value - top) for token, value in logits.items()}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def kept(logits: Logits, tokens: Sequence[int]) -> Logits:
    return {token: logits[token] for token in tokens}


def penalties(logits: Logits, o: SamplerOptions, history: list[int], n_prompt: int) -> Logits:
    if o.penalty_over == "answer":
        seen = history[n_prompt:]
    else:
        n = o.penalty_last_n
        seen = history if n < 0 else history[max(0, len(history) - n) :]
    changed = dict(logits)
    for token, count in Counter(seen).items():
        if token in changed:
            value = changed[token]
            factor = o.repetition_penalty
            value = value * factor if value <= 0 else value / factor
            changed[token] = value - count * o.frequency_penalty - o.presence_penalty
    return changed


def dry(logits: Logits, o: SamplerOptions, history: list[int]) -> Logits:
    """Breakers are token ids here."""
    n = o.dry_penalty_last_n
    text = history if n < 0 else history[max(0, len(history) - n) :]
    breakers = [(one,) if isinstance(one, int) else tuple(one) for one in o.dry_sequence_breakers]
    if not o.has_dry or len(text) <= o.dry_allowed_length:
        return logits
    limit = len(text)
    for place in range(len(text) - 1, -1, -1):
        ends = [place + len(b) for b in breakers if tuple(text[place : place + len(b)]) == b]
        if ends:
            limit = len(text) - max(ends)
            break
    longest: dict[int, int] = {}
    for end in range(len(text) - 1):
        length = 0
        while length < limit and length <= end and text[end - length] == text[-1 - length]:
            length += 1
        if length >= o.dry_allowed_length:
            longest[text[end + 1]] = max(length, longest.get(text[end + 1], 0))
    changed = dict(logits)
    for token, length in longest.items():
        if token in changed and (token,) not in breakers:
            changed[token] -= o.dry_multiplier * o.dry_base ** (length - o.dry_allowed_length)
    return changed


def top_n_sigma(logits: Logits, o: SamplerOptions) -> Logits:
    if o.top_n_sigma <= 0:
        return logits
    mean = math.fsum(logits.values()) / len(logits)
    sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in logits.values()) / len(logits))
    border = max(logits.values()) - o.top_n_sigma * sigma
    return {t: v for t, v in logits.items() if v >= border - ROUNDING}


def top_k(logits: Logits, o: SamplerOptions) -> Logits:
    return kept(logits, ranked(logits)[: o.top_k]) if o.top_k else logits


def reaching(
    order: list[int], shares: dict[int, float], p: float, least: int, exceed: bool = False
) -> list[int]:
    mass = 0.0
    for n, token in enumerate(order, 1):
        mass += shares[token]
        enough = mass > p + ROUNDING if exceed else mass >= p - ROUNDING
        if enough and n >= least:
            return order[:n]
    return order


def top_p(logits: Logits, o: SamplerOptions) -> Logits:
    if o.top_p >= 1:
        return logits
    return kept(logits, reaching(ranked(logits), softmax(logits), o.top_p, o.min_keep))


def min_p(logits: Logits, o: SamplerOptions) -> Logits:
    border = o.min_p * max(softmax(logits).values()) * (1 - ROUNDING)
    n = sum(p >= border for p in softmax(logits).values())
    return kept(logits, ranked(logits)[: max(n, o.min_keep)])


def typ_p(logits: Logits, o: SamplerOptions) -> Logits:
    if o.typical_p >= 1:
        return logits
    shares = softmax(logits)
    top = max(logits.values())
    mass = math.log(math.fsum(math.exp(v - top) for v in logits.values()))
    surprise = {t: mass + top - v for t, v in logits.items()}  # a share may be 0 by rounding
    entropy = math.fsum(shares[t] * surprise[t] for t in shares)
    order = sorted(ranked(logits), key=lambda t: round(abs(surprise[t] - entropy), 11))
    return kept(logits, reaching(order, shares, o.typical_p, o.min_keep, exceed=True))


def xtc(logits: Logits, o: SamplerOptions) -> Logits:
    """What it does when it does."""
    shares = softmax(logits)
    likely = [t for t in ranked(logits) if shares[t] >= o.xtc_threshold - ROUNDING]
    rest = set(logits) - set(likely[:-1])
    on = len(likely) > 1 and len(rest) >= o.min_keep and o.xtc_threshold <= 0.5
    return kept(logits, sorted(rest)) if on else logits


def temperature(logits: Logits, o: SamplerOptions) -> Logits:
    value = o.temperature
    if o.dynatemp_range > 0 and not o.mirostat:
        if len(logits) == 1:
            return logits
        shares = [p for p in softmax(logits).values() if p > 0]
        share = -math.fsum(p * math.log(p) for p in shares) / math.log(len(logits))
        low, high = max(0.0, value - o.dynatemp_range), value + o.dynatemp_range
        value = low + (high - low) * min(max(share, 0.0), 1.0) ** o.dynatemp_exponent
    if value == 0:
        return kept(logits, ranked(logits)[:1])
    return {t: v / value for t, v in logits.items()}


def distribution(
    row: Sequence[float], o: SamplerOptions, history: Sequence[int] = (), n_prompt: int = 0
) -> dict[int, float]:
    """The whole chain; XTC applies if its probability is 1."""
    biased = {t: value + o.logit_bias.get(t, 0.0) for t, value in enumerate(row)}
    logits = {t: value for t, value in biased.items() if value > -math.inf}
    for name in o.samplers:
        if name == "penalties":
            logits = penalties(logits, o, list(history), n_prompt)
        elif name == "dry":
            logits = dry(logits, o, list(history))
        elif name != "adaptive_p" and (name != "xtc" or o.xtc_probability == 1):
            logits = CUTS[name](logits, o)
    return softmax(logits)


CUTS = {
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "typ_p": typ_p,
    "xtc": xtc,
    "temperature": temperature,
}


def mirostat(row: Sequence[float], o: SamplerOptions, mu: float) -> dict[int, float]:
    """What mirostat leaves at this mu."""
    logits = temperature(dict(enumerate(row)), o)
    shares, order = softmax(logits), ranked(logits)
    if o.mirostat == 2:
        n = sum(-math.log2(p) <= mu for p in shares.values())
    else:
        pairs = list(pairwise(order))[:99]
        t = [math.log((i + 2) / (i + 1)) for i in range(len(pairs))]
        b = [math.log(shares[one] / shares[next_one]) for one, next_one in pairs]
        s = math.fsum(x * y for x, y in zip(t, b, strict=True)) / math.fsum(x * x for x in t)
        epsilon = s - 1
        n = int((epsilon * 2**mu / (1 - len(row) ** -epsilon)) ** (1 / s))
    return softmax(kept(logits, order[: max(1, n)]))


def adaptive_p(shares: dict[int, float], target: float) -> dict[int, float]:
    """llama.cpp's curve around a target."""
    distance = {t: abs(p - target) / 0.3 for t, p in shares.items()}
    return softmax({t: 5 - 10 * d * d / (1 + d) for t, d in distance.items()})
