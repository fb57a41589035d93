"""Rule-based sentence splitting for English and German.

The libraries for this are no longer maintained (pysbd), or download models or data (spaCy, nltk's punkt).

A full stop ends a sentence, an abbreviation, an initial or a German ordinal. Short lists of abbreviations and of words
that begin sentences decide most cases. Ambiguous stops are not split, because half a sentence does more harm to a
summary than two sentences in one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
# "J", "J.-P", "U.S", "a.m", "Ph.D": one or two letters between stops; the stop in question comes last.
_INITIALS = re.compile(r"(?:[^\W\d_]{1,2}\.-?)+[^\W\d_]{1,2}|[^\W\d_]")


@dataclass(frozen=True)
class _Rules:
    """Words that decide whether a full stop ends a sentence.

    Attributes:
        never: Abbreviations that never end a sentence.
        before_number: Abbreviations only before a number.
        open: Abbreviations that may end a sentence; the following word decides.
        starters: Words that, with a capital, begin a sentence.
        ordinals: True if "3." may mean "third".
    """

    never: frozenset[str]
    before_number: frozenset[str]
    open: frozenset[str]
    starters: frozenset[str]
    ordinals: bool


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RULES = {
    "en": _Rules(
        never=_words(
            "mr mrs ms dr prof rev hon gen col lt sgt capt sen rep gov st mt e.g i.e cf vs viz approx "
            "fig figs eq eqs eqn resp esp incl excl et yahoo!"
        ),
        before_number=_words(
            "no nos p pp vol vols sec secs sect ch chap chapt tab ca max min jan feb mar apr jun jul aug sep sept oct "
            "nov dec"
        ),
        open=_words("etc al inc ltd co corp bros jr sr dept univ assn est a.m p.m ibid"),
        starters=_words(
            "the this that these those there here it its he his she her they their we our i my you your who what which "
            "when where why how while if as at by for from in on to with without within after before since until "
            "during despite unlike through among under over about although though because however moreover furthermore "
            "nevertheless nonetheless additionally also besides therefore thus hence consequently then finally first "
            "firstly second secondly third lastly next later recently currently today specifically particularly "
            "instead similarly overall meanwhile yet and but or so nor another other others many most more much some "
            "several few such both all any each every either neither no not only even still just once given using "
            "based compared a an one two three experiments experimental results"
        ),
        ordinals=False,
    ),
    "de": _Rules(
        never=_words(
            "hr fr dr prof dipl ing mag hl st nr vgl bzw ca z.b d.h z.t u.u v.a s.o s.u sog evtl ggf inkl exkl einschl "
            "abb abs bd bde kap aufl hrsg geb gest verh tel zzt bspw insb resp dgl vs"
        ),
        before_number=_words("s art tab anm max min mind jan feb mär apr jun jul aug sep sept okt nov dez"),
        open=_words("usw etc al u.a o.ä u.ä mio mrd tsd std str jh co gmbh v.chr n.chr i.d.r m.e a.d uvm"),
        starters=_words(
            "der die das den dem des ein eine einen einem einer eines es er sie wir ich ihr ihre ihr sein seine mein "
            "meine unser unsere man in im an am auf aus bei beim mit nach von vom vor zu zum zur für über unter durch "
            "gegen ohne um seit bis während trotz wegen dies diese dieser dieses diesem diesen jeder jede jedes als "
            "wenn weil da dann danach dort hier so auch aber doch und oder denn nun jedoch dabei dagegen daher "
            "deshalb dennoch trotzdem außerdem zudem ferner schließlich zunächst nachdem obwohl nur noch schon alle "
            "viele einige manche beide andere was wer wie wo warum wann welche welcher nicht kein keine heute gestern"
        ),
        ordinals=True,
    ),
}


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
    if language not in _RULES:
        raise ConfigError(f"the language is {language!r}; expected one of: {', '.join(_RULES)}")
    if not isinstance(text, str):
        raise DataError(f"got {text!r}; expected text, a str")
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        start = 0
        for stop in _STOP.finditer(paragraph):
            if _ends(paragraph[start : stop.start()], stop, _RULES[language]):
                sentences.append(paragraph[start : stop.end("close")])
                start = stop.end()
        sentences.append(paragraph[start:])
    return [" ".join(sentence.split()) for sentence in sentences if sentence.strip()]


def _ends(before: str, stop: re.Match[str], rules: _Rules) -> bool:
    """Return True if a sentence ends at a stop; `before` is the sentence up to it."""
    follower = _WORD.search(stop["next"])
    if follower is None or not _may_begin(follower[0]):
        return False
    starts = follower[0].lower() in rules.starters
    token, pair = _last_words(before)
    if not stop["gap"]:
        return starts and stop["stop"] == "." and not stop["close"] and token.isalpha() and token[1:].islower()
    if stop["stop"] != ".":
        pause = stop["stop"].startswith(("..", "…"))
        return not (pause and follower[0] == "I") and token.lower() + stop["stop"] not in rules.never
    if token.lower() in rules.never or pair in rules.never:
        return False
    if token.lower() in rules.before_number and follower[0][0].isdigit():
        return False
    if token.isdigit() and len(token) < 3 and before.strip() == token:  # "1. Introduction"
        return False
    if _is_open(token, pair, rules):
        return starts and not stop["close"]
    return True


def _last_words(before: str) -> tuple[str, str]:
    """Return the word before a stop, without opening quotes, and an abbreviation in two parts such as "z. B"."""
    if not before or before[-1].isspace():
        return "", ""
    *earlier, last = before.split()[-2:]
    last = last.lstrip(_OPENING)
    first = earlier[0].lstrip(_OPENING) if earlier else ""
    return last, (first + last).lower() if first.endswith(".") else ""


def _is_open(token: str, pair: str, rules: _Rules) -> bool:
    """Return True if a word with a stop is an abbreviation that may end its sentence."""
    if rules.ordinals and token.isdigit() and len(token) < 4:
        return True
    if token.lower() in rules.open or pair in rules.open:
        return True
    # A single lower-case letter is a word in English ("of size n.") and half an abbreviation in German ("z. B.").
    is_word = len(token) == 1 and token.islower() and not rules.ordinals
    return _INITIALS.fullmatch(token) is not None and not is_word


def _may_begin(word: str) -> bool:
    """Return True if a sentence may begin with a word: not a lower-case one, but "mBERT"."""
    return not word[0].islower() or any(letter.isupper() for letter in word)
