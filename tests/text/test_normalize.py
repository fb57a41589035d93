import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xformer.errors import ConfigError, DataError
from xformer.text.normalize import normalize_text

FORMS = ["NFC", "NFKC"]
SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u200b"
INVISIBLE = "\x00\x07\x1b\x7f\x80\x9f\xad\u061c\u200e\u200f\u202a\u202e\u2060\u2066\u2069\ufeff"

# Plenty of what the rules are about, and anything else.
any_text = st.text(
    st.one_of(
        st.sampled_from(SPACES + INVISIBLE + " a\u0301e\u0308ﬁ\uff54²\u200c\u200d\u00b4\u1100\u1161"),
        st.characters(exclude_categories=["Cs"]),
    )
)


@pytest.mark.parametrize("form", FORMS)
def test_white_space_is_a_space_and_invisible_characters_are_removed(form):
    for space in SPACES:
        assert normalize_text(f"{space}ein{space} {space}Haus{space}", form) == "ein Haus"
    for character in INVISIBLE:
        assert normalize_text(f"{character}Haus{character}boot ", form) == "Hausboot"


def test_joiners_of_letters_stay():
    for text in ("\u0645\u06cc\u200c\u062e", "👩\u200d🚀", "क्\u200dष"):
        assert normalize_text(text) == text


def test_forms():
    assert normalize_text("Ma\u0308nner") == "Männer"
    # What is removed cannot keep a letter and its accent apart.
    assert normalize_text("a\u2060\u0308") == "ä"
    assert normalize_text("ﬁne \uff54ext x²") == "ﬁne \uff54ext x²"
    assert normalize_text("ﬁne \uff54ext x²", "NFKC") == "fine text x2"


@given(text=any_text, form=st.sampled_from(FORMS))
def test_normalization_is_idempotent(text, form):
    once = normalize_text(text, form)
    assert normalize_text(once, form) == once
    assert unicodedata.is_normalized(form, once)
    assert once == " ".join(once.split())
    assert not any(unicodedata.category(character) == "Cc" for character in once)


def test_other_forms_and_types_are_refused():
    with pytest.raises(ConfigError, match=r"^the Unicode form is 'NFD'; expected one of: NFC, NFKC$"):
        normalize_text("a", "NFD")
    with pytest.raises(DataError, match=r"; expected text, a str$"):
        normalize_text(b"a")
