"""Rule-based sentence splitting for English and German.

The libraries for this are no longer maintained (pysbd), or download models or data (spaCy, nltk's punkt).

A full stop ends a sentence, an abbreviation, an initial or a German ordinal. Short lists of abbreviations and of words
that begin sentences decide most cases. Ambiguous stops are not split, because half a sentence does more harm to a
summary than two sentences in one.
"""

from __future__ import annotations

import functools
import re
from operator import itemgetter

from xformer.errors import ConfigError, DataError

_CLOSING = "\"'”\u2019“»«)\\]}"
_OPENING = "\"'“”\u2018„\u201a«»([{¿¡–—-"
# A stop with its closing quotes, brackets or citation mark; then a lookahead at the following word.
_STOP = re.compile(
    rf"(?P<stop>[.!?…]+)(?P<close>[{_CLOSING}]*(?:\[[\d,\s–-]+\])?)(?P<gap>\s*)"
    rf"(?=(?P<open>[{re.escape(_OPENING)}]*)(?P<next>\S+))"
)
_PARAGRAPH = re.compile(r"\n\s*\n")
_WORD = re.compile(r"[^\W_]+")
_DIGIT, _LETTER = r"[\d¹²³⁰⁴-⁹₀-₉①-⑨]", r"[^\W\d_]"


# Abbreviations that never end a sentence, do not before a number, or may (the following word decides); and words that,
# with a capital, begin a sentence.
_WORDS = {
    "en": {
        "never": (
            "mr mrs ms dr prof rev hon gen col lt sgt capt sen rep gov st mt e.g i.e cf vs viz approx "
            "fig figs eq eqs eqn resp esp incl excl et yahoo!"
        ),
        "before_number": (
            "no nos p pp vol vols sec secs sect ch chap chapt tab ca max min jan feb mar apr jun jul aug sep sept oct "
            "nov dec"
        ),
        "open": "etc al inc ltd co corp bros jr sr dept univ assn est a.m p.m ibid",
        "starters": (
            "the this that these those there here it its he his she her they their we our i my you your who what which "
            "when where why how while if as at by for from in on to with without within after before since until "
            "during despite unlike through among under over about although though because however moreover furthermore "
            "nevertheless nonetheless additionally also besides therefore thus hence consequently then finally first "
            "firstly second secondly third lastly next later recently currently today specifically particularly "
            "instead similarly overall meanwhile yet and but or so nor another other others many most more much some "
            "several few such both all any each every either neither no not only even still just once given using "
            "based compared a an one two three experiments experimental results"
        ),
    },
    "de": {
        "never": (
            "hr fr dr prof dipl ing mag hl st nr vgl bzw ca z.b d.h z.t u.u v.a s.o s.u sog evtl ggf inkl exkl einschl "
            "abb abs bd bde kap aufl hrsg geb gest verh tel zzt bspw insb resp dgl vs"
        ),
        "before_number": "s art tab anm max min mind jan feb mär apr jun jul aug sep sept okt nov dez",
        "open": "usw etc al u.a o.ä u.ä mio mrd tsd std str jh co gmbh v.chr n.chr i.d.r m.e a.d uvm",
        "starters": (
            "der die das den dem des ein eine einen einem einer eines es er sie wir ich ihr ihre ihr sein seine mein "
            "meine unser unsere man in im an am auf aus bei beim mit nach von vom vor zu zum zur für über unter durch "
            "gegen ohne um seit bis während trotz wegen dies diese dieser dieses diesem diesen jeder jede jedes als "
            "wenn weil da dann danach dort hier so auch aber doch und oder denn nun jedoch dabei dagegen daher "
            "deshalb dennoch trotzdem außerdem zudem ferner schließlich zunächst nachdem obwohl nur noch schon alle "
            "viele einige manche beide andere was wer wie wo warum wann welche welcher nicht kein keine heute gestern"
        ),
    },
}


@functools.cache
def _rules(language: str) -> tuple[re.Pattern[str], set[str]]:
    """Return the pattern of a stop within a sentence, and the words that, with a capital, begin sentences.

    The pattern is for two words, the stop, ")" for what closes, a space and the next word, in lower case.
    """
    opening = rf"[{re.escape(_OPENING)}]*"
    never, before_number, open = (
        re.escape(words).replace(r"\ ", "|").replace(r"\.", rf"\.(?:\ {opening})?")  # "e.g." and "e. g."
        for words in itemgetter("never", "before_number", "open")(_WORDS[language])
    )
    starters = _WORDS[language]["starters"].split()
    ordinals = rf"{_DIGIT}{{1,3}}" if language == "de" else "(?!)"  # "3." means "third"
    # "J.-P", "U.S", "a.m", "Ph.D": one or two letters between stops; or a single letter.
    initials = rf"(?:{_LETTER}{{1,2}}\.-?)+{_LETTER}{{1,2}}|(?P<letter>{_LETTER})"
    within = rf"""(?:^|\ ){opening}(?:(?:{never})(?:(?<=!)|(?<=\w)\.)\)?\ \w+|(?:{before_number})\.\)?\ {_DIGIT}\w*
        |(?:{open}|{ordinals}|{initials})\.(?!\ (?:{"|".join(starters)})$)\)?\ \w+)$
        |^{_DIGIT}{{1,2}}\.\)?\ \w+$|(?<![.!?…])(?:\.\.|…)[.!?…]*\)?\ i$"""  # "1. Introduction", "So... I see"
    return re.compile(within, re.VERBOSE), set(starters)


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences.

    Nothing but white space is lost: runs of it become single spaces. A blank line ends a sentence; a single line end is
    a space. A stop without a following space ends a sentence only between a lower-case word and a word that begins
    sentences (a common typo: "... decreases.In ...").

    Args:
        text: The text.
        language: "en" or "de".

    Raises:
        ConfigError: For another language.
        DataError: If `text` is not a str.

    Examples:
        >>> split_sentences("Dr. J. Smith et al. (2019) scored 3.5 points, i.e. more. We do not! Why?")
        ['Dr. J. Smith et al. (2019) scored 3.5 points, i.e. more.', 'We do not!', 'Why?']
        >>> split_sentences("Am 3. Mai kam z. B. Frau Dr. Ott. Sie blieb.", "de")
        ['Am 3. Mai kam z. B. Frau Dr. Ott.', 'Sie blieb.']
    """
    if language not in _WORDS:
        raise ConfigError(f"the language is {language!r}; expected one of: {', '.join(_WORDS)}")
    if not isinstance(text, str):
        raise DataError(f"got {text!r}; expected text, a str")
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        start = 0
        for stop in _STOP.finditer(paragraph):
            if _ends(paragraph[start : stop.start()], stop, language):
                sentences.append(paragraph[start : stop.end("close")])
                start = stop.end()
        sentences.append(paragraph[start:])
    return [" ".join(sentence.split()) for sentence in sentences if sentence.strip()]


def _ends(before: str, stop: re.Match[str], language: str) -> bool:
    """Return True if a sentence ends at a stop; `before` is the sentence up to it."""
    follower = _WORD.search(stop["next"])
    if follower is None or (follower[0][0].islower() and not any(map(str.isupper, follower[0]))):  # but "mBERT"
        return False
    (within, starters), word = _rules(language), follower[0].lower()
    tail = "" if before[-1:].isspace() else " ".join(before.split()[-2:])
    if not stop["gap"]:
        token = tail[tail.rfind(" ") + 1 :].lstrip(_OPENING)
        return (
            word in starters and stop["stop"] == "." and not stop["close"] and token.isalpha() and token[1:].islower()
        )
    found = within.search(f"{tail.lower()}{stop['stop']}{')' if stop['close'] else ''} {word}")
    # A lower-case letter is a word in English ("of size n.") and half an abbreviation in German ("z. B.").
    return found is None or (language == "en" and found["letter"] is not None and before[-1].islower())
