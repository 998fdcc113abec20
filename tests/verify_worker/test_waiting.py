"""The line of waiting requests: order, grammars that come late, and the moment at which one is ready."""

from concurrent.futures import Future

from decoding.editing import TextRules
from decoding.sampling import SamplingParameters
from protocol.fields import RegexGrammar
from tests.tiny.models import VOCAB_SIZE, TinyModels
from verify_worker.grammar import GrammarCompiler, GrammarError, Matcher
from verify_worker.sequence import Request
from verify_worker.vocabulary import read_vocabulary
from verify_worker.waiting import Waiting, WaitingLine


def request(sequence_id: int) -> Request:
    return Request(sequence_id, [1], 1, SamplingParameters(), TextRules(VOCAB_SIZE), True)


def taken(line: WaitingLine) -> list[int]:
    """Ids in the order in which they can start now."""
    ids = []
    while (entry := line.next_ready()) is not None:
        ids.append(entry.request.sequence_id)
    return ids


def test_first_come_first_served() -> None:
    line = WaitingLine()
    for sequence_id in (5, 3, 9):
        line.add(Waiting(request(sequence_id)))
    assert 3 in line and 4 not in line and len(line) == 3
    removed = line.remove(3)
    assert removed is not None and removed.request.sequence_id == 3
    assert line.remove(3) is None
    assert taken(line) == [5, 9]


def test_a_grammar_on_its_way_lets_others_pass(models: TinyModels) -> None:
    compiler = GrammarCompiler(read_vocabulary(models.tokenizer(), VOCAB_SIZE), models.runner().target.device)
    line, late = WaitingLine(), Future[Matcher]()
    line.add(Waiting(request(1), late))
    line.add(Waiting(request(2)))
    line.settle()
    assert (line.is_compiling, taken(line)) == (True, [2])
    late.set_result(compiler.compile(RegexGrammar(pattern="a")))
    assert taken(line) == []  # only `settle` looks, so that a check and its use see the same
    line.settle()
    assert (line.is_compiling, len(line)) == (False, 1)
    entry = line.next_ready()
    assert entry is not None and entry.grammar is not None and not entry.grammar.may_end()


def test_a_broken_grammar_never_starts() -> None:
    line, broken = WaitingLine(), Future[Matcher]()
    line.add(Waiting(request(1), broken))
    broken.set_exception(GrammarError("no"))
    assert taken(line) == [] and line.take_broken() == []
    line.settle()
    assert taken(line) == []
    (entry,) = line.take_broken()
    assert str(entry.problem) == "no" and len(line) == 0
