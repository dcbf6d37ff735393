r"""Reading formulas: those that a statement gives, and those that a text ends with.

A formula is an atom, taken whole or not at all. In prose without dollar signs the longest runs of mathematical signs are formulas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmeval_prune.scoring.forms import gives_several
from lmeval_prune.scoring.normalisation import flat, phrases, words
from lmeval_prune.scoring.statements import CUT_OFF, DENIED, MAX_END
from lmeval_prune.scoring.text import GIVES_UP, MAX_WORDS, PROSE, REASON, concluding_sentences

_ROW_ENVIRONMENT = r"\{(?:align|aligned|equation|gather|gathered|split)\*?\}"
# By pandoc's rule: no space inside the dollars and no digit after them, so `$18 and $20` are prices.
_FORMULA = re.compile(
    r"\$\$((?:\\.|[^$\\])+)\$\$|\$\s*([^$\n]{0,40}\\begin[^$]+)\$|(?<!\\)\$(?=\S)((?:\\.|[^$\\\n])+?)(?<=\S)\$(?!\d)"
    r"|\\\(((?:[^\\]|\\[^)])+)\\\)|\\\[((?:[^\\]|\\[^\]])+)\\\]"
    rf"|\\begin{_ROW_ENVIRONMENT}((?:[^\\]|\\(?!end{_ROW_ENVIRONMENT})[\s\S])+)(?:\\end{_ROW_ENVIRONMENT}\s*)+"
)
_TOKEN = (  # numbers and commands are never given back: a run of them would be read in two ways each
    rf"(?:\d++(?:[.,]\d++)*+|\\[A-Za-z]++|(?:{phrases('mathematical_words')})(?![A-Za-z])|[b-zA-HJ-Z](?![A-Za-z'])"
    r"|[aI](?![A-Za-z']|\s[\w$])|[-+*/^=<>≤≥≠±√π∞∪∩·×÷°²³_{}()\[\]|!%…]|[,:](?= ?[-\d√π∞±\\(A-Za-z]))"
)
# the longest, of a sentence without dollars: x = 2 + 3i
_RUN = re.compile(rf"(?<![\w\\]){_TOKEN}(?: ?{_TOKEN})*(?![\w-])")
ATOM = "[\ua000-\ua48c]"  # letters of Yi, which stand for formulas
_LIST = re.compile(rf"{ATOM}(?:\s*(?:,|;|and|or|, and|, or|、|和|或)\s*{ATOM})*")  # x = 1 or x = 2
# for x = 3; but the sum of both is 3
_CONDITION = re.compile(rf"(?i)\b{phrases('conditions_before')}\b(?:(?!\b(?:is|are|equals)\b)[A-Za-z\s]){{0,20}}$")
_SUPPOSED = re.compile(  # suppose x = 3; next, we add 5
    rf"(?i)^\W*(?:{phrases('supposed_sentence')}|{phrases('supposed_sentence', 'zh')})|{phrases('planned')}"
)
_WHY = re.compile(r"(?i)\b(?:because|since)\b")  # after it, formulas are reasons
_NEGATES = re.compile(  # is not x = 3
    rf"(?i)\b(?:{phrases('refusing')}|\w+n't)(?! (?:only|just))(?: \(?\w+){{0,4}}\s*$|{phrases('refusing', 'zh')}\W*$"
)
_CHOOSES = re.compile(rf"(?i)\b(?:{phrases('rejecting')}|only the)\b")  # of several values: only the first works
_NAMED = re.compile(  # before a name that is the answer
    rf"(?i)(?:[=:]|\b(?:{phrases('announcing_verbs')}|gets?|obtain|gives|leaves|left with|(?:simplifies|reduces|evaluates|equal) to)"
    rf"(?: (?:{phrases('announcing_adverbs')}|only|the|line|ray|side|segment|angle|point|variable))*|^\W*{phrases('conclusions')}\b,?)\W*$"
)
_REJECTED = re.compile(rf"(?i)\s*(?:is|are) {phrases('rejected')}\b")  # x = 3 is rejected
_AFTERTHOUGHT = re.compile(  # x = 3 (as x > 0), x = 3 — the larger one
    rf"(?<={ATOM})\s*\([^()]*[A-Za-z≈][^()]*\)|(?<={ATOM})\W*\s(?:[—–-]|{phrases('explained_by')})\s.*$"
)
_CHECKED = re.compile(rf"(?i)(?<={ATOM}),?\s(?:and )?(?:one|we|you|i) (?:\w+ )?(?:checks?|verif\w+|confirms?)\b.*$")
_PREMISE = re.compile(rf"(?i)\W*(?:by|{'|'.join(words('conditions'))})\b")  # from x = 3 we see that
_APPROXIMATED = re.compile(  # 36\pi cm² (≈ 113.1 cm²); \sqrt{2}, or about 1.41
    rf"(?<={ATOM})((?:\s+(?!{phrases('refusing')}|{phrases('comparatives')})[A-Za-z²³]{{2,}}){{0,3}})[\s,]*"
    rf"(?:≈|[(,]\s*(?:(?:or|that is|which is|i\.e\.),? )?(?:≈|about|approx\w*|roughly|around|nearly))\s*(?:[$£€]?\d|{ATOM}).*$"
)
# x, AB, \alpha: no values
_NAME = re.compile(r"\s*(?:[A-Za-z]|[A-Z]{2,}|\\(?!emptyset|infty|varnothing|pi)[A-Za-z]+)\s*")
_WORDS = re.compile(  # and layout in a formula
    r"\\(?:text\w*|mathrm|mbox|color)\s*\{[^{}]*\}|\\[dtc]?frac|\\(?:,|;|!| |quad|left|right)|(?<![A-Za-z\\])[A-Za-z]{3,}"
)
# of a computation or a name: x + 1
_SIGNS = re.compile(r"\\[A-Za-z{]|[+*/^_<>=|:!]|(?<!^)-|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_EMPHASIS = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])")
_ROWS = re.compile(rf"\\(?:begin|end){_ROW_ENVIRONMENT}|&")  # a &= b
_END = re.compile(r"(?:[ .,]|\\[,;:! ]?)*+$")  # stops and spaces
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\*?\}")
_INNER = re.compile(r"\\begin\{(\w*matrix|cases|array)\}[\s\S]*?\\end\{\1\}")  # rows that are no equations
_SAYING = re.compile(  # 'the value of x is', 'triangle ABC has area ='
    rf"(?i)^(?:[\w\s]|\\text\s*\{{)*?\b{phrases('saying')}s?(?: \w+){{0,3}}?\s?(?:is|are|:)\s*\}}?\s*"
    rf"|^(?:\\?triangle\s*)?[A-Z]*\s*\\text\s*\{{[^{{}}]*\b{phrases('measures')}\s*\}}\s*=?\s*"
)
_UNITS = re.compile(r"(?<=[\d})\]π])(?:\s+(?!(?:and|or|pi|sqrt)\b)[A-Za-z]{2,}[²³]?){1,3}$")  # 3\pi square inches
# a digit, a sign, a lone letter
_MATHEMATICAL = re.compile(r"[\d\\^_+=<>()\[\]√π∞]|^\W*\w\W*$|\b[A-Za-z] ?- ?[A-Za-z]\b")


def is_bare_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_formula(text: str) -> bool:
    """Return whether a text computes or names something outside its words, and so is no number in prose."""
    return bool(_SIGNS.search(_WORDS.sub("", text)))


class Atoms:
    """A text in which a letter of Yi stands for each of its formulas."""

    def __init__(self, text: str) -> None:
        self.formulas: list[str] = []
        self.text = _FORMULA.sub(lambda match: self._atom(match[match.lastindex or 0]), re.sub(ATOM, " ", text))

    def _atom(self, formula: str) -> str:
        self.formulas.append(formula)
        return ("≈ " if formula.lstrip().startswith((r"\approx", "≈")) else "") + chr(0xA000 + len(self.formulas) - 1)

    def with_runs(self, sentence: str) -> str:
        """Return a sentence with letters for its runs of mathematical signs, too."""
        return _RUN.sub(self._run, sentence)

    def _run(self, match: re.Match[str]) -> str:
        run = match.group()
        formula = run.lstrip("=:,*/ ").rstrip("=:,-+*/ ") if run.strip("(").strip(" =") else ""
        if len(re.findall(r"[)\]]", formula)) > len(re.findall(r"[(\[]", formula)):
            formula = formula.rstrip(")] ")
        is_formula = re.search(r"\w|[√π∞]", formula) and _MATHEMATICAL.search(formula) and not is_bare_name(formula)
        return run.replace(formula, f" {self._atom(formula)} ", 1) if is_formula else run

    def formula(self, letter: str) -> str:
        return self.formulas[ord(letter) - 0xA000]

    def joined(self, letters: str) -> str:
        r"""Return what formulas with joints between them say; of rows, `a &= b \\ &= c`, the last."""
        formula = re.sub(ATOM, lambda letter: self.formula(letter.group()), letters)
        if _ROWS.search(formula):
            masked = _INNER.sub(lambda inner: inner.group().replace("\\\\", "\0").replace("&", "\1"), formula)
            rows = [row for row in _ROWS.sub(" ", masked).split("\\\\") if row.strip()]
            formula = (rows[-1] if rows else "").replace("\0", "\\\\").replace("\1", "&")
            formula = formula.rpartition("=")[2] if len(rows) > 1 else formula
        return _END.sub("", flat(formula))


@dataclass(frozen=True)
class FormulaReader:
    """Reads a formula, or several that are joined; of a sentence without one, its words."""

    words: bool = False  # the answer is words, so formulas count only where the statement begins with one
    runs: bool = True  # at the end of a text, mathematical signs in prose are formulas, too
    names: bool = False  # the answer is a name, such as `x`; else a mere name is no answer that a text ends with
    gold: str = ""  # whose words (`xy`) are no prose in a line that is nothing but a formula

    def read(self, content: str, how: str) -> str | None:
        """Return the formula; None of a remark that holds none."""
        if how == "boxed":
            return _SAYING.sub("", _END.sub("", flat(content))) or None
        content = _EMPHASIS.sub("", content).replace("`", " ").strip()
        atoms = Atoms(content)
        why = _WHY.search(atoms.text)
        until = why.start() if why and PROSE.search(atoms.text[: why.start()]) else len(atoms.text)
        first = re.match(ATOM, atoms.text) if self.words else re.search(ATOM, atoms.text[:until])
        if first:
            denied = _NEGATES.search(atoms.text[: first.start()])
            return None if denied else atoms.joined("".join(_LIST.findall(atoms.text, first.start())[:1]))
        words = _SAYING.sub("", REASON.split(content, maxsplit=1)[0]).strip(" $*_=").rstrip(" .$!。")
        if not self.words and _MATHEMATICAL.search(words):
            return _UNITS.sub("", words)
        return words if self.words or len(PROSE.findall(words)) <= MAX_WORDS else None

    def is_bare(self, content: str) -> bool:
        if len(content) > MAX_END:
            return False
        if _FORMULA.search(content):
            return not PROSE.search(_FORMULA.sub("", REASON.split(content, maxsplit=1)[0]).replace("and", ""))
        return len(PROSE.findall(content)) <= MAX_WORDS

    def read_end(self, text: str) -> str | None:
        """Return a last line that is nothing but a formula, or what the last sentence with a formula states."""
        atoms = Atoms(_EMPHASIS.sub("", text[-MAX_END:]))
        line = next((line.strip() for line in reversed(atoms.text.splitlines()) if line.strip()), "")
        prose = set(PROSE.findall(_ENVIRONMENT.sub(" ", line))).difference(PROSE.findall(self.gold))
        if re.search(r"\w|∞", line) and not prose and not re.search(ATOM, line):
            return None if _is_doubted(line) else self.read(line, "end")
        chosen = False
        for sentence in concluding_sentences(atoms.text):
            if _is_doubted(sentence):
                return None
            if re.search(rf"\d|[√π∞]|{ATOM}", sentence):
                return self._stated(atoms, sentence, chosen)
            chosen = chosen or _CHOOSES.search(sentence) is not None
        return None

    def _stated(self, atoms: Atoms, sentence: str, chosen: bool) -> str | None:
        """Return the last formulas of a sentence that are no name, no condition, not rejected, and not `chosen` from later."""
        if self.runs and not re.search(ATOM, sentence):
            sentence = atoms.with_runs(sentence)
        sentence = _AFTERTHOUGHT.sub("", _APPROXIMATED.sub(r"\1", sentence))
        sentence = sentence if _PREMISE.match(sentence) else _CHECKED.sub("", sentence)
        lists = []
        for formulas in _LIST.finditer(sentence):
            before, after = sentence[: formulas.start()], sentence[formulas.end() :]
            is_answer = self.names and (_NAMED.search(before) or not PROSE.search(before + after))
            is_name = is_bare_name(atoms.formula(formulas.group()[-1])) and not is_answer
            lists += [] if is_name or _REJECTED.match(after) else [formulas]
        meant = [m for m in lists if not _CONDITION.search(sentence, 0, m.start())]
        if not lists:
            return None
        stated = (meant or lists)[-1]
        formula, after = atoms.joined(stated.group()), sentence[stated.end() :]
        is_other = self.words and "\\text" not in formula and PROSE.search(after)
        if (chosen or _CHOOSES.search(after)) and gives_several(formula):
            return None
        return None if is_other or _NEGATES.search(sentence[: stated.start()]) or re.search(r"\d", after) else formula


def _is_doubted(sentence: str) -> bool:
    cut_off = CUT_OFF.search(sentence) and len(PROSE.findall(sentence)) > 2
    return bool(cut_off or any(doubt.search(sentence) for doubt in (GIVES_UP, DENIED, _SUPPOSED)))
