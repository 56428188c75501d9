"""Typed access to a file's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ModelFileError, UnsupportedModel
from kvcellar.models.hparams import HyperParams

ARCH = {"general.architecture": "llama"}


def _with(value: Any) -> HyperParams:
    return HyperParams({**ARCH, "llama.x": value})


def test_keys_that_begin_with_a_dot_are_the_architecture_s() -> None:
    hp = HyperParams({**ARCH, "llama.x": 3, "general.y": 4})
    assert hp.arch == "llama"
    assert hp.count(".x") == 3
    assert hp.count("general.y") == 4
    assert hp.has(".x")
    assert not hp.has("x")


@pytest.mark.parametrize("arch", [3, True, ["llama"], None])
def test_the_architecture_must_be_a_string(arch: object) -> None:
    with pytest.raises((ModelFileError, UnsupportedModel), match=r"general\.architecture"):
        HyperParams({"general.architecture": arch})


def test_no_architecture_is_an_error() -> None:
    with pytest.raises(UnsupportedModel, match=r"lacks the hyper-parameter general\.architecture"):
        HyperParams({})


@pytest.mark.parametrize("method", ["count", "size", "number", "positive", "text"])
def test_what_is_absent_is_named(method: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"the file lacks the hyper-parameter llama\.y"):
        getattr(_with(1), method)(".y")


@pytest.mark.parametrize(
    ("method", "default"),
    [("count", 0), ("size", 1), ("number", -0.5), ("positive", 2.0), ("text", "t")],
)
def test_what_is_absent_may_have_a_default(method: str, default: object) -> None:
    assert getattr(_with(1), method)(".y", default) == default


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1])
def test_counts(value: int) -> None:
    assert _with(value).count(".x") == value


@pytest.mark.parametrize(
    "value", [-1, 2**31, 2**64 - 1, 1.0, float("nan"), True, "1", ["1"], np.array([1])]
)
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.x=.*: expected a count"):
        _with(value).count(".x")


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"llama\.x=0: expected a count above zero"):
        _with(0).size(".x")


@pytest.mark.parametrize("value", [0, -3, 2.5, -1e30, 3e38])
def test_numbers(value: float) -> None:
    assert _with(value).number(".x") == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39, -1e300])
def test_numbers_are_finite_as_f32(value: float) -> None:
    with pytest.raises(ModelFileError, match="expected a finite number"):
        _with(value).number(".x")


@pytest.mark.parametrize("value", [True, "1.0", ["a"], np.array([1.0])])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ModelFileError, match="expected a number"):
        _with(value).number(".x")


@pytest.mark.parametrize("value", [0, 0.0, -1e-5, -7])
def test_positive_is_above_zero(value: float) -> None:
    with pytest.raises(ModelFileError, match="expected a number above zero"):
        _with(value).positive(".x")


@pytest.mark.parametrize("value", [3, 1.5, True, ["a"], np.array([1])])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(ModelFileError, match="expected a string"):
        _with(value).text(".x")


@pytest.mark.parametrize("value", [True, False])
def test_flags(value: bool) -> None:
    assert _with(value).flag(".x") is value
    assert _with(1).flag(".y", value) is value


@pytest.mark.parametrize("value", [0, 1, "true", np.array([True])])
def test_what_is_no_flag_is_refused(value: object) -> None:
    with pytest.raises(ModelFileError, match="expected true or false"):
        _with(value).flag(".x")


def test_caps_may_be_nothing_but_not_negative() -> None:
    assert [_with(value).cap(".x") for value in (0.0, 0, 2.5)] == [0, 0, 2.5]
    assert _with(1).cap(".y", 30.0) == 30.0
    with pytest.raises(ModelFileError, match=r"llama\.x=-0\.5: expected a number that is not neg"):
        _with(-0.5).cap(".x")


def test_an_array_or_none() -> None:
    array = np.array([1, 2])
    assert _with(array).array(".x") is array
    assert _with(3).array(".x") is None
    assert _with(array).array(".y") is None


@pytest.mark.parametrize("value", [0, 1, 0.0, False, np.array([0, 1, 0]), np.array(1.0)])
def test_only_some_values_are_taken(value: object) -> None:
    _with(value).only(".x", 0, 1)
    _with(7).only(".y", 0, 1)


@pytest.mark.parametrize(
    "value", [2, -1, 0.5, float("nan"), "0", ["0"], np.array([0, 2]), np.array(["0"])]
)
def test_any_other_is_unsupported(value: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"llama\.x=.*: only 0 or 1 is supported"):
        _with(value).only(".x", 0, 1)


def test_zero_is_absent() -> None:
    _with(0).absent(".x", ".y")
    with pytest.raises(UnsupportedModel, match=r"llama\.x=3: only 0 is supported"):
        _with(3).absent(".y", ".x")


def test_one_number_stands_for_all_layers() -> None:
    assert _with(4).per_layer(".x", 3) == (4, 4, 4)
    assert _with(4).per_layer(".y", 2, 7) == (7, 7)


def test_an_array_has_a_number_a_layer() -> None:
    assert _with(np.array([1, 2, 3], np.uint32)).per_layer(".x", 3) == (1, 2, 3)


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, 2]),
        np.array([1.0, 2.0, 3.0]),
        np.array([[1, 2, 3]]),
        np.array([1, 0, 3]),
        np.array([1, -2, 3]),
        np.array([1, 2, 2**64 - 1], np.uint64),
        np.array([True, True, True]),
        0,
        -4,
        "3",
    ],
)
def test_arrays_that_do_not_fit_are_refused(value: object) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.x=.*: expected"):
        _with(value).per_layer(".x", 3)


def test_layers_may_be_allowed_to_have_none() -> None:
    assert _with(np.array([1, 0, 3])).per_layer(".x", 3, least=0) == (1, 0, 3)
    assert _with(0).per_layer(".x", 2, least=0) == (0, 0)
    with pytest.raises(ModelFileError, match=r"llama\.x=.*: expected counts"):
        _with(np.array([1, -2, 3])).per_layer(".x", 3, least=0)


def test_a_message_does_not_quote_a_whole_vocabulary() -> None:
    with pytest.raises(ModelFileError) as caught:
        _with(["token"] * 100_000).count(".x")
    assert len(str(caught.value)) < 200
