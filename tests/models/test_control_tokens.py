from hypothesis import given
from hypothesis import strategies as st

from paceline.models.control_tokens import ControlTokens

PIECES = st.text("<|>ab", min_size=1, max_size=5)


@given(tokens=st.sets(PIECES, min_size=1, max_size=8), text=st.text("<|>ab", max_size=40))
def test_text_is_split_at_the_leftmost_longest_tokens(tokens: set[str], text: str) -> None:
    expected, position = [""], 0
    while position < len(text):
        found = max((token for token in tokens if text.startswith(token, position)), key=len, default="")
        if found:
            expected += [found, ""]
        else:
            expected[-1] += text[position]
        position += len(found) or 1
    assert ControlTokens(tokens).split(text) == expected


@given(
    tokens=st.sets(PIECES, min_size=1, max_size=8),
    texts=st.lists(st.text("<|>ab", max_size=12), min_size=1, max_size=3),
)
def test_broken_up_texts_hold_no_token_alone_or_beside_each_other(tokens: set[str], texts: list[str]) -> None:
    tokens = {token for token in tokens if not token.isalnum()}  # a bare word is left to the template's own words
    if any(len(token) == 1 for token in tokens):
        return  # nothing can be put inside it
    control = ControlTokens(tokens)
    broken = [control.break_up(text, "\ue000") for text in texts]
    assert control.split("".join(broken)) == ["".join(broken)]
    assert "".join(broken).replace("\ue000", "") == "".join(texts)


def test_tokens_that_overlap_are_all_broken() -> None:
    control = ControlTokens(["<<", "<<a", "a<"])
    assert control.break_up("x<<<a<", "\ue000") == "x<\ue000<\ue000<a\ue000<\ue000"


def test_without_control_tokens_all_is_text() -> None:
    control = ControlTokens([])
    assert control.split("<s>") == ["<s>"]
    assert control.break_up({"a": ["<s>", 1, None]}, "\ue000") == {"a": ["<s>", 1, None]}


def test_ordinary_words_stay_as_they_are() -> None:
    control = ControlTokens(["<|user|>", "EOT"])
    message = {"role": "user", "content": "E and T", "n": 3}
    assert control.break_up(message, "\ue000") == message
