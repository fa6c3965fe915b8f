"""Planted mistakes in the data: one line of damage each, and the check that must notice."""

from tests.checks.faults import Fault

TRANSLATION = "data.tasks.seq2seq:Translation."
ANSWERED = "data.task:answered_batch"
FSM, DRAWN = "data.tasks.fsm:Fsm.", "data.tasks.fsm:"
SHIFT = "tokens_BT[:, 1:] = next_BT[:, :-1]"
TRAIN_WALK = "train follows the walk"
DRAWS = "counted targets are draws from the oracle"
COMMON = "_probabilities(walk, strings, prefix_NL, states_NL) * spec.examples > 1.0"

CORPUS, ORDER = "data.corpus.windows:Corpus.", "data.corpus.windows:WindowOrder."
PREPARE = "data.corpus.prepare:"

FAULTS = (
    # labels
    Fault("seq2seq labels not shifted", ANSWERED, SHIFT, "tokens_BT[:] = next_BT", "sequences"),
    Fault("seq2seq reads the future", ANSWERED, SHIFT, "tokens_BT[:, :-1] = next_BT[:, 1:]", "sequences"),
    Fault("seq2seq without EOS", "data.tasks.seq2seq:Sequences._make", "source_NS[place, length] = answer_NT[place, length] = EOS", "source_NS[place, length] = EOS", "sequences"),
    Fault("FSM labels not shifted", DRAWN + "_rows", "next_NT = np.pad(words, ((0, 0), (0, 1)), constant_values=PAD)", "next_NT = tokens_NT.copy()", "rows"),
    Fault("FSM without EOS", DRAWN + "_rows", "np.where(ended, EOS, following + FIRST)", "following + FIRST", "rows"),
    Fault("FSM state one late", DRAWN + "_rows", "np.where(valid_NT, states_NL[numbers], 0)", "np.where(valid_NT, np.roll(states_NL[numbers], 1, axis=1), 0)", "rows"),
    Fault("FSM class is the state", FSM + "batch", "np.where(valid_BT, self._classes_Q[states_BT], 0)", "np.where(valid_BT, states_BT, 0)", "rows"),
    Fault("text labels not shifted", "data.tasks.text:Text.batch", "window_BT[:, 1:]", "window_BT[:, :-1]", "text targets"),
    Fault("text windows overlap", "data.tasks.text:Text._window", "rows[:, None] * self.spec.length", "rows[:, None] * (self.spec.length - 1)", "text targets"),
    Fault("translation not shifted", ANSWERED, SHIFT, "tokens_BT[:, 1:] = next_BT[:, 1:]", "translation batches"),
    Fault("translation PAD weighted", ANSWERED, "weights=valid_BT.astype(np.float32)", "weights=np.ones(valid_BT.shape, dtype=np.float32)", "translation batches"),
    Fault("source of another pair", "data.tasks.seq2seq:_Pairs.chosen", "self.source_NS[numbers]", "self.source_NS[numbers[::-1]]", "translation batches"),
    # answers
    Fault("the other form's words", TRANSLATION + "_pair", "written(value.kind, value.value, wanted)", "written(value.kind, value.value, given)", "translations"),
    Fault("dates a day late", "data.tasks.seq2seq:_date", "format_date(date,", "format_date(date + datetime.timedelta(1),", "translations"),
    Fault("numbers one more", "data.tasks.seq2seq:_number", "num2words(value,", "num2words(value + 1,", "translations"),
    Fault("SECOND is the first", "data.tasks.digits:_answers", "digits[:, 1]", "digits[:, 0]", "digits"),
    Fault("SUM modulo 9", "data.tasks.digits:_answers", "% 10", "% 9", "digits"),
    Fault("answers of other rows", "data.tasks.digits:Digits.__init__", "every.answers_N[mixed]", "every.answers_N[numbers]", "digits"),
    Fault("SEP forgotten", "data.tasks.digits:_enumerate", "tokens_NT[place, length + 1] = SEP", "pass", "digits"),
    Fault("reverse is a copy", "data.tasks.seq2seq:_rearranged", "rows[:, ::-1]", "rows", "sequences"),
    Fault("sorted backwards", "data.tasks.seq2seq:_rearranged", "np.sort(rows, axis=1)", "np.sort(rows, axis=1)[:, ::-1]", "sequences"),
    # padding
    Fault("seq2seq PAD weighted", ANSWERED, "weights=valid_BT.astype(np.float32)", "weights=np.ones(valid_BT.shape, dtype=np.float32)", "sequence padding"),
    Fault("FSM PAD weighted", DRAWN + "_rows", "counts_NL[numbers] & valid_NT", "counts_NL[numbers]", "FSM padding"),
    Fault("FSM oracle on PAD", FSM + "oracle", "self._nats_MQ[phase_T, states_BT] * valid_BT", "self._nats_MQ[phase_T, states_BT]", "FSM padding"),
    Fault("valid one too long", "data.task:padded_to_longest", "np.arange(width) < lengths_N[:, None]", "np.arange(width) <= lengths_N[:, None]", "digit batches"),
    # splits
    Fault("test is val too", "data.task:tenths", "numbers[place == 9]", "numbers[place >= 8]", "digits"),
    Fault("train has all", "data.task:tenths", "numbers[place < 8]", "numbers", "sequence splits"),
    Fault("draws with repetition", "data.task:distinct_rows", "return_index=True", "return_index=True), (0, np.arange(len(rows_NL))", "sequence splits"),
    Fault("strings split by draw", DRAWN + "divided", "np.where(common_N, dice_N,", "np.where(True, dice_N,", "FSM splits"),
    Fault("common strings held out", DRAWN + "divided", COMMON, "np.zeros(len(strings.lengths_N), dtype=bool)", TRAIN_WALK),
    Fault("common strings not thinned", DRAWN + "divided", "np.where(common_N, dice_N,", "np.where(common_N, 0,", TRAIN_WALK),
    Fault("held-out prefixes all count", DRAWN + "divided", "likeliest_NL * spec.examples <= 1.0", "likeliest_NL >= 0.0", DRAWS),
    Fault("only what happened is rare", DRAWN + "divided", "rest_LQ[np.arange(spec.max_length + 1), states_NL]", "1e-9", DRAWS),
    Fault("longer counts from the start", DRAWN + "longer", "np.arange(cut + 1) > spec.max_length", "np.arange(cut + 1) >= 0", DRAWS),
    Fault("hash reads the padding", "data.rng:hash_rows", "np.where(place < lengths_N, mixed_N, hash_N)", "mixed_N", "row hashes"),
    Fault("pairs split, not values", "data.tasks.seq2seq:_divided", 'mixed.permutation(numbers)]', 'mixed.permutation(len(values))[: len(numbers)]]', "translation splits"),
    # oracle
    Fault("oracle forgets min_length", FSM + "oracle", "np.minimum(np.arange(width), self.spec.min_length)", "np.full(width, self.spec.min_length)", "oracle"),
    Fault("oracle of the next state", FSM + "oracle", "states_BT = kept.states_NT[:, :width]", "states_BT = np.roll(kept.states_NT[:, :width], -1, axis=1)", "oracle"),
    Fault("entropy in bits", "data.automata.library:Walk.entropies", "np.log(", "np.log2(", "entropy"),
    Fault("entropy without the end", "data.automata.library:Walk.entropies", "p = self.probabilities_MQE", "p = self.probabilities_MQE[:, :, :-1]", "entropy"),
    Fault("walk ignores its weights", "data.automata.library:Walk.draw", "np.cumsum(self.probabilities_MQE, axis=2)", "np.cumsum(self.probabilities_MQE > 0, axis=2)", "draws"),
    Fault("walk ends too often", "data.automata.library:Walk.draw", "(bounds <= below).sum(axis=1)", "(bounds <= below * 1.2).sum(axis=1).clip(max=end)", "draws"),
    Fault("excess by the targets' mean", "data.task:Oracle.excess", "- self.entropy", "- self.entropy.mean()", "perfect model"),
    # machines
    Fault("Hopcroft forgets a half", "data.automata.machine:coarsest_refinement", "(block, other) in waiting or len(inside)", "len(inside)", "Hopcroft"),
    Fault("Hopcroft never waits", "data.automata.machine:coarsest_refinement", "while waiting:", "for _ in range(1):", "Hopcroft"),
    Fault("minimised ignores ends", "data.automata.machine:Machine.minimised", "2 * kind + end", "2 * kind", "Hopcroft"),
    Fault("counterexample not shortest", "data.automata.machine:counterexample", "queue.popleft()", "queue.pop()", "equivalence"),
    Fault("what cannot be read is ignored", "data.automata.machine:counterexample", "if state == NOWHERE:\n            return None", "if state == NOWHERE:\n            state = 0", "equivalence"),
    Fault("legal into a dead end", "data.automata.machine:Machine.legal", "target != NOWHERE and alive[target]", "target != NOWHERE", "legal"),
    Fault("plus matches nothing", "data.automata.construct:_Parser.repeated", 'how in "*?"', 'how in "*?+"', "regex"),
    Fault("star only once", "data.automata.construct:_Parser.repeated", 'how in "*+"', 'how in "+"', "regex"),
    Fault("choice not inverted", "data.automata.construct:_Parser.choice", "return inverted, frozenset(members)", "return False, frozenset(members)", "regex"),
    # order and text
    Fault("last batch dropped", "data.rng:Sampler._batches_of", "range(0, self.size, self.batch_size)", "range(0, self.size - self.size % self.batch_size or self.size, self.batch_size)", "every row once"),
    Fault("every epoch alike", "data.rng:Sampler._batches_of", '"order", epoch', '"order"', "epochs differ"),
    Fault("order depends on the past", "data.rng:Sampler.rows", "if epoch != self._epoch:", "if self._epoch < 0:", "step alone decides"),
    Fault("not sorted by length", "data.rng:Sampler._batches_of", "part[by_length]", "part", "like length"),
    Fault("short batches first", "data.rng:Sampler._batches_of", "rng.permutation(len(batches))", "range(len(batches))", "like length"),
    Fault("pieces learned from all text", "data.tasks.text:_tokenizer", 'learning_lines(texts["train"].decode("utf-8"))', 'learning_lines(b"".join(texts.values()).decode("utf-8"))', "pieces"),
    Fault("bytes counted as characters", "data.tasks.text:Text._tokens", "_Part(ids[split], len(text))", "_Part(ids[split], len(text.decode()))", "text parts"),
    Fault("val inside train", "data.tasks.text:Text.__init__", '"train": whole[:cut]', '"train": whole', "text parts"),
    # corpora
    Fault("corpus labels not shifted", CORPUS + "batch", '{"next": window_BT[:, 1:]}', '{"next": window_BT[:, :-1]}', "corpus windows"),
    Fault("a document predicts the next one's first token", CORPUS + "batch", "weights_BT[row, ends - 1] = 0.0", "pass", "corpus windows"),
    Fault("a document begins one token early", CORPUS + "batch", "np.searchsorted(ends, np.arange(shape[1]), side=\"right\")", "np.searchsorted(ends, np.arange(shape[1]) + 1, side=\"right\")", "corpus windows"),
    Fault("corpus windows overlap", CORPUS + "_places", "(inside - int(part.starts[split][shard])) * self.spec.length", "(inside - int(part.starts[split][shard])) * (self.spec.length - 1)", "corpus windows"),
    Fault("held-out documents trained on", PREPARE + "_encoded", "_hash(each, spec.seed) < plan.threshold", "_hash(each, spec.seed) > plan.threshold", "corpus documents"),
    Fault("a corpus without ends", PREPARE + "_Encoder.__call__", "self._end if ended else ()", "()", "corpus documents"),
    Fault("documents' ends one early", "data.corpus.shards:ShardWriter.add", "self._ends.append(self.tokens)", "self._ends.append(self.tokens - 1)", "corpus documents"),
    Fault("a shard is read again from its file's beginning", PREPARE + "_units", "close(made.source, made.document.position)", "close(made.source, ())", "corpus stopped"),
    Fault("a line of JSON read twice", "data.corpus.readers:_lines", "offset + len(line) + 1", "offset + len(line)", "corpus stopped"),
    Fault("blocks never verified", "data.corpus.shards:OpenShard.read", "if not self.seen[block]:", "if False:", "corpus damage"),
    Fault("small files never verified", "data.corpus.shards:ShardReader._small", "hashlib.sha256(data).hexdigest() != shard.sha256[ending]", "False", "corpus damage"),
    Fault("the index never verified", "data.corpus.shards:read_index", "stated != _body_hash(data)", "False", "corpus damage"),
    Fault("every epoch the same", ORDER + "rows", '("windows", int(corpus), int(epoch))', '("windows", int(corpus), 0)', "corpus epochs"),
    Fault("rows beyond the corpus folded back", "data.rng:permuted", "outside = found >= np.uint64(size)", "found, outside = found % np.uint64(size), np.zeros(1, bool)", "corpus epochs"),
    Fault("a mixture begins anew in every block", ORDER + "_fill", "count + np.arange(int(mine.sum()))", "np.arange(int(mine.sum()))", "corpus mixture"),
    Fault("a mixture of equal shares", ORDER + "__init__", "np.cumsum([0.0, *weights]) / sum(weights)", "np.linspace(0, 1, len(weights) + 1)", "corpus mixture"),
)  # fmt: skip
