"""SentencePiece BPE: the merges that a vocabulary's scores stand for."""

import numpy as np
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer, Prepend, Replace, Sequence

from paceline.models.pretokenizers import Splitting
from paceline.models.vocabulary import SPACE, TokenType, Vocabulary


def sentencepiece_bpe(vocabulary: Vocabulary) -> BPE:
    """The model of a vocabulary with scores; a character without a token becomes its UTF-8 bytes' tokens."""
    unknown = None if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    return BPE(ids, merges_by_score(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)


def merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, in the order in which SentencePiece prefers them.

    SentencePiece (bpe_model.cc, ``Model::SampleEncode``) has no list of merges: it joins the two neighbours whose
    joint piece has the highest score, the leftmost of equals. Only normal pieces count: text that spells a control
    or byte token stays text, and user-defined tokens are found before.
    """
    assert vocabulary.scores is not None
    normal = np.asarray(vocabulary.types) == TokenType.NORMAL
    best_first = np.argsort(-vocabulary.scores, kind="stable")
    ordered = [vocabulary.tokens[i] for i in best_first[normal[best_first]].tolist()]
    pieces = frozenset(ordered)
    return [
        (left, right)
        for piece in ordered
        for end in range(1, len(piece))
        if (left := piece[:end]) in pieces and (right := piece[end:]) in pieces
    ]


def sentencepiece_splitting(vocabulary: Vocabulary) -> Splitting:
    """No words, only spaces as SentencePiece writes them; the one in front goes to every stretch of text between added
    tokens, as in llama.cpp and in Llama 2's own tokenizer.json."""
    spaces: Normalizer = Replace(" ", SPACE)
    if vocabulary.add_space_prefix:
        spaces = Sequence([Prepend(SPACE), spaces])
    return Splitting(pre_tokenizer=None, normalizer=spaces, add_bos=True)
