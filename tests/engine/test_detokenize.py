from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.detokenize import Detokenizer


class Pieces:
    """A vocabulary of arbitrary byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def pieces_of(pieces: list[bytes], stop: list[str], *, include: bool = False) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(Pieces(pieces), stop, include)
    shown = [detokenizer.add(token_id) for token_id in range(len(pieces))]
    return [*shown, detokenizer.finish()], detokenizer


def oracle(text: str, stop: list[str], *, include: bool) -> tuple[str, str | None]:
    """Try every end, and there every stop string."""
    for end in range(1, len(text) + 1):
        completed = [s for s in stop if text[:end].endswith(s)]
        if completed:
            longest = max(completed, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def held_back(text: str, stop: list[str]) -> int:
    """Length of the longest suffix that could still become a stop string."""
    return max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)


# Few letters, so that stop strings overlap themselves, each other and the text.
stops = st.lists(st.text("ab", min_size=1, max_size=5) | st.text("aé🚲", min_size=1, max_size=3), max_size=4)
byte_pieces = st.lists(
    st.one_of(
        st.binary(max_size=3),
        st.text("ab", max_size=4).map(lambda text: text.encode()),
        st.text("aé🚲", max_size=3).map(lambda text: text.encode()),
        st.text("é🚲", min_size=1, max_size=2).flatmap(
            lambda text: st.integers(1, len(text.encode())).map(lambda cut: text.encode()[:cut])
        ),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(byte_pieces, stops, st.booleans())
def test_the_pieces_are_the_text_up_to_the_first_stop(pieces: list[bytes], stop: list[str], include: bool) -> None:
    shown, detokenizer = pieces_of(pieces, stop, include=include)
    expected = oracle(b"".join(pieces).decode(errors="replace"), stop, include=include)
    assert ("".join(shown), detokenizer.stop_string) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20), st.lists(st.integers(1, 3), max_size=30))
def test_any_split_of_the_bytes_gives_the_same_text(text: str, cuts: list[int]) -> None:
    data = text.encode(errors="replace")
    pieces = []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    shown, _ = pieces_of([*pieces, data], [])
    assert "".join(shown) == text.encode(errors="replace").decode()
    assert "\ufffd" not in "".join(shown) or "\ufffd" in text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("abé", max_size=3), max_size=12), stops)
def test_held_back_is_what_could_become_a_stop_string_and_no_more(texts: list[str], stop: list[str]) -> None:
    detokenizer = Detokenizer(Pieces([text.encode() for text in texts]), stop)
    text = shown = ""
    for token_id, piece in enumerate(texts):
        text += piece
        shown += detokenizer.add(token_id)
        if detokenizer.stop_string is not None:
            break
        assert shown == text[: len(text) - held_back(text, stop)]


def test_no_half_code_point_is_sent() -> None:
    bicycle = "🚲".encode()
    assert pieces_of([bicycle[:1], bicycle[1:3], bicycle[3:] + b"!"], [])[0] == ["", "", "🚲!", ""]


def test_an_incomplete_code_point_at_the_end_becomes_a_replacement_character() -> None:
    assert pieces_of([b"a", "🚲".encode()[:3]], [])[0] == ["a", "", "\ufffd"]


def test_a_stop_string_over_several_tokens_leaks_nothing() -> None:
    shown, detokenizer = pieces_of([b"one<", b"/s", b">two"], ["</s>"])
    assert shown == ["one", "", "", ""]
    assert detokenizer.stop_string == "</s>"


def test_a_stop_string_may_begin_within_a_failed_attempt_at_itself() -> None:
    assert pieces_of([b"xaaab"], ["aab"])[0] == ["xa", ""]
    assert pieces_of([b"abab", b"abc!"], ["ababc"])[0] == ["", "ab", ""]


def test_what_did_not_become_a_stop_string_is_sent() -> None:
    assert pieces_of([b"<", b"/", b"p>"], ["</s>"])[0] == ["", "", "</p>", ""]


def test_an_unfinished_stop_string_is_flushed() -> None:
    assert pieces_of([b"a</"], ["</s>"])[0] == ["a", "</"]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    shown, detokenizer = pieces_of([b"xabcd"], ["abcd", "bc"])
    assert shown == ["xa", ""]
    assert detokenizer.stop_string == "bc"


def test_of_two_that_end_together_the_longer_wins() -> None:
    shown, detokenizer = pieces_of([b"xab"], ["b", "ab"])
    assert shown == ["x", ""]
    assert detokenizer.stop_string == "ab"


def test_the_stop_string_can_be_included() -> None:
    assert pieces_of([b"one</", b"s>two"], ["</s>"], include=True)[0] == ["one", "</s>", ""]


def test_nothing_comes_after_a_stop() -> None:
    detokenizer = Detokenizer(Pieces([b"a.", b"b"]), ["."])
    assert [detokenizer.add(0), detokenizer.add(1), detokenizer.finish()] == ["a", "", ""]


def test_a_flushed_replacement_character_can_complete_a_stop_string() -> None:
    shown, detokenizer = pieces_of([b"ab\xc3"], ["b\ufffd"])
    assert "".join(shown) == "a"
    assert detokenizer.stop_string == "b\ufffd"
