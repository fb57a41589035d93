import pytest
from hypothesis import given
from hypothesis import strategies as st

from xformer.errors import ConfigError, DataError
from xformer.text.sentences import split_sentences

# "|" is where a sentence ends; a space follows it, unless the text has none there ("||").
ENGLISH = [
    "One. | Two! | Three? | Four", "Mr. Smith met Dr. J. R. Jones and Prof. Lee. | They talked.",
    "Smith et al. (2019) and Lee et al. 2020 agree. | So say Gu et al. | We do not.",
    "Cooper et. al. (2014) say so. | So do we.",
    "It uses features, e.g. POS tags, i.e. BERT, cf. Fig. 3 and Eq. (2), vs. ELMo. | Good.",
    "It uses many tools, etc. | The rest is here.", "The rest (BERT, ELMo, etc.) We can skip.",
    "It rose by 3.5 points to 92.1. | 12 systems took part in 2017. | Our system won.",
    "See p. 5, no. 7, Sec. 3 and vol. 2 of Jan. 5. | The answer is no. | We know.",
    "He lives in the U.S. Army base. | She lives in the U.S. | The flag is there at 5 p.m. | It falls.",
    "She has a Ph.D. | She got it in the U.K. government.", "J.-P. Sartre wrote it. | I read it.",
    "For subtask B. | We use an LSTM of size n. | Then we stop.",
    'He said "I will go." | Then he left. | "Why?" he asked. | "Go!" | She went.',
    "(This is one.) | [This is two.] | \u2018This is three.\u2019 | “And four?” | Five.",
    "Well... it works… | But how? | So... I wonder.", "What?! | No!!! | Yes.",
    "We show it.[12] | It is new.[3, 4–6] | Good.", "We present mBERT. | mBERT wins. word2vec loses. and so on.",
    "It is like generation.|| However, the loss decreases.|| In this paper we use file.Name and Node.js.",
    "1. Introduction is first. | 2. Method comes next.", "A. Smith wrote 1. | The end.",
    "We use Yahoo! Answers. | Nice.",
    "Visit example.org. | The code is at https://example.org/a.b?c=D. | We thank you.",
    "It works !  | Spaced text ends so . | Yes ?", "Acme Inc. | The owners of Acme Inc. Europe and Smith Jr. left.",
]  # fmt: skip
GERMAN = [
    "Das ist gut. | Wirklich! | Oder? | Ja",
    "Am 3. Mai 2020 kam Frau Dr. Müller im 19. Jahrhundert an. | Sie blieb bis 1890. | Danach ging sie.",
    "Es gibt z. B. Hunde, z.B. Katzen, d. h. Tiere, u. a. Vögel, usw. | Das reicht.",
    "Vgl. Abb. 3, Nr. 5 und S. 7 bzw. Kap. 2. | Die Zahl ist ca. 3,5 Mio. Euro, i. d. R. mehr.",
    "Er kam um ca. 5 Uhr. | „Warum?“, fragte er. | „Darum.“ | Sie lachte. | »Gut.« | Ende.",
    "Das ist Max. | Er ist 12. | Die Mutter heißt Fr. Ott.",
    "Sie wohnt in der Hauptstr. | Das Haus ist alt.",
    "Prof. Dr. h. c. Otto Weiß und J. S. Bach lebten im 2. Stock. | Ein Klavier war da.",
]


def expected(marked):
    return [" ".join(sentence.split()) for sentence in marked.split("|") if sentence.strip()]


def text_of(marked):
    return marked.replace("|| ", "").replace("| ", "").replace("|", "")


def test_english_and_german():
    for language, texts in (("en", ENGLISH), ("de", GERMAN)):
        for marked in texts:
            assert split_sentences(text_of(marked), language) == expected(marked)


def test_lines_and_paragraphs():
    text = "A heading\n\nThe text runs\nover lines. It ends\n \n\nhere"
    assert split_sentences(text) == ["A heading", "The text runs over lines.", "It ends", "here"]
    for blank in ("", " ", "\n\n \n"):
        assert split_sentences(blank) == []
    for single in (".", "?!", "Hello", "Dr.", ". . .", "U.S."):
        assert split_sentences(single) == [single]


FRAGMENTS = 'The cat Dr. et al. U.S. e.g. 3.5 7. end. End! "So?" (x.) ... … I z. B.'
any_text = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS.split()), max_size=12).map(" ".join))


@given(text=any_text, language=st.sampled_from(["en", "de"]))
def test_nothing_is_lost(text, language):
    sentences = split_sentences(text, language)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == " ".join(sentence.split()) for sentence in sentences)


def test_unknown_language():
    with pytest.raises(ConfigError, match=r"^the language is 'fr'; expected one of: en, de$"):
        split_sentences("Bonjour.", "fr")
    with pytest.raises(DataError, match=r"; expected text, a str$"):
        split_sentences(["a"])
